"""A small trained pair made large without changing what it computes, so that decoding is memory-bound as on a Mac.

Tokens and acceptance stay those of the trained pair; bytes become those of a real model. The hidden size is padded with
zeros (norms, embedding and projections rescaled by sqrt(D / D')), MLPs with columns that the down projection ignores, the
vocabulary with copies of the padding token's row.

    python -m bench.inflate OUT [--pair DIR]
"""

import argparse
import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_gemma_mtp.hub import DEMO

HIDDEN, WIDTH, VOCAB = 1024, 5376, 40960  # 1 GB in float32, a sixth of it the output head
CONTEXT = 40960  # positions: their number does not change what a pass computes


def pad(array: np.ndarray, *shape: int) -> np.ndarray:
    """`array` in the corner of a larger one of zeros."""
    out = np.zeros(shape, np.float32)
    out[tuple(slice(0, n) for n in array.shape)] = array
    return out


def inflate_target(weights: dict, text: dict, hidden: int, width: int, vocab: int) -> dict:
    """weights: Hugging Face names -> float32.  text: the old text_config. Returns the new weights."""
    old, old_vocab, ratio = text["hidden_size"], text["vocab_size"], math.sqrt(text["hidden_size"] / hidden)
    first_shared = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    random, out = np.random.default_rng(0), {}
    for name, w in weights.items():
        base = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if base in ("embed_tokens", "embed_tokens_per_layer"):
            w = np.concatenate([w, np.repeat(w[:1], vocab - old_vocab, axis=0)])
            w = pad(w * ratio, vocab, hidden) if base == "embed_tokens" else w
        elif base.endswith("layernorm") or base == "post_per_layer_input_norm":
            w = pad(w * ratio, hidden)
        elif base == "norm":  # the final norm feeds the tied head, whose table was scaled by the ratio
            w = pad(w, hidden)
        elif base in ("gate_proj", "up_proj", "down_proj"):
            shared = int(name.split("layers.")[1].split(".")[0]) >= first_shared
            wide = width * (2 if shared and text["use_double_wide_mlp"] else 1)
            if base == "down_proj":
                w = pad(w, hidden, wide)
            else:
                w = np.concatenate([w, random.normal(size=(wide - len(w), old), scale=old**-0.5).astype(np.float32)])
                w = pad(w, wide, hidden)
        elif base == "per_layer_model_projection":
            w = pad(w / ratio, len(w), hidden)
        elif base in ("q_proj", "k_proj", "v_proj", "per_layer_input_gate"):
            w = pad(w, len(w), hidden)
        elif base in ("o_proj", "per_layer_projection"):
            w = pad(w, hidden, w.shape[1])
        out[name] = w
    return out


def inflate_drafter(weights: dict, text: dict, backbone: int, hidden: int, vocab: int, clusters: int) -> dict:
    """As above. The target's hidden state is larger by sqrt(D' / D); its embedding is not."""
    ratio, old_vocab, out = math.sqrt(backbone / hidden), text["vocab_size"], dict(weights)
    pre = weights["pre_projection.weight"]
    halves = (pad(half, len(pre), hidden) for half in (pre[:, :backbone], pre[:, backbone:] * ratio))
    out["pre_projection.weight"] = np.concatenate(list(halves), axis=1)
    out["post_projection.weight"] = pad(weights["post_projection.weight"] / ratio, hidden, text["hidden_size"])
    table = weights["model.embed_tokens.weight"]
    out["model.embed_tokens.weight"] = np.concatenate([table, np.repeat(table[:1], vocab - old_vocab, axis=0)])
    ordering = weights["masked_embedding.token_ordering"].reshape(clusters, -1)
    new = np.arange(old_vocab, vocab).reshape(clusters, -1)
    out["masked_embedding.token_ordering"] = np.concatenate([ordering, new], axis=1).reshape(-1)
    return out


def read(directory: Path) -> tuple[dict, dict]:
    config = json.loads((directory / "config.json").read_text())
    arrays = mx.load(str(directory / "model.safetensors"))
    floats = {n: np.array(a.astype(mx.float32)) for n, a in arrays.items() if a.dtype != mx.int64}
    return config, floats | {n: np.array(a) for n, a in arrays.items() if a.dtype == mx.int64}


def write(source: Path, out: Path, config: dict, weights: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    (out / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(str(out / "model.safetensors"), {n: mx.array(w) for n, w in weights.items()}, {"format": "pt"})


def inflate(pair: Path, out: Path, hidden: int = HIDDEN, width: int = WIDTH, vocab: int = VOCAB) -> None:
    """Writes out/target and out/drafter from pair/target and pair/drafter."""
    clusters = json.loads((pair / "drafter" / "config.json").read_text())["num_centroids"]
    vocab -= vocab % clusters
    config, weights = read(pair / "target")
    text = config["text_config"]
    backbone = text["hidden_size"]
    weights = inflate_target(weights, text, hidden, width, vocab)
    changes = {"hidden_size": hidden, "intermediate_size": width, "vocab_size": vocab, "vocab_size_per_layer_input": vocab}
    changes["max_position_embeddings"] = CONTEXT
    config["text_config"] = text | changes | {"rms_norm_eps": text["rms_norm_eps"] * backbone / hidden}
    write(pair / "target", out / "target", config | {"vocab_size": vocab, "dtype": "float32"}, weights)
    config, weights = read(pair / "drafter")
    text = config["text_config"]
    weights = inflate_drafter(weights, text, backbone, hidden, vocab, clusters)
    config |= {"backbone_hidden_size": hidden, "dtype": "float32", "text_config": text | {"vocab_size": vocab}}
    write(pair / "drafter", out / "drafter", config, weights)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pair", type=Path, default=DEMO)
    options = parser.parse_args()
    inflate(options.pair, options.out)


if __name__ == "__main__":
    main()
