"""What the trainers share: optimizer, schedule, checkpoints, faster exponentials on a CPU. Knows no model."""

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import gemma4_text

from mlx_gemma_mtp import joined, target

PATCHED = (gemma4_text, joined, target)  # modules that import the functions training_math replaces


def make_optimizer(matrix_rate, other_rate, steps, decay=0.5):
    """Muon for the matrices of the layers, Adam for tables, norms and scalars.

    Rates rise over the first tenth (30 steps at most), stay, and fall to zero over the last `decay` fraction of `steps`.
    Source: Jordan et al. 2024 (Muon); Haegele et al. 2024 (constant rate, then a short decay).
    """
    warmup = min(30, max(1, steps // 10))

    def schedule(peak):
        def rate(step):
            rising = (step + 1) / warmup
            falling = (steps - step) / max(1.0, steps * decay)
            return peak * mx.clip(mx.minimum(rising, falling), 0.0, 1.0)

        return rate

    return optim.MultiOptimizer(
        [
            optim.Muon(schedule(matrix_rate), momentum=0.95, weight_decay=0.0),
            optim.Adam(schedule(other_rate), betas=[0.9, 0.95], bias_correction=True),
        ],
        [lambda name, array: array.ndim == 2 and "embed" not in name and "centroids" not in name],
    )


def save_checkpoint(path, parameters, optimizer, progress):
    """Writes weights, optimizer state and `progress` (a JSON-able dict) as one file, replacing the old one at once."""
    arrays = {f"parameters.{name}": array for name, array in tree_flatten(parameters)}
    arrays |= {f"optimizer.{name}": array for name, array in tree_flatten(optimizer.state)}
    unfinished = Path(path).with_suffix(".unfinished.safetensors")
    mx.save_safetensors(str(unfinished), arrays, {"progress": json.dumps(progress)})
    os.replace(unfinished, path)


def load_checkpoint(path, optimizer):
    """Returns (parameters tree, progress) and puts the saved state into `optimizer`."""
    arrays, metadata = mx.load(str(path), return_metadata=True)
    trees = {}
    for part in ("parameters", "optimizer"):
        start = part + "."
        trees[part] = tree_unflatten([(k[len(start) :], v) for k, v in arrays.items() if k.startswith(start)])
    optimizer.state = trees["optimizer"]
    return trees["parameters"], json.loads(metadata["progress"])


@mx.custom_function
def fast_exp(x):
    """exp for |x| <= 40 (values beyond are clamped), relative error below 1e-4 for |x| < 10: exp(x/64)^64."""
    small = mx.clip(x, -40.0, 40.0) * (1.0 / 64.0)
    power = 1.0 + small * (1.0 + small * (0.5 + small * (1.0 / 6.0 + small * (1.0 / 24.0))))
    for _ in range(6):
        power = power * power
    return power


@fast_exp.vjp
def _fast_exp_vjp(primals, cotangent, output):
    return cotangent * output


def log_sum_exp(x):
    """log(sum(exp(x))) over the last axis, for values within 40 of the largest; [..., N] -> [...]."""
    top = mx.stop_gradient(x.max(-1, keepdims=True))
    return mx.log(fast_exp(x - top).sum(-1)) + top[..., 0]


def fast_softcap(cap, x):
    """cap * tanh(x / cap)."""
    return cap - 2.0 * cap / (1.0 + fast_exp(x * (2.0 / cap)))


def fast_geglu(gate, x):
    """gelu (tanh form) of `gate`, times x: gate * sigmoid(2 sqrt(2/pi) (gate + 0.044715 gate^3)) * x."""
    inner = gate * (1.5957691216057308 + 0.07135481627 * (gate * gate))
    return gate * x / (1.0 + fast_exp(-inner))


def fast_softmax(scores, mask=None):
    """Softmax over the last axis; masked entries get exactly zero, a row without any entry all zeros."""
    if mask is not None:
        scores = mx.where(mask, scores, -1e9)
    weights = fast_exp(scores - mx.stop_gradient(scores.max(-1, keepdims=True)))
    weights = weights if mask is None else mx.where(mask, weights, 0.0)
    return weights / mx.maximum(weights.sum(-1, keepdims=True), 1e-9)


@dataclass(frozen=True)
class PositionMask:
    """Which keys 0 .. S-1 the queries at positions first .. first+T-1 see: earlier ones, within `window` if there is one."""

    window: int | None = None
    first: int = 0
    includes_self: bool = True

    def array(self, T, S):
        """[T, S] booleans."""
        query, key = self.first + mx.arange(T)[:, None], mx.arange(S)
        visible = (key <= query) if self.includes_self else (key < query)
        return visible if self.window is None else visible & (key > query - self.window)


class Recorder:
    """Stands for a layer's cache in mlx-lm's models: whole sequences from position 0, keys and values kept for a drafter."""

    offset = 0

    def make_mask(self, tokens, window_size=None, return_array=False):
        return PositionMask(window_size)

    def update_and_fetch(self, keys, values):
        self.keys, self.values = keys, values
        return keys, values


def window_attention(queries, keys, values, mask):
    """Attention of a sliding layer over a whole sequence, in blocks of one window that read two blocks of keys.

    queries [B, H, T, E], keys and values [B, G, T, E], T a multiple of the window. Returns [B, H, T, E].
    """
    B, H, T, E = queries.shape
    G, window = keys.shape[1], mask.window
    N = T // window

    def with_previous_block(x):  # [B, G, T, E] -> [B, G, 1, N, 2 window, E]
        blocks = x.reshape(B, G, 1, N, window, E)
        before = mx.concatenate([mx.zeros_like(blocks[:, :, :, :1]), blocks[:, :, :, :-1]], axis=3)
        return mx.concatenate([before, blocks], axis=4)

    visible = PositionMask(window, window, mask.includes_self).array(window, 2 * window)
    visible = visible & ((mx.arange(2 * window) >= window) | (mx.arange(N)[:, None, None] > 0))  # nothing precedes block 0
    scores = queries.reshape(B, G, H // G, N, window, E) @ with_previous_block(keys).swapaxes(-1, -2)
    return (fast_softmax(scores, visible) @ with_previous_block(values)).reshape(B, H, T, E)


def fast_attention(queries, keys, values, cache=None, scale=1.0, mask=None, sinks=None):
    """queries [B, H, T, E], keys and values [B, G, S, E], mask a PositionMask. Returns [B, H, T, E]."""
    B, H, T, E = queries.shape
    G, S = keys.shape[1], keys.shape[2]
    queries = queries * scale
    if mask.window and T == S and T % mask.window == 0 and mask.first == 0:
        return window_attention(queries, keys, values, mask)
    scores = (queries.reshape(B, G, H // G * T, E) @ keys.swapaxes(-1, -2)).reshape(B, H, T, S)
    weights = fast_softmax(scores, mask.array(T, S))
    return (weights.reshape(B, G, H // G * T, S) @ values).reshape(B, H, T, E)


def exact_attention(queries, keys, values, cache=None, scale=1.0, mask=None, sinks=None):
    """The same with MLX's own attention."""
    visible = mask.array(queries.shape[2], keys.shape[2])
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=visible)


@contextlib.contextmanager
def training_math():
    """While active, attention of mlx-lm's and our Gemma layers takes PositionMasks, and on a CPU the functions above.

    MLX's CPU backend computes exp and tanh one element at a time, which is two thirds of a training step of a small
    model; products and sums compiled into one loop are four times faster. For training only: the results differ from
    exact ones by about 1e-5, which a comparison of greedy tokens could notice.
    """
    on_cpu = mx.default_device() == mx.Device(mx.cpu, 0)
    attention = fast_attention if on_cpu else exact_attention
    changes = {"scaled_dot_product_attention": attention, "attend": attention}
    if on_cpu:
        changes |= {"geglu": fast_geglu, "logit_softcap": fast_softcap}
    saved = [(module, name, vars(module)[name]) for module in PATCHED for name in changes if name in vars(module)]
    exact_gelu = nn.gelu_approx
    try:
        for module, name, _ in saved:
            setattr(module, name, changes[name])
        if on_cpu:
            nn.gelu_approx = lambda x: fast_geglu(x, 1.0)
        yield
    finally:
        for module, name, function in saved:
            setattr(module, name, function)
        nn.gelu_approx = exact_gelu


class ParallelGradients:
    """A loss(parameters, *batch) -> scalar, differentiated on several threads that share the rows of a batch.

    make_loss() is called once per worker: tracing writes into the model, so every worker needs one of its own.

    MLX's CPU backend runs a stream's operations one after another, on one core outside of matrix products; two
    streams in two threads use two cores. The result is the mean over the workers in a fixed order, so it does not
    depend on timing.
    """

    def __init__(self, make_loss, workers=1):
        self.functions = [mx.compile(mx.value_and_grad(make_loss())) for _ in range(workers)]
        self.threads = [ThreadPoolExecutor(1) for _ in range(workers)]  # a stream belongs to the thread that made it
        self.streams = [t.submit(mx.new_stream, mx.default_device()).result() for t in self.threads]

    def __call__(self, parameters, *batch):
        """batch: arrays [B, ...], B divisible by the number of workers. Returns (loss, gradients), evaluated."""
        workers = len(self.functions)
        if batch[0].shape[0] % workers:
            raise ValueError(f"{batch[0].shape[0]} rows cannot be shared by {workers} workers: use a multiple")
        rows = batch[0].shape[0] // workers
        parts = [[array[i * rows : (i + 1) * rows] for array in batch] for i in range(workers)]
        mx.eval(parameters, parts)  # a thread cannot evaluate what another one left lazy
        running = [t.submit(self._run, i, parameters, parts[i]) for i, t in enumerate(self.threads)]
        results = [future.result() for future in running]
        mean = tree_map(lambda *arrays: sum(arrays[1:], arrays[0]) / workers, *results)
        mx.eval(mean)
        return mean

    def _run(self, worker, parameters, part):
        with mx.stream(self.streams[worker]):
            result = self.functions[worker](parameters, *part)
            mx.eval(result)
        return result

    def close(self):
        """Ends the threads; their streams have to go first."""
        for thread in self.threads:
            thread.submit(mx.clear_streams).result()
            thread.shutdown()
