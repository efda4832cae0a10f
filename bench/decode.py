"""Engines in turn on the same prompts: speed, tokens a round, equal output; and what a round's two halves cost."""

import random
import statistics
import sys
import time

import mlx_gemma_mtp
from bench.engines import Run, parting
from mlx_gemma_mtp.calibration import measure as measure_costs

PAUSE = 2.0 if sys.platform == "darwin" else 0.0  # seconds between runs, for a chip to cool


def measure(engines: list, prompts: list[list[int]], count: int) -> dict[str, list[Run]]:
    """Runs of `count` tokens by engine, a prompt at a time. One that is not timed makes graphs and kernels first."""
    results: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    for engine in engines:
        engine.run(prompts[0], count)
    for index, prompt in enumerate(prompts):
        for engine in engines[:: -1 if index % 2 else 1]:
            results[engine.name].append(engine.run(prompt, count))
            time.sleep(PAUSE)
    return results


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median and the bootstrap's 95 % interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]


def summarise(results: dict[str, list[Run]], base: str) -> list[dict]:
    """A line per engine: medians over prompts, speed relative to `base` prompt by prompt, equal output.

    same_tokens: share of prompts whose tokens equal plain decoding's.  parted: where the first that differ do.
    """
    lines, reference = [], results["ours plain"]
    for name, runs in results.items():
        ratios = [b.milliseconds_per_token / r.milliseconds_per_token for r, b in zip(runs, results[base])]
        median, low, high = interval(ratios)
        lines.append({
            "engine": name,
            "ms_per_token": statistics.median(r.milliseconds_per_token for r in runs),
            "ms_per_round": statistics.median(r.milliseconds_per_round() for r in runs),
            "tokens_per_round": sum(len(r.tokens) - 1 for r in runs) / max(sum(r.rounds for r in runs), 1),
            "speed": median,
            "interval": [low, high],
            "first_token_seconds": statistics.median(r.first_seconds for r in runs),
            "same_tokens": sum(r.tokens == t.tokens for r, t in zip(runs, reference)) / len(runs),
            "parted": [parting(r.tokens, t.tokens) for r, t in zip(runs, reference) if r.tokens != t.tokens],
            "accepted_by_position": by_position(runs),
        })  # fmt: skip
    return lines


def by_position(runs: list[Run]) -> list[float]:
    """Share of rounds in which each draft token was accepted."""
    rounds, drafts = sum(r.rounds for r in runs), max(len(r.accepted_by_position) for r in runs)
    return [sum((r.accepted_by_position + [0] * drafts)[i] for r in runs) / max(rounds, 1) for i in range(drafts)]


def show(kind: str, lines: list[dict], base: str) -> None:
    """Prints a Markdown table."""
    print(f"\n{kind}\n\n| engine | ms per token | ms per round | tokens per round | speed over {base} [95 %] | same tokens |")
    print("|---|---|---|---|---|---|")
    for line in lines:
        low, high = line["interval"]
        same = f"{line['same_tokens']:.0%}" + (f" (parts at {line['parted']})" if line["parted"] else "")
        print(
            f"| {line['engine']} | {line['ms_per_token']:.1f} | {line['ms_per_round']:.1f} | {line['tokens_per_round']:.2f} "
            f"| {line['speed']:.2f} [{low:.2f}, {high:.2f}] | {same} |"
        )


def split(pair: mlx_gemma_mtp.Pair, lengths: list[int]) -> dict[int, dict[str, float]]:
    """Milliseconds of a round at the start of a context, by draft length: verifying, and drafting."""
    costs = measure_costs(pair.engine)
    known = [k for k in (0, *lengths) if k + 1 in costs.verify_seconds]
    return {k: {"verify_ms": 1000 * costs.cost(k + 1, 0), "draft_ms": 1000 * k * costs.draft_seconds} for k in known}
