"""A drafter in the form that is trained, and back into a checkpoint."""

import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from mlx_gemma_mtp.checkpoint import read_tensors
from mlx_gemma_mtp.cluster_head import ClusterHead
from mlx_gemma_mtp.config import load_drafter_config
from mlx_gemma_mtp.drafter import Drafter, count_clusters
from mlx_gemma_mtp.target import load_checkpoint as load_weights


def load_trainable(directory: Path, dtype: mx.Dtype = mx.float32) -> Drafter:
    """The drafter of a directory in the form that is trained: products not joined, floats as `dtype`, ordering frozen."""
    raw, config = load_drafter_config(directory)
    clusters = count_clusters(directory)

    class Args:  # mlx-lm builds the model from the raw config; ours is checked and complete already
        from_dict = staticmethod(lambda _: config)

    drafter = load_weights(directory, raw, lambda **_: (lambda args: Drafter(args, clusters), Args))
    drafter.set_dtype(dtype)
    if clusters:
        drafter.head.freeze(keys=["ordering"])
    mx.eval(drafter.state)
    return drafter


def hugging_face_tensors(drafter: Drafter) -> dict[str, mx.array]:
    """The tensors of a drafter, quantized or not, under the names of a Hugging Face checkpoint: undoes Drafter.sanitize."""
    clustered = isinstance(drafter.head, ClusterHead)
    ordering = drafter.head.ordering.reshape(-1) if clustered else None
    tensors = {}
    for name, value in tree_flatten(drafter.parameters()):
        part = name.split(".")[-1]
        if name == "head.ordering":
            tensors["masked_embedding.token_ordering"] = ordering.astype(mx.int64)
        elif name.startswith("head.centroids."):
            tensors["masked_embedding." + name.removeprefix("head.")] = value
        elif name.startswith("head.tokens."):
            tensors[f"model.embed_tokens.{part}"] = value.reshape(ordering.size, -1)[mx.argsort(ordering)]
        elif name.startswith("head."):
            tensors[f"model.embed_tokens.{part}"] = value
        else:
            tensors[name if "_projection" in name.split(".")[0] else "model." + name] = value
    return tensors


def output_table(module: nn.Module) -> mx.array:
    """Output rows [V, d] of a head's table, dequantized if it is quantized."""
    weight = module.weight
    if "scales" in module:
        weight = mx.dequantize(weight, module.scales, module.get("biases"), module.group_size, module.bits, module.mode)
    return weight.reshape(-1, weight.shape[-1])


def save_drafter(drafter: Drafter, source: Path, out: Path, dtype: mx.Dtype) -> None:
    """Writes out/model.safetensors, floats in `dtype`, beside the configuration files of `source`."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = hugging_face_tensors(drafter)
    tensors = {n: v.astype(dtype) if mx.issubdtype(v.dtype, mx.floating) else v for n, v in tensors.items()}
    unfinished = out / "unfinished.safetensors"
    mx.save_safetensors(str(unfinished), tensors, {"format": "pt"})
    unfinished.replace(out / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists() and source.resolve() != out.resolve():
            shutil.copyfile(source / name, out / name)


def copy_drafter(source: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            shutil.copyfile(path, out / path.name)


def stored_dtype(directory: Path) -> mx.Dtype:
    """The floating type of a drafter's weights in its file."""
    names = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
    found = [names[t.dtype] for t in read_tensors(directory).values() if t.dtype in names]
    return found[0] if found else mx.float32


def add_deltas(drafter: Drafter, rank: int) -> None:
    """Puts a trainable low-rank delta on every product of the layers and projections, and freezes everything else."""
    drafter.freeze()
    products = [(path, module) for path, module in drafter.named_modules()
                if isinstance(module, (nn.Linear, nn.QuantizedLinear)) and not path.startswith("head")]  # fmt: skip
    drafter.update_modules(
        tree_unflatten([(path, LoRALinear.from_base(module, r=rank, scale=1.0)) for path, module in products])
    )


def fuse_deltas(drafter: Drafter) -> None:
    """Adds the deltas to the weights; a quantized product is quantized again as it was."""
    fused = [(path, module.fuse()) for path, module in drafter.named_modules() if isinstance(module, LoRALinear)]
    drafter.update_modules(tree_unflatten(fused))
