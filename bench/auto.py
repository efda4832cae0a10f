"""Is the automatic draft length ever slower, and what does sampling cost? Interleaved pairs, bootstrap intervals.

    python -m bench.auto [--pair DIR] [--pairs 20]

* a drafter of random weights, which accepts nothing: automatic against plain
* a drafter that is always right: automatic against the best fixed length
* the pair itself on code, prose and repetition: automatic against the best fixed length
* a sampled round (temperature 1, top-k 64, top-p 0.95) against a greedy one, K = 4

Ratios are of tokens per second (of milliseconds per round for sampling). The last line is JSON.
"""

import argparse
import json
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map

import mlx_gemma_mtp
from bench.__main__ import check_blas, interval
from bench.engines import GREEDY
from bench.inflate import inflate
from bench.prompts import prompts_of
from mlx_gemma_mtp import Sampling
from mlx_gemma_mtp.hub import DEMO
from mlx_gemma_mtp.pair import Pair

SAMPLED = Sampling(temperature=1.0, top_k=64, top_p=0.95)


def rate(pair: Pair, prompt, tokens, draft_length) -> float:
    """Tokens per second after the first."""
    options = {"max_tokens": tokens, "draft_length": draft_length, "sampling": GREEDY, "ignore_eos": True, "reuse": False}
    return pair.generate(prompt, **options).stats.generation_tokens_per_second


def compare(name, pairs, prompts, run, other) -> dict:
    """Median ratio of two functions of a prompt, run in turn, and its interval."""
    ratios = []
    for index in range(-1, pairs):  # the first warms up
        prompt = prompts[index % len(prompts)]
        a, b = (run(prompt), other(prompt)) if index % 2 else (other(prompt), run(prompt))[::-1]
        if index >= 0:
            ratios.append(a / b)
    median, low, high = interval(ratios)
    print(f"{name:<46} {median:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return {"name": name, "median": median, "interval": [low, high], "pairs": pairs}


def with_random_drafter(pair: Pair) -> Pair:
    """The same target; every floating weight of the drafter drawn anew."""
    drafter = mlx_gemma_mtp.drafter.Drafter(pair.drafter.config, pair.drafter.head.centroids.weight.shape[0])
    drafter.head.ordering = pair.drafter.head.ordering
    for layer in drafter.layers:
        mlx_gemma_mtp.joined.join_layer(layer)
    fresh = lambda a: mx.random.normal(a.shape) * 0.05 if a.dtype == mx.float32 else a
    drafter.update(tree_map(fresh, drafter.parameters()))
    mx.eval(drafter.parameters())
    return Pair(pair.target, drafter, pair.tokenizer, "random drafter")


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
        sampler.knobs["right"] = self.right
        return super().run_round(state, active, read, drafts, sampler, texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, help="directory with target/ and drafter/ (default: the demo pair, inflated)")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    options = parser.parse_args()
    check_blas()
    with tempfile.TemporaryDirectory() as work:
        if options.pair is None:
            inflate(DEMO, Path(work))
        pair = mlx_gemma_mtp.load(options.pair or work)
    count, tokens, lines = options.pairs, options.tokens, []
    prompts = {kind: prompts_of(kind, pair.tokenizer, 4) for kind in ("code", "prose", "repetition")}
    code = prompts["code"]

    scrambled = with_random_drafter(pair)
    run = lambda k, p=scrambled: lambda prompt: rate(p, prompt, tokens, k)
    lines.append(compare("random drafter: auto / plain", count, code, run("auto"), run(0)))

    oracle = Pair(pair.target, pair.drafter, pair.tokenizer, "oracle")
    oracle.engine = Oracle(pair.target, pair.drafter)
    plain = pair.generate(code[0], max_tokens=tokens, draft_length=0, sampling=GREEDY, ignore_eos=True, reuse=False).tokens
    oracle.engine.right = mx.array([(code[0] + plain + [0] * 8192)[:8192]], mx.int32)
    oracle.auto = mlx_gemma_mtp.Auto(calibrate=oracle.auto.calibrate)
    run = lambda k: lambda prompt: rate(oracle, prompt, tokens, k)
    best = max(options.lengths, key=lambda k: (run(k)(code[0]), run(k)(code[0]))[1])
    lines.append(compare(f"always right: auto / best fixed (K={best})", count, code[:1], run("auto"), run(best)))

    for kind, texts in prompts.items():
        run = lambda k: lambda prompt: rate(pair, prompt, tokens, k)
        speed = {k: sum(run(k)(p) for p in (texts[0], *texts[:2])[1:]) for k in (0, *options.lengths)}
        best = max(speed, key=speed.get)
        lines.append(compare(f"{kind}: auto / best fixed (K={best})", count, texts, run("auto"), run(best)))

    def round_ms(prompt, sampling):
        stats = pair.generate(prompt, max_tokens=64, draft_length=4, sampling=sampling, ignore_eos=True, reuse=False).stats
        return stats.decode_seconds / stats.rounds

    lines.append(
        compare("sampled round / greedy round", count, code, lambda p: round_ms(p, SAMPLED), lambda p: round_ms(p, GREEDY))
    )
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
