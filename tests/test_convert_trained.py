"""A cluster head built for a trained drafter: random weights have no clusters and prove nothing."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_gemma_mtp
from mlx_gemma_mtp import Sampling
from mlx_gemma_mtp.checkpoint import read_tensors
from mlx_gemma_mtp.convert.build import Options, convert
from mlx_gemma_mtp.convert.cluster import PROMPTS
from mlx_gemma_mtp.convert.parts import read_rows
from mlx_gemma_mtp.drafter import count_clusters
from mlx_gemma_mtp.hub import Source

DEMO = Path(mlx_gemma_mtp.__file__).parent / "demo"
pytestmark = pytest.mark.skipif(not (DEMO / "drafter").exists(), reason="this checkout has no demo pair")
CODE = ("def read_lines(path):", "class Stack:\n    def push(", "import os\n\ndef walk(", "for key, value in sorted(")


@pytest.fixture(scope="module")
def dense_drafter(tmp_path_factory):
    """The demo's drafter with its whole table as head: every token's row is trained, in clusters or not."""
    directory = tmp_path_factory.mktemp("dense")
    shutil.copyfile(DEMO / "drafter" / "generation_config.json", directory / "generation_config.json")
    config = json.loads((DEMO / "drafter" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"use_ordered_embeddings": False}))
    tensors = read_tensors(DEMO / "drafter")
    if count_clusters(DEMO / "drafter") and "masked_embedding.token_ordering" not in tensors:
        pytest.skip("the demo's drafter is converted already")
    weights = {name: read_rows(t, slice(None)) for name, t in tensors.items() if not name.startswith("masked_embedding.")}
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    return directory


def acceptance_length(pair):
    rounds = accepted = 0
    for prompt in CODE:
        stats = pair.generate(
            prompt, raw=True, max_tokens=80, draft_length=4, ignore_eos=True, sampling=Sampling(temperature=0)
        ).stats
        rounds, accepted = rounds + stats.rounds, accepted + stats.accepted
    return 1 + accepted / rounds


@pytest.mark.parametrize("recipe", ["clusters", "8bit"])
def test_a_built_cluster_head_drafts_as_the_dense_head_does_and_reads_less(dense_drafter, tmp_path, recipe):
    """Four prompts tell 3 % apart; over 119 prompts it was within 1 % at the default level."""
    target, drafter = Source(DEMO / "target", "demo"), Source(dense_drafter, "dense")
    options = Options(recipe="bf16", drafter_recipe=recipe, prompts=PROMPTS[-6:])
    made = convert(target, drafter, tmp_path / "out", options, lambda line: None)["drafter"]["head"]
    assert made["scored_clusters"] <= made["clusters"] / 2 and made["hidden_states"] > 100
    assert made["top1_agreement"] >= 0.99 * min(1, made["top1_agreement_all_clusters"])
    assert made["bytes_per_step"] < made["bytes_per_step_source"]
    dense = mlx_gemma_mtp.load(DEMO / "target", dense_drafter, dtype="float32")
    built = mlx_gemma_mtp.load(tmp_path / "out", dtype="float32")
    assert acceptance_length(built) > 0.97 * acceptance_length(dense)
