"""What lies in a directory of weights: tensor names, types and shapes, read from the safetensors headers alone."""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from .errors import CheckpointError, DoesNotFit

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header. start: its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises CheckpointError when it is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: give a directory with a Gemma 4 checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object: download it again")
    return value


def read_header(file: Path) -> dict[str, Tensor]:
    """Tensors of one safetensors file; checks that the file holds all the bytes its header promises."""
    broken = f"{file} is truncated or no safetensors file: download it again"
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            start = handle.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > size - 8:
                raise CheckpointError(broken)
            header = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        data = 8 + length
        tensors = {n: Tensor(e["dtype"], tuple(e["shape"]), file, data + e["data_offsets"][0]) for n, e in entries.items()}
        end = max((e["data_offsets"][1] for e in entries.values()), default=0)
        unknown = {t.dtype for t in tensors.values()} - set(ITEM_BYTES)
        sizes = [t.size for t in tensors.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise CheckpointError(broken) from None
    if any(not isinstance(size, int) or size < 0 for size in sizes):
        raise CheckpointError(broken)
    if 8 + length + end > size:
        raise CheckpointError(f"{file} is truncated: it has {size} bytes of {8 + length + end}: download it again")
    if unknown:
        raise CheckpointError(f"{file} holds tensors of unknown type {', '.join(sorted(unknown))}")
    return tensors


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Tensors of all `model*.safetensors` in a directory.

    Raises CheckpointError when there is none, when a shard named by the index is missing, or when one is truncated.
    """
    files = sorted(directory.glob("model*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.exists():
        named = read_json(index).get("weight_map", {})
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise CheckpointError(f"{index} holds no map of weights to files: download it again")
        named = set(named.values())
        if missing := named - {f.name for f in files}:
            raise CheckpointError(f"{directory} lacks {', '.join(sorted(missing))}: download the missing shards")
    if not files:
        raise CheckpointError(f"{directory} has no model*.safetensors: download the weights into it")
    tensors = {}
    for file in files:
        tensors |= read_header(file)
    return tensors


def weight_bytes(directory: Path, dtype: mx.Dtype | None, dropped: tuple[str, ...]) -> int:
    """Bytes of a directory's tensors once loaded, floats cast to `dtype`, without those whose names start with `dropped`."""
    wanted = [t for name, t in read_tensors(directory).items() if not name.startswith(dropped)]
    return sum(t.size * dtype.size if dtype and t.dtype in FLOATS else t.nbytes for t in wanted)


def machine_bytes() -> int:
    """Memory of this machine that a model may fill, in bytes (unified memory on a Mac)."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(needed_bytes: int, what: str) -> None:
    """Raises DoesNotFit when `needed_bytes` of weights exceed this machine's memory."""
    if needed_bytes > machine_bytes():
        raise DoesNotFit(
            f"{what} needs {needed_bytes / 1e9:.1f} GB for its weights, this machine has {machine_bytes() / 1e9:.1f} GB: "
            "use a smaller size or a quantized checkpoint"
        )
