"""A stream of tokens -> what it says: answer, thought, tool calls. Gemma 4 marks them with special tokens:

    <|channel>thought
    ...
    <channel|>answer<|tool_call>call:NAME{key:<|"|>text<|"|>,other:3}<tool_call|>

Markers are told by their token ids, so a user's or model's text that merely looks like one is text.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field

from .tokenizer import Markers, Tokenizer

ESCAPE = '<|"|>'


@dataclass(frozen=True)
class ToolCall:
    """A call the model asks for. arguments: as JSON would give them."""

    name: str
    arguments: dict

    def as_message(self) -> dict:
        """The form chat templates take inside an assistant message's "tool_calls"."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class Segment:
    """Tokens of one kind. text: what of them may be shown by now.  channel: "answer" or "thought"."""

    channel: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    tool_call: ToolCall | None = None


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
            with suppress(IndexError):  # an id beyond the tokenizer's, in a padded vocabulary, has no text
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


class ChannelParser:
    """Takes a generation's tokens as they come, gives segments.

    stops: strings that end the answer.  markers: None to take everything as answer.  budget: most tokens of thought.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...] = (),
        markers: Markers | None = None,
        prompt: list[int] | None = None,
        budget: int | None = None,
    ):
        self._tokenizer, self._stops, self._markers, self._budget = tokenizer, stops, markers, budget
        self._thought_tokens = 0
        self._enter("answer")
        if markers is not None and markers.is_open(prompt or []):  # a template may begin the thought itself
            self._enter("thought")

    def _enter(self, state: str) -> None:
        """state: "answer", "name" (of a channel, up to the newline), "thought" or "call"."""
        self._state, self._held = state, ""
        self._text = TextStream(self._tokenizer, self._stops if state == "answer" else (), self._tokenizer.stop_ids)

    def add(self, tokens: list[int]) -> tuple[list[Segment], int, str | None]:
        """Segments of the first tokens, how many those are, and what ended them: "stop" (a stop string), "budget", or None.

        After "budget" the thought must be closed: call `add` with `Markers.closing`.
        """
        segments: list[Segment] = []
        for count, token in enumerate(tokens, 1):
            channel = "thought" if self._is_thought_next(token) else "answer"
            if not segments or segments[-1].channel != channel or segments[-1].tool_call:
                segments.append(Segment(channel))
            segments[-1].tokens.append(token)
            if self._step(token, segments[-1]):
                return segments, count, "stop"
            if self._state == "thought" and self._budget is not None and self._thought_tokens >= self._budget:
                self._budget = None
                return segments, count, "budget"
        return segments, len(tokens), None

    def finish(self) -> Segment:
        """What was held back, as a segment without tokens."""
        return Segment("thought" if self._state in ("name", "thought") else "answer", [], self._leave())

    def _is_thought_next(self, token: int) -> bool:
        return self._state in ("name", "thought") or (
            self._state == "answer" and self._markers is not None and token == self._markers.thought_start
        )

    def _step(self, token: int, segment: Segment) -> bool:
        """Takes one token into `segment`. Returns whether it completes a stop string."""
        marks, state = self._markers, self._state
        if marks is not None and state == "answer" and token in (marks.thought_start, marks.call_start):
            segment.text += self._leave()
            self._enter("name" if token == marks.thought_start else "call")
        elif marks is not None and state in ("name", "thought") and token == marks.thought_end:
            segment.text += self._leave()
            self._enter("answer")
        elif marks is not None and state == "call" and token == marks.call_end:
            text = self._leave()
            try:
                segment.tool_call = parse_tool_call(text)
            except ValueError:  # nothing of what a model says is dropped
                segment.text += text
            self._enter("answer")
        else:
            self._thought_tokens += state == "thought"
            text, complete = self._text.add([token])
            segment.text += self._show(text)
            return complete is not None
        return False

    def _show(self, text: str) -> str:
        """What of new text may be shown: no channel name, no newline before the end of a thought, no half of a call."""
        if self._state == "answer":
            return text
        self._held += text
        if self._state == "name" and "\n" in self._held:
            self._held, self._state = self._held.split("\n", 1)[1], "thought"
        if self._state != "thought":
            return ""
        shown = self._held.rstrip("\n")
        self._held = self._held[len(shown) :]
        return shown

    def _leave(self) -> str:
        """The rest of the state's text that may be shown."""
        rest = self._text.finish()
        if self._state in ("answer", "call"):
            return self._held + rest
        return self._show(rest) if self._state == "thought" else ""


# --- the arguments of a call -----------------------------------------------------------------------------------------


def parse_tool_call(text: str) -> ToolCall:
    """`call:NAME{key:value,...}`: values are <|"|>strings<|"|>, numbers, true, false, null, lists and objects.

    Raises ValueError.
    """
    head, brace, rest = text.strip().partition("{")
    name = head.removeprefix("call:").strip()
    if not head.startswith("call:") or not name or not brace:
        raise ValueError(f"no tool call: {text!r}")
    arguments, at = _object(rest, 0)
    if rest[at:].strip():
        raise ValueError(f"text after a tool call: {rest[at:]!r}")
    return ToolCall(name, arguments)


def _space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _string(text: str, at: int) -> tuple[str, int]:
    end = text.index(ESCAPE, at + len(ESCAPE))
    return text[at + len(ESCAPE) : end], end + len(ESCAPE)


def _object(text: str, at: int) -> tuple[dict, int]:
    """An object whose opening brace lies before `at`."""
    fields: dict = {}
    at = _space(text, at)
    while text[at : at + 1] != "}":
        if text.startswith(ESCAPE, at):
            key, at = _string(text, at)
            at = text.index(":", at) + 1
        else:
            end = text.index(":", at)
            key, at = text[at:end].strip(), end + 1
        fields[key], at = _value(text, at)
        at = _after_value(text, at, "}")
    return fields, at + 1


def _list(text: str, at: int) -> tuple[list, int]:
    """A list whose opening bracket lies before `at`."""
    items = []
    at = _space(text, at)
    while text[at : at + 1] != "]":
        item, at = _value(text, at)
        items.append(item)
        at = _after_value(text, at, "]")
    return items, at + 1


def _after_value(text: str, at: int, end: str) -> int:
    at = _space(text, at)
    if text[at : at + 1] == ",":
        return _space(text, at + 1)
    if text[at : at + 1] != end:
        raise ValueError(f"a value is followed by {text[at : at + 10]!r}")
    return at


def _value(text: str, at: int) -> tuple:
    at = _space(text, at)
    if text.startswith(ESCAPE, at):
        return _string(text, at)
    if text[at : at + 1] == "{":
        return _object(text, at + 1)
    if text[at : at + 1] == "[":
        return _list(text, at + 1)
    return json.JSONDecoder().raw_decode(text, at)
