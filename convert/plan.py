"""What a conversion of each published model makes, in bytes, from the shapes in facts.json: nothing is downloaded."""

import json
import math
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.gemma4_text import ModelArgs

from mlx_gemma_mtp.checkpoint import ITEM_BYTES, Tensor
from mlx_gemma_mtp.config import FULL, SLIDING, DrafterConfig

from .cluster import cluster_count, step_bytes
from .drafter import CENTROIDS, ORDERING, map_drafter
from .parts import Part
from .recipes import DRAFTER_RECIPES, TARGET_RECIPES, choose_drafter_recipe, choose_target_recipe
from .target import inner_config, map_target

FACTS = Path(__file__).with_name("facts.json")
ROPE = {
    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
}
BUILT_SCORED = 64  # clusters a built head is planned with; conversion measures how many it needs


def facts() -> dict:
    """Per size: shapes and configs of the published target and drafter."""
    return json.loads(FACTS.read_text(encoding="utf-8"))


def expand(compact: dict) -> dict[str, Tensor]:
    """Tensors from their compact form: name pattern -> shape, or shape -> runs of layers."""
    tensors = {}
    for pattern, shapes in compact.items():
        for shape, layers in (shapes if isinstance(shapes, dict) else {shapes: None}).items():
            *kind, sides = shape.split()
            sides = () if sides == "scalar" else tuple(map(int, sides.split("x")))
            tensor = Tensor(kind[0] if kind else "BF16", sides, None)
            names = [pattern] if layers is None else [pattern.replace("*", str(i), 1) for i in numbers(layers)]
            tensors |= dict.fromkeys(names, tensor)
    return tensors


def numbers(runs: str) -> list[int]:
    """ "0-3,5" -> [0, 1, 2, 3, 5]"""
    ends = [list(map(int, run.split("-"))) for run in runs.split(",")]
    return [i for first, *last in ends for i in range(first, (last or [first])[0] + 1)]


def text_values(compact: dict) -> dict:
    """mlx-lm's arguments, as config.text_values gives them."""
    full = numbers(compact["full_layers"])
    kinds = [FULL if i in full else SLIDING for i in range(compact["num_hidden_layers"])]
    rest = {key: value for key, value in compact.items() if key != "full_layers"}
    return rest | {"layer_types": kinds, "rope_parameters": ROPE}


def target_facts(size: str) -> tuple[dict[str, Tensor], dict]:
    """Tensors of a published target, and its config as `load_target_config` returns it."""
    found = facts()[size]["target"]
    values = text_values(found["text_config"])
    config = {"model_type": found["model_type"], "text_config": values, "vocab_size": values["vocab_size"]}
    return expand(found["tensors"]), config


def drafter_facts(size: str) -> tuple[dict[str, Tensor], DrafterConfig]:
    """Tensors of a published drafter, and its config."""
    found = facts()[size]["drafter"]
    args = ModelArgs.from_dict(text_values(found["text_config"]))
    config = DrafterConfig(
        args=args,
        backbone_hidden_size=found["backbone_hidden_size"],
        scored_clusters=found["centroid_intermediate_top_k"] or 32,
        draft_length=None,
    )
    return expand(found["tensors"]), config


def total(parts: list[Part]) -> int:
    return sum(entry.nbytes for part in parts for entry in part.entries(mx.bfloat16))


def target_bytes(size: str, recipe: str | None = None, per_layer_bits: int | None = None) -> int:
    """Bytes of a converted target."""
    tensors, config = target_facts(size)
    chosen = choose_target_recipe(recipe, bool(inner_config(config)["hidden_size_per_layer_input"]), per_layer_bits)
    return total(map_target(tensors, config, chosen, size)[0])


def drafter_parts(size: str, recipe: str | None = None) -> tuple[list[Part], int | None]:
    """Parts of a converted drafter and how many clusters a step scores (None: dense)."""
    tensors, config = drafter_facts(size)
    clustered = ORDERING in tensors
    chosen = choose_drafter_recipe(recipe, clustered)
    scored = config.scored_clusters if clustered else None
    if chosen.build_clusters and not clustered:
        vocab, width = config.args.vocab_size, config.args.hidden_size
        scored = BUILT_SCORED
        tensors |= {
            CENTROIDS + "weight": Tensor("F32", (cluster_count(vocab), width), None),
            ORDERING: Tensor("I64", (vocab,), None),
        }
    return map_drafter(tensors, config, chosen, size)[0], scored


def source_bytes(size: str) -> tuple[int, int]:
    """Bytes to download for a published target and its drafter."""
    found = facts()[size]
    target, drafter = (expand(found[side]["tensors"]).values() for side in ("target", "drafter"))
    return tuple(sum(math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in side) for side in (target, drafter))


def describe(sizes: list[str]) -> str:
    """The table --plan prints. * marks a model's default recipe."""
    lines = ["GB on disk after conversion (1 GB = 1e9 bytes; * default)", ""]
    names = list(TARGET_RECIPES)
    lines.append(f"{'target':<10}{'download':>10}" + "".join(f"{name:>10}" for name in names))
    for size in sizes:
        default = choose_target_recipe(None, bool(inner_config(target_facts(size)[1])["hidden_size_per_layer_input"])).name
        cells = "".join(f"{target_bytes(size, name) / 1e9:>9.2f}{'*' if name == default else ' '}" for name in names)
        lines.append(f"{size:<10}{source_bytes(size)[0] / 1e9:>10.2f}{cells}")
    names = list(DRAFTER_RECIPES)
    lines += ["", f"{'drafter':<10}{'download':>10}" + "".join(f"{name:>12}" for name in names)]
    steps = []
    for size in sizes:
        default = choose_drafter_recipe(None, ORDERING in drafter_facts(size)[0]).name
        made = {name: drafter_parts(size, name) for name in names}
        cells = "".join(f"{total(p) / 1e9:>11.3f}{'*' if name == default else ' '}" for name, (p, _) in made.items())
        lines.append(f"{size:<10}{source_bytes(size)[1] / 1e9:>10.3f}{cells}")
        cells = "".join(f"{step_bytes(p, mx.bfloat16, scored) / 1e6:>11.1f} " for p, scored in made.values())
        steps.append(f"{size:<20}{cells}")
    lines += ["", f"{'MB read per draft':<20}" + "".join(f"{name:>12}" for name in names), *steps]
    lines += ["", f"built cluster heads: with {BUILT_SCORED} clusters scored; conversion measures how many are needed"]
    lines += ["", "recipes"]
    lines += [f"  {recipe.name:<12}{recipe.reason}" for recipe in TARGET_RECIPES.values()]
    lines += ["drafter recipes"]
    lines += [f"  {recipe.name:<12}{recipe.reason}" for recipe in DRAFTER_RECIPES.values()]
    return "\n".join(lines)


def describe_conversion(repository: str) -> str:
    """(5.9 GB)" for a published checkpoint, "" for another."""
    size = next((s for s in facts() if f"gemma-4-{s}".lower() in repository.lower()), None)
    if size is None:
        return ""
    made = target_bytes(size) + total(drafter_parts(size)[0])
    return f": {sum(source_bytes(size)) / 1e9:.1f} GB of weights to download become {made / 1e9:.1f} GB"
