"""Milliseconds of a round beside mlx-vlm's, where arithmetic costs nothing: a tiny random pair, K = 4, greedy.

    python -m bench.round_overhead PAIR        # a directory with target/ and assistant/; needs mlx-vlm 0.7.10

What is left on so small a pair is the cost of operations, graphs and synchronisation. Runs alternate; the last line is JSON.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx

import mlx_gemma_mtp


def time_ours(pair, prompt, tokens, drafts):
    """Seconds per round, and the tokens."""
    done = pair.generate(prompt, max_tokens=tokens, draft_length=drafts, ignore_eos=True)
    return done.stats.decode_seconds / done.stats.rounds, done.tokens


def peer(directory: Path):
    """mlx-vlm's target and drafter, in float32 like ours."""
    from mlx_vlm.speculative.drafters import load_drafter
    from mlx_vlm.utils import load_model

    target = load_model(directory / "target")
    drafter, _ = load_drafter(str(directory / "assistant"))
    return target, drafter


def time_peer(target, drafter, prompt, tokens, drafts):
    """Seconds per round of mlx-vlm, and the tokens."""
    from mlx_vlm.generate.ar import generate_step

    steps = generate_step(
        mx.array([prompt]), target, None, None, max_tokens=tokens, temperature=0.0,
        draft_model=drafter, draft_kind="mtp", draft_block_size=drafts + 1,
    )  # fmt: skip
    out = [next(steps)[0]]
    start = time.perf_counter()
    out += [token for token, _ in steps]
    return (time.perf_counter() - start) / len(drafter.accept_lens), [int(t) for t in out]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", type=Path)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--runs", type=int, default=8)
    options = parser.parse_args()
    pair = mlx_gemma_mtp.load(options.pair / "target", options.pair / "assistant")
    target, drafter = peer(options.pair)
    prompt = list(range(3, 23))
    ours, theirs, same = [], [], True
    for run in range(options.runs + 1):  # the first warms up
        a, tokens = time_ours(pair, prompt, options.tokens, options.drafts)
        b, peer_tokens = time_peer(target, drafter, prompt, options.tokens, options.drafts)
        same = same and tokens[: len(peer_tokens)] == peer_tokens[: len(tokens)]
        if run:
            ours.append(a * 1000)
            theirs.append(b * 1000)
    ratios = [a / b for a, b in zip(ours, theirs)]
    print(f"ours {statistics.median(ours):.2f} ms per round, mlx-vlm {statistics.median(theirs):.2f} ms, same tokens: {same}")
    print(json.dumps({"ours_ms": ours, "peer_ms": theirs, "ratio_median": statistics.median(ratios), "same_tokens": same}))


if __name__ == "__main__":
    main()
