"""The round: verify, accept, commit, draft. One loop for one row and many, for K = 0 and K > 0.

Between rounds a generation is four things on the device (State). A round is one lazy graph, two compiled functions, and
one evaluation; the host reads a round's result in one place (`_read`) and, before it hands out text, has already
dispatched the next round. Knows nothing of text.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mlx.core as mx

from . import sampling
from .cache import Cache, bucket
from .draft_length import Controller
from .drafter import Drafter
from .errors import OptionError
from .sampling import Method, Sampler
from .target import Target

PREFILL_TOKENS = 1024
# Attention of head size 512 has no fused kernel: a chunk of T tokens holds H x T x S scores. Chunks shrink to keep that.
SCORE_BYTES = 1 << 30
MOST_GRAPHS = 96
GREEDY = Sampler()


@dataclass
class State:
    """A generation between two rounds.

    cache: every committed token except the pending one; cache.length = position of the pending token.
    block: [B, K+1] int32, the pending token followed by K draft tokens.
    confidence: [B, K] float32: the drafter's largest probability at each draft token.
    carried: what the sampling method hands from round to round: history [B, C], log_q and q_ids [B, K, C].
    """

    cache: Cache
    block: mx.array
    confidence: mx.array
    carried: dict[str, mx.array] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.block.shape[0]

    @property
    def width(self) -> int:
        return self.block.shape[1]


@dataclass
class Row:
    """What the host knows of one row.

    prompt: all its tokens before the first round, the pending one last.
    """

    prompt: list[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def committed(self) -> int:
        """Tokens of this row that belong in the cache: all but the last emitted, which is pending."""
        return len(self.prompt) - 1 + len(self.tokens)

    @property
    def pending(self) -> int:
        return (self.tokens or self.prompt)[-1]

    def history(self, count: int) -> list[int]:
        """The last `count` tokens through the pending one; -1 where there are fewer."""
        tokens = (self.prompt + self.tokens)[-count:]
        return [-1] * (count - len(tokens)) + tokens

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
        self.cut(count)
        self.finish_reason = "stop"

    def cut(self, count: int) -> None:
        """Takes back all but the first `count` tokens; at least one of the newest round stays."""
        del self.tokens[count:]
        self.finish_reason = None


@dataclass
class Round:
    """What one round did.

    drafted: draft tokens verified.  accepted: how many per row, None for one that was finished before.
    emitted: tokens per row.  logprobs: per row and token, its log-probability and the most probable (id, log-probability).
    """

    drafted: int
    accepted: list[int | None]
    emitted: list[list[int]]
    logprobs: list[list[tuple[float, list[tuple[int, float]]]]]


class Engine:
    """The compiled rounds of one pair. Holds no state of any generation; safe to use from several threads.

    MLX keeps graphs per thread: a new thread traces them anew, so long-lived worker threads are faster than one per call.
    """

    def __init__(self, target: Target, drafter: Drafter | None):
        self.target, self.drafter = target, drafter
        self.traces = 0  # graphs made so far: a round that made one says nothing of costs (without mx.compile every round)
        self._compiled: dict[tuple, Callable] = {}

    def _get(self, make: Callable[[], Callable], *key) -> Callable:
        """The graph of a key, of which the newest are kept; mx.compile itself tells apart shapes, and threads."""
        if key not in self._compiled:
            while len(self._compiled) >= MOST_GRAPHS:
                self._compiled.pop(next(iter(self._compiled)), None)
            function = make()

            def traced(*inputs):
                self.traces += 1
                return function(*inputs)

            self._compiled[key] = mx.compile(traced)
        return self._compiled[key]

    def _verify(self, windows: tuple, read: int, sampler: Sampler, texts: list[list[int]] | None = None) -> Callable:
        target, method, processors = self.target, sampler.method, sampler.processors

        def verify(block, active, length, keys, values, knobs, carried):
            layers = Cache(windows, keys, values, length).layers(read)
            hidden = target.hidden(block, layers)  # [B, T, D]
            raw = target.logits(hidden)  # [B, T, V]
            seen = sampling.seen_tokens(carried["history"], block[:, 1:]) if method.penalty_context else None
            logits = sampling.adjust(raw, knobs, method, seen)
            if texts is not None:
                logits = process(logits, block, texts, processors)
            width = block.shape[1]
            position = length[:, None] + 1 + mx.arange(width)
            proposal = tuple(carried[name][:, : width - 1] for name in ("log_q", "q_ids") if name in carried)
            accepted, tokens = sampling.select(logits, block[:, 1:], proposal, position, knobs, method)
            pending = mx.take_along_axis(tokens, accepted[:, None], axis=1)  # [B, 1]
            outputs = {
                "report": mx.concatenate([accepted[:, None], tokens], axis=1),
                "pending": pending,
                "hidden": mx.take_along_axis(hidden, accepted[:, None, None], axis=1)[:, 0],  # [B, D]
                "length": length + (accepted + 1) * active,
                "keys": [c.keys for c in layers],
                "values": [c.values for c in layers],
            }
            if method.penalty_context:
                outputs["history"] = sampling.remember(carried["history"], tokens, accepted + 1)
            if method.logprobs is not None:
                outputs["logprobs"] = sampling.log_probabilities(raw, tokens, method.logprobs)
            return outputs

        return verify

    def _draft(self, windows: tuple, read: int, drafts: int, method: Method) -> Callable:
        drafter, target = self.drafter, self.target

        def draft(pending, hidden, length, keys, values, knobs):
            layers = Cache(windows, keys, values, length).layers(read)
            lent = {kind: layer.lend() for kind, layer in zip(drafter.layer_types, layers)}
            block, confidence, proposals = [pending], [], []
            for index in range(drafts):
                embedding = target.embed(block[-1][:, 0])  # [B, D]
                scores, ids, hidden = drafter.step(embedding, hidden, length, lent)  # [B, N]
                token, sure, proposal = sampling.draft_token(scores, ids, length, index, knobs, method)
                block.append(token)
                confidence.append(sure)
                proposals.append(proposal)
            carried = {}
            if method.rule == "residual":
                carried = {name: mx.concatenate(p, axis=1) for name, p in zip(("log_q", "q_ids"), zip(*proposals))}
            return mx.concatenate(block, axis=1), mx.concatenate(confidence, axis=1), carried

        return draft

    def run_round(self, state: State, active, read: int, drafts: int, sampler: Sampler = GREEDY, texts=None) -> dict:
        """Verifies the state's block, commits, drafts anew: changes `state`, evaluates nothing.

        active: [B] int32, 0 for rows that are finished and must stay as they are.
        read: slots attention looks at, at least length + T of every row.  drafts: K of the new block.
        texts: all tokens of every row through the pending one, for a sampler with processors.
        Returns what the host reads of it: "report" [B, 1 + T] int32, the accepted count and the tokens; "logprobs".
        """
        cache, method = state.cache, sampler.method
        if texts is None:
            verify = self._get(lambda: self._verify(cache.windows, read, sampler), "verify", cache.windows, read, method)
        else:  # a user's Python between the target and the choice: nothing to compile
            verify = self._verify(cache.windows, read, sampler, texts)
        done = verify(state.block, active, cache.length, cache.keys, cache.values, sampler.knobs, state.carried)
        cache.length, cache.keys, cache.values = done.pop("length"), done.pop("keys"), done.pop("values")
        pending, hidden = done.pop("pending"), done.pop("hidden")
        state.carried = {"history": done.pop("history")} if "history" in done else {}
        if drafts == 0:
            state.block, state.confidence = pending, mx.zeros((state.rows, 0))
            return done
        shared = [self.target.shared_layer(kind) for kind in self.drafter.layer_types]
        windows = tuple(cache.windows[i] for i in shared)
        draft = self._get(lambda: self._draft(windows, read, drafts, method), "draft", windows, read, drafts, method)
        keys, values = [cache.keys[i] for i in shared], [cache.values[i] for i in shared]
        state.block, state.confidence, carried = draft(pending, hidden, cache.length, keys, values, sampler.knobs)
        state.carried |= carried
        return done


def process(logits: mx.array, block: mx.array, texts: list[list[int]], processors) -> mx.array:
    """A user's processors at every position of a block, each with the tokens it would see in plain decoding.

    logits: [B, T, V].  block: [B, T].  texts: per row, all tokens through the pending one, block[:, 0].
    """
    rows = []
    for row, (text, functions) in enumerate(zip(texts, processors)):
        before, line = mx.array(text, mx.int32), []
        for position in range(block.shape[1]):
            tokens, scores = mx.concatenate([before, block[row, 1 : position + 1]]), logits[row, position][None]
            for function in functions:
                scores = function(tokens, scores)
                if not isinstance(scores, mx.array) or scores.shape != (1, logits.shape[-1]):
                    got = list(scores.shape) if isinstance(scores, mx.array) else type(scores).__name__
                    raise OptionError(f"a logits processor returned {got}, not an array [1, {logits.shape[-1]}]: mend it")
            line.append(scores[0])
        rows.append(mx.stack(line))
    return mx.stack(rows)


def prefill(
    target: Target,
    prompt: list[int],
    on_prefill: Callable[[int, int], None] | None = None,
    cache: Cache | None = None,
    done: int = 0,
) -> State:
    """A state of one row whose pending token is the prompt's last, all others committed.

    Only layers that own keys and values see the prompt: nothing else of a chunk is evaluated. The last token goes
    through the whole model in the first round, like any pending token.
    on_prefill: called with (tokens done, tokens in all) after every chunk.
    cache: to continue, of one row; holds the first `done` < len(prompt) tokens.
    """
    cache, total = target.empty_cache() if cache is None else cache, len(prompt)
    while done < total - 1:
        chunk = min(prefill_chunk(target, done), total - 1 - done)
        cache.reserve(done + chunk)
        layers = cache.layers(done + chunk, is_first=done == 0)
        target.hidden(mx.array([prompt[done : done + chunk]], mx.int32), layers)
        done += chunk
        cache.commit(layers, mx.array([done], mx.int32))
        del layers
        mx.eval(cache.arrays)
        if on_prefill:
            on_prefill(done, total)
    return State(cache, mx.array([prompt[-1:]], mx.int32), mx.array([[]]))


def prefill_chunk(target: Target, done: int) -> int:
    """Tokens of the next chunk: PREFILL_TOKENS, or fewer when their scores against `done` keys pass SCORE_BYTES."""
    per_token = target.args.num_attention_heads * target.dtype.size * (done + PREFILL_TOKENS)
    return max(1, min(PREFILL_TOKENS, SCORE_BYTES // per_token))


def stack(states: list[State]) -> State:
    """One state of many rows from states of one or more rows each, all of the same block width."""
    capacity = max(s.cache.capacity for s in states)
    for state in states:
        state.cache.grow(capacity)
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


def select(state: State, rows: list[int]) -> State:
    """A state of some rows of another, which stays as it is. Between rounds only: nothing is carried over."""
    if rows == list(range(state.rows)):
        return state
    index, cache = mx.array(rows, mx.int32), state.cache
    taken = lambda arrays: [mx.take(a, index, axis=0) for a in arrays]
    picked = Cache(cache.windows, taken(cache.keys), taken(cache.values), mx.take(cache.length, index), cache.capacity)
    return State(picked, mx.take(state.block, index, axis=0), mx.take(state.confidence, index, axis=0))


def decode(engine: Engine, state: State, rows: list[Row], controller: Controller, sampler: Sampler = GREEDY) -> Iterator[Round]:
    """Runs rounds until every row is finished; yields after each one, the next already running.

    Changes `state` and `rows`. When it ends or is closed, the state holds exactly the rows' tokens, the last one
    pending, and another generation may continue from it. A consumer may finish a row at any yield (`Row.stop_at`).
    """
    flight: deque = deque()
    active = mx.ones((state.rows,), mx.int32)
    was_active = [True] * state.rows
    if sampler.method.penalty_context:
        state.carried = {"history": mx.array([row.history(sampler.method.penalty_context) for row in rows], mx.int32)}

    last_read, away = time.perf_counter(), 0.0

    def dispatch(width: int) -> None:
        nonlocal active, was_active
        is_active = [row.finish_reason is None for row in rows]
        if is_active != was_active:  # a finished row stays where its last token is
            active, was_active = mx.array(is_active, mx.int32), is_active
            committed = mx.array([row.committed for row in rows], mx.int32)
            state.cache.length = mx.where(active, state.cache.length, committed)
        # No row can be further than this: MLX checks no bounds, so the host does before every pass.
        needed = max(row.committed for row in rows) + sum(done["report"].shape[1] - 1 for done, *_ in flight) + width
        state.cache.reserve(needed)
        state.block = state.block[:, :width]
        drafts = controller.draft_length if engine.drafter is not None else 0
        texts = [row.prompt + row.tokens for row in rows] if sampler.processors else None
        traces = engine.traces
        done = engine.run_round(state, active, bucket(needed), drafts, sampler, texts)
        mx.async_eval(done, state.block, state.confidence, state.carried, *state.cache.arrays)
        flight.append((done, state.confidence, drafts, traces))

    def can_run_ahead() -> bool:
        """Whether the next round may start before the last is read: plain decoding, and every row wants its token."""
        wanted = min((r.max_tokens - len(r.tokens) for r in rows if r.finish_reason is None), default=0)
        return state.width == 1 and len(flight) < min(2, wanted) and not sampler.processors

    try:
        dispatch(state.width)
        while flight:
            if can_run_ahead():
                dispatch(1)
            done, confidence, drafts, traces = flight.popleft()
            begun, asked = last_read, time.perf_counter()
            round_, confidence = _read(rows, done, confidence if controller.wants_confidence else None)
            last_read = time.perf_counter()
            # When the consumer was away for long and the read did not have to wait, the round's time is unknown.
            seconds = last_read - begun
            if engine.traces != traces or (away > 0.2 * seconds and last_read - asked < 0.1 * seconds):
                seconds = None
            context = max(row.committed for row in rows)
            controller.observe(round_.drafted, drafts, round_.accepted, seconds, context)
            if all(row.finish_reason for row in rows):
                flight.clear()  # a round ahead of the last
            elif not flight:
                dispatch(1 + controller.verify(state.width - 1, confidence))
            yielded = time.perf_counter()
            yield round_
            away = time.perf_counter() - yielded
    finally:
        state.cache.length = mx.array([row.committed for row in rows], mx.int32)
        # Made of host numbers, not of operations: what is left lazy here could not be evaluated by another thread.
        state.block = mx.array([[row.pending] for row in rows], mx.int32)
        state.confidence, state.carried = mx.array([[] for _ in rows]), {}


def _read(rows: list[Row], done: dict, confidence: mx.array | None) -> tuple[Round, list[list[float]]]:
    """The one place where the host waits for the device. done: as `run_round` returns it."""
    report = done["report"]
    accepted, emitted, logprobs = [], [], []
    own, top, top_ids = (a.tolist() for a in done["logprobs"]) if "logprobs" in done else ([[]] * len(rows),) * 3
    for row, (count, *tokens), *scores in zip(rows, report.tolist(), own, top, top_ids):
        accepted.append(count if row.finish_reason is None else None)
        emitted.append(row.take(tokens[: count + 1]))
        logprobs.append([(o, list(zip(i, t))) for o, t, i, _ in zip(*scores, emitted[-1])])
    sure = [[]] * len(rows) if confidence is None else confidence.tolist()
    sure = [c if row.finish_reason is None else [] for row, c in zip(rows, sure)]
    return Round(report.shape[1] - 2, accepted, emitted, logprobs), sure
