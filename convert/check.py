"""Whether a converted pair is whole: files as pair.json says, tensors as config.json says, finite values, a drafted round."""

import math
from pathlib import Path

import mlx.core as mx

from mlx_gemma_mtp.checkpoint import FLOATS, Tensor, read_json, read_tensors
from mlx_gemma_mtp.errors import CheckpointError
from mlx_gemma_mtp.hub import load
from mlx_gemma_mtp.sampling import Sampling

from .build import FORMAT_VERSION
from .directory import PAIR
from .parts import Part, slices


def check(directory: Path) -> dict:
    """Checks everything and returns pair.json. Raises CheckpointError with the first fault."""
    if not (directory / PAIR).exists():
        raise CheckpointError(f"{directory} has no {PAIR}: give a directory that a conversion wrote")
    pair = read_json(directory / PAIR)
    if pair.get("format_version") != FORMAT_VERSION:
        version = pair.get("format_version")
        raise CheckpointError(f"{directory} has format {version}, this version reads {FORMAT_VERSION}: convert again")
    sides = [side for side in ("target", "drafter") if side in pair]
    for side in sides:
        check_files(directory / side, pair[side])
        for name, tensor in read_tensors(directory / side).items():
            check_finite(directory / side, name, tensor)
    check_scored(directory, pair)
    # Loading is strict: a tensor missing, unknown or of another shape than config.json says is an error.
    loaded = load(directory, "auto" if "drafter" in pair else None)
    prompt = [2, *range(5, 9)]
    tokens = loaded.generate(prompt, max_tokens=6, draft_length=2, sampling=Sampling(temperature=0), ignore_eos=True)
    if len(tokens.tokens) != 6 or ("drafter" in pair and not tokens.stats.drafted):
        raise CheckpointError(f"{directory} loads but does not draft: convert again")
    return pair


def check_files(directory: Path, described: dict) -> None:
    for name, size in described["files"].items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        # config.json of a drafter is small and may be edited by hand (clusters scored); everything else is as written.
        if found is None or (found != size and name != "config.json"):
            raise CheckpointError(f"{path} {'is missing' if found is None else f'has {found} bytes of {size}'}: convert again")
    if (count := len(read_tensors(directory))) != described["tensors"]:
        raise CheckpointError(f"{directory} has {count} tensors of {described['tensors']}: convert again")


def check_finite(directory: Path, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATS or not math.prod(tensor.shape):
        return
    for array, _ in slices(Part(name, tensor, tensor.shape)):
        if not mx.all(mx.isfinite(array)).item():
            raise CheckpointError(f"{directory}: {name} holds values that are not finite: convert again")


def check_scored(directory: Path, pair: dict) -> None:
    scored = pair.get("drafter", {}).get("head", {}).get("scored_clusters")
    if scored is not None:
        found = read_json(directory / "drafter" / "config.json").get("centroid_intermediate_top_k", 32)
        if found != scored:
            raise CheckpointError(f"{directory}: the drafter scores {found} clusters, {PAIR} says {scored}: convert again")
