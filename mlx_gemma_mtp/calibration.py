"""What rounds cost on this machine: measured once per pair, remembered in the cache directory."""

import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from .cache import bucket
from .draft_length import Knowledge
from .speculative import Engine, State

WIDTHS = (1, 2, 3, 5, 9)
DRAFTS = 4
REMEMBERED = 12  # outcomes that what an earlier process learned of acceptance counts for: this text may be another


def cache_directory() -> Path:
    """Where this package keeps files: MLX_GEMMA_MTP_CACHE, or the platform's place for caches."""
    if chosen := os.environ.get("MLX_GEMMA_MTP_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx_gemma_mtp"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_gemma_mtp"


def knowledge_file(engine: Engine) -> Path:
    """One file per machine, MLX version and shapes of the pair."""
    models = engine.target.model, engine.drafter
    shapes = [(n, a.shape, str(a.dtype)) for model in models for n, a in tree_flatten(model.parameters())]
    facts = [platform.node(), str(mx.device_info()), mx.__version__, shapes, WIDTHS]
    return cache_directory() / "costs" / f"{sha256(repr(facts).encode()).hexdigest()[:16]}.json"


def load_knowledge(engine: Engine) -> Knowledge:
    """What an earlier run measured; nothing when there is none or it cannot be read."""
    try:
        values = json.loads(knowledge_file(engine).read_text())
        costs = [*values["verify_seconds"].values(), values["draft_seconds"]]
        shares = [*values["acceptance"], *values["by_confidence"]]
        if not all(0 < float(c) < math.inf for c in costs) or not all(0 <= float(s) <= 1 for s in shares):
            return Knowledge()
        return Knowledge(
            {int(w): float(s) for w, s in values["verify_seconds"].items()},
            float(values["draft_seconds"]),
            [float(a) for a in values["acceptance"]],
            [float(a) for a in values["by_confidence"]],
            [min(int(n), REMEMBERED) for n in values["seen"]],
            [min(int(n), REMEMBERED) for n in values["seen_by_confidence"]],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return Knowledge()


def calibrate_with(engine: Engine) -> Callable[[Knowledge], None]:
    """Measures the cost of every width and of drafting, once, and remembers it."""
    lock = threading.Lock()

    def calibrate(knowledge: Knowledge) -> None:
        with lock:
            if not knowledge.verify_seconds:
                measure(knowledge)

    def measure(knowledge: Knowledge) -> None:
        plain = {width: _seconds(engine, width, 0) for width in WIDTHS}
        knowledge.draft_seconds = max((_seconds(engine, 1, DRAFTS) - plain[1]) / DRAFTS, 0.01 * plain[1])
        knowledge.verify_seconds.update(plain)
        save_knowledge(engine, knowledge)

    return calibrate


def save_knowledge(engine: Engine, knowledge: Knowledge) -> None:
    """For the next process. A cache directory that cannot be written to is no error."""
    try:
        file = knowledge_file(engine)
    except RuntimeError:  # no home directory
        return
    temporary = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(knowledge)))
        temporary.replace(file)
    except OSError:
        return


def _seconds(engine: Engine, width: int, drafts: int, repeats: int = 4) -> float:
    """The fastest of a few rounds on an empty state; the first makes the graph."""
    cache = engine.target.empty_cache()
    cache.reserve(bucket(1))
    # Unlike ids: equal ones would all go to the same experts.
    block = mx.array([[(7919 * i + 11) % engine.target.args.vocab_size for i in range(width)]], mx.int32)
    state = State(cache, block, mx.zeros((1, width - 1)))
    active, best = mx.zeros((1,), mx.int32), float("inf")
    for _ in range(repeats):
        state.block = block
        start = time.perf_counter()
        done = engine.run_round(state, active, cache.capacity, drafts)
        mx.eval(done, state.block, *cache.arrays)
        best = min(best, time.perf_counter() - start)
    return best
