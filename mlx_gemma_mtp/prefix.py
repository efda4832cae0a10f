"""Finished states, kept so that a prompt which begins like an earlier one is not computed again. Knows nothing of text.

A full layer holds every position, so its arrays serve any shorter prefix. A ring has forgotten what lies more than
window + SLACK before its newest entry, so it serves a prefix only near the length at which it was seen last: its arrays
are remembered when a prompt has been read and when its generation has ended. MLX arrays are values: to remember a ring is
to hold it, and the next round then writes into a copy. The arrays of full layers are never held while rounds run.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx

from .cache import SLACK, Cache

CACHE_BYTES = 1 << 30
MOST_KEPT, MOST_RINGS = 32, 16
WORTH_A_COPY = 64  # tokens


def overshoot(width: int) -> int:
    """How far a generation of blocks of `width` tokens may have written beyond what it left committed.

    The rest of a block that was cut, and rounds that ran ahead; never more than the cache is made for.
    """
    return min(2 * width + 1, SLACK + 1)


@dataclass(frozen=True)
class Rings:
    """The sliding layers at one moment.

    length: positions below it hold what was committed.  written: an upper bound of the positions ever written.
    arrays: keys, then values of the sliding layers, [1, G, S, E] each.
    """

    length: int
    written: int
    arrays: tuple[mx.array, ...]

    def serve(self, length: int, windows: tuple[int | None, ...]) -> bool:
        """Whether a generation may continue after `length` tokens: nothing that its windows show was overwritten."""
        sizes = [w for w in windows if w is not None]
        return length <= self.length and all(self.written - (w + SLACK) <= max(0, length - w + 1) for w in sizes)


@dataclass
class Branch:
    """A cache that continues from a kept prefix: belongs to one generation.

    reused: tokens that were there already.  rings: what is remembered of it, oldest first.
    """

    cache: Cache
    reused: int = 0
    rings: list[Rings] = field(default_factory=list)

    def remember(self, length: int, written: int) -> None:
        """Holds the rings as they are now. length, written: as in Rings."""
        if not any(r.length == length and r.written <= written for r in self.rings):
            arrays = _layers(self.cache, is_full=False)
            self.rings = [*self.rings[1 - MOST_RINGS :], Rings(length, written, tuple(arrays))]


@dataclass(frozen=True)
class Kept:
    """What is left of a finished generation.

    tokens: their keys and values are in the full layers.  full: keys, then values of the full layers, [1, G, S, E] each.
    rings: oldest first.
    """

    windows: tuple[int | None, ...]
    capacity: int
    tokens: list[int]
    full: tuple[mx.array, ...]
    rings: tuple[Rings, ...]

    @property
    def nbytes(self) -> int:
        arrays = {id(a): a.nbytes for ring in self.rings for a in ring.arrays}
        return sum(arrays.values()) + sum(a.nbytes for a in self.full)

    @property
    def prompt_length(self) -> int:
        """Tokens of the newest prompt, whose rings were remembered before a generation wrote further."""
        return max((r.length for r in self.rings if r.written == r.length), default=0)

    def reach(self, prompt: list[int]) -> tuple[int, Rings | None]:
        """The longest prefix of all but the prompt's last token that a generation can continue from, and its rings."""
        common = common_prefix(self.tokens, prompt[:-1])
        lengths = [(min(common, ring.length), ring) for ring in self.rings]
        served = [(length, ring) for length, ring in lengths if length and ring.serve(length, self.windows)]
        return max(served, key=lambda pair: pair[0], default=(0, None))

    def branch(self, length: int, rings: Rings, copy: bool) -> Branch:
        """A branch of the first `length` tokens. copy: leave the arrays of the full layers as they are."""
        full = (a[:, :, :length] if copy else a for a in self.full)
        sliding = iter(rings.arrays)
        keys, values = ([next(full if w is None else sliding) for w in self.windows] for _ in range(2))
        cache = Cache(self.windows, keys, values, mx.array([length], mx.int32))
        ring = max((a.shape[2] for a in rings.arrays), default=0)
        cache.reserve(max(length, ring) if copy else self.capacity)
        clipped = [replace(r, length=min(r.length, length)) for r in self.rings]
        return Branch(cache, length, [r for r in clipped if r.serve(r.length, self.windows)])


def _layers(cache: Cache, is_full: bool) -> list[mx.array]:
    return [a for arrays in (cache.keys, cache.values) for a, w in zip(arrays, cache.windows) if (w is None) == is_full]


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two lists begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # comparing slices is fast; the lists agree up to `low`
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixStore:
    """What is kept of finished generations, least recently used first. Safe to use from several threads.

    limit_bytes: what it may hold. The newest generation, with the rings of its prompt, is kept in any case.
    """

    def __init__(self, empty_cache: Callable[[], Cache], limit_bytes: int = CACHE_BYTES):
        self.limit_bytes = limit_bytes
        self._empty_cache, self._lock = empty_cache, threading.Lock()
        self._kept: list[Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    def clear(self) -> None:
        with self._lock:
            self._kept = []

    def take(self, prompt: list[int]) -> Branch:
        """A branch to run `prompt` on, with the longest usable prefix.

        A prompt that goes on where a kept one ended takes over its arrays. One that leaves it earlier, as after an undo or
        with a common system message, copies what it needs if there is room, so that both can be continued later.
        """
        with self._lock:
            found = [(*kept.reach(prompt), kept) for kept in self._kept]
            length, rings, kept = max(found, key=lambda f: f[0], default=(0, None, None))
            copy = kept is not None and kept.prompt_length - length > SLACK + 1
            if rings is None or (copy and length < WORTH_A_COPY):
                return Branch(self._empty_cache())
            self._kept = [k for k in self._kept if k is not kept]
            if copy and self.nbytes + 2 * kept.nbytes <= self.limit_bytes:
                self._kept.append(kept)
            else:
                copy = False
            return kept.branch(length, rings, copy)

    def put(self, branch: Branch, tokens: list[int]) -> None:
        """Keeps a branch whose full layers hold `tokens`."""
        cache = branch.cache
        full, rings = tuple(_layers(cache, is_full=True)), tuple(r for r in branch.rings if r.length <= len(tokens))
        self.keep(Kept(cache.windows, cache.capacity, tokens, full, rings))

    def keep(self, kept: Kept) -> None:
        """Keeps a generation as the newest, and drops what is over the limit."""
        with self._lock:
            self._kept.append(kept)
            while len(self._kept) > 1 and (len(self._kept) > MOST_KEPT or self.nbytes > self.limit_bytes):
                self._kept.pop(0)
            rings = list(kept.rings)
            while len(rings) > 1 and self.nbytes > self.limit_bytes:  # the newest prompt's rings go last
                rings.pop(0 if len(rings) > 2 else 1)
                self._kept[-1] = replace(kept, rings=tuple(rings))

    def find(self, prompt: list[int]) -> Kept | None:
        """What a generation of `prompt` would continue from. Only to look at: held, it makes the next generation copy."""
        with self._lock:
            reached = [(kept.reach(prompt)[0], kept) for kept in self._kept]
        length, kept = max(reached, key=lambda pair: pair[0], default=(0, None))
        return kept if length else None
