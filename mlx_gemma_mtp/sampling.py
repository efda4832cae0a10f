"""Logits -> tokens, and how many draft tokens the target agrees with."""

import mlx.core as mx


def choose(logits: mx.array) -> mx.array:
    """The token of every position, greedily. logits: [..., V]. Returns ids [...] int32."""
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def accept(draft_tokens: mx.array, target_tokens: mx.array) -> mx.array:
    """Length of the accepted prefix of every row.

    draft_tokens: [B, K] ids.  target_tokens: [B, K+1] ids the target chose at the same positions.
    Returns n [B] int32, 0 <= n <= K.
    Source: Leviathan et al. 2023, greedy case of algorithm 1.
    """
    agrees = (draft_tokens == target_tokens[:, :-1]).astype(mx.int32)
    return mx.cumprod(agrees, axis=1).sum(axis=1).astype(mx.int32)
