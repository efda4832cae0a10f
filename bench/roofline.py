"""How fast memory alone would let plain decoding be."""

import os
import time

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_gemma_mtp.target import Target


def share_read(name: str, chosen: int | None, experts: int | None) -> float:
    """Share of a weight that one decoding step reads, 0 to 1.

    0 of a table a token only looks one row up in, of experts those chosen, of all else everything.
    """
    if "embed_tokens_per_layer" in name:
        return 0.0
    return chosen / experts if ".experts." in name else 1.0


def bytes_per_pass(target: Target) -> int:
    """Bytes of weights one decoding step reads."""
    chosen, experts = target.args.top_k_experts, target.args.num_experts
    return sum(int(a.nbytes * share_read(n, chosen, experts)) for n, a in tree_flatten(target.model.parameters()))


def bandwidth(seconds: float = 4.0) -> float:
    """Bytes per second this device reads: the fastest of the passes over 0.94 GB of matrices that fit in `seconds`.

    A pass multiplies a row by every matrix, as decoding does, or sums every matrix's rows. On Metal one stream of either
    fills memory; on a CPU the sums of integers, a stream a core, read faster than BLAS does.
    """
    device = mx.default_device()
    matrices, row = [mx.ones((4096, 4096)) for _ in range(14)], mx.ones((1, 4096))
    integers = [matrix.view(mx.uint32) for matrix in matrices]
    mx.eval(matrices, row, integers)
    streams = [mx.new_stream(device) for _ in range(min(14, os.cpu_count() or 1) if device == mx.cpu else 1)]
    passes = (
        lambda: [row @ matrix.T for matrix in matrices],
        lambda: [mx.sum(matrix, axis=1, stream=streams[i % len(streams)]) for i, matrix in enumerate(integers)],
    )
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for read in passes:
            start = time.perf_counter()
            mx.eval(read())
            best = min(best, time.perf_counter() - start)
    return sum(matrix.nbytes for matrix in matrices) / best
