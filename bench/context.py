"""Against context length: seconds to the first token, milliseconds of a round, memory. Ours, mlx-lm and mlx-vlm.

    python -m bench.context PAIR [--lengths 1024 4096 32768]

PAIR: a directory with target/ and drafter/. The prompt is random ids: content does not change the cost. The last line is JSON.
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx

from bench.engines import GREEDY, Loaded, Ours, load
from bench.machine import check_blas
from mlx_gemma_mtp.speculative import prefill
from mlx_gemma_mtp.target import Target

DRAFTS = 4


def ours_at(engine: Ours, prompt: list[int], tokens: int) -> dict:
    """Median of a round, and memory a round needs beyond what is live before it."""
    mx.reset_peak_memory()
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
        "peak_bytes": prefill_peak,
        "round_bytes": mx.get_peak_memory() - live,
    }


def peer_at(engine, prompt: list[int], tokens: int) -> dict:
    """Mean of a round: a peer's rounds cannot be told apart from outside."""
    mx.reset_peak_memory()
    run = engine.run(prompt, tokens)
    return {
        "first_token_seconds": run.first_seconds,
        "round_ms": 1000 * run.seconds / run.rounds,
        "peak_bytes": mx.get_peak_memory(),
    }


def every_layer_seconds(target: Target, prompt: list[int]) -> float:
    """Seconds of our prefill if it evaluated all layers of every chunk, not only those that own keys and values."""
    thorough = copy.copy(target)

    def hidden(tokens, layers):
        states = target.hidden(tokens, layers)
        mx.eval(states)
        return states

    thorough.hidden = hidden
    start = time.perf_counter()
    prefill(thorough, prompt)
    return time.perf_counter() - start


def measure(loaded: Loaded, lengths: list[int], tokens: int) -> list[dict]:
    """A line per engine and context length that the target allows; `tokens` are generated at each."""
    lines, target = [], loaded.pair.target
    engines = [*loaded.ours([DRAFTS]), *loaded.peers([DRAFTS])]
    for length in lengths:
        if length + tokens > target.args.max_position_embeddings:
            print(f"{length} tokens are left out: the context holds {target.args.max_position_embeddings}")
            continue
        random = mx.random.randint(20, 1000, (length - 1,), key=mx.random.key(length)).tolist()
        for engine in engines:
            at = ours_at if isinstance(engine, Ours) else peer_at
            if length <= 4096:
                at(engine, [2, *random], 12)  # graphs and kernels; what they cost is lost in a longer prefill
            lines.append({"engine": engine.name, "context": length, **at(engine, [2, *random], tokens)})
            show(lines[-1])
        seconds = every_layer_seconds(target, [2, *random])
        lines.append({"engine": "ours, every layer", "context": length, "first_token_seconds": seconds})
        show(lines[-1])
    return lines


def show(line: dict) -> None:
    print(f"{line['context']:>6} tokens  {line['engine']:<18}{line['first_token_seconds']:>8.2f} s to the first token", end="")
    if "round_ms" in line:
        print(f"{line['round_ms']:>9.1f} ms a round, {line['peak_bytes'] / 1e9:.2f} GB at peak", end="")
    if "round_bytes" in line:
        print(f", a round {line['round_bytes'] / 1e6:.1f} MB beyond what is live", end="")
    print(flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=60)
    options = parser.parse_args()
    check_blas()
    print(json.dumps(measure(load(options.pair), options.lengths, options.tokens)))


if __name__ == "__main__":
    main()
