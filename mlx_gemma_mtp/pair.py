"""A target and its drafter as a user sees them: text in, text out."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .calibration import calibrate_with, load_knowledge
from .draft_length import Auto, Fixed, Policy, as_policy
from .drafter import Drafter
from .errors import OptionError, PromptError
from .sampling import Sampler, Sampling
from .speculative import Engine, Row, decode, prefill
from .stats import Stats
from .target import Target
from .tokenizer import Prompt, Tokenizer


@dataclass(frozen=True)
class Piece:
    """What one round added. `text` may be empty while a character or a possible stop string is incomplete.

    logprobs: per token, when asked for.
    """

    text: str
    tokens: list[int]
    logprobs: list["Logprob"]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of an emitted token under the target itself, before penalties and warps.

    top: the most probable (id, log-probability).
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Completion:
    """A finished generation. finish_reason: "stop" (stop id or stop string) or "length" (max_tokens)."""

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[Logprob]

    def __repr__(self) -> str:
        return f"{self.text}\n\n[{self.finish_reason}]\n{self.stats}"


class Pair:
    """A loaded target and drafter. Holds no state of any generation: streams may be interleaved or run in threads."""

    def __init__(self, target: Target, drafter: Drafter | None, tokenizer: Tokenizer, name: str):
        self.target, self.drafter, self.tokenizer, self.name = target, drafter, tokenizer, name
        self.engine = Engine(target, drafter)
        self.auto = Auto(load_knowledge(self.engine), calibrate_with(self.engine)) if drafter else Fixed(0)

    def __repr__(self) -> str:
        args = self.target.args
        drafting = "no drafter: plain decoding" if self.drafter is None else "with its drafter"
        return (
            f"Pair({self.name}: Gemma 4 of {args.num_hidden_layers} layers, hidden size {args.hidden_size}, "
            f"context {args.max_position_embeddings}, {drafting})"
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        draft_length: int | str | Policy | None = None,
        sampling: Sampling | None = None,
        logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = (),
        logprobs: int | None = None,
        raw: bool = False,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> "Stream":
        """Generates piece by piece.

        prompt: text (a user's message when the checkpoint has a chat template, unless `raw`), a list of messages, or
        token ids.  max_tokens: how many at most.  draft_length: 0 for plain decoding, a number, "heuristic", or a
        policy object; None for "auto".  sampling: how tokens are chosen, None for the checkpoint's own way.
        logits_processors: functions from (tokens so far [n], logits [1, V]) to logits [1, V], applied at every position.
        logprobs: report the log-probability of every token, and of this many of the most probable; None for neither.
        stop: strings that end the text and are not part of it.  ignore_eos: go on after stop ids.
        on_prefill: called with (tokens done, tokens in all) while a long prompt is read.
        Returns an iterator of pieces; its `completion()` gives the text, tokens and statistics so far.
        Raises PromptError, OptionError.
        """
        ids = self.tokenizer.encode(prompt, raw)
        context = self.target.args.max_position_embeddings
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise OptionError(f"max_tokens {max_tokens!r}: give a whole number of at least 1")
        if len(ids) + max_tokens > context:
            raise PromptError(
                f"prompt of {len(ids)} tokens plus max_tokens {max_tokens} is beyond the context of {context}: "
                + (f"ask for at most {context - len(ids)} tokens" if len(ids) < context else "shorten the prompt")
            )
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(s, str) and s for s in stops):
            raise OptionError(f"stop {stop!r}: give a string or several, none of them empty")
        if logprobs is not None and (isinstance(logprobs, bool) or not isinstance(logprobs, int) or not 0 <= logprobs <= 64):
            raise OptionError(f"logprobs {logprobs!r}: give a number from 0 to 64")
        policy = as_policy(draft_length, self.drafter.config.draft_length if self.drafter else None, self.auto)
        sampler = Sampler.of(
            [(sampling or Sampling()).resolve(self.tokenizer.generation)],
            self.target.args.vocab_size,
            self.tokenizer.suppressed,
            logprobs,
            (tuple(logits_processors),) if logits_processors else (),
        )
        row = Row(ids, max_tokens, frozenset() if ignore_eos else self.tokenizer.stop_ids)
        return Stream(self, row, policy, sampler, stops, on_prefill)

    def generate(self, prompt: Prompt, **options) -> Completion:
        """All of `stream` at once, with the same arguments."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.completion()


class Stream:
    """A running generation of one row: an iterator of pieces that owns the state and frees it when it ends."""

    def __init__(self, pair: Pair, row: Row, policy: Policy, sampler: Sampler, stops: tuple[str, ...], on_prefill):
        self._row, self._stats, self._text, self._logprobs = row, Stats(len(row.prompt)), "", []
        self._pieces = self._run(pair, policy, sampler, stops, on_prefill)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the generation and frees its cache; what was generated stays readable."""
        self._pieces.close()

    def completion(self) -> Completion:
        """What was generated so far. finish_reason is "length" while it runs."""
        reason = self._row.finish_reason or "length"
        return Completion(self._text, list(self._row.tokens), reason, self._stats, list(self._logprobs))

    def _run(self, pair: Pair, policy: Policy, sampler: Sampler, stops: tuple[str, ...], on_prefill) -> Iterator[Piece]:
        row, stats = self._row, self._stats
        text = TextStream(pair.tokenizer, stops, pair.tokenizer.stop_ids)
        controller = policy.begin()
        mx.reset_peak_memory()
        start = time.perf_counter()
        state = prefill(pair.target, row.prompt, on_prefill)
        first = None
        for round_ in decode(pair.engine, state, [row], controller, sampler):
            now = time.perf_counter()
            if first is None:
                first = now
            else:
                stats.count(round_, 0)
            emitted = round_.emitted[0]
            piece, complete = text.add(emitted)
            if complete is not None:
                row.stop_at(len(row.tokens) - len(emitted) + complete)
                emitted = emitted[:complete]
            if row.finish_reason:
                piece += text.finish()
            stats.generated_tokens = len(row.tokens)
            stats.prefill_seconds, stats.decode_seconds = first - start, now - first
            stats.peak_memory_bytes = mx.get_peak_memory()
            stats.estimated_gain = controller.gain()
            scores = [Logprob(token, *score) for token, score in zip(emitted, round_.logprobs[0])]
            self._text += piece
            self._logprobs += scores
            yield Piece(piece, emitted, scores)


class TextStream:
    """Tokens -> text that never shows half a character, nor what a stop string would take back."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], hidden: frozenset[int]):
        self._detokenizer, self._stops, self._hidden = tokenizer.detokenizer(), stops, hidden
        self._held = ""

    def add(self, tokens: list[int]) -> tuple[str, int | None]:
        """Text that may be shown now, and how many of `tokens` complete a stop string (None: none does)."""
        if self._detokenizer is None:
            return "", None
        for count, token in enumerate(tokens, 1):
            if token in self._hidden:
                continue
            self._detokenizer.add_token(token)
            self._held += self._detokenizer.last_segment
            found = [at for at in (self._held.find(s) for s in self._stops) if at >= 0]
            if found:
                shown, self._held, self._detokenizer = self._held[: min(found)], "", None
                return shown, count
        keep = max((n for s in self._stops for n in range(len(s)) if self._held.endswith(s[:n])), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, None

    def finish(self) -> str:
        """The rest: what was held back, and half a character as the replacement character."""
        if self._detokenizer is None:
            return ""
        self._detokenizer.finalize()
        return self._held + self._detokenizer.last_segment
