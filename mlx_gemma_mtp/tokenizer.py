"""Text -> ids and ids -> text: chat template, BOS, stop ids. The tokenizer and its streaming detokenizer are mlx-lm's."""

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

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Ids of a prompt, at least one.

        prompt: text, a list of {"role", "content"} messages, or token ids. Text becomes a user's message when the
        checkpoint has a chat template, unless `raw`. Text and messages start with BOS exactly once; ids are taken as
        they are. Thinking is off.
        Raises PromptError.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty: give some text")
            chat = not raw and self.wrapper is not None and self.wrapper.has_chat_template
            return self._encode_chat([{"role": "user", "content": prompt}]) if chat else self._encode_text(prompt)
        if not isinstance(prompt, list) or not prompt:
            raise PromptError("the prompt is empty or of an unknown kind: give text, a list of messages or a list of ids")
        if all(isinstance(item, dict) for item in prompt):
            return self._encode_chat(prompt)
        if not all(isinstance(item, int) and 0 <= item < self.vocab_size for item in prompt):
            raise PromptError(f"a prompt of token ids holds whole numbers from 0 to {self.vocab_size - 1} only")
        return list(prompt)

    def _encode_chat(self, messages: list[dict]) -> list[int]:
        wrapper = self._need_wrapper()
        if not wrapper.has_chat_template:
            raise PromptError("this checkpoint has no chat template: give the prompt as plain text")
        try:
            text = wrapper.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        except Exception as error:  # a template is a program of the checkpoint and may raise anything
            raise PromptError(f"the chat template cannot render these messages ({type(error).__name__}: {error})") from error
        return self._encode_text(text)

    def _encode_text(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise PromptError("the prompt holds bytes that are not UTF-8 text: convert it to UTF-8") from None
        ids = self._need_wrapper().encode(text, add_special_tokens=False)
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def _need_wrapper(self) -> TokenizerWrapper:
        if self.wrapper is None:
            raise PromptError("this checkpoint has no tokenizer: give the prompt as token ids, or add tokenizer.json")
        return self.wrapper

    def detokenizer(self) -> StreamingDetokenizer | None:
        """A new streaming detokenizer, None without a tokenizer."""
        return None if self.wrapper is None else self.wrapper.detokenizer


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
