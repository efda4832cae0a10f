"""Rows run side by side, and engines whose drafts follow a script instead of a model."""

import mlx.core as mx

from mlx_gemma_mtp import speculative
from mlx_gemma_mtp.speculative import Engine, Row

SCRIPTS = {
    "right": lambda row, position, index: mx.broadcast_to(mx.array(True), position.shape),
    "wrong": lambda row, position, index: mx.broadcast_to(mx.array(False), position.shape),
    "wrong at 0": lambda row, position, index: (index != 0) & (position > 0),
    "wrong at 2": lambda row, position, index: (index != 2) & (position > 0),
    "uneven": lambda row, position, index: (position * 7 + row * 3) % 5 != 0,
    "by row": lambda row, position, index: (row % 2 == 0) & (position > 0),
}


def run_rows(engine, prompts, max_tokens, policy, stop_ids=frozenset(), on_round=None, sampler=speculative.GREEDY):
    """Decodes prompts as rows of one batch. Returns the rows. on_round(state, rows, round) after each."""
    state = speculative.stack([speculative.prefill(engine.target, p) for p in prompts])
    rows = [Row(p, n, stop_ids) for p, n in zip(prompts, max_tokens)]
    for round_ in speculative.decode(engine, state, rows, policy.begin(), sampler):
        if on_round:
            on_round(state, rows, round_)
    return rows


class ScriptedEngine(Engine):
    """Drafts the right token wherever `script(row, position, index)` says so, and a wrong one elsewhere.

    right: per row, the ids of prompt and output.  script: of arrays [B, 1], [B, K] (position) and [1, K] (index in draft).
    """

    def __init__(self, target, drafter, right, script):
        super().__init__(target, drafter)
        longest = max(map(len, right))
        self.right = mx.array([ids + [0] * (longest + 40 - len(ids)) for ids in right], mx.int32)
        self.script = script

    def _draft(self, windows, read, drafts, method):
        def draft(pending, hidden, length, keys, values, knobs):
            index = mx.arange(drafts)[None]
            position = length[:, None] + 1 + index
            right = mx.take_along_axis(self.right, position, axis=1)
            wrong = (right + 1) % self.target.args.vocab_size
            row = mx.arange(pending.shape[0])[:, None]
            block = mx.where(self.script(row, position, index), right, wrong)
            return mx.concatenate([pending, block], axis=1), mx.ones(block.shape), {}

        return draft
