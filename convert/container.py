"""The safetensors container, written piece by piece: headers first, then rows as they come, so that nothing is held."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_gemma_mtp.checkpoint import ITEM_BYTES

SHARD_BYTES = 5 << 30
DTYPE_NAMES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32"}
UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


@dataclass(frozen=True)
class Entry:
    """A tensor of the output."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass
class _Region:
    """Where a tensor lies in its file, and how much of it is written."""

    file: int
    next: int
    end: int


def shard(groups: list[list[Entry]], shard_bytes: int) -> list[list[Entry]]:
    """Entries in files of at most `shard_bytes`, where no single group is larger; a group stays together."""
    shards: list[list[Entry]] = []
    filled = 0
    for group in groups:
        size = sum(entry.nbytes for entry in group)
        if not shards or filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1] += group
        filled += size
    return shards


class Writer:
    """The weights of one directory. Every tensor is appended to in row order; several may be open at once."""

    def __init__(self, directory: Path, groups: list[list[Entry]], shard_bytes: int = SHARD_BYTES):
        shards = shard(groups, shard_bytes)
        names = ["model.safetensors"]
        if len(shards) > 1:
            names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        self._regions: dict[str, _Region] = {}
        self._files = []
        for name, entries in zip(names, shards):
            header, offset = {"__metadata__": {"format": "mlx"}}, 0
            for entry in entries:
                end = offset + entry.nbytes
                header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
                offset = end
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            handle = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            self._files.append(handle)
            os.pwrite(handle, len(text).to_bytes(8, "little") + text, 0)
            os.ftruncate(handle, 8 + len(text) + offset)
            for entry in entries:
                start, end = (8 + len(text) + at for at in header[entry.name]["data_offsets"])
                self._regions[entry.name] = _Region(handle, start, end)
        if len(shards) > 1:
            total = sum(entry.nbytes for entries in shards for entry in entries)
            weight_map = {entry.name: name for name, entries in zip(names, shards) for entry in entries}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def append(self, name: str, rows: mx.array) -> None:
        """The next rows of a tensor. rows: evaluated or not, of the entry's type."""
        region = self._regions[name]
        data = memoryview(mx.contiguous(rows.reshape(-1)).view(UNSIGNED[rows.dtype.size])).cast("B")
        assert region.next + len(data) <= region.end, f"{name}: more rows than its header promises"
        while len(data):
            written = os.pwrite(region.file, data, region.next)
            region.next += written
            data = data[written:]

    def finish(self) -> None:
        """Checks that every tensor is complete."""
        unfinished = [name for name, region in self._regions.items() if region.next != region.end]
        assert not unfinished, f"rows of {unfinished[0]} were never written"

    def close(self) -> None:
        for handle in self._files:
            os.close(handle)
        self._files = []

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_) -> None:
        self.close()
