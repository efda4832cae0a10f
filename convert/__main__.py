"""python -m mlx_gemma_mtp.convert: Hugging Face checkpoints in, a quantized MLX pair out."""

import argparse
import sys
from pathlib import Path

from mlx_gemma_mtp.command import exit_code
from mlx_gemma_mtp.errors import OptionError
from mlx_gemma_mtp.hub import SIZES, cache_directory, drafter_id, hub_id, resolve, say

from .build import DTYPES, Options, convert
from .check import check
from .plan import describe
from .recipes import DRAFTER_RECIPES, PER_LAYER_BITS, TARGET_RECIPES


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_gemma_mtp.convert",
        description="Convert a Gemma 4 target and its drafter into one directory that loads fast and small.",
        epilog="--plan shows every recipe, its reason and the sizes it makes.",
    )
    add = parser.add_argument
    add("source", nargs="?", metavar="SOURCE", help=f"a size ({', '.join(SIZES)}, also -base, -qat), a hub id or a directory")
    add("--drafter", metavar="SOURCE", help='its drafter (default: the one that belongs to the size or id); "none" for none')
    add("--out", type=Path, metavar="DIR", help="directory to make (default for a size or id: where --model NAME looks)")
    add("--recipe", choices=TARGET_RECIPES, help="bits of the target (default: mixed for E2B and E4B, else 4bit)")
    add("--drafter-recipe", choices=DRAFTER_RECIPES, help="bits of the drafter, and whether a dense head becomes clusters")
    add("--per-layer-bits", type=int, choices=PER_LAYER_BITS, help="bits of the per-layer-embedding table of E2B and E4B")
    add("--dtype", choices=DTYPES, default="bfloat16", help="type of unquantized weights and of scales (default %(default)s)")
    add("--agreement", type=float, default=Options.agreement, metavar="SHARE",
        help="how often a built cluster head must choose as the dense head does (default %(default)s)")  # fmt: skip
    add("--force", action="store_true", help="replace a converted pair at DIR")
    add("--plan", action="store_true", help="print recipes and sizes, of SOURCE or of all; nothing is downloaded")
    add("--check", type=Path, metavar="DIR", help="verify a converted pair instead")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    if options.plan:
        print(describe(plan_sizes(options.source)))
    elif options.check is not None:
        pair = check(options.check)
        print(f"{options.check} is whole: {', '.join(side for side in ('target', 'drafter') if side in pair)}")
    elif options.source is None:
        raise OptionError(f"no SOURCE: give a size ({', '.join(SIZES)}), a hub id or a directory, or --plan or --check DIR")
    else:
        convert_sources(options)


def plan_sizes(source: str | None) -> list[str]:
    if source is None:
        return list(SIZES)
    found = [size for size in SIZES if f"gemma-4-{size}".lower() in (hub_id(source) or "").lower()]
    if not found:
        raise OptionError(f"--plan {source}: sizes are known of {', '.join(SIZES)}")
    return found


def convert_sources(options: argparse.Namespace) -> None:
    is_directory = Path(options.source).expanduser().is_dir()
    repository = None if is_directory else hub_id(options.source)
    out, drafter = options.out, options.drafter
    if not is_directory and repository is None:
        resolve(options.source)  # says what it is not
    if out is None:
        if repository is None:
            raise OptionError("--out DIR is needed to convert a directory: name the directory to make")
        out = cache_directory() / repository.split("/")[1]
    if drafter is None:
        drafter = drafter_id(repository) if repository else ""
        if not drafter:
            raise OptionError(f'no drafter is known for {options.source}: give --drafter SOURCE, or "none"')
    chosen = Options(
        recipe=options.recipe,
        drafter_recipe=options.drafter_recipe,
        dtype=options.dtype,
        per_layer_bits=options.per_layer_bits,
        agreement=options.agreement,
        force=options.force,
    )
    target = resolve(options.source)
    convert(target, None if drafter.lower() == "none" else resolve(drafter, is_drafter=True), out, chosen, say)
    say(f"{out} is ready: python -m mlx_gemma_mtp.generate --model {out}")


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, 2 for a user's mistake, 130 after Ctrl-C."""
    options = parse(arguments)
    return exit_code(lambda: run(options), "interrupted: nothing was left behind")


if __name__ == "__main__":
    sys.exit(main())
