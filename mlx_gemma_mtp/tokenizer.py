"""Text -> ids and ids -> text: chat template, BOS, stop ids. The tokenizer and its streaming detokenizer are mlx-lm's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_wrapper

from .checkpoint import read_json
from .errors import CheckpointError, PromptError

# Keys of config.json: what stands for images, audio and video, which a text-only run must not emit.
MEDIA_TOKENS = (
    "boi_token_id", "eoi_token_id", "image_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id",
    "video_token_id",
)  # fmt: skip
Prompt = str | list[dict] | list[int]


@dataclass(frozen=True)
class Markers:
    """Ids of the special tokens that part a model's output.  closing: what ends a thought."""

    thought_start: int
    thought_end: int
    call_start: int
    call_end: int
    closing: tuple[int, ...]

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a thought."""
        last = next((t for t in reversed(prompt) if t in (self.thought_start, self.thought_end)), None)
        return last == self.thought_start


class Tokenizer:
    """The tokenizer of a checkpoint. A checkpoint without one takes and gives token ids only."""

    def __init__(
        self,
        wrapper: TokenizerWrapper | None,
        vocab_size: int,
        bos_id: int | None,
        stop_ids: frozenset[int],
        generation: dict | None = None,
        suppressed: tuple[int, ...] = (),
    ):
        """generation: the checkpoint's generation_config.json.  suppressed: ids a text-only run must not emit."""
        self.wrapper, self.vocab_size, self.bos_id, self.stop_ids = wrapper, vocab_size, bos_id, stop_ids
        self.generation, self.suppressed = generation or {}, suppressed
        self.markers = find_markers(wrapper)

    def encode(
        self, prompt: Prompt, raw: bool = False, thinking: bool = False, tools: Sequence[dict] | None = None
    ) -> list[int]:
        """Ids of a prompt, at least one.

        prompt: text, a list of {"role", "content"} messages, or token ids. Text becomes a user's message when the
        checkpoint has a chat template, unless `raw`. Text and messages start with BOS exactly once; ids are taken as
        they are.  thinking, tools: as for `render`.
        Raises PromptError.
        """
        chat = not raw and self.wrapper is not None and self.wrapper.has_chat_template
        if (thinking or tools) and (raw or not chat):
            raise PromptError("thinking and tools need a checkpoint with a chat template, and no raw prompt")
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty: give some text")
            if not chat:
                return self._encode_text(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list) or not prompt:
            raise PromptError("the prompt is empty or of an unknown kind: give text, a list of messages or a list of ids")
        if all(isinstance(item, dict) for item in prompt):
            return self._encode_text(self.render(prompt, thinking, tools))
        if not all(isinstance(item, int) and 0 <= item < self.vocab_size for item in prompt):
            raise PromptError(f"a prompt of token ids holds whole numbers from 0 to {self.vocab_size - 1} only")
        return list(prompt)

    def render(
        self, messages: list[dict], thinking: bool = False, tools: Sequence[dict] | None = None, open_turn: bool = True
    ) -> str:
        """Messages as the checkpoint's template writes them.

        thinking: let the model think.  tools: declarations in OpenAI's form.  open_turn: begin the model's next turn.
        Raises PromptError.
        """
        wrapper = self._need_wrapper()
        if not wrapper.has_chat_template:
            raise PromptError("this checkpoint has no chat template: give the prompt as plain text")
        try:
            return wrapper.apply_chat_template(
                [_with_object_arguments(m) for m in messages], tokenize=False, add_generation_prompt=open_turn,
                enable_thinking=thinking, tools=list(tools) if tools else None,
            )  # fmt: skip
        except Exception as error:  # a template is a program of the checkpoint and may raise anything
            raise PromptError(f"the chat template cannot render these messages ({type(error).__name__}: {error})") from error

    def _encode_text(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise PromptError("the prompt holds bytes that are not UTF-8 text: convert it to UTF-8") from None
        ids = self._need_wrapper().encode(text, add_special_tokens=False, verbose=False)
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def _need_wrapper(self) -> TokenizerWrapper:
        if self.wrapper is None:
            raise PromptError("this checkpoint has no tokenizer: give the prompt as token ids, or add tokenizer.json")
        return self.wrapper

    def detokenizer(self) -> StreamingDetokenizer | None:
        """A new streaming detokenizer, None without a tokenizer."""
        return None if self.wrapper is None else self.wrapper.detokenizer


def _with_object_arguments(message: dict) -> dict:
    """A message whose tool calls carry their arguments as objects, though they came as JSON text: templates need that."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    decoded = []
    for call in calls:
        function = call["function"]
        if isinstance(function.get("arguments"), str):
            function = function | {"arguments": json.loads(function["arguments"] or "{}")}
        decoded.append(call | {"function": function})
    return message | {"tool_calls": decoded}


def find_markers(wrapper: TokenizerWrapper | None) -> Markers | None:
    """The markers of a tokenizer, None when it lacks one of them."""
    if wrapper is None:
        return None
    vocabulary = wrapper.get_vocab()
    ids = [vocabulary.get(text) for text in ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>")]
    if None in ids:
        return None
    return Markers(*ids, closing=(*wrapper.encode("\n", add_special_tokens=False), ids[1]))


def load_tokenizer(directory: Path, config: dict, vocab_size: int) -> Tokenizer:
    """The tokenizer in a target's directory. config: its config.json.

    Stop ids come from generation_config.json: config.json lacks the one that ends a tool call.
    """
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    inner = config.get("text_config") or {}
    stop = next((c["eos_token_id"] for c in (generation, config, inner) if c.get("eos_token_id") is not None), [])
    bos = next((c["bos_token_id"] for c in (generation, config, inner) if c.get("bos_token_id") is not None), None)
    wrapper = None
    if (directory / "tokenizer.json").exists():
        try:
            wrapper = load_wrapper(directory)
        except Exception as error:  # transformers and tokenizers raise many kinds for a broken file
            raise CheckpointError(f"the tokenizer in {directory} cannot be read: {str(error).splitlines()[0]}") from error
    suppressed = {*generation.get("suppress_tokens", ()), *(config[name] for name in MEDIA_TOKENS if name in config)}
    return Tokenizer(
        wrapper,
        vocab_size,
        bos,
        frozenset([stop] if isinstance(stop, int) else stop),
        generation,
        tuple(sorted(token for token in suppressed if isinstance(token, int) and 0 <= token < vocab_size)),
    )
