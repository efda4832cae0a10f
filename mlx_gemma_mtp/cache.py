"""Keys and values of the target. Knows positions and windows; knows nothing of drafting.

Every slot's position follows from `length` by arithmetic, so masks are made on the device and no host number enters the
graph of a pass. A full layer holds position p in slot p. A sliding layer is a ring of window + SLACK slots that holds
position p in slot p mod size: an entry overwritten by a token that is later rejected was outside every window already.
"""

from dataclasses import dataclass

import mlx.core as mx

MAX_DRAFT_LENGTH = 16
# A pass writes T <= MAX_DRAFT_LENGTH + 1 entries and one more may be dispatched ahead: 2T - 2 entries beyond the committed.
SLACK = 2 * MAX_DRAFT_LENGTH
SMALLEST_BUCKET = 256


def bucket(slots: int) -> int:
    """`slots` rounded up to one of eight sizes per octave: few graphs, and never more than 1/8 read too much."""
    step = max(SMALLEST_BUCKET, (1 << slots.bit_length()) // 16)
    return -(-slots // step) * step


class LayerCache:
    """One layer's keys and values during one pass of T tokens, in the form of mlx-lm's cache protocol.

    keys, values: [B, G, S, E].  length: [B] committed tokens = position of the first token of the pass.
    read: how many slots attention may look at; at least length + T of every row.
    slots: what the layers of a pass share: where they write, by ring size.  is_first: no row holds anything yet.
    """

    def __init__(self, window: int | None, keys, values, length: mx.array, read: int, slots: dict, is_first: bool):
        self.window, self.keys, self.values, self.offset = window, keys, values, length
        self.size = keys.shape[2]
        self.read = min(read, self.size)
        self._slots, self._is_first = slots, is_first

    def _slot_positions(self, last: mx.array, slots: int) -> mx.array:
        """Positions [B, slots] of the first slots when `last` [B] is the newest position written; negative: empty."""
        slot = mx.arange(slots)[None]
        return last[:, None] - (last[:, None] - slot) % self.size

    def _visible(self, queries: mx.array, positions: mx.array) -> mx.array:
        """Mask [B, 1, T, S] from query positions [B, T] and key positions [B, S]."""
        queries, positions = queries[:, None, :, None], positions[:, None, None, :]
        mask = (positions <= queries) & (positions >= 0)
        return mask if self.window is None else mask & (positions > queries - self.window)

    def _is_long(self, tokens: int) -> bool:
        """Whether a pass would overwrite ring entries that its own first tokens still see."""
        return self.window is not None and tokens > SLACK + 1

    def make_mask(self, tokens: int, window_size: int | None = None, return_array: bool = True) -> mx.array:
        """Mask [B, 1, T, S] over what `update_and_fetch` of `tokens` entries returns (mlx-lm's protocol)."""
        queries = self.offset[:, None] + mx.arange(tokens)
        if self._is_long(tokens):
            before = [] if self._is_first else [self._slot_positions(self.offset - 1, self.size)]
            positions = mx.concatenate([*before, queries], axis=1)
        else:
            positions = self._slot_positions(self.offset + (tokens - 1), self.read)
        return self._visible(queries, positions)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes T entries per row at `length`, then returns what attention reads: [B, G, S, E] each.

        Write first, read after: MLX updates a buffer in place only while no earlier read of it is in the graph.
        """
        tokens = keys.shape[2]
        ring = (self.keys, self.values)
        kept = min(tokens, self.size)
        if self.size not in self._slots:
            positions = self.offset[:, None] + mx.arange(tokens - kept, tokens)
            self._slots[self.size] = (positions % self.size)[:, None, :, None]
        slots = self._slots[self.size]  # [B, 1, T, 1]
        self.keys = mx.put_along_axis(self.keys, slots, keys[:, :, tokens - kept :].astype(self.keys.dtype), axis=2)
        self.values = mx.put_along_axis(self.values, slots, values[:, :, tokens - kept :].astype(self.values.dtype), axis=2)
        if self._is_long(tokens) and self._is_first:
            return keys, values
        if self._is_long(tokens):
            return mx.concatenate([ring[0], keys], axis=2), mx.concatenate([ring[1], values], axis=2)
        return self.keys[:, :, : self.read], self.values[:, :, : self.read]

    def lend(self) -> tuple[mx.array, mx.array, mx.array]:
        """Committed keys and values [B, G, S, E], and the mask [B, 1, 1, S] of what a query at `length` sees.

        In a sliding layer those are the last window - 1 committed keys: the query itself is the window's last.
        """
        positions = self._slot_positions(self.offset - 1, self.read)
        return self.keys[:, :, : self.read], self.values[:, :, : self.read], self._visible(self.offset[:, None], positions)


@dataclass
class Cache:
    """Keys and values of all KV-owning layers.

    windows: per layer, None for a full layer.  keys, values: per layer [B, G, S, E].
    length: [B] int32, committed tokens per row; entries beyond it are leftovers that no mask lets through.
    """

    windows: tuple[int | None, ...]
    keys: list[mx.array]
    values: list[mx.array]
    length: mx.array
    capacity: int = 0

    @staticmethod
    def empty(windows, heads, head_sizes, dtype, rows: int = 1) -> "Cache":
        """A cache of no tokens. heads, head_sizes: G and E per layer."""
        arrays = lambda: [mx.zeros((rows, g, 0, e), dtype) for g, e in zip(heads, head_sizes)]
        return Cache(tuple(windows), arrays(), arrays(), mx.zeros((rows,), mx.int32))

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values, self.length]

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` positions in every row. The host calls it before each pass: MLX checks no bounds."""
        if tokens <= self.capacity:
            return
        self.grow(bucket(max(tokens, self.capacity * 3 // 2)))

    def grow(self, capacity: int) -> None:
        """Pads all buffers for `capacity` positions, one of the sizes of `bucket`."""
        self.capacity = capacity
        for arrays in (self.keys, self.values):
            for index, (array, window) in enumerate(zip(arrays, self.windows)):
                size = self.capacity if window is None else min(self.capacity, window + SLACK)
                if more := size - array.shape[2]:
                    arrays[index] = mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)])

    def layers(self, read: int, is_first: bool = False) -> list[LayerCache]:
        """The layers for one pass; arguments as in LayerCache."""
        arrays, slots = zip(self.windows, self.keys, self.values), {}
        return [LayerCache(w, k, v, self.length, read, slots, is_first) for w, k, v in arrays]

    def commit(self, layers: list[LayerCache], length: mx.array) -> None:
        """Takes over what a pass wrote and makes `length` [B] tokens count. A smaller length is a roll-back."""
        self.keys, self.values = [c.keys for c in layers], [c.values for c in layers]
        self.length = length
