"""config.json -> what we need: mlx-lm's arguments with nothing left to a default, and the check that two belong together."""

from dataclasses import dataclass
from pathlib import Path

from mlx_lm.models.gemma4_text import ModelArgs

from .checkpoint import read_json
from .errors import CheckpointError, PairMismatch

SLIDING, FULL = "sliding_attention", "full_attention"
UNIFIED = ("gemma4_unified", "gemma4_unified_text", "gemma4_unified_assistant")
TARGETS = {"gemma4": "gemma4", "gemma4_unified": "gemma4", "gemma4_text": "gemma4_text", "gemma4_unified_text": "gemma4_text"}
DRAFTERS = ("gemma4_assistant", "gemma4_unified_assistant")

# Vision and audio: never loaded.
TOWERS = tuple(
    prefix + name
    for prefix in ("model.", "")
    for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder", "multi_modal_projector")
)
REQUIRED = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "layer_types", "rope_parameters", "sliding_window", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
KINDS = {name: int for name in REQUIRED if name not in ("layer_types", "rope_parameters", "rms_norm_eps")} | {
    "layer_types": list, "rope_parameters": dict, "rms_norm_eps": float,
}  # fmt: skip
# The unified family re-saved by transformers leaves these out; mlx-lm's own defaults are those of E2B and would be wrong.
UNIFIED_VALUES = {
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "use_double_wide_mlp": False, "enable_moe_block": False, "attention_k_eq_v": True,
}  # fmt: skip
OPTIONAL = {
    "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None, "num_global_key_value_heads": None,
    "final_logit_softcapping": None, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter. `scored_clusters`: clusters whose tokens are scored in a step (if it has a cluster head)."""

    args: ModelArgs
    backbone_hidden_size: int
    scored_clusters: int
    draft_length: int | None


def text_values(config: dict, where: Path) -> dict:
    """All of mlx-lm's `ModelArgs` from a config in either spelling, explicit to the last value.

    Raises CheckpointError for a key that is missing or an unknown layer type.
    """
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise CheckpointError(f"{where / 'config.json'} has a text_config that is no object: download it again")
    text = dict(text)
    per_layer = {int(index): own for index, own in (text.get("per_layer_config") or {}).items()}  # "05" or "5"
    if config["model_type"] in UNIFIED:
        text = UNIFIED_VALUES | text
    if text.get("expert_intermediate_size") is not None:
        text.setdefault("moe_intermediate_size", text["expert_intermediate_size"])
    if missing := [name for name in (*REQUIRED, *UNIFIED_VALUES) if text.get(name) is None]:
        raise CheckpointError(f"{where / 'config.json'} lacks {', '.join(missing)}: download it again")
    for name, kinds in KINDS.items():
        if not isinstance(text[name], kinds) or (kinds is int and text[name] < 1):
            raise CheckpointError(f"{where / 'config.json'} has {name} {text[name]!r}: download it again")
    shared = text["num_kv_shared_layers"]
    if not isinstance(shared, int) or not 0 <= shared <= text["num_hidden_layers"]:
        raise CheckpointError(f"{where / 'config.json'} has num_kv_shared_layers {shared!r}: download it again")
    layer_types = text["layer_types"]
    if unknown := sorted({str(kind) for kind in layer_types} - {SLIDING, FULL}):
        raise CheckpointError(f"{where / 'config.json'} has layers of unknown type {', '.join(unknown)}")
    if len(layer_types) != text["num_hidden_layers"]:
        raise CheckpointError(
            f"{where / 'config.json'} names {len(layer_types)} layer types for {text['num_hidden_layers']} layers"
        )
    values = {name: text[name] for name in (*REQUIRED, *UNIFIED_VALUES)}
    values |= {name: text.get(name, default) for name, default in OPTIONAL.items()}
    values["global_head_dim"] = text.get("global_head_dim") or text["head_dim"]
    for index, layer_type in enumerate(layer_types):  # the spelling of transformers >= 5.2x
        own = per_layer.get(index, {}) if layer_type == FULL else {}
        values["global_head_dim"] = own.get("head_dim", values["global_head_dim"])
        values["num_global_key_value_heads"] = own.get("num_key_value_heads", values["num_global_key_value_heads"])
    return values


def load_target_config(directory: Path) -> dict:
    """config.json of a target in the form mlx-lm's `load_model` takes, with every value filled in."""
    config = read_json(directory / "config.json")
    kind = str(config.get("model_type"))
    if kind in DRAFTERS:
        raise CheckpointError(f"{directory} is a drafter ({kind}): give it as drafter, and a Gemma 4 model as target")
    if kind not in TARGETS:
        raise CheckpointError(f"{directory} holds a model of type {kind}: a Gemma 4 target is {' or '.join(TARGETS)}")
    values = text_values(config, directory)
    if TARGETS[kind] == "gemma4":  # mlx-lm reads vocab_size from the top level and overrides the inner one
        return config | {"text_config": values, "vocab_size": values["vocab_size"]}
    return config | values | {"model_type": "gemma4_text"}


def load_drafter_config(directory: Path) -> tuple[dict, DrafterConfig]:
    """config.json of a drafter, raw and as a DrafterConfig."""
    config = read_json(directory / "config.json")
    kind = str(config.get("model_type"))
    if kind not in DRAFTERS:
        raise CheckpointError(f"{directory} holds a model of type {kind}: a Gemma 4 drafter is {' or '.join(DRAFTERS)}")
    if not isinstance(config.get("backbone_hidden_size"), int):
        raise CheckpointError(f"{directory / 'config.json'} lacks backbone_hidden_size: download it again")
    scored = config.get("centroid_intermediate_top_k", 32)
    if not isinstance(scored, int) or scored < 1:
        raise CheckpointError(f"{directory / 'config.json'} has centroid_intermediate_top_k {scored!r}: download it again")
    generation = directory / "generation_config.json"
    return config, DrafterConfig(
        args=ModelArgs.from_dict(text_values(config, directory)),
        backbone_hidden_size=config["backbone_hidden_size"],
        scored_clusters=scored,
        draft_length=read_json(generation).get("num_assistant_tokens") if generation.exists() else None,
    )


def kv_heads(args: ModelArgs, layer_type: str) -> int:
    """Key/value heads G of the layers of one type."""
    if layer_type == FULL and args.attention_k_eq_v and args.num_global_key_value_heads is not None:
        return args.num_global_key_value_heads
    return args.num_key_value_heads


def head_size(args: ModelArgs, layer_type: str) -> int:
    """Head size E of the layers of one type."""
    return args.global_head_dim if layer_type == FULL else args.head_dim


def kv_owners(args: ModelArgs) -> list[str]:
    """Types of the layers that write keys and values; later layers read those of the last owner of their type."""
    return args.layer_types[: args.num_hidden_layers - args.num_kv_shared_layers]


def check_pair(target: ModelArgs, drafter: DrafterConfig) -> None:
    """Raises PairMismatch, naming both values, unless the drafter can read this target."""
    facts = [
        ("hidden size", drafter.backbone_hidden_size, target.hidden_size),
        ("vocabulary", drafter.args.vocab_size, target.vocab_size),
        ("window", drafter.args.sliding_window, target.sliding_window),
    ]
    for kind in sorted(set(drafter.args.layer_types)):
        name = kind.removesuffix("_attention")
        if kind not in kv_owners(target):
            raise PairMismatch(f"drafter reads {name} layers, target has none that own keys: use the drafter of this target")
        facts += [
            (f"head size of {name} layers", head_size(drafter.args, kind), head_size(target, kind)),
            (f"key/value heads of {name} layers", kv_heads(drafter.args, kind), kv_heads(target, kind)),
        ]
    for name, wants, has in facts:
        if wants != has:
            raise PairMismatch(f"drafter expects {name} {wants}, target has {has}: use the drafter of the same Gemma 4 size")
