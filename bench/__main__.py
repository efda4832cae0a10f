"""What does MTP give on this machine, and beside what people use today?

    python -m bench                      # the demo pair, made large enough to be memory-bound
    python -m bench --pair DIR           # a converted pair (DIR/target, DIR/drafter)

Runs alternate between engines, prompt by prompt; outputs are compared before any time is reported. The last line on stdout
is JSON. On Linux the fast BLAS is needed:

    apt-get install libopenblas0-pthread
    LD_PRELOAD=/usr/lib/$(uname -m)-linux-gnu/openblas-pthread/libblas.so.3 python -m bench
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from bench.engines import engines_of
from bench.inflate import inflate
from bench.prompts import prompts_of
from bench.roofline import bandwidth, bytes_per_pass
from mlx_gemma_mtp.hub import DEMO


def check_blas() -> None:
    """Refuses to time MLX's slow reference BLAS, which makes several rows cost several times one."""
    maps = Path("/proc/self/maps")
    if maps.exists() and "openblas" not in maps.read_text():
        sys.exit(f"error: times without a fast BLAS mean nothing; run it so:\n{__doc__.split('needed:')[1]}")


def machine() -> dict:
    """What a reader needs to know of this machine."""
    packages = {}
    for name in ("mlx", "mlx-lm", "mlx-vlm"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {"system": platform.platform(), "device": mx.device_info(), "default": str(mx.default_device()), **packages}


def measure(engines, prompts, count: int, pause: float) -> dict:
    """Per engine and workload: runs, interleaved. A first, untimed token count of each makes graphs and kernels."""
    results = {engine.name: {kind: [] for kind in prompts} for engine in engines}
    for engine in engines:
        engine.run(next(iter(prompts.values()))[0], count)
    for kind, texts in prompts.items():
        for prompt in texts:
            for engine in engines:
                results[engine.name][kind].append(engine.run(prompt, count))
                time.sleep(pause)
    return results


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median and the bootstrap's 95 % interval."""
    import random

    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]


def summarise(results: dict, kind: str, base: str) -> list[dict]:
    """A line per engine: milliseconds per token, speed over `base` by prompt, tokens per round, equal output."""
    lines, reference = [], results["ours plain"][kind]
    for name, by_kind in results.items():
        runs = by_kind[kind]
        ratios = [b.milliseconds_per_token / r.milliseconds_per_token for r, b in zip(runs, results[base][kind])]
        median, low, high = interval(ratios)
        lines.append({
            "engine": name,
            "ms_per_token": statistics.median(r.milliseconds_per_token for r in runs),
            "ms_per_round": statistics.median(1000 * r.seconds / max(r.rounds, 1) for r in runs),
            "tokens_per_round": sum(len(r.tokens) - 1 for r in runs) / max(sum(r.rounds for r in runs), 1),
            f"speed_over_{base}": median,
            "interval": [low, high],
            "first_token_seconds": statistics.median(r.first_seconds for r in runs),
            "same_tokens": sum(r.tokens == t.tokens for r, t in zip(runs, reference)) / len(runs),
        })  # fmt: skip
    return lines


def show(kind: str, lines: list[dict], base: str) -> None:
    print(f"\n{kind}")
    print(f"{'engine':<18}{'ms/token':>10}{'ms/round':>10}{'tokens/round':>14}{'over ' + base:>22}{'first s':>9}  same tokens")
    for line in lines:
        low, high = line["interval"]
        speed = f"{line[f'speed_over_{base}']:.2f} [{low:.2f}, {high:.2f}]"
        print(
            f"{line['engine']:<18}{line['ms_per_token']:>10.1f}{line['ms_per_round']:>10.1f}{line['tokens_per_round']:>14.2f}"
            f"{speed:>22}{line['first_token_seconds']:>9.2f}  {line['same_tokens']:.0%}"
        )


def main():
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pair", type=Path, help="directory with target/ and drafter/ (default: the demo pair, inflated to 1 GB)")
    add("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 6], help="fixed draft lengths to time")
    add("--kinds", nargs="+", default=["code", "prose", "repetition"], help="workloads")
    add("--prompts", type=int, default=6, help="prompts per workload")
    add("--tokens", type=int, default=256, help="tokens per run")
    add("--base", default="mlx-lm plain", help="engine that speeds are relative to")
    add("--no-peers", action="store_true", help="leave mlx-lm and mlx-vlm out")
    add("--plots", type=Path, help="directory for PNG plots")
    options = parser.parse_args()
    check_blas()
    with tempfile.TemporaryDirectory() as work:
        pair = options.pair
        if pair is None:
            pair = Path(work)
            inflate(DEMO, pair)
        engines = engines_of(pair, options.lengths, not options.no_peers)
    ours = engines[0].pair
    prompts = {kind: prompts_of(kind, ours.tokenizer, options.prompts) for kind in options.kinds}
    base = "ours plain" if options.no_peers else options.base
    results = measure(engines, prompts, options.tokens, 2.0 if sys.platform == "darwin" else 0.0)
    summary = {kind: summarise(results, kind, base) for kind in prompts}
    for kind, lines in summary.items():
        show(kind, lines, base)
    limit = {"bytes_per_pass": bytes_per_pass(ours.target), "bytes_per_second": bandwidth()}
    plain = next(line for line in next(iter(summary.values())) if line["engine"] == "ours plain")
    limit["fraction_of_limit"] = limit["bytes_per_pass"] / limit["bytes_per_second"] / (plain["ms_per_token"] / 1000)
    print(
        f"\nroofline: a pass reads {limit['bytes_per_pass'] / 1e9:.2f} GB, memory gives "
        f"{limit['bytes_per_second'] / 1e9:.1f} GB/s, plain decoding reaches {limit['fraction_of_limit']:.0%} of that"
    )
    if options.plots:
        from bench.plots import draw

        draw(results, summary, options.plots)
    print(json.dumps({"machine": machine(), "base": base, "workloads": summary, "roofline": limit}))


if __name__ == "__main__":
    main()
