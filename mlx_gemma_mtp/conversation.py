"""A conversation of many turns: messages in, streamed answers out, and a clear rule for when the context is full."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import saved
from .draft_length import Policy
from .errors import OptionError, PromptError
from .sampling import Sampling

ON_FULL = ("stop", "slide")


@dataclass
class Chat:
    """A conversation with a pair. Change any field between two turns; `messages` is what the next prompt is made of.

    pair: a Pair.  max_tokens: of one answer, None for all that the context has room for.  sampling, draft_length,
    thinking, tools: as for `Pair.stream`.  on_full: "stop" refuses a turn the context has no room for; "slide" forgets the
    oldest turns, down to half of the context.
    """

    pair: object
    messages: list[dict] = field(default_factory=list)
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    draft_length: int | str | Policy | None = None
    thinking: bool | int = False
    tools: Sequence[dict] | None = None
    on_full: str = "stop"

    def __post_init__(self):
        if self.on_full not in ON_FULL:
            raise OptionError(f'on_full {self.on_full!r}: use "stop" or "slide"')

    @property
    def system(self) -> str | None:
        """The system message, which may be set."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    def send(self, text: str, on_prefill: Callable[[int, int], None] | None = None) -> "Turn":
        """Says something. Returns an iterator of pieces; when it ends or is closed, the answer so far is in `messages`.

        As the last value of a notebook's cell it shows itself as it comes.
        Raises PromptError, OptionError.
        """
        return self._turn([{"role": "user", "content": text}], on_prefill)

    def send_results(self, results: Sequence[object]) -> "Turn":
        """Answers the tool calls of the last turn, in order; the model goes on in the same turn.

        results: text, or what JSON can hold, which becomes JSON text.
        Raises PromptError.
        """
        calls = self.messages[-1].get("tool_calls", []) if self.messages else []
        if not calls or len(results) != len(calls):
            raise PromptError(f"{len(results)} results for {len(calls)} tool calls: give one for each call of the last turn")
        texts = [result if isinstance(result, str) else json.dumps(result, ensure_ascii=False) for result in results]
        messages = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
            for call, text in zip(calls, texts)
        ]
        return self._turn(messages, None)

    def undo(self) -> str | None:
        """Takes back the last thing said and all that followed. Returns it, None when nothing was said."""
        last = max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=None)
        if last is None:
            return None
        text = self.messages[last]["content"]
        del self.messages[last:]
        return text

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.system, self.messages = self.system, self.messages[:1] if self.system is not None else []

    def save(self, path: str | Path) -> None:
        """Writes the messages as JSON; a name in .safetensors adds what was computed of them. Raises OutputError."""
        kept = self.pair.prefixes.find(self._encode(self.messages)) if self.messages else None
        saved.write(Path(path).expanduser(), self.messages, kept, self.pair.target.model)

    def load(self, path: str | Path) -> None:
        """Takes the messages that `save` wrote, and what was computed of them by the same model. Raises PromptError."""
        target = self.pair.target
        self.messages, kept = saved.read(Path(path).expanduser(), target.model, target.empty_cache())
        if kept is not None:
            self.pair.prefixes.keep(kept)

    def _encode(self, messages: list[dict]) -> list[int]:
        return self.pair.tokenizer.encode(messages, thinking=bool(self.thinking), tools=self.tools)

    def _turn(self, new: list[dict], on_prefill) -> "Turn":
        prompt, room = self._fit(new)
        stream = self.pair.stream(
            prompt,
            max_tokens=min(self.max_tokens or room, room),
            draft_length=self.draft_length,
            sampling=self.sampling,
            thinking=self.thinking,
            tools=self.tools,
            on_prefill=on_prefill,
        )
        return Turn(self, prompt, stream)

    def _fit(self, new: list[dict]) -> tuple[list[dict], int]:
        """The messages of the next prompt, and how many tokens the answer may have."""
        context, messages = self.pair.target.args.max_position_embeddings, self.messages + new
        tokens = len(self._encode(messages))
        if context - tokens >= min(self.max_tokens or 1, context // 4):
            return messages, context - tokens
        if self.on_full == "slide":
            while tokens > context // 2:
                turns = [i for i, m in enumerate(messages) if m["role"] == "user"]
                if len(turns) < 2:
                    break
                messages = messages[: turns[0]] + messages[turns[1] :]
                tokens = len(self._encode(messages))
        if context - tokens < 1:
            raise PromptError(
                f"the conversation of {tokens} tokens fills the context of {context}: "
                "start a new one, undo a turn, or let it slide (on_full)"
            )
        return messages, context - tokens


class Turn:
    """An answer on its way: an iterator of pieces."""

    def __init__(self, chat: Chat, prompt: list[dict], stream):
        self.stream = stream
        self._pieces = self._run(chat, prompt)

    def __iter__(self) -> Iterator:
        return self

    def __next__(self):
        return next(self._pieces)

    def close(self) -> None:
        """Ends the answer; what was said stays in the conversation."""
        self._pieces.close()

    def completion(self):
        """What was said so far (a Completion)."""
        return self.stream.completion()

    def _run(self, chat: Chat, prompt: list[dict]) -> Iterator:
        try:
            yield from self.stream
        finally:
            self.stream.close()
            done = self.stream.completion()
            if done.tokens:
                message = {"role": "assistant", "content": done.text}
                if done.thought:
                    message["reasoning"] = done.thought
                if done.tool_calls:
                    message["tool_calls"] = [{"id": f"call_{i}"} | c.as_message() for i, c in enumerate(done.tool_calls)]
                chat.messages = [*prompt, message]

    def _ipython_display_(self) -> None:
        for piece in self:
            print(piece.text, end="", flush=True)
        print()
