"""The round: verify, accept, commit, draft. One loop for one row and many, for K = 0 and K > 0.

Between rounds a generation is four things on the device (State). A round is one lazy graph, two compiled functions, and
one evaluation; the host reads a round's result in one place (`_read`) and, before it hands out text, has already
dispatched the next round. Knows nothing of text.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mlx.core as mx

from .cache import Cache, bucket
from .draft_length import Controller
from .drafter import Drafter
from .sampling import accept, choose
from .target import Target

PREFILL_TOKENS = 1024
# Attention of head size 512 has no fused kernel: a chunk of T tokens holds H x T x S scores. Chunks shrink to keep that.
SCORE_BYTES = 1 << 30


@dataclass
class State:
    """A generation between two rounds.

    cache: every committed token except the pending one; cache.length = position of the pending token.
    block: [B, K+1] int32, the pending token followed by K draft tokens.
    confidence: [B, K] float32, the drafter's probability of each draft token.
    """

    cache: Cache
    block: mx.array
    confidence: mx.array

    @property
    def rows(self) -> int:
        return self.block.shape[0]

    @property
    def width(self) -> int:
        return self.block.shape[1]


@dataclass
class Row:
    """What the host knows of one row.

    start: its committed tokens before the first round.  first: the token pending then.
    """

    start: int
    first: int
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def committed(self) -> int:
        """Tokens of this row that belong in the cache: all but the last emitted, which is pending."""
        return self.start + len(self.tokens)

    @property
    def pending(self) -> int:
        return self.tokens[-1] if self.tokens else self.first

    def take(self, tokens: list[int]) -> list[int]:
        """Emits what of a round's tokens may be emitted: nothing after a stop id, nothing over budget."""
        emitted = []
        for token in tokens:
            if self.finish_reason:
                break
            emitted.append(token)
            self.tokens.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_tokens:
                self.finish_reason = "length"
        return emitted

    def stop_at(self, count: int) -> None:
        """Ends the row with its first `count` tokens, after a stop string."""
        del self.tokens[count:]
        self.finish_reason = "stop"


@dataclass
class Round:
    """What one round did.

    drafted: draft tokens verified.  accepted: how many per row, None for one that was finished before.  emitted: per row.
    """

    drafted: int
    accepted: list[int | None]
    emitted: list[list[int]]


class Engine:
    """The compiled rounds of one pair. Holds no state of any generation; safe to use from several threads."""

    def __init__(self, target: Target, drafter: Drafter | None):
        self.target, self.drafter = target, drafter
        self._compiled: dict[tuple, Callable] = {}

    def _get(self, make: Callable, *key) -> Callable:
        """A graph per (kind, slots read, drafts): mx.compile itself tells apart shapes of rows, widths and caches."""
        key = (make, *key)
        if key not in self._compiled:
            self._compiled[key] = mx.compile(make(*key[1:]))
        return self._compiled[key]

    def _verify(self, windows: tuple, read: int) -> Callable:
        def verify(block, active, length, keys, values):
            layers = Cache(windows, keys, values, length).layers(read)
            hidden = self.target.hidden(block, layers)  # [B, T, D]
            tokens = choose(self.target.logits(hidden))  # [B, T]
            accepted = accept(block[:, 1:], tokens)  # [B]
            pending = mx.take_along_axis(tokens, accepted[:, None], axis=1)  # [B, 1]
            hidden = mx.take_along_axis(hidden, accepted[:, None, None], axis=1)[:, 0]  # [B, D]
            length = length + (accepted + 1) * active
            report = mx.concatenate([accepted[:, None], tokens], axis=1)
            return report, pending, hidden, length, [c.keys for c in layers], [c.values for c in layers]

        return verify

    def _draft(self, windows: tuple, read: int, drafts: int) -> Callable:
        drafter, target = self.drafter, self.target

        def draft(pending, hidden, length, keys, values):
            layers = Cache(windows, keys, values, length).layers(read)
            lent = {kind: layer.lend() for kind, layer in zip(drafter.layer_types, layers)}
            block, confidence = [pending], []
            for _ in range(drafts):
                embedding = target.embed(block[-1][:, 0])  # [B, D]
                scores, ids, hidden = drafter.step(embedding, hidden, length, lent)  # [B, N]
                best = choose(scores)[:, None]
                peak = mx.take_along_axis(scores, best, axis=1)
                confidence.append(mx.exp(peak - mx.logsumexp(scores, axis=1, keepdims=True)))
                block.append(best if ids is None else mx.take_along_axis(ids, best, axis=1))
            return mx.concatenate(block, axis=1), mx.concatenate(confidence, axis=1)

        return draft

    def run_round(self, state: State, active: mx.array, read: int, drafts: int) -> mx.array:
        """Verifies the state's block, commits, drafts anew: changes `state`, evaluates nothing.

        active: [B] int32, 0 for rows that are finished and must stay as they are.
        read: slots attention looks at, at least length + T of every row.  drafts: K of the new block.
        Returns what the host reads of it, [B, 1 + T] int32: the accepted count and the target's tokens.
        """
        cache = state.cache
        verify = self._get(self._verify, cache.windows, read)
        report, pending, hidden, cache.length, cache.keys, cache.values = verify(
            state.block, active, cache.length, cache.keys, cache.values
        )
        if drafts == 0:
            state.block, state.confidence = pending, mx.zeros((state.rows, 0))
            return report
        shared = [self.target.shared_layer(kind) for kind in self.drafter.layer_types]
        draft = self._get(self._draft, tuple(cache.windows[i] for i in shared), read, drafts)
        state.block, state.confidence = draft(
            pending, hidden, cache.length, [cache.keys[i] for i in shared], [cache.values[i] for i in shared]
        )
        return report


def prefill(target: Target, prompt: list[int], on_prefill: Callable[[int, int], None] | None = None) -> State:
    """A state of one row whose pending token is the prompt's last, all others committed.

    Only layers that own keys and values see the prompt: nothing else of a chunk is evaluated. The last token goes
    through the whole model in the first round, like any pending token.
    on_prefill: called with (tokens done, tokens in all) after every chunk.
    """
    cache, total, done = target.empty_cache(), len(prompt), 0
    while done < total - 1:
        chunk = min(prefill_chunk(target, done), total - 1 - done)
        cache.reserve(done + chunk)
        layers = cache.layers(done + chunk)
        target.hidden(mx.array([prompt[done : done + chunk]], mx.int32), layers)
        done += chunk
        cache.commit(layers, mx.array([done], mx.int32))
        del layers
        mx.eval(cache.arrays)
        if on_prefill:
            on_prefill(done, total)
    return State(cache, mx.array([prompt[-1:]], mx.int32), mx.zeros((1, 0)))


def prefill_chunk(target: Target, done: int) -> int:
    """Tokens of the next chunk: PREFILL_TOKENS, or fewer when their scores against `done` keys pass SCORE_BYTES."""
    per_token = target.args.num_attention_heads * target.dtype.size * (done + PREFILL_TOKENS)
    return max(1, min(PREFILL_TOKENS, SCORE_BYTES // per_token))


def stack(states: list[State]) -> State:
    """One state of many rows from states of one or more rows each, all of the same block width."""
    capacity = max(s.cache.capacity for s in states)
    for state in states:
        state.cache.reserve(capacity)
    joined = lambda arrays: mx.concatenate(arrays, axis=0)
    caches = [s.cache for s in states]
    return State(
        Cache(
            caches[0].windows,
            [joined(arrays) for arrays in zip(*(c.keys for c in caches))],
            [joined(arrays) for arrays in zip(*(c.values for c in caches))],
            joined([c.length for c in caches]),
            capacity,
        ),
        joined([s.block for s in states]),
        joined([s.confidence for s in states]),
    )


def decode(engine: Engine, state: State, rows: list[Row], controller: Controller) -> Iterator[Round]:
    """Runs rounds until every row is finished; yields after each one, the next already running.

    Changes `state` and `rows`. When it ends or is closed, the state holds exactly the rows' tokens, the last one
    pending, and another generation may continue from it. A consumer may finish a row at any yield (`Row.stop_at`).
    """
    flight: deque = deque()
    active = mx.ones((state.rows,), mx.int32)
    was_active = [True] * state.rows

    def dispatch() -> None:
        nonlocal active, was_active
        is_active = [row.finish_reason is None for row in rows]
        if is_active != was_active:  # a finished row stays where its last token is
            active, was_active = mx.array(is_active, mx.int32), is_active
            committed = mx.array([row.committed for row in rows], mx.int32)
            state.cache.length = mx.where(active, state.cache.length, committed)
        # No row can be further than this: MLX checks no bounds, so the host does before every pass.
        needed = max(row.committed for row in rows) + sum(report.shape[1] - 1 for report in flight) + state.width
        state.cache.reserve(needed)
        drafts = controller.draft_length if engine.drafter is not None else 0
        report = engine.run_round(state, active, bucket(needed), drafts)
        mx.async_eval(report, state.block, state.confidence, *state.cache.arrays)
        flight.append(report)

    def can_run_ahead() -> bool:
        """Whether the next round may start before the last is read: plain decoding, and every row wants its token."""
        wanted = min((r.max_tokens - len(r.tokens) for r in rows if r.finish_reason is None), default=0)
        return state.width == 1 and len(flight) < min(2, wanted)

    try:
        dispatch()
        while flight:
            if can_run_ahead():
                dispatch()
            round_ = _read(rows, flight.popleft())
            if round_.drafted:
                controller.observe(round_.drafted, [n for n in round_.accepted if n is not None])
            if not flight and any(row.finish_reason is None for row in rows):
                dispatch()
            yield round_
    finally:
        state.cache.length = mx.array([row.committed for row in rows], mx.int32)
        state.block = mx.array([row.pending for row in rows], mx.int32)[:, None]
        state.confidence = mx.zeros((state.rows, 0))


def _read(rows: list[Row], report: mx.array) -> Round:
    """The one place where the host waits for the device. report: as `run_round` returns it."""
    accepted, emitted = [], []
    for row, (count, *tokens) in zip(rows, report.tolist()):
        accepted.append(count if row.finish_reason is None else None)
        emitted.append(row.take(tokens[: count + 1]))
    return Round(report.shape[1] - 2, accepted, emitted)
