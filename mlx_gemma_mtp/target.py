"""The Gemma 4 model, mlx-lm's own, as four functions: embed, hidden, logits, empty_cache."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import logit_softcap
from mlx_lm.utils import load_adapters, load_model

from .cache import Cache, LayerCache
from .config import SLIDING, head_size, kv_heads, kv_owners
from .errors import CheckpointError
from .joined import join_layer


class Target:
    """A loaded target. `args` are mlx-lm's ModelArgs of the text model."""

    def __init__(self, model: nn.Module):
        """model: mlx-lm's `gemma4_text.Model`, weights loaded (lazily or not)."""
        self.model, self.text, self.args = model, model.model, model.args
        self.embed_tokens = self.text.embed_tokens
        self.owners = kv_owners(self.args)
        self.dtype = self.text.norm.weight.dtype

    def embed(self, tokens: mx.array) -> mx.array:
        """Scaled input embeddings [..., D] of ids [...]."""
        return self.embed_tokens(tokens) * self.text.embed_scale

    def hidden(self, tokens: mx.array, layers: list[LayerCache]) -> mx.array:
        """Hidden states [B, T, D] after the final norm of ids [B, T] at positions length .. length + T - 1."""
        return self.text(tokens, cache=layers)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [..., V] of hidden states [..., D]."""
        head = self.embed_tokens.as_linear if self.args.tie_word_embeddings else self.model.lm_head
        logits, cap = head(hidden), self.args.final_logit_softcapping
        return logits if cap is None else logit_softcap(cap, logits)

    def empty_cache(self, rows: int = 1) -> Cache:
        """A cache of no tokens for this target."""
        args = self.args
        return Cache.empty(
            [args.sliding_window if kind == SLIDING else None for kind in self.owners],
            [kv_heads(args, kind) for kind in self.owners],
            [head_size(args, kind) for kind in self.owners],
            self.dtype,
            rows,
        )

    def shared_layer(self, layer_type: str) -> int:
        """Index of the cache entry a drafter's layer of this type reads: the last owner of the type."""
        return max(index for index, kind in enumerate(self.owners) if kind == layer_type)


def load_checkpoint(directory: Path, config: dict, get_classes=None) -> nn.Module:
    """mlx-lm's loader, lazily and strictly, with a one-line error in place of its tracebacks."""
    options = {} if get_classes is None else {"get_model_classes": get_classes}
    try:
        return load_model(directory, lazy=True, strict=True, model_config=config, **options)[0]
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError, ArithmeticError, LookupError, OSError) as error:
        lines = [line.strip(" ,.") for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise CheckpointError(f"{directory} does not fit its config.json: {' '.join(lines[:2])[:300]}") from error


def load_target(directory: Path, config: dict, dtype: mx.Dtype | None, adapter: Path | None = None) -> Target:
    """The target in a Hugging Face or mlx-lm directory, its products joined, evaluated.

    config: as `load_target_config` returns it.  dtype: type of all floating weights, None for the checkpoint's.
    adapter: directory of an mlx-lm LoRA adapter.
    Raises CheckpointError.
    """
    model = load_checkpoint(directory, config)
    if adapter is not None:
        try:
            model = load_adapters(model, str(adapter))
        except (OSError, KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"adapter {adapter} does not fit {directory}: {str(error).splitlines()[0]}") from error
        model.eval()
    if dtype is not None:
        model.set_dtype(dtype)
    if config["model_type"] != "gemma4_text":
        model = model.language_model
    for layer in model.layers:
        join_layer(layer)
        mx.eval(layer.parameters())
    mx.eval(model.state)  # parameters and, say, the frequencies of the rotary embedding: any thread may come first
    return Target(model)
