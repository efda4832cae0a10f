"""How fast memory alone would let plain decoding be."""

import time

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_gemma_mtp.target import Target


def bytes_per_pass(target: Target) -> int:
    """Weights one decoding step reads: all but the tables a token only looks one row up in, and the experts not chosen."""
    args, total = target.args, 0
    for name, array in tree_flatten(target.model.parameters()):
        if "embed_tokens_per_layer" in name:
            continue
        share = args.top_k_experts / args.num_experts if ".experts." in name else 1
        total += int(array.nbytes * share)
    return total


def bandwidth(size: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes per second this device reads: the fastest of a few matrix-vector products of 1 GB."""
    matrix, vector = mx.zeros((size // 4096, 4096)), mx.zeros((4096, 1))
    mx.eval(matrix, vector)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(matrix @ vector)
        best = min(best, time.perf_counter() - start)
    return matrix.nbytes / best
