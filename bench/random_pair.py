"""A pair of random weights with the structure of a published size, as narrow as wanted: for times and memory, not for text.

    python -m bench.random_pair OUT --size E2B --scale 0.5 --vocab 32768

Kept: layers and their kinds, KV sharing, head sizes, window, per-layer embeddings, experts per token. Scaled: hidden size,
width of MLPs and experts, number of heads and of experts. Weights stream, so that little of them is in memory at a time.
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from mlx_gemma_mtp.checkpoint import weight_bytes
from mlx_gemma_mtp.config import load_drafter_config, load_target_config
from mlx_gemma_mtp.convert.container import DTYPE_NAMES, Entry, Writer
from mlx_gemma_mtp.convert.drafter import ORDERING
from mlx_gemma_mtp.convert.plan import facts, text_values
from mlx_gemma_mtp.convert.target import expected_target
from mlx_gemma_mtp.convert.trainable import hugging_face_tensors
from mlx_gemma_mtp.drafter import Drafter
from mlx_gemma_mtp.hub import DEMO, DTYPES, SIZES

BLOCK = 1 << 24  # values made at a time
CLUSTER = 128  # tokens of a cluster of the drafter's head, as published


def scaled(text: dict, scale: float, vocab: int | None, context: int) -> dict:
    """A text config made narrower. text: as `text_values` gives it.  vocab: None for its own."""

    def times(name: str, step: int) -> int | None:
        return text[name] and max(step, round(text[name] * scale / step) * step)

    vocab = vocab or text["vocab_size"]
    kv_heads, full_kv_heads = times("num_key_value_heads", 1), times("num_global_key_value_heads", 1)
    return text | {
        "hidden_size": times("hidden_size", 64),
        "intermediate_size": times("intermediate_size", 64),
        "moe_intermediate_size": times("moe_intermediate_size", 64),
        "num_experts": times("num_experts", 8),
        "num_attention_heads": times("num_attention_heads", math.lcm(kv_heads, full_kv_heads or 1)),
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": full_kv_heads,
        "vocab_size": vocab,
        "vocab_size_per_layer_input": text["vocab_size_per_layer_input"] and vocab,
        "max_position_embeddings": max(text["max_position_embeddings"], context),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def configs(size: str, scale: float, vocab: int | None, context: int, dtype: str) -> tuple[dict, dict]:
    """config.json of target and drafter."""
    found = facts()[size]
    target, drafter = (scaled(text_values(found[s]["text_config"]), scale, vocab, context) for s in ("target", "drafter"))
    kind = found["target"]["model_type"]
    text_kind = {"model_type": f"{kind.removesuffix('_text')}_text"}
    common = {"dtype": dtype, "tie_word_embeddings": True}
    clustered = ORDERING in found["drafter"]["tensors"]
    return (
        common
        | {"model_type": kind, "vocab_size": target["vocab_size"], "eos_token_id": [1], "text_config": target | text_kind},
        common
        | {
            "model_type": found["drafter"]["model_type"],
            "backbone_hidden_size": target["hidden_size"],
            "use_ordered_embeddings": clustered,
            "num_centroids": target["vocab_size"] // CLUSTER if clustered else found["drafter"]["num_centroids"],
            "centroid_intermediate_top_k": found["drafter"]["centroid_intermediate_top_k"],
            "text_config": drafter | text_kind,
        },
    )


def target_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of the target that the directory's config.json describes."""
    shapes = {}
    for name, shape in expected_target(load_target_config(directory)).items():
        name = name.replace("language_model.model.", "model.language_model.")
        if name.endswith("switch_glu.gate_proj.weight"):  # one tensor there
            experts, width, hidden = shape
            name, shape = name.replace("switch_glu.gate_proj.weight", "gate_up_proj"), (experts, 2 * width, hidden)
        elif name.endswith("switch_glu.up_proj.weight"):
            continue
        shapes[name.replace("switch_glu.down_proj.weight", "down_proj")] = shape
    return shapes


def drafter_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """As above, of the drafter."""
    config, loaded = load_drafter_config(directory)
    drafter = Drafter(loaded, config["num_centroids"] if config["use_ordered_embeddings"] else 0)
    return {name: value.shape for name, value in hugging_face_tensors(drafter).items()}


def values(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> Iterator[mx.array]:
    """The values of a tensor, block by block: matrices that keep the size of what they multiply, norms of one."""
    if name == ORDERING:
        yield mx.random.permutation(shape[0]).astype(mx.int64)
    elif name == "model.language_model.norm.weight":  # all of one sign, the tied table would repeat the last token for ever
        yield (mx.random.bernoulli(0.5, shape) * 2.0 - 1.0).astype(dtype)
    elif len(shape) < 2:  # queries are scaled by their norm alone: with ones, attention would see a single token
        yield mx.full(shape, shape[0] ** -0.5 if name.endswith("q_norm.weight") else 1.0, dtype)
    else:
        size = math.prod(shape)
        for start in range(0, size, BLOCK):
            yield (mx.random.normal((min(BLOCK, size - start),)) * shape[-1] ** -0.5).astype(dtype)


def write_weights(directory: Path, shapes: dict[str, tuple[int, ...]], dtype: mx.Dtype) -> None:
    """Random weights; the per-layer table is always bf16, as it is nearly half of an E2B and only looked up."""
    types = {name: mx.bfloat16 if "embed_tokens_per_layer" in name else dtype for name in shapes}
    kinds = {name: "I64" if name == ORDERING else DTYPE_NAMES[kind] for name, kind in types.items()}
    with Writer(directory, [[Entry(name, kinds[name], shape)] for name, shape in shapes.items()]) as writer:
        for name, shape in shapes.items():
            for block in values(name, shape, types[name]):
                writer.append(name, block)
        writer.finish()


def widen_tokenizer(file: Path, vocab: int) -> None:
    """Gives every id of the model a text: the tokenizer's own 1,536 are fewer than the model chooses from."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    known |= {f"~{i}": i for i in range(len(known), vocab)}
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


def write_pair(
    out: Path, size: str, scale: float = 1.0, vocab: int | None = None, context: int = 40960, dtype: str = "float32"
) -> None:
    """Writes out/target and out/drafter in the form of Hugging Face, with the demo pair's tokenizer.

    scale: of the widths; 1 gives the published shapes.  vocab: tokens, a multiple of 128; None for the published 262,144.
    context: positions the pair must be able to hold.  dtype: of the weights, "float32" or "bfloat16".
    """
    mx.random.seed(0)
    for side, config in zip(("target", "drafter"), configs(size, scale, vocab, context, dtype)):
        (out / side).mkdir(parents=True)
        for file in (DEMO / side).iterdir():
            if file.name != "config.json" and file.suffix != ".safetensors":
                shutil.copyfile(file, out / side / file.name)
        (out / side / "config.json").write_text(json.dumps(config, indent=1))
        shapes = (target_shapes if side == "target" else drafter_shapes)(out / side)
        write_weights(out / side, shapes, DTYPES[dtype])
    widen_tokenizer(out / "target" / "tokenizer.json", vocab or 262144)


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.random_pair", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--size", choices=SIZES, default="E2B", help="whose structure (E2B)")
    parser.add_argument("--scale", type=float, default=1.0, help="of its widths (1.0)")
    parser.add_argument("--vocab", type=int, help="a multiple of 128 (default: as published)")
    parser.add_argument("--context", type=int, default=40960, help="positions the pair must be able to hold")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    options = parser.parse_args()
    if options.scale <= 0:
        parser.error(f"--scale {options.scale}: give a number above 0")
    if options.vocab is not None and (options.vocab % CLUSTER or options.vocab < CLUSTER):
        parser.error(f"--vocab {options.vocab}: give a multiple of {CLUSTER}")
    if options.out.exists():
        parser.error(f"{options.out} exists: choose another directory")
    unfinished = options.out.with_name(f"{options.out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    write_pair(unfinished, options.size, options.scale, options.vocab, options.context, options.dtype)
    unfinished.rename(options.out)
    for side in ("target", "drafter"):
        on_disk, in_float32 = (weight_bytes(options.out / side, kind, ()) / 1e9 for kind in (None, mx.float32))
        print(f"{side:<8} {on_disk:.2f} GB on disk, {in_float32:.2f} GB in float32")


if __name__ == "__main__":
    main()
