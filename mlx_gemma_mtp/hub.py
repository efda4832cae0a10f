"""Names -> directories -> a loaded Pair."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import ModelArgs
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import maybe_set_recommended_wired_limit

from .checkpoint import check_memory, machine_bytes, read_json, weight_bytes
from .config import TOWERS, check_pair, load_drafter_config, load_target_config
from .drafter import POSITION_OFFSET, load_drafter
from .errors import CheckpointError, OptionError
from .pair import Pair
from .target import load_target
from .tokenizer import load_tokenizer

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
CACHE_BYTES = 2 << 30


def load(
    target: str | Path,
    drafter: str | Path | None = "auto",
    dtype: str | None = None,
    adapter_path: str | Path | None = None,
    draft_position: int = POSITION_OFFSET,
) -> Pair:
    """Loads a target and its drafter; everything is evaluated, so that any thread can use the pair.

    target: directory of a Gemma 4 checkpoint (Hugging Face or mlx-lm, quantized or not), or of a converted pair.
    drafter: directory of its drafter, None for plain decoding, "auto" for the one that belongs to a converted pair.
    dtype: "float32", "bfloat16" or "float16"; None for float32 on a CPU and the checkpoint's type elsewhere.
    adapter_path: directory of an mlx-lm LoRA adapter for the target.
    draft_position: position of the drafter's query relative to the pending token (see drafter.POSITION_OFFSET).
    Raises CheckpointError, PairMismatch, DoesNotFit, OptionError.
    """
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r}: use {', '.join(DTYPES)}")
    if dtype is None and mx.default_device() == mx.cpu:
        dtype = "float32"
    directory, drafter_directory = find(Path(target), drafter)
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


def find(target: Path, drafter: str | Path | None) -> tuple[Path, Path | None]:
    """Directories of target and drafter (None: plain decoding)."""
    if not target.is_dir():
        raise CheckpointError(f"{target} is not a directory: give the path of a Gemma 4 checkpoint")
    is_pair = (target / "target").is_dir() and not (target / "config.json").exists()
    directory = target / "target" if is_pair else target
    if drafter != "auto":
        path = None if drafter is None else Path(drafter)
        if path is not None and not path.is_dir():
            raise CheckpointError(f"{path} is not a directory: give the path of the drafter")
        return directory, path
    if is_pair and (target / "drafter").is_dir():
        return directory, target / "drafter"
    raise CheckpointError(f"no drafter belongs to {target}: name its directory, or None for plain decoding")


def _limit_memory() -> None:
    """Wires the weights on a Mac as mlx-lm does, and bounds freed buffers by bytes: a count of tokens bounds nothing."""
    maybe_set_recommended_wired_limit()
    mx.set_cache_limit(min(CACHE_BYTES, machine_bytes() // 8))
