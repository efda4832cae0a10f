"""The automatic draft length against the best fixed one, on cost curves published for Macs and on random ones."""

import random
import sys
import threading
from dataclasses import asdict

import pytest

from bench.simulate import CURVES, World, regret
from mlx_gemma_mtp import Heuristic, OptionError
from mlx_gemma_mtp.draft_length import Auto, AutoController, Fixed, as_policy
from mlx_gemma_mtp.knowledge import Costs, Knowledge, octave


@pytest.mark.parametrize("informative", [False, True])
@pytest.mark.parametrize("acceptance", [0.9, 0.7, 0.5, 0.3, 0.15, 0.05])
@pytest.mark.parametrize("curve", CURVES)
def test_regret_against_the_best_fixed_length_is_under_five_percent(curve, acceptance, informative):
    world = World(curve, acceptance, informative, 1)
    controller = Auto(Knowledge(), world.calibrate).begin()
    assert regret(world, controller, 200, 4000) < 0.05


@pytest.mark.parametrize("acceptance", [0.9, 0.5, 0.15, 0.0])
@pytest.mark.parametrize("curve", CURVES)
def test_a_machine_that_is_slowed_down_now_and_then_misleads_nobody(curve, acceptance):
    """What a slow minute taught of one length is stale in the next: no length may be avoided, or played, for it for ever."""
    for seed in range(2):
        world = World(curve, acceptance, False, seed, restless=True)
        assert regret(world, Auto(Knowledge(), world.calibrate).begin(), 200, 3000) < 0.05


@pytest.mark.parametrize("acceptances", [(0.9, 0.05), (0.05, 0.9), (0.3, 0.8), (0.8, 0.3)])
@pytest.mark.parametrize("curve", CURVES)
def test_it_follows_a_text_that_changes_midway(curve, acceptances):
    world = World(curve, acceptances[0], False, 2)
    controller = Auto(Knowledge(), world.calibrate).begin()
    world.play(controller, 1000)
    world.acceptance = acceptances[1]
    assert regret(world, controller, 200, 3000) < 0.05


def test_curves_and_acceptances_drawn_at_random():
    """So that nothing is tuned to the list, with a text that changes: all under the bound, half of them well under it."""
    draw, regrets = random.Random(3), []
    for seed in range(60):
        steps = [1.0]
        for _ in range(8):
            steps.append(steps[-1] + draw.choice([0.01, 0.05, 0.1, 0.2, 0.5]) * draw.random() * 2)
        world = World((lambda t, s=steps: s[t - 1], draw.choice([0.01, 0.05, 0.1, 0.3])), draw.uniform(0.05, 0.95), False, seed)
        controller = Auto(Knowledge(), world.calibrate).begin()
        world.play(controller, 300)
        world.acceptance = draw.uniform(0.05, 0.95)
        regrets.append(regret(world, controller, 200, 3000))
    regrets.sort()
    assert regrets[30] < 0.01 and regrets[-1] < 0.05, regrets[50:]


def test_a_drafter_that_is_never_right_costs_next_to_nothing():
    """256 tokens from a cold start: all trials and probes together under 3 %."""
    for curve in CURVES:
        world = World(curve, 0.0, False, 4)
        tokens, seconds = world.play(Auto(Knowledge(), world.calibrate).begin(), 256)
        assert tokens / seconds > 0.95, curve
        controller = Auto(Knowledge(), world.calibrate).begin()
        world.play(controller, 256)
        tokens, seconds = world.play(AutoController(controller.knowledge), 256)
        assert tokens / seconds > 0.97, curve


def test_a_useless_drafter_is_tried_ever_more_rarely_across_generations():
    world, know, drafted = World("M1 Max", 0.0, False, 6), Knowledge(), []
    for _ in range(12):
        controller, rounds = Auto(know, world.calibrate).begin(), []
        observe = controller.observe
        controller.observe = lambda verified, *rest, seen=rounds, tell=observe: (seen.append(verified), tell(verified, *rest))
        world.play(controller, 128)
        drafted.append(sum(n > 0 for n in rounds))
    assert 0 < sum(drafted[-4:]) <= 12  # of 512 rounds


def test_neighbours_are_looked_at_in_short_generations_too():
    world, know, lengths = World("M4 Pro", 0.6, False, 7), Knowledge(), set()
    for _ in range(40):
        controller = Auto(know, world.calibrate).begin()
        for _ in range(10):
            world.play(controller, 1)
            lengths.add(controller.draft_length)
    best = AutoController(know).draft_length
    assert {best - 1, best} <= lengths and max(lengths) > best


def test_plain_decoding_that_was_measured_in_a_slow_minute_is_looked_at_again():
    world, know = World("M1 Max", 0.0, False, 8), Knowledge()
    world.play(Auto(know, world.calibrate).begin(), 200)
    know.costs_at(1, 0).verify_seconds[1] *= 2
    controller = AutoController(know)
    assert controller.draft_length > 0
    world.play(controller, 400)
    assert controller.draft_length == 0


def test_outliers_do_not_derail_the_costs():
    know = Costs({1: 1.0, 3: 1.2, 5: 1.6, 9: 3.0}, 0.05, 99, {5: 99})
    for _ in range(3):
        know.learn(5, 4, 500.0)
    assert know.cost(5, 4) < 1.3 * 1.8
    for _ in range(60):
        know.learn(5, 4, 1.8)
    assert know.cost(5, 4) == pytest.approx(1.8, rel=0.05)


def test_a_cut_depends_on_no_later_confidence():
    know = Knowledge({(1, octave(0)): Costs({1: 1.0, 3: 1.4, 5: 2.2, 9: 4.0}, 0.05)}, seen_by_confidence=[99] * 8)

    def verified(*confidence):
        controller = AutoController(know)
        controller.observe(0, 4, [0], None, 0)
        return controller.verify(4, [list(confidence)])

    base = verified(0.9, 0.1, 0.9, 0.9)
    assert 0 < base < 4
    assert {verified(0.9, 0.1, later, other) for later in (0.0, 0.5, 1.0) for other in (0.0, 1.0)} == {base}
    assert verified(0.9, 0.9, 0.9, 0.9) == 4


def test_the_heuristic_grows_on_full_acceptance_and_shrinks_otherwise():
    controller = Heuristic(4).begin()
    seen = []
    for drafted, accepted in ((4, 4), (6, 2), (5, 0), (4, 4)):
        controller.observe(drafted, 4, [accepted], None, 0)
        seen.append(controller.draft_length)
    assert seen == [6, 5, 4, 6]
    for _ in range(30):
        controller.observe(1, 1, [0], None, 0)
    assert controller.draft_length == 1


def test_what_a_user_may_ask_for():
    auto = Auto()
    assert as_policy(None, 6, auto) is auto and as_policy("auto", 6, auto) is auto
    assert as_policy("heuristic", 6, auto) == Heuristic(6)
    assert as_policy(3, 6, auto) == Fixed(3)
    for wrong in (-1, 17, "fast", 1.5, True):
        with pytest.raises(OptionError):
            as_policy(wrong, 6, auto)


def test_costs_of_other_contexts_and_batches_are_kept_apart():
    know = Knowledge({(1, octave(0)): Costs({1: 1.0, 5: 2.0}, 0.05, 99)})
    short, long, batch = know.costs_at(1, 500), know.costs_at(1, 20000), know.costs_at(8, 500)
    assert long.cost(5, 4) == batch.cost(5, 4) == short.cost(5, 4)  # the nearest known, until it is measured
    for _ in range(30):
        long.learn(5, 4, 4.4)
    assert long.cost(5, 4) == pytest.approx(4.4, rel=0.05) and long.cost(1, 0) > 1.3
    assert short is know.costs_at(1, 1000) and short.cost(5, 4) == pytest.approx(2.2)
    assert know.costs_at(1, 50000).cost(5, 4) == long.cost(5, 4)


def test_the_controller_uses_the_costs_of_its_context():
    """At 30,000 tokens verifying five is dear on this machine, at 100 tokens it is free."""
    know = Knowledge(
        {(1, octave(0)): Costs({1: 1.0, 9: 1.0}, 0.01, 99), (1, octave(30000)): Costs({1: 1.0, 9: 30.0}, 0.01, 99)}
    )
    controller = AutoController(know)
    controller.observe(0, 0, [0], None, 100)
    assert controller.draft_length == 8
    controller.observe(0, 0, [0], None, 30000)
    assert controller.draft_length == 0


def test_confidences_are_used_once():
    """A decode that begins anew, as after a batch's rows have left, verifies nothing: what is old must teach nothing."""
    know = Knowledge({(1, octave(0)): Costs({1: 1.0, 9: 1.1}, 0.01, 99)}, seen_by_confidence=[99] * 8)
    controller = AutoController(know)
    controller.verify(4, [[0.1, 0.1, 0.1, 0.1]])
    controller.observe(1, 4, [1], None, 0)
    before = list(know.acceptance), list(know.seen)
    controller.observe(0, 4, [0], None, 0)
    assert (know.acceptance, know.seen) == before


def test_a_draft_that_was_not_verified_is_no_evidence():
    know = Knowledge({(1, octave(0)): Costs({1: 1.0, 9: 1.1}, 0.01, 99)}, seen_by_confidence=[99] * 8)
    know.expect_outcome(2, 0.1)
    assert know.acceptance[2] < 0.7 and know.seen[2] == 0


def test_costs_may_be_read_while_another_thread_learns():
    know, failures = Knowledge({(1, octave(0)): Costs({1: 1.0, 5: 2.0}, 0.05)}), []

    def use(rows):
        try:
            for index in range(1500):
                costs = know.costs_at(rows + index % 7, 2000 * (index % 9))
                costs.learn(1 + index % 199, index % 5, 1.0)
                if index % 50 == 0:
                    [asdict(known) for known in know.costs.copy().values()]
        except RuntimeError as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(1 + 3 * i,)) for i in range(4)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert not failures
