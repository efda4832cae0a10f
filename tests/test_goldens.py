"""Token for token what transformers computes, for all families and draft lengths, across the window."""

import os
from functools import partial

import mlx.core as mx
import pytest
from pairs import FAMILIES, WINDOW
from scripted import run_rows

import mlx_gemma_mtp
from mlx_gemma_mtp import Fixed, Heuristic, Sampling, speculative
from mlx_gemma_mtp.speculative import Engine

GREEDY = Sampling(temperature=0)
LENGTHS = [0, 1, 2, 3, 4, 7, "heuristic"]


@pytest.mark.parametrize("draft_length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_transformers(load_pair, goldens, family, draft_length, monkeypatch):
    """All cases of one seed as a batch of ragged rows, and a few of every seed alone."""
    monkeypatch.setattr(speculative, "PREFILL_TOKENS", 64)
    cases, turn = goldens(family)["cases"], LENGTHS.index(draft_length)
    policy = Heuristic() if draft_length == "heuristic" else Fixed(draft_length)
    seeds = sorted({case["seed"] for case in cases})
    batch = [case for case in cases if case["seed"] == seeds[turn % len(seeds)]]
    pair = load_pair(family, batch[0]["seed"])
    rows = run_rows(pair.engine, [c["prompt"] for c in batch], [len(c["tokens"]) for c in batch], policy)
    assert [row.tokens for row in rows] == [c["tokens"] for c in batch]
    for case in cases[turn :: 3 * len(LENGTHS)]:
        done = load_pair(family, case["seed"]).generate(
            case["prompt"], max_tokens=len(case["tokens"]), draft_length=draft_length, ignore_eos=True
        )
        assert done.tokens == case["tokens"]


def test_the_goldens_cross_the_window_at_every_offset_and_hold_long_and_short_prompts(goldens):
    """What the comparison above is worth depends on its cases."""
    for family in FAMILIES:
        lengths = {len(case["prompt"]) for case in goldens(family)["cases"]}
        assert {1, 2, 3} <= lengths and max(lengths) > 2 * 64
        assert {WINDOW - 7, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 7} <= lengths


@pytest.mark.compiled
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_rounds_equal_transformers(load_pair, goldens, family):
    case = next(c for c in goldens(family)["cases"] if len(c["prompt"]) == WINDOW - 1)
    pair = load_pair(family, case["seed"])
    for draft_length in (0, 4):
        done = pair.generate(case["prompt"], max_tokens=len(case["tokens"]), draft_length=draft_length, ignore_eos=True)
        assert done.tokens == case["tokens"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(load_pair, goldens, family):
    case = next(c for c in goldens(family)["cases"] if "logits" in c)
    pair = load_pair(family, case["seed"])
    ids = case["prompt"] + case["tokens"]
    cache = pair.target.empty_cache()
    cache.reserve(len(ids))
    hidden = pair.target.hidden(mx.array([ids]), cache.layers(len(ids)))
    logits = pair.target.logits(hidden)[0]
    for name, position in (("first", len(case["prompt"]) - 1), ("last", len(ids) - 1)):
        expected = mx.array(case["logits"][name])
        assert mx.allclose(logits[position][mx.array(case["logits"]["ids"])], expected, atol=2e-4), name


class ForcedEngine(Engine):
    """Accepts as much as a script says, whatever was drafted: the drafts of a round depend on committed tokens alone.

    right: ids of prompt and output.  shift: another script.
    """

    def __init__(self, target, drafter, right=None, shift=0):
        super().__init__(target, drafter)
        self.right, self.shift, self.blocks = right, shift, []

    def _verify(self, windows, read, sampler, texts=None):
        honest = super()._verify(windows, read, sampler, texts)
        if self.right is None:
            return honest

        def verify(block, active, length, *rest):
            index = mx.arange(block.shape[1] - 1)
            truth = self.right[length[:, None] + 1 + index]
            keep = index < (length[:, None] * 5 + self.shift) % (block.shape[1] + 1)
            block = mx.concatenate([block[:, :1], mx.where(keep, truth, (truth + 1) % 512)], axis=1)
            return honest(block, active, length, *rest)

        return verify

    def run_round(self, state, *rest):
        done = super().run_round(state, *rest)
        self.blocks.append(state.block)
        return done


def drafts_of_rounds(pair, case, policy, make_engine=ForcedEngine):
    """Per round of a generation: the tokens out when its block was drafted, the round, and the block."""
    seen, engine = [], make_engine(pair.target, pair.drafter)
    note = lambda state, rows, round_: seen.append((len(rows[0].tokens), round_))
    run_rows(engine, [case["prompt"]], [len(case["tokens"])], policy, on_round=note)
    return seen, [block.tolist()[0] for block in engine.blocks]


@pytest.mark.parametrize("drafts", [1, 4, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_draft_tokens_equal_the_reference_drafter(load_pair, goldens, family, drafts):
    """Over whole generations with partial rejections of every length, from committed keys only, across the window."""
    pair, compared = load_pair(family, 1), 0
    for case in (c for c in goldens(family)["cases"] if "drafts" in c):
        right = mx.array(case["prompt"] + case["tokens"] + [0] * 40, mx.int32)
        for shift in range(3):
            engine = partial(ForcedEngine, right=right, shift=shift)
            seen, blocks = drafts_of_rounds(pair, case, Fixed(drafts), engine)
            for (count, _), block in zip(seen, blocks):
                if count == len(case["tokens"]):
                    break  # the last block may have been cut
                assert block[0] == case["tokens"][count - 1]
                for ours, theirs in zip(block[1:], case["drafts"][count - 1]):
                    if theirs is not None:
                        assert ours == theirs
                        compared += 1
    assert compared > 100


def test_acceptance_on_a_trained_pair_equals_the_reference_loop(goldens):
    """The accepted counts of every round, when the trained pair the golden was made of is at hand."""
    directory = os.environ.get("TRAINED_PAIR")
    if not directory:
        pytest.skip("set TRAINED_PAIR to the directory of the pair the golden was made of")
    pair = mlx_gemma_mtp.load(f"{directory}/target", f"{directory}/assistant")
    totals = [0] * 4
    for case in goldens("real")["cases"]:
        for draft_length in LENGTHS:
            done = pair.generate(
                case["prompt"], max_tokens=len(case["tokens"]), draft_length=draft_length, sampling=GREEDY, ignore_eos=True
            )
            assert done.tokens == case["tokens"]
        seen, _ = drafts_of_rounds(pair, case, Fixed(4))
        rounds = [[before - 1, r.accepted[0]] for (before, _), (_, r) in zip(seen, seen[1:])]
        assert rounds[: len(case["rounds"])] == case["rounds"]
        totals = [t + sum(n > i for _, n in case["rounds"]) for i, t in enumerate(totals)]
    assert totals == [sum(c["accepted_by_position"][i] for c in goldens("real")["cases"]) for i in range(4)]
