"""Random-weight Gemma 4 pairs in Hugging Face form, written with numpy alone.

Shapes are small, structure is the family's. The values of a tensor depend on the seed and on its name only, so the
goldens of a seed hold for every spelling, shard count and set of extra tensors. Knows nothing of any model code.
"""

import json
import zlib
from pathlib import Path

import numpy as np

# One key a line would make the tables of this file three times as long.
# fmt: off

FAMILIES = ("e2b", "e4b", "unified12b", "moe26b", "dense31b")
WINDOW = 16
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"}}

# Per family: target layers, layers up to and including the first full one, KV-shared layers, query heads, K/V heads,
# K/V heads of full layers (None: as sliding ones), width of the MLP.
SHAPES = {"e2b": (10, 5, 5, 4, 1, None, 128), "e4b": (12, 6, 6, 4, 2, None, 128), "unified12b": (6, 6, 0, 4, 2, 1, 160),
          "moe26b": (6, 6, 0, 4, 2, 1, 96), "dense31b": (6, 6, 0, 8, 4, 2, 160)}


def write_pair(out: Path, family: str, seed: int, *, vocab: int = 512, per_layer_config: bool = False,
               unused_kv: bool = False, towers: bool = False, shards: int = 1, dtype: str = "float32") -> None:
    """Writes out/target and out/assistant: config.json, generation_config.json and the weights.

    per_layer_config: the config spelling of transformers >= 5.2x instead of that of the published checkpoints.
    unused_kv: k_proj, v_proj and k_norm of KV-shared layers, present in the published E2B and E4B and used by nothing.
    towers: some vision and audio tensors.  shards: number of weight files of the target.  dtype: float32 or bfloat16.
    """
    ordered = family in ("e2b", "e4b")
    assert vocab % 32 == 0, "a cluster of the drafter's head holds 32 tokens"
    text, draft_text = target_text_config(family, vocab), drafter_text_config(family, vocab)
    unified = family == "unified12b"
    name, kind = ("Gemma4Unified", "gemma4_unified") if unified else ("Gemma4", "gemma4")
    common = {"dtype": dtype, "tie_word_embeddings": True, "transformers_version": "5.24.0"}
    target = common | {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind,
                       "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999, "eoi_token_id": 258882,
                       "eoa_token_index": 258883, "image_token_id": 258880, "video_token_id": 258884,
                       "initializer_range": 0.02,
                       "text_config": respell(text, unified) if per_layer_config else text}
    drafter = common | {"architectures": [f"{name}AssistantForCausalLM"], "model_type": f"{kind}_assistant",
                        "backbone_hidden_size": text["hidden_size"], "use_ordered_embeddings": ordered,
                        "num_centroids": vocab // 32 if ordered else 2048,
                        "centroid_intermediate_top_k": 8 if ordered else 32,
                        "text_config": respell(draft_text, unified) if per_layer_config else draft_text}

    target_shapes = text_shapes(text, "model.language_model.", keys=True, unused_kv=unused_kv)
    if towers:
        target_shapes |= tower_shapes(text["hidden_size"], unified)
    drafter_shapes = text_shapes(draft_text, "model.", keys=False)
    drafter_shapes |= {"pre_projection.weight": (32, 2 * text["hidden_size"]),
                       "post_projection.weight": (text["hidden_size"], 32)}
    if ordered:
        drafter_shapes |= {"masked_embedding.centroids.weight": (vocab // 32, 32),
                           "masked_embedding.token_ordering": (vocab,)}
    write_part(out / "target", target, target_shapes, seed, shards)
    write_part(out / "assistant", drafter, drafter_shapes, seed, 1)


def target_text_config(family: str, vocab: int) -> dict:
    layers, period, shared, heads, kv_heads, full_kv_heads, width = SHAPES[family]
    per_layer = family in ("e2b", "e4b")
    moe = family == "moe26b"
    config = {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": not per_layer, "bos_token_id": 2,
        "enable_moe_block": moe, "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64, "hidden_size_per_layer_input": 16 * per_layer,
        "initializer_range": 0.02, "intermediate_size": width,
        "layer_types": [FULL if (i + 1) % period == 0 else SLIDING for i in range(layers)],
        "max_position_embeddings": 4096, "model_type": "gemma4_text", "moe_intermediate_size": 32 if moe else None,
        "num_attention_heads": heads, "num_experts": 8 if moe else None, "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads, "num_kv_shared_layers": shared, "pad_token_id": 0, "rms_norm_eps": 1e-06,
        "rope_parameters": ROPE, "sliding_window": WINDOW, "tie_word_embeddings": True,
        "top_k_experts": 2 if moe else None, "use_bidirectional_attention": None, "use_cache": True,
        "use_double_wide_mlp": family == "e2b", "vocab_size": vocab, "vocab_size_per_layer_input": vocab * per_layer,
        "global_head_dim": 32, "num_global_key_value_heads": full_kv_heads}
    if family == "unified12b":
        config |= {"model_type": "gemma4_unified_text", "use_bidirectional_attention": "vision"}
    return config


def drafter_text_config(family: str, vocab: int) -> dict:
    return target_text_config(family, vocab) | {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_kv_shared_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL], "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False,
        "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}


def respell(text: dict, unified: bool) -> dict:
    """The published spelling of a text config -> the one transformers >= 5.2x writes."""
    absent = {"global_head_dim", "num_global_key_value_heads"}
    if unified:
        absent |= {"hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "num_experts",
                   "top_k_experts", "moe_intermediate_size"}
    layer = {"head_dim": text["global_head_dim"]}
    if text["num_global_key_value_heads"]:
        layer["num_key_value_heads"] = text["num_global_key_value_heads"]
    digits = len(str(text["num_hidden_layers"] - 1))   # "5" of 6 layers, "05" of 12
    full = {str(i).zfill(digits): layer for i, kind in enumerate(text["layer_types"]) if kind == FULL}
    return {key: value for key, value in text.items() if key not in absent} | {"per_layer_config": full}


def text_shapes(text: dict, prefix: str, *, keys: bool, unused_kv: bool = False) -> dict[str, tuple]:
    """Tensor name -> shape of the text part. keys: whether layers that are not KV-shared have keys and values."""
    hidden, per_layer = text["hidden_size"], text["hidden_size_per_layer_input"]
    layers, vocab = text["num_hidden_layers"], text["vocab_size"]
    shapes = {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,)}
    if per_layer:
        shapes |= {"embed_tokens_per_layer.weight": (vocab, layers * per_layer),
                   "per_layer_model_projection.weight": (layers * per_layer, hidden),
                   "per_layer_projection_norm.weight": (per_layer,)}
    for i, kind in enumerate(text["layer_types"]):
        shared = i >= layers - text["num_kv_shared_layers"]
        size = text["global_head_dim"] if kind == FULL else text["head_dim"]
        kv_heads = (kind == FULL and text["num_global_key_value_heads"]) or text["num_key_value_heads"]
        width = text["intermediate_size"] * (2 if shared and text["use_double_wide_mlp"] else 1)
        queries = text["num_attention_heads"] * size
        layer = {f"{norm}_layernorm.weight": (hidden,)
                 for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward")}
        layer |= {"layer_scalar": (1,), "mlp.gate_proj.weight": (width, hidden), "mlp.up_proj.weight": (width, hidden),
                  "mlp.down_proj.weight": (hidden, width), "self_attn.q_proj.weight": (queries, hidden),
                  "self_attn.q_norm.weight": (size,), "self_attn.o_proj.weight": (hidden, queries)}
        if keys and (unused_kv or not shared):
            layer |= {"self_attn.k_proj.weight": (kv_heads * size, hidden), "self_attn.k_norm.weight": (size,)}
            if not (text["attention_k_eq_v"] and kind == FULL):
                layer["self_attn.v_proj.weight"] = (kv_heads * size, hidden)
        if per_layer:
            layer |= {"per_layer_input_gate.weight": (per_layer, hidden), "post_per_layer_input_norm.weight": (hidden,),
                      "per_layer_projection.weight": (hidden, per_layer)}
        if text["enable_moe_block"]:
            experts, inner = text["num_experts"], text["moe_intermediate_size"]
            layer |= {"router.proj.weight": (experts, hidden), "router.scale": (hidden,),
                      "router.per_expert_scale": (experts,), "experts.gate_up_proj": (experts, 2 * inner, hidden),
                      "experts.down_proj": (experts, hidden, inner)}
            layer |= {f"{norm}.weight": (hidden,) for norm in (
                "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return {prefix + name: shape for name, shape in shapes.items()}


def tower_shapes(hidden: int, unified: bool) -> dict[str, tuple]:
    shapes = {"embed_vision.embedding_projection.weight": (hidden, 32),
              "embed_audio.embedding_projection.weight": (hidden, 32)}
    if unified:
        shapes |= {"vision_embedder.patch_dense.weight": (hidden, 48), "vision_embedder.patch_dense.bias": (hidden,),
                   "vision_embedder.pos_embedding": (8, 2, hidden)}
    else:
        shapes |= {"vision_tower.patch_embedder.input_proj.weight": (32, 48),
                   "vision_tower.encoder.layers.0.self_attn.k_proj.linear.weight": (32, 32),
                   "vision_tower.encoder.layers.0.self_attn.k_proj.input_max": (),
                   "audio_tower.layers.0.self_attn.k_proj.linear.weight": (32, 32),
                   "audio_tower.layers.0.lconv1d.depthwise_conv1d.weight": (32, 1, 5)}
    return {f"model.{name}": shape for name, shape in shapes.items()}


def values(name: str, shape: tuple, seed: int) -> np.ndarray:
    """Uniform values, which do not depend on a math library, of a scale that keeps greedy decoding well separated."""
    uniform = np.random.default_rng([seed, zlib.crc32(name.encode())]).random(shape)
    if name.endswith("token_ordering"):
        return np.argsort(uniform).astype(np.int64)
    # Attention scores are not scaled: smaller norms of queries and keys keep rounding errors from growing layer by layer.
    if name.endswith(("layer_scalar", "q_norm.weight", "k_norm.weight")):
        return (0.5 + 0.5 * uniform).astype(np.float32)
    if name.endswith("scale") or "norm" in name:
        return (0.75 + 0.5 * uniform).astype(np.float32)
    deviation = 0.12 if "embed_tokens" in name or not shape else shape[-1] ** -0.5
    return ((uniform - 0.5) * 12 ** 0.5 * deviation).astype(np.float32)


def write_part(directory: Path, config: dict, shapes: dict[str, tuple], seed: int, shards: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    special = {"bos_token_id": 2, "eos_token_id": [1], "pad_token_id": 0, "transformers_version": "5.24.0"}
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    (directory / "generation_config.json").write_text(json.dumps(special, indent=2))
    # The two parts share a seed: the directory's name keeps, say, their final norms apart.
    tensors = {name: values(name if directory.name == "target" else "drafter." + name, shape, seed)
               for name, shape in sorted(shapes.items())}
    if shards == 1:
        return write_safetensors(directory / "model.safetensors", tensors, config["dtype"])
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        write_safetensors(directory / file, part, config["dtype"])
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """The container: length of the header (8 bytes), header (JSON), data. Integers stay what they are."""
    header, data, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, tensor in tensors.items():
        kind = "I64" if tensor.dtype == np.int64 else "F32"
        if kind == "F32" and dtype == "bfloat16":
            bits = tensor.view(np.uint32)   # rounded to nearest, ties to even
            tensor, kind = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), "BF16"
        end = offset + tensor.nbytes
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        data.append(tensor.tobytes())
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
