"""Token for token what transformers computes, for all families and draft lengths, across the window."""

import mlx.core as mx
import pytest
from pairs import FAMILIES, WINDOW
from scripted import run_rows

from mlx_gemma_mtp import Fixed, Heuristic, speculative

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
