"""Against context length: seconds to the first token, milliseconds of a round, memory. Ours, mlx-lm and mlx-vlm.

    python -m bench.context PAIR [--lengths 1024 4096 32768]

PAIR: a directory with target/ and drafter/. The prompt is random ids: content does not change the cost. The last line is JSON.
"""

import argparse
import copy
import json
import sys
from pathlib import Path

import mlx.core as mx

import mlx_gemma_mtp
from bench.engines import PEERS, WARM, Loaded, Ours, load
from bench.machine import check_blas
from mlx_gemma_mtp.command import exit_code

NEGLIGIBLE = 4096  # tokens of a prompt beside which making graphs takes no time, so that it need not be run twice


class EveryLayer(Ours):
    """Ours, but for a prefill that evaluates all layers of every chunk, not only those that own keys and values."""

    def __init__(self, pair: mlx_gemma_mtp.Pair):
        target, thorough = copy.copy(pair.target), copy.copy(pair)

        def hidden(tokens, layers):
            states = pair.target.hidden(tokens, layers)
            mx.eval(states)
            return states

        target.hidden, thorough.target = hidden, target
        super().__init__(thorough, 0, "ours, every layer")


def measure(loaded: Loaded, lengths: list[int], tokens: int, drafts: list[int]) -> list[dict]:
    """A line per engine and context length that the target allows; a round is the mean of those of `tokens` tokens."""
    lines, limit = [], loaded.pair.target.args.max_position_embeddings
    engines = [*loaded.ours(drafts), *loaded.peers(drafts)]
    for length in lengths:
        if length + tokens > limit:
            print(f"{length} tokens are left out: the context holds {limit}")
            continue
        prompt = [2, *mx.random.randint(20, 1000, (length - 1,), key=mx.random.key(length)).tolist()]
        for engine in engines:
            if length <= NEGLIGIBLE:
                engine.run(prompt, 2 * WARM)
            run = engine.run(prompt, WARM + tokens)
            line = {"engine": engine.name, "context": length, "first_token_seconds": run.first_seconds}
            line |= {"round_ms": run.milliseconds_per_round(WARM), "peak_bytes": run.peak_bytes, "round_bytes": run.round_bytes}
            lines.append(line)
            show(line)
        if length <= NEGLIGIBLE:
            run = EveryLayer(loaded.pair).run(prompt, 2)
            lines.append({"engine": "ours, every layer", "context": length, "first_token_seconds": run.first_seconds})
            show(lines[-1])
    return lines


def show(line: dict) -> None:
    print(f"{line['context']:>6} tokens  {line['engine']:<18}{line['first_token_seconds']:>8.2f} s to the first token", end="")
    if "round_ms" in line:
        print(
            f"{line['round_ms']:>9.1f} ms a round, memory beyond the weights {line['peak_bytes'] / 1e9:.2f} GB at peak, "
            f"{line['round_bytes'] / 1e6:.1f} MB in a round",
            end="",
        )
    print(flush=True)


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.context", description=__doc__.splitlines()[0])
    parser.add_argument("pair", type=Path, help="directory with target/ and drafter/")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=60, help="tokens after it (60)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 4], help="draft lengths")
    parser.add_argument("--peers", choices=PEERS, nargs="*", default=list(PEERS), help="what to compare with")
    options = parser.parse_args()
    if min(options.tokens, *options.lengths) < 1:
        parser.error("--tokens and --lengths must be at least 1")
    check_blas()
    loaded = load(options.pair, peers=options.peers)
    print(json.dumps(measure(loaded, options.lengths, options.tokens, options.drafts)))


if __name__ == "__main__":
    sys.exit(exit_code(main))
