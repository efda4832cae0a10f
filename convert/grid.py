"""Weights that a quantization-aware training left on a Q4_0 grid: blocks of 32 values d * k, k in -8 .. 7.

MLX's affine form holds such a block exactly: scale d, bias -8 d, codes k + 8. Its own `mx.quantize` would stretch the grid
over the block's extremes and move every value. -8 d is exact whenever d is, in every floating type.
Source of the format: ggml's block_q4_0.
"""

import mlx.core as mx

GROUP = 32
# What the largest value of a block is a multiple of: -8 in ggml's files, anything where training moved it.
EXTREMES = (-8, 7, -7, 6, -6, 5, -5, 4, -4, 3, -3, 2, -2, 1, -1)


def fit(weights: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Scales, codes and agreement of blocks.

    weights: [..., N], N a multiple of 32.  dtype: the scales' type.
    Returns d [..., N / 32] of `dtype`, k [..., N / 32, 32] float32, and exact [..., N / 32]: whether d * k, rounded to
    the weights' type, is each weight of the block. Where no d of that type does, d and k are the nearest found.
    """
    blocks = mx.unflatten(weights, -1, (-1, GROUP))
    kind, blocks = blocks.dtype, blocks.astype(mx.float32)
    at = mx.argmax(mx.abs(blocks), axis=-1, keepdims=True)
    extreme = mx.take_along_axis(blocks, at, axis=-1)  # [..., N / 32, 1]
    best_scale, best_code, best_error = mx.zeros_like(extreme), mx.zeros_like(blocks), mx.full(extreme.shape, mx.inf)
    for multiple in EXTREMES:
        scale = extreme / multiple
        code = mx.clip(mx.round(blocks / mx.where(scale == 0, 1, scale)), -8, 7)
        # The extreme value was rounded as well: the scale that fits all values is nearer to the one they were made with.
        fitted = (blocks * code).sum(-1, keepdims=True) / mx.maximum((code * code).sum(-1, keepdims=True), 1)
        for candidate in (scale, fitted):
            candidate = candidate.astype(dtype).astype(mx.float32)
            made = (candidate * code).astype(kind).astype(mx.float32)
            error = mx.abs(made - blocks).max(-1, keepdims=True)
            better = error < best_error
            best_scale = mx.where(better, candidate, best_scale)
            best_code = mx.where(better, code, best_code)
            best_error = mx.where(better, error, best_error)
        mx.eval(best_scale, best_code, best_error)
        if (best_error == 0).all().item():
            break
    return best_scale[..., 0].astype(dtype), best_code, best_error[..., 0] == 0


def lies_on_grid(rows: mx.array) -> bool:
    """Whether a sample of a tensor is Q4_0: every block d * k for some float32 d, up to the rounding of its type."""
    if rows.shape[-1] % GROUP or not mx.any(rows != 0).item():
        return False
    scale, code, _ = fit(rows, mx.float32)
    blocks = mx.unflatten(rows, -1, (-1, GROUP)).astype(mx.float32)
    # Half of eps is what rounding moved a weight by, the rest what that did to the scale.
    return mx.all(mx.abs(scale[..., None] * code - blocks) <= mx.finfo(rows.dtype).eps * mx.abs(blocks)).item()


def pack(weights: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Packed codes [..., N / 8] uint32, scales and biases [..., N / 32], as mx.quantize returns them for 4 bits."""
    scale, code, _ = fit(weights, dtype)
    nibbles = mx.unflatten((code + 8).astype(mx.uint32), -1, (-1, 8)) << mx.arange(0, 32, 4, dtype=mx.uint32)
    return mx.flatten(nibbles.sum(-1), -2, -1).astype(mx.uint32), scale, -8 * scale
