"""How many bits each product of a model gets, as data, each recipe with its reason."""

import re
from dataclasses import dataclass, replace

from mlx_gemma_mtp.errors import OptionError


@dataclass(frozen=True)
class Quantization:
    """MLX's affine quantization. grid: the weights lie on a Q4_0 grid already, whose values are kept."""

    bits: int
    group_size: int = 64
    grid: bool = False

    def fit(self, width: int) -> "Quantization | None":
        """The same for rows of `width` values: smaller groups, or none, where the group size does not divide them."""
        return next((replace(self, group_size=g) for g in (self.group_size, 32) if width % g == 0), None)


Q4, Q8 = Quantization(4), Quantization(8)
GRID = Quantization(4, 32, grid=True)


@dataclass(frozen=True)
class Recipe:
    """Quantization by module path: the first rule whose pattern is found in the path decides, else `default`."""

    name: str
    reason: str
    default: Quantization | None
    rules: tuple[tuple[str, Quantization | None], ...] = ()
    build_clusters: bool = False  # drafters: a dense head gets clusters

    def quantization(self, path: str) -> Quantization | None:
        return next((found for pattern, found in self.rules if re.search(pattern, path)), self.default)


ROUTER = (r"router\.proj$", Q8)  # a 4-bit router picks 14 % other experts

TARGET_RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("4bit", "smallest and fastest; good from 12B on, poor for E2B and E4B", Q4, (ROUTER,)),
        Recipe("mixed", "4 bit with 8-bit MLPs: E2B and E4B lose half their answers at uniform 4 bit", Q4,
               (ROUTER, (r"\.mlp\.", Q8))),
        Recipe("8bit", "half of bf16, next to no loss", Q8),
        Recipe("bf16", "the weights as they are", None),
    )
}  # fmt: skip
DRAFTER_RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("8bit", "half the bytes per draft, nearly the same drafts; a dense head becomes clusters", Q8, (), True),
        Recipe("mixed", "4-bit layers, 8-bit cluster head: about a tenth of the bytes of a dense bf16 drafter", Q4,
               ((r"^head\.", Q8),), True),
        Recipe("4bit", "smallest; some drafts differ", Q4, (), True),
        Recipe("4bit-dense", "4 bit, a dense head stays dense", Q4),
        Recipe("clusters", "unquantized; a dense head becomes clusters", None, (), True),
        Recipe("bf16", "the weights as they are; a dense head stays dense", None),
    )
}  # fmt: skip
PER_LAYER_BITS = (4, 8, 16)


def choose_target_recipe(name: str | None, per_layer_table: bool, per_layer_bits: int | None = None) -> Recipe:
    """The recipe called `name`; None for the default of a model with or without a per-layer-embedding table.

    per_layer_bits: bits of that table, 16 for as it is; None for what the recipe gives it.
    Raises OptionError.
    """
    recipe = _find(TARGET_RECIPES, "recipe", name or ("mixed" if per_layer_table else "4bit"))
    if per_layer_bits is None:
        return recipe
    if not per_layer_table:
        raise OptionError("--per-layer-bits: this model has no per-layer-embedding table (E2B and E4B have): leave it out")
    table = None if per_layer_bits == 16 else Quantization(per_layer_bits)
    rules = ((r"embed_tokens_per_layer$", table), *recipe.rules)
    return replace(recipe, name=f"{recipe.name}-ple{per_layer_bits}", rules=rules)


def choose_drafter_recipe(name: str | None, cluster_head: bool) -> Recipe:
    """The recipe called `name`; None for the default of a drafter with a cluster head or a dense one."""
    return _find(DRAFTER_RECIPES, "drafter recipe", name or ("8bit" if cluster_head else "mixed"))


def _find(recipes: dict[str, Recipe], kind: str, name: str) -> Recipe:
    if name not in recipes:
        raise OptionError(f"{kind} {name!r}: use {', '.join(recipes)}")
    return recipes[name]
