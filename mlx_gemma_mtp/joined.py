"""mlx-lm's attention and MLP with fewer, larger products: q/k/v in one, gate and up in one, the heads of a group in one.

Drop-in modules of the same call signature, put in place after loading. A product is joined only where its parts are
plain or quantized linear layers of one kind, so adapters and mixed bit widths stay as they are.
"""

import math
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import MLP, Attention

FEW = 32  # tokens a pass may have to count as a round


def join(parts: list[nn.Module]) -> nn.Module | None:
    """One linear layer whose output is the parts' outputs side by side, or None where they differ in kind."""
    first = parts[0]
    if any(type(p) is not type(first) or "bias" in p for p in parts):
        return None
    if type(first) is nn.QuantizedLinear:
        if any((p.group_size, p.bits, p.mode) != (first.group_size, first.bits, first.mode) for p in parts):
            return None
    elif type(first) is not nn.Linear:
        return None
    if len(parts) > 1:
        for name in list(first.keys()):
            first[name] = mx.concatenate([p[name] for p in parts])
    return first


@partial(mx.compile, shapeless=True)
def geglu(gate: mx.array, x: mx.array) -> mx.array:
    """gelu(gate) * x, the tanh approximation written as a sigmoid: the cube by products, one exponential.

    The same function as mlx-lm's, whose power and tanh cost a CPU more than the products around them (measured: a fifth of
    a round of five tokens).
    """
    return gate * mx.sigmoid(2 * math.sqrt(2 / math.pi) * gate * (1 + 0.044715 * gate * gate)) * x


class JoinedMLP(nn.Module):
    """down(gelu(gate) * up) with gate and up as one product."""

    def __init__(self, mlp: MLP, gate_up: nn.Module):
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, mlp.down_proj

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(geglu(gate, up))


class JoinedAttention(nn.Module):
    """Gemma 4 attention with q, k and v (or k = v) as one product; of a layer that owns no keys and values, q alone."""

    def __init__(self, attention: Attention, qkv: nn.Module):
        super().__init__()
        self.n_heads, self.head_dim, self.use_k_eq_v = attention.n_heads, attention.head_dim, attention.use_k_eq_v
        self.qkv_proj, self.o_proj, self.rope = qkv, attention.o_proj, attention.rope
        self.q_norm = attention.q_norm
        if attention.has_kv:
            self.n_kv_heads, self.k_norm, self.v_norm = attention.n_kv_heads, attention.k_norm, attention.v_norm

    def __call__(self, x, mask=None, cache=None, shared_kv=None, offset=None):
        batch, tokens, _ = x.shape
        heads = self.qkv_proj(x).reshape(batch, tokens, -1, self.head_dim).transpose(0, 2, 1, 3)
        offset = cache.offset if shared_kv is None else offset
        queries = self.rope(self.q_norm(heads[:, : self.n_heads]), offset=offset)
        if shared_kv is None:
            keys = heads[:, self.n_heads : self.n_heads + self.n_kv_heads]
            values = keys if self.use_k_eq_v else heads[:, self.n_heads + self.n_kv_heads :]
            shared_kv = cache.update_and_fetch(self.rope(self.k_norm(keys), offset=offset), self.v_norm(values))
        output = attend(queries, *shared_kv, mask=mask)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(batch, tokens, -1)), shared_kv, offset


def attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> mx.array:
    """Attention [B, H, T, E] of queries [B, H, T, E] to keys and values [B, G, S, E] under a mask [B, 1, T, S]; scale 1.

    A round's few queries of all heads of a group become the rows of one product, so that keys and values are read once, not
    once per head; where MLX has a fused kernel (on a GPU, heads of up to 256) that does the same.
    """
    batch, heads, tokens, size = queries.shape
    groups, slots = keys.shape[1], keys.shape[2]
    if tokens > FEW or (size <= 256 and mx.default_device() != mx.cpu):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask)
    scores = queries.reshape(batch, groups, -1, size) @ keys.swapaxes(2, 3)
    scores = scores.reshape(batch, groups, -1, tokens, slots)
    weights = mx.softmax(mx.where(mask[:, :, None], scores, mx.finfo(scores.dtype).min), axis=-1, precise=True)
    return (weights.reshape(batch, groups, -1, slots) @ values).reshape(batch, heads, tokens, size)


def join_layer(layer: nn.Module) -> None:
    """Joins what can be joined in one decoder layer; call it before the weights are evaluated, or they are held twice."""
    attention, mlp = layer.self_attn, layer.mlp
    if gate_up := join([mlp.gate_proj, mlp.up_proj]):
        layer.mlp = JoinedMLP(mlp, gate_up)
    names = ["q_proj", "k_proj", "v_proj"][: 1 if not attention.has_kv else 2 if attention.use_k_eq_v else 3]
    if qkv := join([attention[name] for name in names]):
        layer.self_attn = JoinedAttention(attention, qkv)
