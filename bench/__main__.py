"""What does MTP give on this machine, and beside what people use today?

    python -m bench                      # the demo pair, made large enough to be memory-bound
    python -m bench --model E4B          # a real pair: a size, a hub id, or a directory as for mlx_gemma_mtp.load

Engines run in turn, prompt by prompt; outputs are compared before any time is reported. What is printed is Markdown, to be
pasted where it is asked for; the last line on stdout is JSON. On Linux a fast BLAS is needed:

    apt-get install libopenblas0-pthread
    LD_PRELOAD=/usr/lib/$(uname -m)-linux-gnu/openblas-pthread/libblas.so.3 python -m bench
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from bench import batch, chips, context, decode
from bench.engines import PEERS, Loaded, load
from bench.inflate import inflate
from bench.machine import check_blas, describe, machine
from bench.prompts import prompts_of
from bench.roofline import bandwidth, bytes_per_pass
from mlx_gemma_mtp.command import exit_code
from mlx_gemma_mtp.hub import DEMO

PARTS = ("decode", "context", "batch")
PLAIN, AUTO = "ours plain", "ours auto"


def load_engines(options) -> Loaded:
    if options.model:
        return load(options.model, options.drafter, options.peer_drafter, options.peers)
    with tempfile.TemporaryDirectory() as work:
        inflate(DEMO, Path(work))
        return load(work, peers=options.peers)


def decode_part(loaded: Loaded, options) -> dict:
    """Tables of all workloads, what a round's halves cost, and the limit that memory sets."""
    engines = [*loaded.ours([0, *options.lengths, "auto"]), *loaded.peers([0, *options.lengths])]
    base = loaded.mlx_lm.name if loaded.mlx_lm else PLAIN
    prompts, workloads = {kind: prompts_of(kind, loaded.pair.tokenizer, options.prompts) for kind in options.kinds}, {}
    for kind in prompts:
        workloads[kind] = decode.summarise(decode.measure(engines, prompts[kind], options.tokens), base)
        decode.show(f"{kind}, {options.prompts} prompts, {options.tokens} tokens", workloads[kind], base)
    halves = decode.split(loaded.pair, options.lengths)
    print("\nmilliseconds of a round, verify + draft: ", end="")
    print(", ".join(f"K={k} {half['verify_ms']:.1f} + {half['draft_ms']:.1f}" for k, half in halves.items()))
    lines = {line["engine"]: line for line in next(iter(workloads.values()))}
    limit = roofline(loaded, lines[PLAIN], lines[AUTO])
    return {"base": base, "workloads": workloads, "round": halves, "roofline": limit}


def roofline(loaded: Loaded, plain: dict, fastest: dict) -> dict:
    """How near plain decoding comes to what memory allows, and what that would be on Apple's chips."""
    limit = {"bytes_per_pass": bytes_per_pass(loaded.pair.target), "bytes_per_second": bandwidth()}
    limit["fraction_of_limit"] = limit["bytes_per_pass"] / limit["bytes_per_second"] / (plain["ms_per_token"] / 1000)
    print(
        f"\nA pass reads {limit['bytes_per_pass'] / 1e9:.2f} GB, memory gives {limit['bytes_per_second'] / 1e9:.1f} GB/s: "
        f"plain decoding reaches {limit['fraction_of_limit']:.0%} of that limit.\n"
    )
    length, cost = fastest["tokens_per_round"], fastest["ms_per_round"] / plain["ms_per_round"]
    limit["projection"] = chips.project(limit["bytes_per_pass"], length, cost)
    chips.show(limit["projection"], f"these weights; MTP: {length:.2f} tokens in a round of {cost:.2f} plain steps, as above")
    return limit


def main():
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="pair to measure: a size, a hub id or a directory (default: the demo pair, inflated to 1 GB)")
    add("--drafter", default="auto", help="its drafter, where it is not the model's own")
    add("--peer-drafter", help="drafter for mlx-vlm, in Hugging Face's form (default: the same, or Google's)")
    add("--parts", choices=PARTS, nargs="+", default=list(PARTS), help="what to measure")
    add("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 6], help="fixed draft lengths, ours and mlx-vlm's")
    add(
        "--kinds",
        nargs="+",
        default=["code", "prose", "repetition"],
        help="workloads: code, prose, repetition, chat, or a number of tokens",
    )
    add("--prompts", type=int, default=6, help="prompts per workload")
    add("--tokens", type=int, default=256, help="tokens per run")
    add("--contexts", type=int, nargs="+", default=[1024, 4096, 16384], help="context lengths in tokens")
    add("--rows", type=int, nargs="+", default=[1, 4, 8], help="rows of a batch")
    add("--peers", choices=PEERS, nargs="*", default=list(PEERS), help="what to compare with")
    add("--plots", type=Path, help="directory for PNG plots")
    options = parser.parse_args()
    check_blas()
    loaded = load_engines(options)
    report: dict = {"machine": machine(), "model": options.model or "demo, inflated"}
    print(f"mlx_gemma_mtp bench: {report['model']}\n{describe(report['machine'])}")
    if "decode" in options.parts:
        report |= decode_part(loaded, options)
    if "context" in options.parts:
        print("\nagainst context length\n")
        report["context"] = context.measure(loaded, options.contexts, 60, [0, 4])
    if "batch" in options.parts:
        print("\nbatches\n")
        report["batch"] = batch.measure(loaded, options.rows, 64, [0, 3, "auto"])
    if options.plots:
        from bench.plots import draw

        draw(report, options.plots)
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(exit_code(main))
