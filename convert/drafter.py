"""Tensors of an MTP drafter -> ours: the output table in the order of its clusters, so that a cluster is one block.

The table is the drafter's only embedding (its input embedding is the target's) and is stored once, as the head.
"""

from pathlib import Path

import numpy as np
from mlx.utils import tree_flatten

from mlx_gemma_mtp.checkpoint import Tensor
from mlx_gemma_mtp.config import DrafterConfig
from mlx_gemma_mtp.drafter import Drafter
from mlx_gemma_mtp.errors import CheckpointError

from .parts import Part, quantized, read_rows
from .recipes import Recipe
from .target import check_complete

ORDERING = "masked_embedding.token_ordering"
CENTROIDS = "masked_embedding.centroids."
CONVERTED = ("head.centroids.weight", "head.ordering")


def map_drafter(
    tensors: dict[str, Tensor], config: DrafterConfig, recipe: Recipe | None, where: Path | str
) -> tuple[list[Part], dict[str, str]]:
    """Parts of the output, and the reason of every tensor that is dropped, as in `target.map_target`.

    A dense head stays dense here: `with_clusters` changes it.
    """
    dropped = {}
    clusters = next((t.shape[0] for n, t in tensors.items() if n in (CENTROIDS + "weight", CONVERTED[0])), 0)
    parts = []
    ordering = read_ordering(tensors[ORDERING], clusters, where) if ORDERING in tensors else None
    for name, tensor in tensors.items():
        inner = name.removeprefix("model.")
        if inner == "lm_head.weight":
            dropped[name] = "the output table is the embedding table"
        elif inner == ORDERING:
            size = tensor.size // clusters
            parts.append(Part("head.ordering", tensor, (clusters, size)))
        elif inner.startswith("embed_tokens."):
            parts.append(table_part(inner.removeprefix("embed_tokens."), tensor, ordering, clusters))
        else:
            parts.append(Part(inner.replace(CENTROIDS, "head.centroids."), tensor, tensor.shape))
    if recipe is None:
        return parts, dropped
    check_complete({part.name: part.shape for part in parts}, expected_drafter(config, clusters), where)
    return [quantized(part, recipe.quantization(part.path)) for part in parts], dropped


def table_part(piece: str, tensor: Tensor, ordering: np.ndarray | None, clusters: int) -> Part:
    """The output table, or its scales or biases, by cluster if there are any."""
    if not clusters:
        return Part(f"head.{piece}", tensor, tensor.shape)
    rows, width = tensor.shape
    return Part(f"head.tokens.{piece}", tensor, (clusters, rows // clusters, width), order=ordering)


def read_ordering(tensor: Tensor, clusters: int, where: Path | str) -> np.ndarray | None:
    """Token ids cluster by cluster [V]; None of a tensor without a file (planning). Raises CheckpointError."""
    if tensor.file is None:
        return None
    ids = np.array(read_rows(tensor, slice(None)))
    if not clusters or len(ids) % clusters or not np.array_equal(np.sort(ids), np.arange(len(ids))):
        raise CheckpointError(f"{where}: {ORDERING} is no order of the {len(ids)} tokens: download the drafter again")
    return ids


def expected_drafter(config: DrafterConfig, clusters: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes our drafter has before quantization; nothing is allocated."""
    return {name: value.shape for name, value in tree_flatten(Drafter(config, clusters).parameters())}
