"""Names -> directories -> a loaded Pair.

A name is a directory, a size such as E4B, or an id on the Hugging Face hub. Sizes and Google's checkpoints are converted
once and kept in `cache_directory()`; other ids are taken as they are, from the hub's own cache.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HTTPError
from mlx_lm.models.gemma4_text import ModelArgs
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import maybe_set_recommended_wired_limit

from .calibration import cache_directory
from .checkpoint import check_memory, machine_bytes, read_json, weight_bytes
from .config import TOWERS, check_pair, load_drafter_config, load_target_config
from .drafter import POSITION_OFFSET, load_drafter
from .errors import CheckpointError, HubError, OptionError
from .pair import Pair
from .target import load_target
from .tokenizer import load_tokenizer

DEMO = Path(__file__).parent / "demo"
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
CACHE_BYTES = 2 << 30
SIZES = ("E2B", "E4B", "12B", "26B-A4B", "31B")
SIZE = "|".join(SIZES)
# A drafter's tokenizer and a target's processors are never read.
DRAFTER_PATTERNS = ["config.json", "generation_config.json", "model*.safetensors*"]
TARGET_PATTERNS = [*DRAFTER_PATTERNS, "tokenizer*", "*.jinja", "special_tokens_map.json"]


@dataclass(frozen=True)
class Source:
    """Where a model comes from. name: as the user gave it, or its hub id.  revision: the hub's commit, if known."""

    directory: Path
    name: str
    revision: str | None = None


def find(target: str | Path, drafter: str | Path | None) -> tuple[Path, Path | None]:
    """Directories of target and drafter (None: plain decoding), downloaded and converted where needed.

    target, drafter: as for `load`.
    Raises CheckpointError, HubError, and what conversion raises.
    """
    path = path_of(target)
    if not path.is_dir():
        repository = hub_id(str(target))
        if repository is None:
            raise CheckpointError(
                f"{target} is not a directory: give the path of a Gemma 4 checkpoint, a size ({', '.join(SIZES)}), demo, "
                "or a hub id"
            )
        if not repository.startswith("google/"):
            directory = fetch(repository, TARGET_PATTERNS).directory
            return directory, find_drafter(drafter_id(repository) if drafter == "auto" else drafter, repository)
        path = converted_pair(repository, str(target))
    is_pair = (path / "target").is_dir() and not (path / "config.json").exists()
    directory = path / "target" if is_pair else path
    if drafter != "auto":
        return directory, find_drafter(drafter, str(target))
    if is_pair and (path / "drafter").is_dir():
        return directory, path / "drafter"
    return directory, find_drafter("", str(target))


def find_drafter(drafter: str | Path | None, target: str) -> Path | None:
    """Directory of a drafter given by directory, size or id; None for none, an error for "" (not known)."""
    if drafter is None:
        return None
    if not drafter:
        raise CheckpointError(f"no drafter belongs to {target}: name its directory, or None for plain decoding")
    return resolve(drafter, is_drafter=True).directory


def hub_id(name: str) -> str | None:
    """The id on the hub of the target a name stands for, None if it stands for none.

    name: a size, case-insensitive, with or without "gemma-4-" before it and "-it", "-base" or "-qat" after it; or an id.
    """
    short = re.fullmatch(rf"(?:gemma-4-)?({SIZE})(-it|-base)?(-qat)?", name, re.IGNORECASE)
    if not short:
        return name if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) else None
    size, kind, qat = (part.lower() if part else "" for part in short.groups())
    size = next(s for s in SIZES if s.lower() == size)
    return f"google/gemma-4-{size}" + ("" if kind == "-base" else "-it") + ("-qat-q4_0-unquantized" if qat else "")


def drafter_id(target: str) -> str:
    """The id of the drafter that belongs to a target's id, "" if its size cannot be told. Source: Google's model cards."""
    found = re.search(rf"gemma-4-({SIZE})(?![a-z0-9])", target, re.IGNORECASE)
    if not found:
        return ""
    size = next(s for s in SIZES if s.lower() == found[1].lower())
    # Weights trained for Q4_0 have drafters of their own; with the other kind fewer drafts are accepted.
    return f"google/gemma-4-{size}-it" + ("-qat-q4_0-unquantized" if "qat" in target.lower() else "") + "-assistant"


def path_of(name: str | Path) -> Path:
    """The directory a name means if it means one; "demo" is the pair that comes with the package."""
    path = Path(name).expanduser()
    return DEMO if str(name) == "demo" and not path.is_dir() else path


def resolve(name: str | Path, is_drafter: bool = False) -> Source:
    """The checkpoint a directory, size or id stands for, downloaded if need be. Raises CheckpointError, HubError."""
    path = path_of(name)
    if path.is_dir():
        return Source(path, str(name))
    repository = hub_id(str(name))
    if repository is None:
        what = "drafter" if is_drafter else "checkpoint"
        raise CheckpointError(
            f"{name} is not a directory: give the path of the {what}, a size ({', '.join(SIZES)}) or a hub id"
        )
    if is_drafter and not repository.endswith("assistant") and repository != str(name):
        repository = drafter_id(repository)
    return fetch(repository, DRAFTER_PATTERNS if is_drafter else TARGET_PATTERNS)


def converted_pair(repository: str, name: str) -> Path:
    """Directory of the converted pair of one of Google's targets, converted now if it is not there yet."""
    directory = cache_directory() / repository.split("/")[1]
    if (directory / "pair.json").exists():
        return directory
    from mlx_gemma_mtp.convert.build import Options, convert  # conversion builds on loading, and loading on it only here
    from mlx_gemma_mtp.convert.plan import describe_conversion

    drafter = drafter_id(repository)
    say(f"{name}: converting {repository} and its drafter, once, into {directory}{describe_conversion(repository)}")
    target = fetch(repository, TARGET_PATTERNS, command=f"python -m mlx_gemma_mtp.convert {name} --out DIR")
    convert(target, fetch(drafter, DRAFTER_PATTERNS), directory, Options(), say)
    say(f"{name}: done; `hf cache rm model/{repository}` frees the download")
    return directory


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fetch(repository: str, patterns: list[str], command: str | None = None) -> Source:
    """The files of a hub repository that match, from the hub's cache or downloaded into it; says how much before it starts.

    command: what to run where there is a network, when it cannot be had here.
    Raises HubError.
    """
    try:
        files = snapshot_download(repository, allow_patterns=patterns, dry_run=True)
        if missing := sum(file.file_size or 0 for file in files if file.will_download):
            say(f"{repository}: downloading {missing / 1e9:.2f} GB into {constants.HF_HUB_CACHE}")
        path = snapshot_download(repository, allow_patterns=patterns)
    except (OSError, ValueError, HTTPError) as error:
        path = _cached(repository, patterns)
        if path is None:
            cause = error.__cause__ or error
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise HubError(
                f"{repository} is not on this machine and cannot be downloaded ({reason}): where there is a network, run "
                f"`{command or f'hf download {repository}'}` and copy what it makes"
            ) from error
    path = Path(path)
    return Source(path, repository, path.name)


def _cached(repository: str, patterns: list[str]) -> str | None:
    """A snapshot in the hub's cache that has weights, None if there is none."""
    try:
        path = snapshot_download(repository, allow_patterns=patterns, local_files_only=True)
    except (OSError, ValueError, HTTPError):
        return None
    return path if any(Path(path).glob("model*.safetensors")) else None


def load(
    target: str | Path,
    drafter: str | Path | None = "auto",
    dtype: str | None = None,
    adapter_path: str | Path | None = None,
    draft_position: int = POSITION_OFFSET,
) -> Pair:
    """Loads a target and its drafter; everything is evaluated, so that any thread can use the pair.

    target: directory of a Gemma 4 checkpoint (Hugging Face or mlx-lm, quantized or not) or of a converted pair; a size
    (E2B, E4B, 12B, 26B-A4B, 31B), downloaded and converted on first use; or a hub id.
    drafter: directory or id of its drafter, None for plain decoding, "auto" for the one that belongs to the target.
    dtype: "float32", "bfloat16" or "float16"; None for float32 on a CPU and the checkpoint's type elsewhere.
    adapter_path: directory of an mlx-lm LoRA adapter for the target.
    draft_position: position of the drafter's query relative to the pending token (see drafter.POSITION_OFFSET).
    Raises CheckpointError, PairMismatch, DoesNotFit, OptionError, HubError, OutputError.
    """
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r}: use {', '.join(DTYPES)}")
    if dtype is None and mx.default_device() == mx.cpu:
        dtype = "float32"
    directory, drafter_directory = find(target, drafter)
    kind = DTYPES[dtype] if dtype else None
    config = load_target_config(directory)
    needed = weight_bytes(directory, kind, TOWERS)
    if drafter_directory is not None:
        check_pair(ModelArgs.from_dict(config.get("text_config", config)), load_drafter_config(drafter_directory)[1])
        needed += weight_bytes(drafter_directory, kind, ())
    check_memory(needed, str(target))
    _limit_memory()
    loaded = load_target(directory, config, kind, None if adapter_path is None else Path(adapter_path))
    loaded_drafter = None
    if drafter_directory is not None:
        loaded_drafter = load_drafter(drafter_directory, kind or loaded.dtype)
        loaded_drafter.position_offset = draft_position
    for model in (loaded.model, loaded_drafter):
        if model is not None and mx.default_device() == mx.cpu:
            _check_cpu_types(model)
    tokenizer = load_tokenizer(directory, read_json(directory / "config.json"), loaded.args.vocab_size)
    return Pair(loaded, loaded_drafter, tokenizer, Path(target).name)


def _check_cpu_types(model: nn.Module) -> None:
    """Raises OptionError for experts or clusters that MLX's CPU backend cannot multiply: its gather_mm knows float32 only."""
    if any(type(m) is SwitchLinear and m.weight.dtype != mx.float32 for m in model.modules()):
        raise OptionError("on a CPU, experts and cluster heads run in float32 only: leave --dtype out, or quantize the weights")


def _limit_memory() -> None:
    """Wires the weights on a Mac as mlx-lm does, and bounds freed buffers by bytes: a count of tokens bounds nothing."""
    maybe_set_recommended_wired_limit()
    mx.set_cache_limit(min(CACHE_BYTES, machine_bytes() // 8))
