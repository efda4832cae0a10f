"""A target and its drafter as a user sees them: text in, text out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import mlx.core as mx
from tqdm import tqdm

from .batch import SIZES, Batch, Guard, Request, batch_size
from .calibration import calibrate_with, load_knowledge, save_knowledge
from .channels import ChannelParser
from .checkpoint import machine_bytes
from .conversation import Chat
from .draft_length import Auto, Fixed, Policy, as_policy
from .drafter import Drafter
from .errors import MtpError, OptionError, PromptError
from .prefix import Branch, PrefixStore, overshoot
from .sampling import Sampler, Sampling
from .speculative import Engine, Row, decode, prefill
from .target import Target
from .tokenizer import Prompt, Tokenizer
from .transcript import Completion, Piece, Transcript

WORTH_REMEMBERING = 32  # rounds of a generation whose costs and acceptances the next process should know


class Pair:
    """A loaded target and drafter. Streams may be interleaved or run in threads: each has a state of its own.

    prefixes: what finished generations computed, for prompts that begin alike; `prefixes.limit_bytes` may be set.
    """

    def __init__(self, target: Target, drafter: Drafter | None, tokenizer: Tokenizer, name: str):
        self.target, self.drafter, self.tokenizer, self.name = target, drafter, tokenizer, name
        self.engine = Engine(target, drafter)
        self.prefixes = PrefixStore(target.empty_cache)
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
        thinking: bool | int = False,
        tools: Sequence[dict] | None = None,
        reuse: bool = True,
    ) -> "Stream":
        """Generates piece by piece.

        prompt: text (a user's message when the checkpoint has a chat template, unless `raw`), a list of messages, or
        token ids.  max_tokens: how many at most.  draft_length: 0 for plain decoding, a number, "heuristic", or a
        policy object; None for "auto".  sampling: how tokens are chosen, None for the checkpoint's own way.
        logits_processors: functions from (tokens so far [n], logits [1, V]) to logits [1, V], applied at every position.
        logprobs: report the log-probability of every token, and of this many of the most probable; None for neither.
        stop: strings that end the text and are not part of it.  ignore_eos: go on after stop ids.
        on_prefill: called with (tokens done, tokens in all) while a long prompt is read.
        thinking: let the model think before it answers; a number is the most tokens it may think, then it must answer.
        tools: declarations of functions the model may call, in OpenAI's form.
        reuse: continue from what earlier generations computed, and keep what this one does.
        Returns an iterator of pieces; its `completion()` gives the text, tokens and statistics so far.
        Raises PromptError, OptionError.
        """
        if logprobs is not None and (isinstance(logprobs, bool) or not isinstance(logprobs, int) or not 0 <= logprobs <= 64):
            raise OptionError(f"logprobs {logprobs!r}: give a number from 0 to 64")
        if sampling is not None and not isinstance(sampling, Sampling):
            raise OptionError(f"sampling {sampling!r}: give a Sampling, as in Sampling(temperature=0.7)")
        if not isinstance(logits_processors, (list, tuple)) or not all(map(callable, logits_processors)):
            raise OptionError(f"logits_processors {logits_processors!r}: give a list of functions")
        transcript = self._transcript(prompt, max_tokens, raw, stop, ignore_eos, thinking, tools)
        sampler = Sampler.of(
            [(sampling or Sampling()).resolve(self.tokenizer.generation)],
            self.target.args.vocab_size,
            self.tokenizer.suppressed,
            logprobs,
            (tuple(logits_processors),) if logits_processors else (),
        )
        return Stream(self, transcript, self._policy(draft_length), sampler, on_prefill, reuse)

    def _policy(self, draft_length: int | str | Policy | None) -> Policy:
        return as_policy(draft_length, self.drafter.config.draft_length if self.drafter else None, self.auto)

    def _transcript(self, prompt: Prompt, max_tokens, raw, stop, ignore_eos, thinking, tools) -> Transcript:
        """A row that is yet to run, its options checked."""
        budget = None if isinstance(thinking, bool) else thinking
        if budget is not None and (not isinstance(budget, int) or budget < 1):
            raise OptionError(f"thinking {thinking!r}: give True, False, or the most tokens of thought")
        ids = self.tokenizer.encode(prompt, raw, bool(thinking), tools)
        context = self.target.args.max_position_embeddings
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise OptionError(f"max_tokens {max_tokens!r}: give a whole number of at least 1")
        if len(ids) + max_tokens > context:
            raise PromptError(
                f"prompt of {len(ids)} tokens plus max_tokens {max_tokens} is beyond the context of {context}: "
                + (f"ask for at most {context - len(ids)} tokens" if len(ids) < context else "shorten the prompt")
            )
        stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, (list, tuple, set)) else (None,)
        if not all(isinstance(s, str) and s for s in stops):
            raise OptionError(f"stop {stop!r}: give a string or several, none of them empty")
        row = Row(ids, max_tokens, frozenset() if ignore_eos else self.tokenizer.stop_ids)
        return Transcript(row, ChannelParser(self.tokenizer, stops, None if raw else self.tokenizer.markers, ids, budget))

    def generate(self, prompt: Prompt, **options) -> Completion:
        """All of `stream` at once, with the same arguments."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.completion()

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | Sequence[int] = 256,
        sampling: Sampling | None | Sequence[Sampling | None] = None,
        logits_processors: Sequence[Sequence[Callable[[mx.array, mx.array], mx.array]]] | None = None,
        draft_length: int | str | Policy | None = None,
        raw: bool = False,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        thinking: bool | int = False,
        tools: Sequence[dict] | None = None,
        rows: int = 8,
        progress: bool = False,
    ) -> list[Completion]:
        """Generates for many prompts together, each as if it were alone.

        max_tokens, sampling: one for all, or one per prompt.  logits_processors: per prompt, the functions of its row.
        rows: how many run at once; where the memory does not hold so many, fewer do.  progress: show a bar.
        The rest is as for `stream`, for all rows.
        Returns completions in the order of the prompts. A row that cannot be run, or whose processor raises, ends alone:
        its finish_reason is "error", and `error` says why.
        Raises OptionError.
        """
        count = len(prompts)
        if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= SIZES[-1]:
            raise OptionError(f"rows {rows!r}: give a number from 1 to {SIZES[-1]}")
        limits, samplings = _per_row("max_tokens", max_tokens, count), _per_row("sampling", sampling, count)
        processors = [()] * count if logits_processors is None else _per_row("logits_processors", logits_processors, count)
        results: list[Completion | None] = [None] * count
        transcripts, resolved = {}, {}
        for index, prompt in enumerate(prompts):
            try:
                transcript = self._transcript(prompt, limits[index], raw, stop, ignore_eos, thinking, tools)
                own = (samplings[index] or Sampling()).resolve(self.tokenizer.generation)
                Sampler.of([own], self.target.args.vocab_size)  # refuses what means nothing for this row alone
                transcripts[index], resolved[index] = transcript, own
            except MtpError as error:
                failed = Transcript(Row([], 0), ChannelParser(self.tokenizer))
                failed.error = error
                results[index] = failed.completion()
        policy = self._policy(draft_length)
        sampler = Sampler.of([resolved[i] for i in transcripts], self.target.args.vocab_size, self.tokenizer.suppressed)
        requests = [
            Request(transcript, at, tuple(Guard(f) for f in processors[i]))
            for at, (i, transcript) in enumerate(transcripts.items())
        ]
        mx.reset_peak_memory()
        room = max(0, machine_bytes() - mx.get_active_memory()) // 2
        ends = self.tokenizer.markers.closing if self.tokenizer.markers else ()
        with tqdm(total=count, initial=count - len(requests), unit="row", disable=not progress) as bar:
            longest = max((len(t.row.prompt) for t in transcripts.values()), default=0)
            controller = policy.begin(batch_size(min(rows, len(requests))), longest)
            Batch(self.engine, sampler, controller, rows, room, ends, lambda _: bar.update()).run(requests)
        if isinstance(policy, Auto):
            save_knowledge(self.engine, policy.knowledge)
        for index, transcript in transcripts.items():
            results[index] = transcript.completion()
        return results

    def chat(self, system: str | None = None, **options) -> Chat:
        """A conversation. options: fields of Chat, such as max_tokens, sampling, thinking, tools, on_full."""
        chat = Chat(self, **options)
        chat.system = system or chat.system
        return chat


def _per_row(name: str, value, count: int) -> list:
    """A value for every row."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise OptionError(f"{len(value)} values of {name} for {count} prompts: give one for all, or one for each")
    return list(value)


class Stream:
    """A running generation of one row: an iterator of pieces that owns the state and gives it to the pair when it ends."""

    def __init__(self, pair: Pair, transcript: Transcript, policy: Policy, sampler: Sampler, on_prefill, reuse: bool):
        self._pair, self._transcript, self._sampler = pair, transcript, sampler
        self._on_prefill, self._reuse = on_prefill, reuse
        self._pieces = self._run(policy)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the generation; what was generated stays readable."""
        self._pieces.close()

    def completion(self) -> Completion:
        """What was generated so far. finish_reason is "length" while it runs."""
        return self._transcript.completion()

    def _run(self, policy: Policy) -> Iterator[Piece]:
        transcript, row, pair = self._transcript, self._transcript.row, self._pair
        controller = policy.begin(1, len(transcript.row.prompt))
        mx.reset_peak_memory()
        transcript.start()
        branch = pair.prefixes.take(row.prompt) if self._reuse else Branch(pair.target.empty_cache())
        transcript.stats.reused_tokens = committed = branch.reused
        width = 1 + controller.draft_length
        try:
            state = prefill(pair.target, row.prompt, self._on_prefill, branch.cache, branch.reused)
            committed = row.committed
            if self._reuse:
                branch.remember(committed, committed)
            while True:
                try:
                    with closing(decode(pair.engine, state, [row], controller, self._sampler)) as rounds:
                        for round_ in rounds:
                            width = max(width, 1 + controller.draft_length)
                            yield from transcript.add(round_, 0, controller.gain())
                            if transcript.must_close:
                                break
                finally:
                    committed = row.committed
                if not transcript.must_close:
                    return
                yield from transcript.close_thought(pair.tokenizer.markers.closing)
                if row.finish_reason:
                    return
                state = prefill(pair.target, row.prompt + row.tokens, None, branch.cache, committed)
        finally:
            if self._reuse:
                if committed > len(row.prompt) - 1:
                    branch.remember(committed, committed + overshoot(width))
                pair.prefixes.put(branch, (row.prompt + row.tokens)[:committed])
            if isinstance(policy, Auto) and transcript.stats.rounds >= WORTH_REMEMBERING:
                save_knowledge(pair.engine, policy.knowledge)
