"""Round time and peak memory of a round against context length, ours and mlx-vlm's, and the time to the first token.

    python -m bench.context PAIR [--lengths 1024 4096 32768]

PAIR: a directory with target/ and drafter/. The prompt is random ids: content does not change the cost. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx

import mlx_gemma_mtp
from bench.__main__ import check_blas
from bench.engines import GREEDY, MlxLm, MlxVlm, Ours


def ours_rounds(engine: Ours, prompt: list[int], tokens: int) -> dict:
    """Median seconds of a round, and memory a round needs beyond what is live before it."""
    stream = engine.pair.stream(
        prompt, max_tokens=tokens, draft_length=engine.draft_length, sampling=GREEDY, ignore_eos=True, reuse=False
    )
    start = time.perf_counter()
    next(stream)
    first = time.perf_counter() - start
    prefill_peak = mx.get_peak_memory()
    next(stream)
    mx.reset_peak_memory()
    live, times, last = mx.get_active_memory(), [], time.perf_counter()
    for _ in stream:
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return {
        "first_token_seconds": first,
        "round_ms": 1000 * statistics.median(times),
        "round_bytes": mx.get_peak_memory() - live,
        "prefill_peak_bytes": prefill_peak,
    }


def peer_rounds(engine, prompt: list[int], tokens: int) -> dict:
    mx.reset_peak_memory()
    run = engine.run(prompt, tokens)
    round_ms = 1000 * run.seconds / run.rounds
    return {"first_token_seconds": run.first_seconds, "round_ms": round_ms, "peak_bytes": mx.get_peak_memory()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=60)
    options = parser.parse_args()
    check_blas()
    engines = [Ours(mlx_gemma_mtp.load(options.pair), 4, "ours K=4"), MlxLm(options.pair)]
    try:
        engines.append(MlxVlm(options.pair, 4))
    except ImportError:
        print("mlx-vlm is not installed: left out")
    results = {engine.name: {} for engine in engines}
    for length in options.lengths:
        prompt = [2, *(int(i) for i in mx.random.randint(20, 1000, (length - 1,), key=mx.random.key(length)).tolist())]
        for engine in engines:
            measure = ours_rounds if isinstance(engine, Ours) else peer_rounds
            measure(engine, prompt, 12)  # graphs and kernels
            results[engine.name][length] = measure(engine, prompt, options.tokens)
            print(engine.name, length, {k: round(v, 3) for k, v in results[engine.name][length].items()}, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
