"""The ten published checkpoints, by names and shapes alone: everything is mapped or dropped, and sizes are the published."""

import re

import mlx.core as mx
import pytest

from mlx_gemma_mtp import CheckpointError
from mlx_gemma_mtp.convert import __main__ as command
from mlx_gemma_mtp.convert import plan
from mlx_gemma_mtp.convert.drafter import map_drafter
from mlx_gemma_mtp.convert.recipes import DRAFTER_RECIPES, TARGET_RECIPES
from mlx_gemma_mtp.convert.target import map_target

SIZES = ("E2B", "E4B", "12B", "26B-A4B", "31B")
# Tensors and bytes of the published files; how many of them are unused for text.
TARGETS = {
    "E2B": (2011, 10_246_357_958, 2011 - 600 + 60), "E4B": (2130, 15_992_314_836, 2130 - 719 + 54),
    "12B": (677, 23_919_460_448, 11), "26B-A4B": (1013, 51_611_872_412, 356), "31B": (1188, 62_546_177_752, 356),
}  # fmt: skip
DRAFTERS = {
    "E2B": (50, 157_559_816), "E4B": (50, 159_132_680), "12B": (48, 845_713_928), "26B-A4B": (48, 839_422_472),
    "31B": (48, 939_037_192),
}  # fmt: skip
# GB of the text model at 4 bit, 8 bit, and 4 bit with 8-bit MLPs.
PUBLISHED = {
    "E2B": (2.60, 4.92, 3.38), "E4B": (4.20, 7.93, 5.85), "12B": (6.70, 12.65, 10.95), "26B-A4B": (14.19, 26.81, 14.47),
    "31B": (17.27, 32.62, 27.67),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_every_tensor_of_a_published_target_is_mapped_or_dropped_with_a_reason(size):
    tensors, config = plan.target_facts(size)
    count, nbytes, unused = TARGETS[size]
    assert (len(tensors), sum(t.nbytes for t in tensors.values())) == (count, nbytes)
    for recipe in TARGET_RECIPES.values():
        parts, dropped = map_target(tensors, config, recipe, size)  # strict: mlx-lm's model has all of them and no other
        joined = sum(part.half == 0 for part in parts)
        assert len(dropped) == unused and all(dropped.values())
        assert len(parts) - joined + len(dropped) == count


@pytest.mark.parametrize("size", SIZES)
def test_every_tensor_of_a_published_drafter_is_mapped(size):
    tensors, config = plan.drafter_facts(size)
    assert (len(tensors), sum(t.nbytes for t in tensors.values())) == DRAFTERS[size]
    for recipe in DRAFTER_RECIPES.values():
        parts, dropped = map_drafter(tensors, config, recipe, size)
        assert len(parts) == len(tensors) and not dropped


@pytest.mark.parametrize("size", ["E2B", "E4B"])
def test_checkpoints_without_the_unused_tensors_are_accepted(size):
    """The quantization-aware and re-saved ones leave keys of KV-shared layers out."""
    tensors, config = plan.target_facts(size)
    full, dropped = map_target(tensors, config, TARGET_RECIPES["4bit"], size)
    parts, dropped = map_target({n: t for n, t in tensors.items() if n not in dropped}, config, TARGET_RECIPES["4bit"], size)
    assert not dropped and parts == full


def test_a_tensor_too_many_or_too_few_is_an_error():
    tensors, config = plan.target_facts("12B")
    name = "model.language_model.layers.3.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=r"lacks language_model.model.layers.3.mlp.up_proj.weight"):
        map_target({n: t for n, t in tensors.items() if n != name}, config, TARGET_RECIPES["4bit"], "12B")
    extra = {name.replace("up_proj", "side_proj"): tensors[name]}
    with pytest.raises(CheckpointError, match="no place for: language_model.model.layers.3.mlp.side_proj.weight"):
        map_target(tensors | extra, config, TARGET_RECIPES["4bit"], "12B")


@pytest.mark.parametrize("size", SIZES)
def test_planned_sizes_agree_with_the_published_within_one_percent(size):
    for recipe, published in zip(("4bit", "8bit", "mixed"), PUBLISHED[size]):
        assert plan.target_bytes(size, recipe) / 1e9 == pytest.approx(published, rel=0.01), recipe


def test_routers_never_get_less_than_eight_bits():
    tensors, config = plan.target_facts("26B-A4B")
    for recipe in TARGET_RECIPES.values():
        parts, _ = map_target(tensors, config, recipe, "26B-A4B")
        routers = [part for part in parts if part.path.endswith("router.proj")]
        assert len(routers) == 30
        assert all(part.quantization is None or part.quantization.bits >= 8 for part in routers)


def test_built_clusters_cut_what_a_draft_reads_to_about_a_tenth():
    for size in ("12B", "26B-A4B", "31B"):
        parts, scored = plan.drafter_parts(size)
        before = plan.step_bytes(*plan.drafter_parts(size, "bf16")[:1], mx.bfloat16, None)
        assert plan.step_bytes(parts, mx.bfloat16, scored) < 0.14 * before


def test_the_plan_is_printed_for_one_model_or_all(capsys):
    assert command.main(["--plan"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^{re.escape(size)} ", text, re.MULTILINE) for size in SIZES) and "3.38*" in text
    assert command.main(["e4b", "--plan"]) == 0
    assert "26B-A4B" not in capsys.readouterr().out.split("recipes")[0]
    assert command.main(["E9", "--plan"]) == 2
