"""Is the automatic draft length ever slower, and what does sampling cost? Runs in turn, bootstrap intervals.

    python -m bench.auto [--pair DIR] [--pairs 20]

* a drafter of random weights, which accepts nothing: automatic against plain
* a drafter that is always right: automatic against the best of K = 4, 6 and 8
* the pair itself on code, prose and repetition: automatic against the best of all fixed lengths, all run in every pair
* a sampled round (temperature 1, top-k 64, top-p 0.95) against a greedy one, K = 4

Ratios are of tokens per second (of milliseconds per round for sampling). The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map

import mlx_gemma_mtp
from bench.decode import interval
from bench.engines import GREEDY, forgetful, load
from bench.inflate import inflate
from bench.machine import check_blas
from bench.prompts import prompts_of
from mlx_gemma_mtp import Sampling
from mlx_gemma_mtp.cluster_head import ClusterHead
from mlx_gemma_mtp.command import exit_code
from mlx_gemma_mtp.drafter import Drafter
from mlx_gemma_mtp.hub import DEMO
from mlx_gemma_mtp.joined import join_layer
from mlx_gemma_mtp.pair import Pair

CASES = ("random", "right", "pair", "sampling")
SAMPLED = Sampling(temperature=1.0, top_k=64, top_p=0.95)


def rate(pair: Pair, prompt, tokens, draft_length) -> float:
    """Tokens per second after the first."""
    options = {"max_tokens": tokens, "draft_length": draft_length, "sampling": GREEDY, "ignore_eos": True, "reuse": False}
    return pair.generate(prompt, **options).stats.generation_tokens_per_second


def compare(name: str, pairs: int, prompts: list, runs: dict) -> dict:
    """Rates of functions of a prompt, run in turn; the first of them over the best of the others by median, pair by pair."""
    (first, *others), rates = runs, {key: [] for key in runs}
    for index in range(-1, pairs):  # the first warms up
        order = list(runs) if index % 2 else list(runs)[::-1]
        for key in order:
            rate_ = runs[key](prompts[index % len(prompts)])
            if index >= 0:
                rates[key].append(rate_)
    best = max(others, key=lambda key: statistics.median(rates[key]))
    median, low, high = interval([a / b for a, b in zip(rates[first], rates[best])])
    print(f"{f'{name}: {first} / {best}':<46} {median:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return {"name": name, "over": best, "median": median, "interval": [low, high], "pairs": pairs, "rates": rates}


def with_random_drafter(pair: Pair) -> Pair:
    """The same target; every floating weight of the drafter drawn anew."""
    head = pair.drafter.head
    clusters = len(head.ordering) if isinstance(head, ClusterHead) else 0
    drafter = Drafter(pair.drafter.config, clusters)
    if clusters:
        drafter.head.ordering = head.ordering
    for layer in drafter.layers:
        join_layer(layer)
    fresh = lambda a: mx.random.normal(a.shape) * 0.05 if a.dtype == mx.float32 else a
    drafter.update(tree_map(fresh, drafter.parameters()))
    mx.eval(drafter.parameters())
    return forgetful(Pair(pair.target, drafter, pair.tokenizer, "random drafter"))


class Oracle(mlx_gemma_mtp.speculative.Engine):
    """Pays for the real drafter's steps and drafts what the target will say."""

    right = mx.zeros((1, 8192), mx.int32)

    def _draft(self, windows, read, drafts, method):
        honest = super()._draft(windows, read, drafts, method)

        def draft(pending, hidden, length, *rest):
            block, _, carried = honest(pending, hidden, length, *rest)
            known = mx.take_along_axis(rest[-1]["right"], length[:, None] + 1 + mx.arange(drafts), axis=1)
            return mx.concatenate([pending, known + 0 * block[:, 1:]], axis=1), mx.ones((1, drafts)), carried

        return draft

    def run_round(self, state, active, read, drafts, sampler=mlx_gemma_mtp.speculative.GREEDY, texts=None):
        sampler = replace(sampler, knobs=sampler.knobs | {"right": self.right})
        return super().run_round(state, active, read, drafts, sampler, texts)


def always_right(pair: Pair, prompt: list[int], tokens: int) -> Pair:
    """The same pair with a drafter that knows what follows this prompt."""
    oracle = Pair(pair.target, pair.drafter, pair.tokenizer, "oracle")
    oracle.engine = Oracle(pair.target, pair.drafter)
    plain = pair.generate(prompt, max_tokens=tokens, draft_length=0, sampling=GREEDY, ignore_eos=True, reuse=False).tokens
    oracle.engine.right = mx.array([(prompt + plain + [0] * 8192)[:8192]], mx.int32)
    return forgetful(oracle)


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.auto", description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, help="directory with target/ and drafter/ (default: the demo pair, inflated)")
    parser.add_argument("--pairs", type=int, default=20, help="runs of everything in turn (20)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of a run (96)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 1, 2, 3, 4, 6, 8], help="fixed draft lengths of the pair")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="which of the above")
    options = parser.parse_args()
    if min(options.pairs, options.tokens) < 1:
        parser.error("--pairs and --tokens must be at least 1")
    check_blas()
    with tempfile.TemporaryDirectory() as work:
        if options.pair is None:
            inflate(DEMO, Path(work), 1024, 2048, 20480)
        pair = load(options.pair or work, peers=[]).pair
    count, tokens, lines = options.pairs, options.tokens, []
    prompts = {kind: prompts_of(kind, pair.tokenizer, 4) for kind in ("code", "prose", "repetition")}
    code = prompts["code"]

    def runs_of(a_pair: Pair, lengths: list) -> dict:
        return {f"K={k}" if k != "auto" else k: (lambda prompt, k=k: rate(a_pair, prompt, tokens, k)) for k in lengths}

    if "random" in options.cases:
        lines.append(compare("random drafter", count, code, runs_of(with_random_drafter(pair), ["auto", 0])))
    if "right" in options.cases:
        lines.append(compare("always right", count, code[:1], runs_of(always_right(pair, code[0], tokens), ["auto", 4, 6, 8])))
    for kind, texts in prompts.items() if "pair" in options.cases else ():
        lines.append(compare(kind, count, texts, runs_of(pair, ["auto", *options.lengths])))

    def round_ms(sampling):
        settings = {"max_tokens": 64, "draft_length": 4, "sampling": sampling, "ignore_eos": True, "reuse": False}
        stats = lambda prompt: pair.generate(prompt, **settings).stats
        return lambda prompt: 1000 * (done := stats(prompt)).decode_seconds / done.rounds

    if "sampling" in options.cases:
        lines.append(compare("ms of a round", count, code, {"sampled": round_ms(SAMPLED), "greedy": round_ms(GREEDY)}))
    print(json.dumps(lines))


if __name__ == "__main__":
    sys.exit(exit_code(main))
