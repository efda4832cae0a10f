"""Conversations in files: messages as JSON, or messages with what was computed of them as safetensors."""

import json
import os
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .cache import SLACK, Cache
from .errors import OutputError, PromptError
from .prefix import Kept, Rings

FORMAT = "mlx_gemma_mtp.conversation/1"
WITH_CACHE = ".safetensors"


def fingerprint(model: nn.Module) -> str:
    """Tells apart models by the names, shapes and first values of all their weights."""
    weights = sorted(tree_flatten(model.parameters()))
    head = mx.concatenate([array.reshape(-1)[:8].view(mx.uint8) for _, array in weights])
    names = repr([(name, array.shape, str(array.dtype)) for name, array in weights])
    return sha256(names.encode() + bytes(memoryview(head))).hexdigest()


def write(path: Path, messages: list[dict], kept: Kept | None, model: nn.Module) -> None:
    """Writes `path` whole or not at all; the cache only where the name ends in .safetensors. Raises OutputError."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        if path.suffix == WITH_CACHE:
            arrays, facts = _pack(kept) if kept else ({"tokens": mx.array([], mx.int32)}, {})
            facts |= {"format": FORMAT, "messages": messages, "model": fingerprint(model)}
            mx.save_safetensors(str(temporary), arrays, {name: json.dumps(value) for name, value in facts.items()})
        else:
            temporary.write_text(json.dumps({"format": FORMAT, "messages": messages}, ensure_ascii=False, indent=1) + "\n")
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"{path} cannot be written: {error}") from None


def read(path: Path, model: nn.Module, empty: Cache) -> tuple[list[dict], Kept | None]:
    """What `write` wrote. empty: a cache of the model. Raises PromptError."""
    wrong = PromptError(f"{path} is no conversation saved by this package")
    if not path.is_file():
        raise PromptError(f"{path} cannot be read: it is not there")
    try:
        arrays = {}
        if path.suffix == WITH_CACHE:
            arrays, facts = mx.load(str(path), return_metadata=True)
            facts = {name: json.loads(value) for name, value in facts.items()}
        else:
            facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["format"] != FORMAT or not all(isinstance(m, dict) and "role" in m for m in facts["messages"]):
            raise wrong
        if not arrays or "rings" not in facts:
            return facts["messages"], None
        if facts["model"] != fingerprint(model):
            raise PromptError(f"{path} was computed by another model: load it with that one, or save the messages as JSON")
        return facts["messages"], _unpack(arrays, facts, empty)
    except (ValueError, KeyError, TypeError, RuntimeError, OSError, AttributeError):
        raise wrong from None


def _pack(kept: Kept) -> tuple[dict[str, mx.array], dict]:
    """A kept generation as named arrays and facts: the full layers as long as its tokens, the two newest rings."""
    arrays = {f"full.{i}": mx.contiguous(a[:, :, : len(kept.tokens)]) for i, a in enumerate(kept.full)}
    arrays["tokens"] = mx.array(kept.tokens, mx.int32)
    rings = kept.rings[-2:]
    for at, ring in enumerate(rings):
        arrays |= {f"rings.{at}.{i}": a for i, a in enumerate(ring.arrays)}
    return arrays, {"rings": [(r.length, r.written) for r in rings], "tokens": kept.tokens}


def _unpack(arrays: dict[str, mx.array], facts: dict, empty: Cache) -> Kept:
    """The reverse of `_pack`. Raises KeyError, ValueError."""
    tokens, windows = facts["tokens"], empty.windows
    shapes = [a.shape for a in (*empty.keys, *empty.values)]
    kinds = [*windows, *windows]
    full, sliding = [s for s, w in zip(shapes, kinds) if w is None], [(s, w) for s, w in zip(shapes, kinds) if w is not None]
    long = [arrays[f"full.{i}"] for i in range(len(full))]
    rings = []
    for at, (length, written) in enumerate(facts["rings"]):
        held = tuple(arrays[f"rings.{at}.{i}"] for i in range(len(sliding)))
        if any(a.shape[2] > window + SLACK for a, (_, window) in zip(held, sliding)) or not 0 < length <= len(tokens):
            raise ValueError("rings of another shape")
        rings.append(Rings(length, written, held))
    ring = max((a.shape[2] for r in rings for a in r.arrays), default=0)
    both = [*zip(long, full), *((a, s) for r in rings for a, (s, _) in zip(r.arrays, sliding))]
    if any((a.shape[:2], a.shape[3], a.dtype) != (s[:2], s[3], empty.keys[0].dtype) for a, s in both):
        raise ValueError("arrays of another shape")
    if any(a.shape[2] != len(tokens) for a in long):
        raise ValueError("full layers of another length")
    mx.eval(arrays)  # any thread may use them
    return Kept(windows, max(len(tokens), ring), list(tokens), tuple(long), tuple(rings))
