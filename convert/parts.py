"""One tensor from the source to the output: read in slices, cast, quantized, appended. Nothing whole is ever held."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_gemma_mtp.checkpoint import FLOATS, Tensor
from mlx_gemma_mtp.errors import CheckpointError

from .container import DTYPE_NAMES, Entry, Writer
from .grid import lies_on_grid, pack
from .recipes import GRID, Quantization

WHOLE_BYTES = 512 << 20  # larger tensors are read in slices of about
SLICE_BYTES = 128 << 20
SAMPLE_ROWS = 8
# Source type -> how numpy reads it, what it is.
READ = {
    "F32": (np.float32, mx.float32), "F16": (np.float16, mx.float16), "BF16": (np.uint16, mx.bfloat16),
    "I64": (np.int64, mx.int64), "I32": (np.int32, mx.int32), "U32": (np.uint32, mx.uint32),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A tensor of the output and where it comes from.

    half: 0 or 1 for the first or second half of the source's second axis (gate and up of experts lie in one tensor).
    order: the source's rows in the order wanted.  shape: of the output, same number of values.
    """

    name: str
    source: Tensor
    shape: tuple[int, ...]
    quantization: Quantization | None = None
    half: int | None = None
    order: np.ndarray | None = None

    @property
    def path(self) -> str:
        """The module's path."""
        return self.name.removesuffix(".weight")

    def entries(self, dtype: mx.Dtype | None) -> list[Entry]:
        """What the part becomes in the file, floats as `dtype` (None: as they are)."""
        kind = DTYPE_NAMES[dtype] if dtype and self.source.dtype in FLOATS else self.source.dtype.replace("I64", "I32")
        if self.quantization is None:
            return [Entry(self.name, kind, self.shape)]
        *rows, width = self.shape
        packed = (*rows, width * self.quantization.bits // 32)
        scales = (*rows, width // self.quantization.group_size)
        return [Entry(self.name, "U32", packed), *(Entry(f"{self.path}.{n}", kind, scales) for n in ("scales", "biases"))]


def quantized(part: Part, quantization: Quantization | None) -> Part:
    """The part with a quantization, if it is a matrix, or a stack of them, whose rows groups divide."""
    if quantization is None or len(part.shape) < 2 or not part.name.endswith(".weight"):
        return part
    return replace(part, quantization=quantization.fit(part.shape[-1]))


def keep_grid(part: Part) -> Part:
    """The part quantized on its own grid, if its weights lie on one and are to be quantized."""
    if part.quantization is None or part.source.dtype not in FLOATS:
        return part
    rows = np.linspace(0, part.source.shape[0] - 1, SAMPLE_ROWS).astype(int)
    sample = read_rows(part.source, rows if len(part.source.shape) == 2 else (rows, rows % part.source.shape[1]))
    return replace(part, quantization=GRID) if lies_on_grid(sample) else part


def read_rows(tensor: Tensor, rows: slice | np.ndarray | tuple) -> mx.array:
    """Rows of the first axis, copied from the mapped file."""
    if tensor.dtype not in READ:
        raise CheckpointError(f"{tensor.file} holds weights of type {tensor.dtype}: give a bf16, fp16 or fp32 checkpoint")
    kind, dtype = READ[tensor.dtype]
    mapped = np.memmap(tensor.file, kind, "r", tensor.start, tensor.shape or (1,))
    array = mx.array(np.ascontiguousarray(mapped[rows]))
    return array if array.dtype == dtype else array.view(dtype)


def slices(part: Part) -> Iterator[tuple[mx.array, int]]:
    """The part's rows in order, and the bytes of the source each slice stands for."""
    source = part.source
    if not source.shape:
        yield read_rows(source, slice(None)).reshape(()), source.nbytes
        return
    rows = source.shape[0]
    row_bytes = max(1, source.nbytes // max(rows, 1))
    step = rows if source.nbytes <= WHOLE_BYTES else max(1, SLICE_BYTES // row_bytes)
    for start in range(0, rows, step):
        wanted = slice(start, start + step) if part.order is None else part.order[start : start + step]
        array = read_rows(source, wanted)
        if part.half is not None:
            array = mx.split(array, 2, axis=1)[part.half]
        yield array, row_bytes * min(step, rows - start) // (1 if part.half is None else 2)


def write_part(part: Part, writer: Writer, dtype: mx.Dtype | None, advance: Callable[[int], None]) -> None:
    """Reads, casts, quantizes and appends a part. advance: called with source bytes done."""
    for array, done in slices(part):
        if array.dtype == mx.int64:
            array = array.astype(mx.int32)
        elif dtype and part.source.dtype in FLOATS and not (part.quantization and part.quantization.grid):
            array = array.astype(dtype)
        if part.quantization is None:
            writer.append(part.name, array)
        else:
            names = [part.name, f"{part.path}.scales", f"{part.path}.biases"]
            for name, piece in zip(names, quantize(array, part.quantization, dtype)):
                writer.append(name, piece)
        advance(done)
    mx.clear_cache()


def quantize(array: mx.array, quantization: Quantization, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales and biases."""
    if quantization.grid:
        return pack(array, dtype)
    return mx.quantize(array, quantization.group_size, quantization.bits)
