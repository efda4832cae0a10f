"""Rounds with drafters that are always right, always wrong, and right at chosen places; rows, stops, roll-back."""

import itertools

import mlx.core as mx
import pytest
from pairs import FAMILIES, WINDOW
from scripted import SCRIPTS, ScriptedEngine, run_rows

from mlx_gemma_mtp import Fixed
from mlx_gemma_mtp.cache import MAX_DRAFT_LENGTH, SLACK
from mlx_gemma_mtp.joined import attend
from mlx_gemma_mtp.speculative import Row, State, decode, prefill


def cases_of(goldens, family, seed=1, count=6):
    cases = [c for c in goldens(family)["cases"] if c["seed"] == seed]
    return cases[:: max(1, len(cases) // count)][:count]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_a_batch_equals_the_row_alone(load_pair, goldens, family, script):
    """Rows of different lengths beyond the window, accepted unevenly, at the usual and the largest draft length."""
    cases, pair = cases_of(goldens, family), load_pair(family)
    engine = ScriptedEngine(pair.target, pair.drafter, [c["prompt"] + c["tokens"] for c in cases], SCRIPTS[script])
    prompts, expected = [c["prompt"] for c in cases], [c["tokens"] for c in cases]
    for drafts in (4, MAX_DRAFT_LENGTH):
        rows = run_rows(engine, prompts, [len(t) for t in expected], Fixed(drafts))
        assert [row.tokens for row in rows] == expected


def test_scripted_drafters_accept_what_their_script_says(load_pair, goldens):
    case, pair = cases_of(goldens, "e2b")[0], load_pair("e2b")
    counts = {}
    for name in ("right", "wrong", "wrong at 2"):
        engine = ScriptedEngine(pair.target, pair.drafter, [case["prompt"] + case["tokens"]], SCRIPTS[name])
        seen = []
        run_rows(engine, [case["prompt"]], [26], Fixed(4), on_round=lambda s, r, round_, seen=seen: seen.append(round_))
        counts[name] = {tuple(r.accepted) for r in seen[1:]}
    assert counts == {"right": {(4,)}, "wrong": {(0,)}, "wrong at 2": {(2,)}}


@pytest.mark.parametrize("offset", range(-9, 4))
def test_rejected_tokens_leave_no_trace_around_the_end_of_the_ring(load_pair, offset):
    """Long outputs from prompts that end at every place around the ring's wrap, mostly rejected at full width."""
    pair = load_pair("dense31b")
    prompt = [(7 * i) % 500 + 3 for i in range(WINDOW + SLACK + offset)]
    plain = pair.generate(prompt, max_tokens=60, draft_length=0, ignore_eos=True).tokens
    engine = ScriptedEngine(pair.target, pair.drafter, [prompt + plain], SCRIPTS["uneven"])
    [row] = run_rows(engine, [prompt], [60], Fixed(MAX_DRAFT_LENGTH))
    assert row.tokens == plain


@pytest.mark.parametrize("drafts", [0, 1, 4, 7])
@pytest.mark.parametrize("stop_at", range(9))
def test_a_stop_id_inside_a_block_ends_the_row_and_the_cache_holds_nothing_after_it(load_pair, goldens, drafts, stop_at):
    """A later turn continues from the finished state as from a cold one."""
    case, pair = cases_of(goldens, "e2b")[2], load_pair("e2b")
    expected = case["tokens"][: case["tokens"].index(case["tokens"][stop_at]) + 1]
    engine = ScriptedEngine(pair.target, pair.drafter, [case["prompt"] + case["tokens"]], SCRIPTS["right"])
    state = prefill(pair.target, case["prompt"])
    row = Row(case["prompt"], 40, frozenset([expected[-1]]))
    list(decode(engine, state, [row], Fixed(drafts).begin()))
    assert (row.tokens, row.finish_reason) == (expected, "stop")
    assert state.cache.length.tolist() == [len(case["prompt"]) + len(expected) - 1]
    assert state.block.tolist() == [[expected[-1]]]
    assert continue_from(pair, state, row) == case["tokens"][len(expected) :]


def continue_from(pair, state, row):
    """Twenty more tokens from where a row ended, or as many as the golden holds."""
    more = Row(row.prompt + row.tokens, 40 - len(row.tokens))
    list(decode(pair.engine, state, [more], Fixed(3).begin()))
    return more.tokens


@pytest.mark.parametrize(("drafts", "budget"), list(itertools.product([0, 1, 4, 7], [1, 2, 3, 5, 6, 11])))
def test_max_tokens_is_exact_and_the_state_can_go_on(load_pair, goldens, drafts, budget):
    case, pair = cases_of(goldens, "moe26b")[1], load_pair("moe26b")
    engine = ScriptedEngine(pair.target, pair.drafter, [case["prompt"] + case["tokens"]], SCRIPTS["right"])
    state = prefill(pair.target, case["prompt"])
    row = Row(case["prompt"], budget)
    list(decode(engine, state, [row], Fixed(drafts).begin()))
    assert (row.tokens, row.finish_reason) == (case["tokens"][:budget], "length")
    assert continue_from(pair, state, row) == case["tokens"][budget:]


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("drafts", [0, 4])
def test_a_generation_abandoned_half_way_leaves_a_state_that_can_go_on(load_pair, goldens, drafts, rounds):
    case, pair = cases_of(goldens, "e4b")[3], load_pair("e4b")
    engine = ScriptedEngine(pair.target, pair.drafter, [case["prompt"] + case["tokens"]], SCRIPTS["uneven"])
    state = prefill(pair.target, case["prompt"])
    row = Row(case["prompt"], 40)
    running = decode(engine, state, [row], Fixed(drafts).begin())
    for _ in range(rounds):
        next(running)
    running.close()
    assert row.tokens == case["tokens"][: len(row.tokens)]
    assert continue_from(pair, state, row) == case["tokens"][len(row.tokens) :]


def test_rows_that_end_at_different_times_do_not_disturb_the_others(load_pair, goldens):
    cases, pair = cases_of(goldens, "e2b"), load_pair("e2b")
    engine = ScriptedEngine(pair.target, pair.drafter, [c["prompt"] + c["tokens"] for c in cases], SCRIPTS["uneven"])
    budgets = [1, 40, 3, 17, 2, 30][: len(cases)]
    finals = {}
    for drafts in (0, 5):
        rows = run_rows(
            engine, [c["prompt"] for c in cases], budgets, Fixed(drafts), on_round=lambda s, r, _: finals.update(state=s)
        )
        assert [row.tokens for row in rows] == [c["tokens"][:n] for c, n in zip(cases, budgets)]
        assert finals["state"].cache.length.tolist() == [row.committed for row in rows]


def test_rows_of_very_different_lengths_share_a_batch(load_pair):
    """Their caches have grown to different sizes."""
    pair = load_pair("dense31b")
    prompts = [[(5 * i) % 500 + 3 for i in range(n)] for n in (1000, 700, 3)]
    alone = [pair.generate(p, max_tokens=6, draft_length=0, ignore_eos=True).tokens for p in prompts]
    assert [row.tokens for row in run_rows(pair.engine, prompts, [6] * 3, Fixed(2))] == alone


def test_no_row_ever_writes_beyond_its_buffers(load_pair, monkeypatch):
    """An out-of-range write raises nothing in MLX. Checked before every pass: finished rows, last rounds, growth."""
    pair = load_pair("e2b")
    seen = []

    class Guarded(ScriptedEngine):
        def run_round(self, state: State, active, read, drafts, *rest):
            last = max(state.cache.length.tolist()) + state.width
            full = max(k.shape[2] for k, w in zip(state.cache.keys, state.cache.windows) if w is None)
            assert last <= read <= full == state.cache.capacity
            seen.append(full)
            return super().run_round(state, active, read, drafts, *rest)

    prompt = [5, 6, 7]
    plain = pair.generate(prompt, max_tokens=700, draft_length=0, ignore_eos=True).tokens
    engine = Guarded(pair.target, pair.drafter, [prompt + plain] * 3, SCRIPTS["uneven"])
    rows = run_rows(engine, [prompt] * 3, [700, 3, 250], Fixed(MAX_DRAFT_LENGTH))
    assert [row.tokens for row in rows] == [plain, plain[:3], plain[:250]]
    assert len(set(seen)) > 1, "the test must cross a growth of the cache"


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 1, 16), (8, 2, 32), (4, 4, 16), (8, 1, 512)])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_attention_with_the_heads_of_a_group_in_one_product_is_attention(heads, groups, size, tokens):
    keys = mx.random.split(mx.random.key(3), 4)
    queries = mx.random.normal((2, heads, tokens, size), key=keys[0])
    lent = [mx.random.normal((2, groups, 70, size), key=key)[:, :, :61] for key in keys[1:3]]
    mask = (mx.random.uniform(shape=(2, 1, tokens, 61), key=keys[3]) > 0.5) | (mx.arange(61) == 7)
    expected = mx.fast.scaled_dot_product_attention(queries, *lent, scale=1.0, mask=mask)
    assert mx.allclose(attend(queries, *lent, mask), expected, rtol=1e-5, atol=1e-5)
