"""A training run of a drafter: loss, steps, resumption.

What is trained is what is run: the frozen target reads a batch of text once and gives hidden states, distributions and
its shared keys and values; the drafter makes K chained steps from every position, at that position, under the masks of
decoding. Loss: per step, the divergence from the target's distribution, and for a cluster head the cross entropy of its
clusters against the target's mass in each, so that the right cluster is among those scored.
"""

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_gemma_mtp.cluster_head import ClusterHead
from mlx_gemma_mtp.config import FULL
from mlx_gemma_mtp.drafter import Drafter
from mlx_gemma_mtp.errors import OptionError
from mlx_gemma_mtp.target import Target

from .trainable import add_deltas, fuse_deltas, load_trainable, output_table
from .training import (
    ParallelGradients,
    PositionMask,
    Recorder,
    fast_softmax,
    load_checkpoint,
    log_sum_exp,
    make_optimizer,
    save_checkpoint,
    training_math,
)

CLUSTER_WEIGHT = 0.2
STEP_WEIGHT = 0.8  # a later draft token counts only if the earlier ones were accepted


@dataclass(frozen=True)
class Settings:
    """What decides the result of a training run, apart from pair and data.

    length: tokens of a training window.  rows: windows per step.  anchors: positions per window, the last ones, from
    which drafts are made.  draft_length: K.  rate: peak learning rate of the matrices (other weights: 0.15 of it).
    rank: of the low-rank deltas trained in place of the weights; None to train the weights.
    """

    steps: int
    length: int = 256
    rows: int = 8
    anchors: int = 256
    draft_length: int = 4
    rate: float = 0.005
    rank: int | None = None
    seed: int = 0


def batch_at(stream: np.ndarray, step: int, settings: Settings) -> mx.array:
    """[rows, length] windows of the stream. Depends on (seed, step) alone, so a resumed run sees the same ones."""
    randomness = np.random.default_rng([settings.seed, step])
    starts = randomness.integers(0, len(stream) - settings.length + 1, settings.rows)
    return mx.array(np.stack([stream[s : s + settings.length] for s in starts]))


def teach(target: Target, tokens: mx.array) -> tuple[mx.array, dict]:
    """One pass of the frozen target over ids [B, L].

    Returns hidden states [B, L, D] after the final norm, and per layer type the shared keys and values [B, G, L, E].
    """
    layers = [Recorder() for _ in target.owners]
    hidden = target.hidden(tokens, layers)
    shared = {kind: layers[target.shared_layer(kind)] for kind in set(target.owners)}
    return hidden, {kind: (layer.keys.astype(mx.float32), layer.values.astype(mx.float32)) for kind, layer in shared.items()}


def draft_chain(drafter: Drafter, embeddings: list[mx.array], hidden: mx.array, first: int, shared: dict) -> list[mx.array]:
    """Normed outputs [B, A, d] of K chained steps from A anchors side by side, at positions first .. first + A - 1.

    embeddings: K arrays [B, A, D], scaled, of the token each step starts from.  hidden: [B, A, D] the target's state that
    chose the first of them.  shared: per layer type keys and values [B, G, L, E]; an anchor sees those before itself,
    in sliding layers the last window - 1: what LayerCache.lend shows in decoding.
    """
    window, outputs = drafter.config.args.sliding_window, []
    for embedding in embeddings:
        x = drafter.pre_projection(mx.concatenate([embedding, hidden], axis=-1))
        for layer in drafter.layers:
            mask = PositionMask(None if layer.layer_type == FULL else window, first, includes_self=False)
            x, _, _ = layer(x, mask, shared_kv=shared[layer.layer_type], offset=first + drafter.position_offset)
        x = drafter.norm(x)
        outputs.append(x)
        hidden = drafter.post_projection(x)
    return outputs


def make_loss(target: Target, drafter: Drafter, settings: Settings):
    """loss(parameters, tokens [B, L]) -> scalar, the mean over anchors and draft steps. Writes into `drafter`."""
    K, A = settings.draft_length, settings.anchors
    first = settings.length - A
    head = drafter.head if isinstance(drafter.head, ClusterHead) else None
    # Where step k of an anchor has text to be judged by; an anchor at 0 would see nothing.
    position = first + mx.arange(A)
    valid = [((position > 0) & (position + k < settings.length)).astype(mx.float32) for k in range(K)]
    total = sum(STEP_WEIGHT**k * valid[k].sum().item() for k in range(K))
    mx.eval(valid)

    def loss(parameters, tokens):
        drafter.update(parameters)
        hidden, shared = teach(target, tokens)
        padded = mx.pad(tokens, [(0, 0), (0, K)])
        embeddings = [target.embed(padded[:, first + k : first + k + A]).astype(mx.float32) for k in range(K)]
        before = mx.pad(hidden, [(0, 0), (1, 0), (0, 0)])[:, first : first + A].astype(mx.float32)  # [B, A, D]
        p = teacher_distribution(target, hidden[:, first:], head)
        entropy = -(p * mx.log(p + 1e-9)).sum(-1)
        p, entropy = mx.pad(p, [(0, 0), (0, K), (0, 0)]), mx.pad(entropy, [(0, 0), (0, K)])
        result = 0.0
        for k, x in enumerate(draft_chain(drafter, embeddings, before, first, shared)):
            divergence = step_loss(drafter, x, p[:, k : k + A]) - entropy[:, k : k + A]  # [B, A]
            result = result + STEP_WEIGHT**k * (divergence * valid[k]).sum()
        return result / (tokens.shape[0] * total)

    return loss


def teacher_distribution(target: Target, hidden: mx.array, head: ClusterHead | None) -> mx.array:
    """The target's distribution [B, A, V], in the order of the drafter's output rows."""
    logits = target.logits(hidden).astype(mx.float32)
    if head is not None:
        logits = mx.take(logits, head.ordering.reshape(-1), axis=-1)
    return mx.stop_gradient(fast_softmax(logits))


def step_loss(drafter: Drafter, x: mx.array, p: mx.array) -> mx.array:
    """Cross entropy [B, A] of one step against p [B, A, V], plus that of the clusters. x: normed output [B, A, d]."""
    head = drafter.head
    if not isinstance(head, ClusterHead):
        scores = head(x).astype(mx.float32)
        return log_sum_exp(scores) - (p * scores).sum(-1)
    clusters, size = head.ordering.shape
    scores = (x @ output_table(head.tokens).T).astype(mx.float32)
    routes = head.centroids(x).astype(mx.float32)  # [B, A, C]
    mass = p.reshape(*p.shape[:-1], clusters, size).sum(-1)
    tokens_loss = log_sum_exp(scores) - (p * scores).sum(-1)
    clusters_loss = log_sum_exp(routes) - (mass * routes).sum(-1) + (mass * mx.log(mass + 1e-9)).sum(-1)
    return tokens_loss + CLUSTER_WEIGHT * clusters_loss


class Run:
    """One training run, resumable: the same settings, pair and data give the same drafter, killed in between or not."""

    def __init__(self, target: Target, source: Path, stream: np.ndarray, settings: Settings, work: Path, workers: int = 1):
        """source: directory of the drafter to start from.  work: directory for the checkpoint."""
        self.target, self.source, self.stream, self.settings = target, source, stream, settings
        self.checkpoint = work / "checkpoint.safetensors"
        mx.random.seed(settings.seed)
        mx.eval(target.model.state)  # rotary frequencies too: the workers' threads cannot evaluate what is lazy here
        self.optimizer = make_optimizer(settings.rate, 0.15 * settings.rate, settings.steps)
        self.parameters = self._new_drafter().trainable_parameters()
        identity = json.dumps(asdict(settings) | {"workers": workers}) + hashlib.sha256(stream.tobytes()).hexdigest()
        self.progress = {"step": 0, "identity": hashlib.sha256(identity.encode()).hexdigest(), "curve": []}
        if self.checkpoint.exists():
            self._resume()
        self.gradients = ParallelGradients(lambda: make_loss(target, self._new_drafter(), settings), workers)

    def _new_drafter(self) -> Drafter:
        """A drafter as the source has it, with fresh deltas if deltas are trained."""
        drafter = load_trainable(self.source)
        if self.settings.rank:
            add_deltas(drafter, self.settings.rank)
        mx.eval(drafter.state)
        return drafter

    def _resume(self) -> None:
        parameters, progress = load_checkpoint(self.checkpoint, self.optimizer)
        if progress["identity"] != self.progress["identity"]:
            raise OptionError(
                f"{self.checkpoint} belongs to a run with other data or options: "
                "give the same ones to go on with it, or remove it to start anew"
            )
        self.parameters, self.progress = parameters, progress

    def steps(self, save_seconds: float = 60.0):
        """Trains; yields (step, loss) after every step, with the drafter up to date, and saves checkpoints."""
        saved = time.time()
        for step in range(self.progress["step"], self.settings.steps):
            with training_math():
                loss, gradient = self.gradients(self.parameters, batch_at(self.stream, step, self.settings))
            self.parameters = self.optimizer.apply_gradients(gradient, self.parameters)
            mx.eval(self.parameters, self.optimizer.state)
            self.progress["step"] = step + 1
            self.progress["curve"].append([step + 1, loss.item()])
            yield step + 1, loss.item()
            if time.time() - saved > save_seconds:
                saved = time.time()
                self.save()

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(self.checkpoint, self.parameters, self.optimizer, self.progress)

    def fused(self) -> Drafter:
        """A drafter of its own with what was trained so far, deltas added in."""
        drafter = self._new_drafter()
        drafter.update(self.parameters)
        fuse_deltas(drafter)
        return drafter
