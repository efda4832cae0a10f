"""What memory alone would allow on each Apple chip: a projection from published bandwidths. Measures nothing.

    python -m bench.chips [--size E4B] [--recipe mixed] [--acceptance-length 2.8] [--round-cost 1.6]

Bytes per token are the planned weights a decoding step reads; keys and values, activations and whether the model fits in
a machine's memory are left out, so real decoding is slower. What a round costs is given, not projected: with a mixture of
experts more tokens read more experts. The last line on stdout is JSON.
"""

import argparse
import json
from dataclasses import dataclass

import mlx.core as mx

from bench.roofline import share_read
from mlx_gemma_mtp.convert.plan import facts, target_facts
from mlx_gemma_mtp.convert.recipes import TARGET_RECIPES, choose_target_recipe
from mlx_gemma_mtp.convert.target import inner_config, map_target

HEADING = "projection from published bandwidths, not measured; an upper limit"
NEWS, SUPPORT = "https://www.apple.com/newsroom/", "https://support.apple.com/en-us/"
# Title and address of where a bandwidth is published.
LLAMA_CPP = ("llama.cpp discussion 4167; Apple gives none for M1", "https://github.com/ggml-org/llama.cpp/discussions/4167")
M1_PRO_MAX = (
    "Introducing M1 Pro and M1 Max: the most powerful chips Apple has ever built",
    NEWS + "2021/10/introducing-m1-pro-and-m1-max-the-most-powerful-chips-apple-has-ever-built/",
)
M1_ULTRA = (
    "Apple unveils M1 Ultra, the world's most powerful chip for a personal computer",
    NEWS + "2022/03/apple-unveils-m1-ultra-the-worlds-most-powerful-chip-for-a-personal-computer/",
)
M2 = (
    "Apple unveils M2, with breakthrough performance and capabilities",
    NEWS + "2022/06/apple-unveils-m2-with-breakthrough-performance-and-capabilities/",
)
M2_PRO_MAX = (
    "Apple unveils M2 Pro and M2 Max: next-generation chips for next-level workflows",
    NEWS + "2023/01/apple-unveils-m2-pro-and-m2-max-next-generation-chips-for-next-level-workflows/",
)
M2_ULTRA = ("Apple introduces M2 Ultra", NEWS + "2023/06/apple-introduces-m2-ultra/")
AIR_2024 = ("MacBook Air (15-inch, M3, 2024) - Tech Specs", SUPPORT + "118552")
PRO_2023 = ("MacBook Pro (14-inch, M3 Pro or M3 Max, Nov 2023) - Tech Specs", SUPPORT + "117736")
STUDIO_2025 = ("Mac Studio (2025) - Tech Specs", SUPPORT + "122211")
M4_PRO_MAX = ("Apple introduces M4 Pro and M4 Max", NEWS + "2024/10/apple-introduces-m4-pro-and-m4-max/")
PRO_2024 = ("MacBook Pro (14-inch, M4 Pro or M4 Max, 2024) - Tech Specs", SUPPORT + "121553")
M5 = (
    "Apple unleashes M5, the next big leap in AI performance for Apple silicon",
    NEWS + "2025/10/apple-unleashes-m5-the-next-big-leap-in-ai-performance-for-apple-silicon/",
)
M5_PRO_MAX = (
    "Apple debuts M5 Pro and M5 Max to supercharge the most demanding pro workflows",
    NEWS + "2026/03/apple-debuts-m5-pro-and-m5-max-to-supercharge-the-most-demanding-pro-workflows/",
)
STUDIO_2026 = ("Mac Studio - Technical Specifications", "https://www.apple.com/mac-studio/specs/")


@dataclass(frozen=True)
class Chip:
    """A chip, or one bin of it, and its published bandwidth in GB/s (1 GB = 1e9 bytes). source: title and address."""

    name: str
    bandwidth: float
    source: tuple[str, str]


CHIPS = (
    Chip("M1", 68, LLAMA_CPP),
    Chip("M1 Pro", 200, M1_PRO_MAX),
    Chip("M1 Max", 400, M1_PRO_MAX),
    Chip("M1 Ultra", 800, M1_ULTRA),
    Chip("M2", 100, M2),
    Chip("M2 Pro", 200, M2_PRO_MAX),
    Chip("M2 Max", 400, M2_PRO_MAX),
    Chip("M2 Ultra", 800, M2_ULTRA),
    Chip("M3", 100, AIR_2024),
    Chip("M3 Pro", 150, PRO_2023),
    Chip("M3 Max, 30-core GPU", 300, PRO_2023),
    Chip("M3 Max, 40-core GPU", 400, PRO_2023),
    Chip("M3 Ultra", 819, STUDIO_2025),
    Chip("M4", 120, M4_PRO_MAX),
    Chip("M4 Pro", 273, M4_PRO_MAX),
    Chip("M4 Max, 32-core GPU", 410, PRO_2024),
    Chip("M4 Max, 40-core GPU", 546, PRO_2024),
    Chip("M5", 153, M5),
    Chip("M5 Pro", 307, M5_PRO_MAX),
    Chip("M5 Max, 32-core GPU", 460, STUDIO_2026),
    Chip("M5 Max, 40-core GPU", 614, M5_PRO_MAX),
)


def planned_step(size: str, recipe: str | None = None) -> tuple[str, int]:
    """Name of the recipe (None: the size's default), and bytes of weights one decoding step of the planned target reads.

    The same rule as roofline.bytes_per_pass has for a loaded target.
    """
    tensors, config = target_facts(size)
    text = inner_config(config)
    chosen = choose_target_recipe(recipe, bool(text["hidden_size_per_layer_input"]))
    entries = [entry for part in map_target(tensors, config, chosen, size)[0] for entry in part.entries(mx.bfloat16)]
    top, experts = text.get("top_k_experts"), text.get("num_experts")
    return chosen.name, sum(int(entry.nbytes * share_read(entry.name, top, experts)) for entry in entries)


def project(bytes_per_token: float, acceptance_length: float, round_cost: float) -> list[dict]:
    """Tokens per second that memory allows each chip, decoding plainly and with MTP.

    acceptance_length: tokens a round emits.  round_cost: a round's time over a plain step's.
    """
    lines = []
    for chip in CHIPS:
        plain = chip.bandwidth * 1e9 / bytes_per_token
        lines.append({
            "kind": "projection",
            "chip": chip.name,
            "bytes_per_second": chip.bandwidth * 1e9,
            "plain_tokens_per_second": plain,
            "mtp_tokens_per_second": plain * acceptance_length / round_cost,
            "source": chip.source,
        })  # fmt: skip
    return lines


def show(lines: list[dict], title: str) -> None:
    """Prints a line per chip. title: what is projected."""
    print(f"{title}\n{HEADING}\n\n{'chip':<22}{'GB/s':>6}{'plain tokens/s':>17}{'MTP tokens/s':>15}")
    for line in lines:
        print(
            f"{line['chip']:<22}{line['bytes_per_second'] / 1e9:>6.0f}"
            f"{line['plain_tokens_per_second']:>17.0f}{line['mtp_tokens_per_second']:>15.0f}"
        )


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.chips", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", choices=list(facts()), default="E4B", help="size of the target")
    add("--recipe", choices=list(TARGET_RECIPES), help="its recipe (default: the size's)")
    add("--acceptance-length", type=float, default=2.8, help="tokens a round emits")
    add("--round-cost", type=float, default=1.6, help="a round's time over a plain step's")
    options = parser.parse_args()
    if options.acceptance_length < 1 or options.round_cost <= 0:
        parser.error("--acceptance-length must be at least 1 and --round-cost more than 0")
    recipe, read = planned_step(options.size, options.recipe)
    lines = project(read, options.acceptance_length, options.round_cost)
    title = f"{options.size} {recipe}: {read / 1e9:.2f} GB of weights a token, without keys and values; "
    show(lines, f"{title}MTP: {options.acceptance_length:g} tokens in a round of {options.round_cost:g} plain steps")
    print(json.dumps({"projection": HEADING, **vars(options), "recipe": recipe, "bytes_per_token": read, "chips": lines}))


if __name__ == "__main__":
    main()
