"""Many prompts in few passes: rows leave when they are done, and waiting prompts take their place."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import mlx.core as mx

from .cache import SLACK, Cache, bucket
from .draft_length import Controller
from .sampling import Sampler
from .speculative import Engine, Row, State, decode, prefill, select, stack
from .transcript import Transcript

SIZES = (1, 2, 4, 8, 16, 32)  # of batches: every other number would be another graph


class Guard:
    """A user's processor that, once it raised, leaves everything as it is.

    error: what it raised.  at: how many tokens it saw then.
    """

    def __init__(self, function: Callable):
        self.function, self.error, self.at = function, None, 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self.error is None:
            try:
                changed = self.function(tokens, logits)
                if changed.shape != logits.shape:
                    raise ValueError(f"a logits processor made {changed.shape} of logits {logits.shape}")
                return changed
            except Exception as error:  # a user's program may raise anything; the other rows go on
                self.error, self.at = error, tokens.shape[0]
        return logits


@dataclass
class Request:
    """One row to run. index: of its row in the batch's sampler."""

    transcript: Transcript
    index: int
    guards: tuple[Guard, ...] = ()

    @property
    def row(self) -> Row:
        return self.transcript.row

    def check(self) -> None:
        """Ends the row where a processor raised: what came after is not what was asked for."""
        for guard in self.guards:
            if guard.error is not None and self.transcript.error is None:
                self.transcript.error, self.row.finish_reason = guard.error, "error"
                del self.row.tokens[max(0, guard.at - len(self.row.prompt)) :]


@dataclass
class Batch:
    """How requests are run.

    sampler: of all requests, a row each.  most_rows: at once.  memory_bytes: that rows may use together; one always runs.
    closing: the tokens that close a thought.  on_finish: called with every transcript that has ended.
    """

    engine: Engine
    sampler: Sampler
    controller: Controller
    most_rows: int
    memory_bytes: int
    closing: tuple[int, ...]
    on_finish: Callable[[Transcript], None]

    def run(self, requests: list[Request]) -> None:
        waiting, running, state = deque(requests), [], None
        while waiting or running:
            state = self._admit(running, state, waiting)
            for _ in self._decode(running, state, bool(waiting)):
                pass
            state, running = self._leave(running, state)

    def _admit(self, running: list[Request], state: State | None, waiting: deque) -> State:
        """The state with the prompts that may join it, of as many rows as a batch size says. Changes `running`, `waiting`."""
        states = [] if state is None else [state]
        while waiting and len(running) < self.most_rows and (not running or self._fits([*running, waiting[0]])):
            request = waiting.popleft()
            request.transcript.start()
            states.append(prefill(self.engine.target, request.row.prompt))
            running.append(request)
        idle = batch_size(len(running)) - len(running)
        states += [prefill(self.engine.target, [0]) for _ in range(idle)]
        return stack(states) if len(states) > 1 else states[0]

    def _fits(self, requests: list[Request]) -> bool:
        """Whether the caches of these rows, all as long as the longest may become, fit into the memory."""
        tokens = bucket(max(len(r.row.prompt) + r.row.max_tokens for r in requests) + SLACK)
        rows = batch_size(len(requests))
        return rows * cache_bytes(self.engine.target.empty_cache(), tokens) <= self.memory_bytes

    def _decode(self, running: list[Request], state: State, has_waiting: bool) -> Iterator[None]:
        """Rounds until a quarter of the rows has ended and others wait, or half of them has, or a thought must be closed."""
        rows = [r.row for r in running]
        idle = [Row([0], 1, finish_reason="length") for _ in range(state.rows - len(rows))]
        index = mx.array([r.index for r in running] + [running[0].index] * len(idle), mx.int32)
        processors = tuple(r.guards for r in running) + ((),) * len(idle)
        sampler = replace(
            self.sampler,
            knobs={name: mx.take(knob, index, axis=0) for name, knob in self.sampler.knobs.items()},
            processors=processors if any(processors) else (),
        )
        enough = -(-len(rows) // 4) if has_waiting else -(-len(rows) // 2)
        with closing(decode(self.engine, state, [*rows, *idle], self.controller, sampler)) as rounds:
            for round_ in rounds:
                for at, request in enumerate(running):
                    if round_.accepted[at] is not None:
                        request.transcript.add(round_, at, self.controller.gain())
                        request.check()
                yield
                ended = sum(row.finish_reason is not None for row in rows)
                if ended >= enough or any(r.transcript.must_close for r in running):
                    return

    def _leave(self, running: list[Request], state: State) -> tuple[State | None, list[Request]]:
        """The state and the requests that go on, those whose thought was closed last."""
        going, closed = [], []
        for at, request in enumerate(running):
            row, done = request.row, request.row.committed
            if request.transcript.must_close:
                request.transcript.close_thought(self.closing)
                if row.finish_reason is None:
                    cache = select(state, [at]).cache
                    closed.append((request, prefill(self.engine.target, row.prompt + row.tokens, None, cache, done)))
            elif row.finish_reason is None:
                going.append(at)
            if row.finish_reason is not None:
                self.on_finish(request.transcript)
        parts = ([select(state, going)] if going else []) + [part for _, part in closed]
        staying = [running[at] for at in going] + [request for request, _ in closed]
        return (stack(parts) if len(parts) > 1 else parts[0] if parts else None), staying


def batch_size(rows: int) -> int:
    """The rows that are run for so many requests."""
    return next(size for size in SIZES if size >= rows)


def cache_bytes(cache: Cache, tokens: int) -> int:
    """What one row's cache of `tokens` positions takes. cache: any of the same target."""
    sizes = [tokens if window is None else min(tokens, window + SLACK) for window in cache.windows]
    per_slot = [2 * keys.shape[1] * keys.shape[3] * keys.dtype.size for keys in cache.keys]
    return sum(size * slot for size, slot in zip(sizes, per_slot))
