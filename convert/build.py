"""A target and its drafter -> a converted pair in one directory."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.gemma4_text import ModelArgs
from tqdm import tqdm

from mlx_gemma_mtp.checkpoint import check_memory, read_json, read_tensors
from mlx_gemma_mtp.config import DrafterConfig, check_pair, load_drafter_config, load_target_config
from mlx_gemma_mtp.errors import OptionError
from mlx_gemma_mtp.hub import Source

from .cluster import CLUSTERS_FILE, PROMPTS, calibrate, fit_head, step_bytes, write_clusters
from .container import Writer
from .directory import PAIR, new_directory
from .drafter import map_drafter
from .parts import Part, keep_grid, write_part
from .recipes import Recipe, choose_drafter_recipe, choose_target_recipe
from .target import FILES, inner_config, is_quantized, map_target, set_types, target_config

FORMAT_VERSION = 1
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
DRAFTER_FILES = ("generation_config.json",)


@dataclass(frozen=True)
class Options:
    """What a user chooses. recipe, drafter_recipe: None for the model's defaults.

    agreement: how often a built cluster head must choose as the dense head does, on the pair's answers to `prompts`.
    """

    recipe: str | None = None
    drafter_recipe: str | None = None
    dtype: str = "bfloat16"
    per_layer_bits: int | None = None
    agreement: float = 0.99
    prompts: tuple[str, ...] = PROMPTS
    force: bool = False


@dataclass
class Side:
    """One half of the conversion, planned: nothing of the weights is read yet."""

    source: Source
    raw: dict
    parts: list[Part]
    dropped: dict[str, str]
    recipe: Recipe | None
    dtype: mx.Dtype | None  # None: as in the source
    files: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for part in self.parts for entry in part.entries(self.dtype))

    @property
    def source_bytes(self) -> int:
        return sum(part.source.nbytes for part in self.parts)

    @property
    def builds_clusters(self) -> bool:
        return bool(self.recipe and self.recipe.build_clusters) and any(part.name == "head.weight" for part in self.parts)

    def describe(self, directory: Path) -> dict:
        sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
        return {
            "source": self.source.name,
            "revision": self.source.revision,
            "recipe": self.recipe.name if self.recipe else "as it was",
            "on_grid": sum(part.quantization is not None and part.quantization.grid for part in self.parts),
            "tensors": sum(len(part.entries(self.dtype)) for part in self.parts),
            "dropped": len(self.dropped),
            "files": sizes,
        }


def prepare_target(source: Source, config: dict, options: Options) -> Side:
    raw = read_json(source.directory / "config.json")
    recipe, tensors = None, read_tensors(source.directory)
    if is_quantized(raw, source.directory):
        if options.recipe or options.per_layer_bits:
            raise OptionError(f"{source.name} is quantized already: leave --recipe out, or give its bf16 checkpoint")
    else:
        per_layer = bool(inner_config(config)["hidden_size_per_layer_input"])
        recipe = choose_target_recipe(options.recipe, per_layer, options.per_layer_bits)
    parts, dropped = map_target(tensors, config, recipe, source.directory)
    return make_side(source, raw, parts, dropped, recipe, FILES, options)


def prepare_drafter(source: Source, raw: dict, config: DrafterConfig, options: Options) -> Side:
    recipe, tensors = None, read_tensors(source.directory)
    if is_quantized(raw, source.directory):
        if options.drafter_recipe:
            raise OptionError(f"{source.name} is quantized already: leave --drafter-recipe out, or give its bf16 checkpoint")
    else:
        recipe = choose_drafter_recipe(options.drafter_recipe, any("centroids" in name for name in tensors))
    parts, dropped = map_drafter(tensors, config, recipe, source.directory)
    return make_side(source, raw, parts, dropped, recipe, DRAFTER_FILES, options)


def make_side(source, raw, parts, dropped, recipe: Recipe | None, files, options: Options) -> Side:
    dtype = None if recipe is None else DTYPES[options.dtype]
    return Side(source, raw, [keep_grid(part) for part in parts], dropped, recipe, dtype, files)


def convert(target: Source, drafter: Source | None, out: Path, options: Options, say: Callable[[str], None] = print) -> dict:
    """Writes the pair `out` and returns its pair.json.

    drafter: None for a target alone.  say: told what is done, a line at a time.
    Raises CheckpointError, PairMismatch, OptionError, OutputError, DoesNotFit.
    """
    if options.dtype not in DTYPES:
        raise OptionError(f"dtype {options.dtype!r}: use {', '.join(DTYPES)}")
    if not 0 < options.agreement <= 1:
        raise OptionError(f"agreement {options.agreement}: give a share above 0 and up to 1, such as 0.99")
    config = load_target_config(target.directory)
    sides = {"target": prepare_target(target, config, options)}
    if drafter is not None:
        raw, drafter_config = load_drafter_config(drafter.directory)
        check_pair(ModelArgs.from_dict(inner_config(config)), drafter_config)
        sides["drafter"] = prepare_drafter(drafter, raw, drafter_config, options)
        if sides["drafter"].builds_clusters:
            needed = sides["target"].nbytes + sides["drafter"].source_bytes
            check_memory(needed, "running the pair to build a cluster head (or: --drafter-recipe 4bit-dense)")
    with new_directory(out, sum(side.nbytes for side in sides.values()), options.force) as partial:
        for name, side in sides.items():
            recipe = side.recipe.name if side.recipe else "as it is"
            say(f"{name}: {side.source.name}, {recipe}, {side.nbytes / 1e9:.2f} GB")
        write_target(sides["target"], config, partial / "target", options)
        pair = {"format_version": FORMAT_VERSION, "target": sides["target"].describe(partial / "target")}
        if drafter is not None:
            write = build_drafter if sides["drafter"].builds_clusters else write_drafter
            head = write(sides["drafter"], drafter_config, partial, options, say)
            pair["drafter"] = sides["drafter"].describe(partial / "drafter") | {"head": head}
        write_json(partial / PAIR, pair)
    return pair


def write_target(side: Side, config: dict, directory: Path, options: Options) -> None:
    write_weights(side, directory)
    written = target_config(side.raw, config, side.parts, options.dtype if side.recipe else None)
    write_json(directory / "config.json", written)


def write_drafter(side: Side, config: DrafterConfig, partial: Path, options: Options, say) -> dict:
    """The drafter with the head it has; what pair.json says of it."""
    write_weights(side, partial / "drafter")
    write_drafter_config(side, partial / "drafter", options.dtype)
    clusters = next((part.shape[0] for part in side.parts if part.name == "head.centroids.weight"), None)
    scored = min(config.scored_clusters, clusters) if clusters else None
    return {"built": False, "scored_clusters": scored, "bytes_per_step": step_bytes(side.parts, side.dtype, scored)}


def build_drafter(side: Side, config: DrafterConfig, partial: Path, options: Options, say) -> dict:
    """The drafter with clusters in place of its dense head; what pair.json says of it.

    The target is at partial / "target" already: the pair is run to see what the head is asked.
    """
    before = side.source_bytes
    say("drafter: running the pair on the calibration prompts")
    fitted, held_out = calibrate(partial / "target", side.source.directory, options.prompts)
    say(f"drafter: clustering {config.args.vocab_size} tokens")
    table = next(part.source for part in side.parts if part.name == "head.weight")
    extra = write_clusters(table, fitted, partial / CLUSTERS_FILE)
    parts, _ = map_drafter(read_tensors(side.source.directory) | extra, config, side.recipe, side.source.directory)
    side.parts = [keep_grid(part) for part in parts]
    clusters = next(part.shape[0] for part in parts if part.name == "head.centroids.weight")
    side.raw = side.raw | {"num_centroids": clusters, "use_ordered_embeddings": True, "centroid_intermediate_top_k": clusters}
    write_weights(side, partial / "drafter")
    write_drafter_config(side, partial / "drafter", options.dtype)
    (partial / CLUSTERS_FILE).unlink()
    head = fit_head(partial / "drafter", table, held_out, options.agreement)
    side.raw["centroid_intermediate_top_k"] = head["scored_clusters"]
    write_drafter_config(side, partial / "drafter", options.dtype)
    after = step_bytes(side.parts, side.dtype, head["scored_clusters"])
    say(
        f"drafter: {head['scored_clusters']} of {clusters} clusters scored, the dense head's choice in "
        f"{head['top1_agreement']:.1%} of {head['hidden_states']} steps; "
        f"{after / 1e6:.1f} MB read per step, {before / 1e6:.1f} before"
    )
    return head | {"built": True, "bytes_per_step": after, "bytes_per_step_source": before}


def write_weights(side: Side, directory: Path) -> None:
    """Weights and the files that go with them; config.json is the caller's."""
    directory.mkdir()
    total = sum(part.source.nbytes // (1 if part.half is None else 2) for part in side.parts)
    with (
        Writer(directory, [part.entries(side.dtype) for part in side.parts]) as writer,
        tqdm(total=total, unit="B", unit_scale=True, desc=directory.name, disable=None) as bar,
    ):
        for part in side.parts:
            bar.set_postfix_str(part.path, refresh=False)
            write_part(part, writer, side.dtype, bar.update)
        writer.finish()
    for name in side.files:
        if (side.source.directory / name).exists():
            shutil.copyfile(side.source.directory / name, directory / name)


def write_drafter_config(side: Side, directory: Path, dtype: str) -> None:
    write_json(directory / "config.json", set_types(side.raw, side.parts, dtype) if side.recipe else side.raw)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
