"""One row's rounds -> pieces of text, and the completion they add up to."""

import time
from dataclasses import dataclass, field

import mlx.core as mx

from .channels import ChannelParser, ToolCall
from .speculative import Round, Row
from .stats import Stats


@dataclass(frozen=True)
class Piece:
    """What a round added, of one channel. `text` may be empty while a character or a possible stop string is incomplete.

    channel: "answer" or "thought".  tool_call: the call that these tokens complete.  logprobs: per token, when asked for.
    """

    text: str
    tokens: list[int]
    logprobs: list["Logprob"]
    channel: str = "answer"
    tool_call: ToolCall | None = None


@dataclass(frozen=True)
class Logprob:
    """Log-probability of an emitted token under the target, before penalties and warps.

    top: the most probable (id, log-probability).
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    text: the answer.  thought: what came before it.  tokens: of all of it.
    finish_reason: "stop" (stop id or stop string), "length" (max_tokens), or "error" (of a batch's row: see `error`).
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[Logprob]
    thought: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    error: Exception | None = None

    def __repr__(self) -> str:
        return f"{self.text}\n\n[{self.finish_reason}]\n{self.stats}"


class Transcript:
    """What a row has said. Ends the row at stop strings, and cuts it where it has thought for as long as it may.

    must_close: the thought is over its budget: `close_thought`, then go on from the row's tokens.
    """

    def __init__(self, row: Row, parser: ChannelParser):
        self.row, self.stats, self.must_close = row, Stats(len(row.prompt)), False
        self.error: Exception | None = None
        self._parser, self._text = parser, {"answer": "", "thought": ""}
        self._tool_calls: list[ToolCall] = []
        self._logprobs: list[Logprob] = []
        self._start = self._first = None

    def start(self) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def add(self, round_: Round, index: int, gain: float | None) -> list[Piece]:
        """Takes what a round emitted for row `index` of its batch. gain: as in Stats."""
        row, stats, now = self.row, self.stats, time.perf_counter()
        if self._first is None:
            self._first = now
        else:
            stats.count(round_, index)
        emitted = round_.emitted[index]
        segments, count, end = self._parser.add(emitted)
        if end:
            row.cut(len(row.tokens) - len(emitted) + count)
            is_full = len(row.tokens) == row.max_tokens
            row.finish_reason = "stop" if end == "stop" else "length" if is_full else None
        self.must_close = end == "budget" and row.finish_reason is None
        stats.generated_tokens = len(row.tokens)
        stats.prefill_seconds, stats.decode_seconds = self._first - self._start, now - self._first
        stats.peak_memory_bytes = mx.get_peak_memory()
        stats.estimated_gain = gain
        return self._pieces(segments, round_.logprobs[index])

    def close_thought(self, tokens: tuple[int, ...]) -> list[Piece]:
        """Puts the tokens that close a thought into the row."""
        self.must_close = False
        segments, *_ = self._parser.add(self.row.take(list(tokens)))
        self.stats.generated_tokens = len(self.row.tokens)
        return self._pieces(segments, [])

    def _pieces(self, segments: list, scores: list) -> list[Piece]:
        """Segments as pieces, the last with what was held back when the row is finished. scores: per token, if any."""
        if self.row.finish_reason:
            rest = self._parser.finish()
            if segments and segments[-1].channel == rest.channel:
                segments[-1].text += rest.text
            elif rest.text:
                segments.append(rest)
        pieces, at = [], 0
        for segment in segments:
            logprobs = [Logprob(t, *score) for t, score in zip(segment.tokens, scores[at:])]
            at += len(segment.tokens)
            self._text[segment.channel] += segment.text
            self._logprobs += logprobs
            self._tool_calls += [segment.tool_call] if segment.tool_call else []
            pieces.append(Piece(segment.text, segment.tokens, logprobs, segment.channel, segment.tool_call))
        return pieces

    def completion(self) -> Completion:
        """What was said so far. finish_reason is "length" while it runs."""
        return Completion(
            self._text["answer"],
            list(self.row.tokens),
            "error" if self.error else self.row.finish_reason or "length",
            self.stats,
            list(self._logprobs),
            self._text["thought"],
            list(self._tool_calls),
            self.error,
        )
