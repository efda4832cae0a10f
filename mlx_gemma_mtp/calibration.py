"""What rounds cost on this machine: measured once per pair, remembered in the cache directory."""

import json
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
from .draft_length import LENGTHS
from .knowledge import BINS, FIRST_PROBE, LAST_PROBE, LONGEST, Costs, Knowledge, octave
from .speculative import Engine, State

WIDTHS = tuple(length + 1 for length in LENGTHS)
DRAFTS = 4
MEASURED = 8  # rounds that a calibration counts for
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
    facts = [platform.node(), str(mx.device_info()), mx.__version__, shapes, WIDTHS, "by context"]
    return cache_directory() / "costs" / f"{sha256(repr(facts).encode()).hexdigest()[:16]}.json"


def load_knowledge(engine: Engine) -> Knowledge:
    """What an earlier run measured; nothing when there is none or it cannot be read."""
    try:
        values = json.loads(knowledge_file(engine).read_text())
        return Knowledge(
            {(int(rows), int(of)): _costs(costs) for rows, tables in values["costs"].items() for of, costs in tables.items()},
            [_between(values["acceptance"][i], 0, 1) for i in range(LONGEST)],
            [_between(values["by_confidence"][i], 0, 1) for i in range(BINS)],
            [min(int(values["seen"][i]), REMEMBERED) for i in range(LONGEST)],
            [min(int(values["seen_by_confidence"][i]), REMEMBERED) for i in range(BINS)],
            int(_between(values["probe_interval"], FIRST_PROBE, LAST_PROBE)),
        )
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError):
        return Knowledge()


def _costs(values: dict) -> Costs:
    seconds = {int(width): _between(s, 1e-9, 1e9) for width, s in values["verify_seconds"].items()}
    if not seconds:
        raise ValueError("no width was measured")
    return Costs(seconds, _between(values["draft_seconds"], 1e-9, 1e9), int(_between(values["measured"], 0, 1e9)))


def _between(value: float, low: float, high: float) -> float:
    if not low <= float(value) <= high:
        raise ValueError(f"{value} is not from {low} to {high}")
    return float(value)


def calibrate_with(engine: Engine) -> Callable[[Knowledge], None]:
    """Measures the cost of every width and of drafting, once, and remembers it."""
    lock = threading.Lock()

    def calibrate(knowledge: Knowledge) -> None:
        with lock:
            if not knowledge.costs:
                knowledge.costs[1, octave(0)] = measure(engine)
                save_knowledge(engine, knowledge)

    return calibrate


def measure(engine: Engine) -> Costs:
    """The costs of one row at the start of a context."""
    plain = {width: _seconds(engine, width, 0) for width in WIDTHS}
    drafting = (_seconds(engine, 1, DRAFTS) - plain[1]) / DRAFTS
    return Costs(plain, max(drafting, 0.01 * plain[1]), MEASURED)


def save_knowledge(engine: Engine, knowledge: Knowledge) -> None:
    """For the next process. A cache directory that cannot be written to is no error."""
    try:
        file = knowledge_file(engine)
    except RuntimeError:  # no home directory
        return
    temporary = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        costs: dict = {}
        for (rows, of), known in knowledge.costs.copy().items():
            costs.setdefault(rows, {})[of] = asdict(known)
        temporary.write_text(json.dumps(vars(knowledge) | {"costs": costs}))
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
