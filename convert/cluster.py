"""A cluster head for a drafter with a dense one: balanced clusters of its output table, and how often they agree with it.

What is built is what Google's E2B and E4B drafters come with, centroids and an order of the tokens, so that everything
after it is the same. The target verifies every draft: a wrong cluster costs a draft token, never a wrong output.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_gemma_mtp.checkpoint import Tensor, read_header, read_json
from mlx_gemma_mtp.cluster_head import ClusterHead
from mlx_gemma_mtp.config import load_target_config
from mlx_gemma_mtp.drafter import load_drafter
from mlx_gemma_mtp.pair import Pair
from mlx_gemma_mtp.sampling import Sampling
from mlx_gemma_mtp.speculative import Engine
from mlx_gemma_mtp.target import load_target
from mlx_gemma_mtp.tokenizer import load_tokenizer

from .drafter import CENTROIDS, ORDERING
from .parts import Part, read_rows

CLUSTERS_FILE = "clusters.safetensors"
ROWS = 1 << 15  # of the table at a time
TOP = 8
STEP = 8  # clusters scored are a multiple of
CALIBRATION_TOKENS = 128
HELD_OUT = 3  # one prompt in so many is measured on and not fitted to
CHOICES = 16  # clusters a token may go to before the rest is looked at
RIDGE = 0.3
PROMPTS = (
    "Explain to a curious child why the sky is blue and sunsets are red.",
    "Write a Python function that reads a CSV file and returns the mean of every numeric column.",
    "Summarise the causes of the French Revolution in five bullet points.",
    'Return a JSON object with the fields "name", "age" and "email" for three invented people.',
    "Übersetze ins Englische: Der Zug fährt morgen um acht Uhr vom Gleis drei ab.",
    "Solve step by step: a train travels 240 km in 3 hours, then 100 km in 2 hours. What is its mean speed?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Escribe una receta sencilla de tortilla de patatas.",
    "Compare SQL and document databases in a table with three columns.",
    "请用三句话介绍长城的历史。",
    "Fix this C code and explain the error: for (int i = 0; i <= n; i++) sum += a[i];",
    "Write a polite email asking a landlord to repair a leaking tap.",
    "import argparse\nimport os\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def read_config(path):\n    with open(path) as handle:\n        for line in handle:\n",
)


def cluster_count(vocab_size: int) -> int:
    """How many clusters: of 128 tokens at 262,144, of fewer in a smaller vocabulary; a power of two, for halving."""
    size = max(4, 1 << int(math.log2(math.sqrt(vocab_size) / 4)))
    return math.gcd(vocab_size // size, 1 << 20)


def balanced_order(table: np.ndarray, clusters: int, iterations: int = 6) -> np.ndarray:
    """Token ids [V], cluster by cluster, all of V / clusters tokens: the table halved again and again.

    table: [V, d].  clusters: a power of two that divides V.
    A part is halved at the median of its projections on its main direction, found by power iteration.
    """
    order = np.arange(len(table))
    random = np.random.default_rng(0)
    parts = 1
    while parts < clusters:
        for group in order.reshape(parts, -1):  # a view: sorted in place
            rows = table[group]
            rows = rows - rows.mean(0)
            direction = random.standard_normal(rows.shape[1]).astype(np.float32)
            for _ in range(iterations):
                direction = (rows @ direction) @ rows
                direction /= np.linalg.norm(direction) + 1e-30
            group[:] = group[np.argpartition(rows @ direction, len(group) // 2)]
        parts *= 2
    return order


def refine(table: np.ndarray, order: np.ndarray, clusters: int, rounds: int = 2) -> np.ndarray:
    """A better order: every token goes to the cluster whose direction it has most of, the clearest cases first."""
    size = len(table) // clusters
    for _ in range(rounds):
        directions = np.stack([table[ids].mean(0) for ids in order.reshape(clusters, size)])
        directions /= np.linalg.norm(directions, axis=1, keepdims=True) + 1e-30
        label, space = np.full(len(table), -1), np.full(clusters, size)
        while (waiting := np.flatnonzero(label < 0)).size:
            open_clusters = np.flatnonzero(space)
            choices = min(CHOICES, len(open_clusters))
            chosen, scores = [], []
            for start in range(0, len(waiting), ROWS):
                all_scores = table[waiting[start : start + ROWS]] @ directions[open_clusters].T
                best = np.argpartition(-all_scores, choices - 1, axis=1)[:, :choices]
                chosen.append(open_clusters[best])
                scores.append(np.take_along_axis(all_scores, best, axis=1))
            chosen, scores = np.concatenate(chosen), np.concatenate(scores)
            for index in np.argsort(-scores, axis=None, kind="stable").tolist():
                row, cluster = waiting[index // choices], chosen.flat[index]
                if label[row] < 0 and space[cluster]:
                    label[row] = cluster
                    space[cluster] -= 1
        order = np.argsort(label, kind="stable")
    return order


def fit_centroids(table: np.ndarray, order: np.ndarray, clusters: int, hidden: np.ndarray) -> np.ndarray:
    """Centroids [C, d] whose scores follow the best token of each cluster.

    hidden: [N, d] states of the drafter.  Ridge regression on what the mean of a cluster's rows leaves over: a mean says
    how good a cluster is as a whole, but a cluster is wanted for one token.
    """
    best = np.stack([(hidden @ table[ids].T).max(1) for ids in order.reshape(clusters, -1)], axis=1)  # [N, C]
    means = np.stack([table[ids].mean(0) for ids in order.reshape(clusters, -1)])  # [C, d]
    missing = best - hidden @ means.T
    missing -= missing.mean(1, keepdims=True)  # what all clusters gain alike changes no choice
    covariance = hidden.T @ hidden
    ridge = RIDGE * np.trace(covariance) / len(covariance) * np.eye(len(covariance), dtype=np.float32)
    return means + np.linalg.solve(covariance + ridge, hidden.T @ missing).T


def write_clusters(table: Tensor, hidden: mx.array, file: Path) -> dict[str, Tensor]:
    """Clusters of an output table as the two tensors of a Hugging Face drafter, in a file; its header."""
    rows = np.array(read_rows(table, slice(None)).astype(mx.float32))
    count = cluster_count(len(rows))
    order = refine(rows, balanced_order(rows, count), count)
    centroids = fit_centroids(rows, order, count, np.array(hidden))
    mx.save_safetensors(
        str(file), {CENTROIDS + "weight": mx.array(centroids.astype(np.float32)), ORDERING: mx.array(order.astype(np.int64))}
    )
    return read_header(file)


class RecordingHead(nn.Module):
    """A dense head that keeps what it was asked."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self._head, self._seen = head, []

    def __call__(self, hidden: mx.array) -> mx.array:
        self._seen.append(hidden)
        return self._head(hidden)

    def take(self) -> list[mx.array]:
        """What was asked since the last time."""
        seen, self._seen = self._seen, []
        return seen


class EagerEngine(Engine):
    """Rounds that are not compiled, so that what passes through them can be kept."""

    def _get(self, make, *key):
        return make()


def calibrate(target_directory: Path, drafter_directory: Path, prompts: Sequence[str]) -> tuple[mx.array, mx.array]:
    """The drafter's hidden states [N, d] that its dense head saw while the pair answered prompts, at temperature 1: varied.

    Returns those to fit to, and those of other prompts to measure on.
    """
    dtype = mx.float32 if mx.default_device() == mx.cpu else None
    target = load_target(target_directory, load_target_config(target_directory), dtype)
    drafter = load_drafter(drafter_directory, dtype or target.dtype)
    tokenizer = load_tokenizer(target_directory, read_json(target_directory / "config.json"), target.args.vocab_size)
    pair = Pair(target, drafter, tokenizer, "calibration")
    drafter.head = RecordingHead(drafter.head)
    pair.engine = EagerEngine(target, drafter)
    random = np.random.default_rng(0)
    seen = []
    for index, prompt in enumerate(prompts):
        if tokenizer.wrapper is None:
            prompt = random.integers(0, target.args.vocab_size, 16).tolist()
        varied = Sampling(temperature=1, seed=index)
        pair.generate(prompt, max_tokens=CALIBRATION_TOKENS, draft_length=4, sampling=varied, ignore_eos=True)
        seen.append(mx.concatenate(drafter.head.take()).astype(mx.float32))
        mx.eval(seen[-1])
    fitted = [states for index, states in enumerate(seen) if index % HELD_OUT != HELD_OUT - 1]
    return mx.concatenate(fitted), mx.concatenate(seen[HELD_OUT - 1 :: HELD_OUT])


def dense_choices(table: Tensor, hidden: mx.array) -> np.ndarray:
    """Ids [N, TOP] of the dense head's best tokens, best first. hidden: [N, d]."""
    states = np.array(hidden)
    best_scores = np.full((len(states), 0), 0, np.float32)
    best_ids = np.zeros((len(states), 0), np.int64)
    for start in range(0, table.shape[0], ROWS):
        rows = np.array(read_rows(table, slice(start, start + ROWS)).astype(mx.float32))
        scores = np.concatenate([best_scores, states @ rows.T], axis=1)
        ids = np.concatenate([best_ids, np.broadcast_to(np.arange(start, start + len(rows)), (len(states), len(rows)))], axis=1)
        top = np.argsort(-scores, axis=1, kind="stable")[:, :TOP]
        best_scores, best_ids = np.take_along_axis(scores, top, 1), np.take_along_axis(ids, top, 1)
    return best_ids


def agreement(head: ClusterHead, hidden: mx.array, dense: np.ndarray, scored: int) -> tuple[float, float]:
    """How often the head's best token is the dense head's, and the share of the dense head's best TOP among its own."""
    head.scored_clusters = scored
    first, shared = 0, 0
    for start in range(0, hidden.shape[0], 32):
        scores, ids = head(hidden[start : start + 32])
        top = mx.take_along_axis(ids, mx.argsort(-scores, axis=1)[:, :TOP], axis=1)
        chosen, wanted = np.array(top), dense[start : start + 32]
        first += int((chosen[:, 0] == wanted[:, 0]).sum())
        shared += sum(len(set(a) & set(b)) for a, b in zip(chosen.tolist(), wanted.tolist()))
    return first / hidden.shape[0], shared / dense.size


def fit_head(directory: Path, table: Tensor, hidden: mx.array, level: float) -> dict:
    """How many clusters a converted drafter must score to choose as the dense head does in `level` of the steps.

    table: the dense head's.  hidden: [N, d], what `calibrate` returns to measure on.
    When even all clusters do not reach the level (coarse quantization moves choices too), `level` of what they reach.
    """
    head = load_drafter(directory, mx.float32 if mx.default_device() == mx.cpu else None).head
    hidden = hidden.astype(mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    dense = dense_choices(table, hidden.astype(mx.float32))
    clusters = head.ordering.shape[0]
    most = agreement(head, hidden, dense, clusters)[0]
    wanted = level if most >= level else level * most
    low, high = 0, STEP  # `low` is known to miss the level, `high` to reach it once the loop has ended
    while high < clusters and agreement(head, hidden, dense, high)[0] < wanted:
        low, high = high, 2 * high
    high = min(high, clusters)
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        if agreement(head, hidden, dense, middle)[0] < wanted:
            low = middle
        else:
            high = middle
    first, top = agreement(head, hidden, dense, high)
    return {
        "clusters": clusters,
        "scored_clusters": high,
        "top1_agreement": round(first, 4),
        f"top{TOP}_agreement": round(top, 4),
        "top1_agreement_all_clusters": round(most, 4),
        "asked_agreement": level,
        "hidden_states": hidden.shape[0],
    }


def step_bytes(parts: list[Part], dtype: mx.Dtype | None, scored: int | None) -> int:
    """Bytes of weights one draft step reads. scored: clusters of a cluster head."""
    total = 0
    for part in parts:
        size = sum(entry.nbytes for entry in part.entries(dtype))
        in_clusters = part.name.startswith(("head.tokens.", "head.ordering"))
        total += size * scored // part.shape[0] if in_clusters else size
    return total
