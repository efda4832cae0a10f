"""Token for token what transformers computes, for all families and draft lengths, across the window."""

import pytest
from pairs import FAMILIES

from mlx_gemma_mtp import speculative


@pytest.mark.parametrize("draft_length", [0, 1, 2, 3, 4, 7, "heuristic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_transformers(load_pair, goldens, family, draft_length, monkeypatch):
    monkeypatch.setattr(speculative, "PREFILL_TOKENS", 64)
    for case in goldens(family)["cases"]:
        done = load_pair(family, case["seed"]).generate(
            case["prompt"], max_tokens=len(case["tokens"]), draft_length=draft_length, ignore_eos=True
        )
        assert done.tokens == case["tokens"], (case["seed"], len(case["prompt"]))
