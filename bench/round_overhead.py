"""Milliseconds of a round beside mlx-vlm's, where arithmetic costs nothing: a tiny random pair, K = 4, greedy.

    python -m bench.random_pair tiny --size E2B --scale 0.05 --vocab 2048
    python -m bench.round_overhead tiny        # needs mlx-vlm 0.7.10

What is left on so small a pair is the cost of operations, graphs and synchronisation. Runs alternate; the last line is JSON.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from bench.engines import load
from bench.machine import check_blas
from mlx_gemma_mtp.command import exit_code


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.round_overhead", description=__doc__.splitlines()[0])
    parser.add_argument("pair", type=Path, help="directory with target/ and drafter/")
    parser.add_argument("--drafts", type=int, default=4, help="draft length (4)")
    parser.add_argument("--tokens", type=int, default=120, help="tokens of a run (120)")
    parser.add_argument("--runs", type=int, default=8, help="timed runs of each (8)")
    options = parser.parse_args()
    check_blas()
    loaded = load(options.pair, peers=["mlx-vlm"])
    engines = [*loaded.ours([options.drafts]), *loaded.mlx_vlm([options.drafts])]
    if len(engines) < 2:
        parser.error("needs mlx-vlm: pip install mlx-vlm==0.7.10")
    prompt, times, same = list(range(3, 23)), ([], []), True
    for index in range(options.runs + 1):  # the first warms up
        runs = [engine.run(prompt, options.tokens) for engine in engines]
        same = same and runs[0].tokens == runs[1].tokens
        for run, milliseconds in zip(runs, times):
            if index:
                milliseconds.append(run.milliseconds_per_round())
    ours, theirs = times
    ratios = [a / b for a, b in zip(ours, theirs)]
    print(f"ours {statistics.median(ours):.2f} ms per round, mlx-vlm {statistics.median(theirs):.2f} ms, same tokens: {same}")
    print(json.dumps({"ours_ms": ours, "peer_ms": theirs, "ratio_median": statistics.median(ratios), "same_tokens": same}))


if __name__ == "__main__":
    sys.exit(exit_code(main))
