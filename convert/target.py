"""Tensors of a Gemma 4 target -> those of an mlx-lm directory: names, what is dropped and why, config.json.

What is expected is asked of mlx-lm's own model, so a tensor too many, too few or of another shape is found before anything
is written.
"""

import re
from pathlib import Path

from mlx.utils import tree_flatten
from mlx_lm.models import gemma4, gemma4_text

from mlx_gemma_mtp.checkpoint import Tensor
from mlx_gemma_mtp.config import TOWERS
from mlx_gemma_mtp.errors import CheckpointError

from .parts import Part, quantized
from .recipes import Recipe

FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip
# Weights of a published quantization of another kind than MLX's.
FOREIGN = ("quant_method", "quant_algo")


def inner_config(config: dict) -> dict:
    """The text model's part of a config as `load_target_config` returns it."""
    return config.get("text_config", config)


def inner_name(name: str) -> str:
    """The name inside the text model, whichever way Hugging Face or mlx-lm nest it."""
    return re.sub(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)", "", name)


def reason_to_drop(name: str, text: dict) -> str | None:
    """Why a tensor is not part of the output, None if it is."""
    if name.startswith(TOWERS):
        return "images and audio: only text is run"
    inner = inner_name(name)
    if inner.startswith("lm_head.") and text["tie_word_embeddings"]:
        return "the output table is the embedding table"
    owner = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    found = re.match(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.", inner)
    if found and int(found[1]) >= owner:
        return "keys and values of a layer that reads those of an earlier one"
    return None


def place(name: str, tensor: Tensor, prefix: str) -> list[Part]:
    """The part, or two for the joined gate and up of experts, that a source tensor becomes."""
    inner = inner_name(name)
    path = f"{prefix.removesuffix('model.')}{inner}" if inner.startswith("lm_head.") else prefix + inner
    if path.endswith(".experts.gate_up_proj"):
        experts, rows, width = tensor.shape
        base = path.removesuffix("gate_up_proj") + "switch_glu."
        shape = (experts, rows // 2, width)
        return [Part(f"{base}{half}_proj.weight", tensor, shape, half=i) for i, half in enumerate(("gate", "up"))]
    if path.endswith(".experts.down_proj"):
        return [Part(path.removesuffix("down_proj") + "switch_glu.down_proj.weight", tensor, tensor.shape)]
    return [Part(path, tensor, tensor.shape)]


def map_target(
    tensors: dict[str, Tensor], config: dict, recipe: Recipe | None, where: Path | str
) -> tuple[list[Part], dict[str, str]]:
    """Parts of the output in the source's order, and the reason of every tensor that is dropped.

    config: as `load_target_config` returns it.  recipe: None takes the weights as they are, quantized ones included.
    Raises CheckpointError when tensors are missing, unknown or of another shape than config.json says.
    """
    text = inner_config(config)
    prefix = "language_model.model." if "text_config" in config else "model."
    dropped = {name: reason for name in tensors if (reason := reason_to_drop(name, text))}
    parts = [part for name, tensor in tensors.items() if name not in dropped for part in place(name, tensor, prefix)]
    if recipe is None:
        return parts, dropped
    check_complete({part.name: part.shape for part in parts}, expected_target(config), where)
    return [quantized(part, recipe.quantization(part.path)) for part in parts], dropped


def expected_target(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes mlx-lm's model has before quantization. Its arrays are lazy: nothing is allocated."""
    nested = "text_config" in config
    module = gemma4 if nested else gemma4_text
    # `from_dict` writes into what it is given.
    model = module.Model(module.ModelArgs.from_dict(config | ({"text_config": dict(config["text_config"])} if nested else {})))
    return {name: value.shape for name, value in tree_flatten(model.parameters())}


def check_complete(found: dict[str, tuple], expected: dict[str, tuple], where: Path | str) -> None:
    """Raises CheckpointError unless both name the same tensors with the same shapes."""
    if missing := sorted(set(expected) - set(found)):
        raise CheckpointError(f"{where} lacks {_some(missing)}: download it again")
    if unknown := sorted(set(found) - set(expected)):
        raise CheckpointError(f"{where} has tensors its config.json has no place for: {_some(unknown)}")
    for name, shape in found.items():
        if tuple(shape) != tuple(expected[name]):
            raise CheckpointError(f"{where}: {name} is {list(shape)}, config.json makes it {list(expected[name])}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def is_quantized(raw: dict, where: Path | str) -> bool:
    """Whether a checkpoint's weights are quantized for MLX. Raises CheckpointError for other formats."""
    quantization = raw.get("quantization") or raw.get("quantization_config")
    if quantization and any(key in quantization for key in FOREIGN):
        method = next(quantization[key] for key in FOREIGN if key in quantization)
        raise CheckpointError(f"{where} is quantized as {method}: give the bf16 checkpoint, or an MLX one")
    return bool(quantization)


def quantization_config(parts: list[Part]) -> dict | None:
    """mlx-lm's description of the parts' bits, None when nothing is quantized: the most common, then every other path."""
    settings = {part.path: (part.quantization.group_size, part.quantization.bits) for part in parts if part.quantization}
    if not settings:
        return None
    kinds = list(settings.values())
    common = max(sorted(set(kinds)), key=kinds.count)
    describe = lambda kind: {"group_size": kind[0], "bits": kind[1], "mode": "affine"}
    return describe(common) | {path: describe(kind) for path, kind in settings.items() if kind != common}


def target_config(raw: dict, config: dict, parts: list[Part], dtype: str | None) -> dict:
    """config.json of the output: the source's with every value of the text model explicit, without towers.

    raw, config: as in the file, and as `load_target_config` returns it.  dtype: None leaves it and the quantization alone.
    """
    written = {key: value for key, value in config.items() if key not in ("vision_config", "audio_config")}
    if "text_config" in config:
        written["text_config"] = (raw.get("text_config") or {}) | config["text_config"]
        written["text_config"].pop("per_layer_config", None)
    written.pop("per_layer_config", None)
    if dtype is None:
        return written
    return set_types(written, parts, dtype)


def set_types(config: dict, parts: list[Part], dtype: str) -> dict:
    """The config with the type and the quantization of the parts."""
    config = {key: value for key, value in config.items() if key not in ("torch_dtype", "quantization", "quantization_config")}
    config["dtype"] = dtype
    if (quantization := quantization_config(parts)) is not None:
        config |= {"quantization": quantization, "quantization_config": quantization}
    return config
