"""Checkpoints in all their forms load to the same model; what cannot be loaded is refused in one line."""

import json
import shutil
import struct

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from pairs import FAMILIES, write_pair

import mlx_gemma_mtp
from mlx_gemma_mtp import CheckpointError, DoesNotFit, OptionError, PairMismatch, checkpoint
from mlx_gemma_mtp.config import load_target_config

PROMPT = [2, 17, 99, 240, 31, 8]


def tokens(pair, drafts=3, count=24):
    return pair.generate(PROMPT, max_tokens=count, draft_length=drafts, ignore_eos=True).tokens


@pytest.mark.parametrize("form", [
    {"per_layer_config": True}, {"unused_kv": True, "towers": True}, {"shards": 3}, {"per_layer_config": True, "towers": True},
])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_of_a_checkpoint_is_the_same_model(load_pair, family, form):
    assert tokens(load_pair(family, 1, **form)) == tokens(load_pair(family, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_checkpoint_runs_in_float32_on_a_cpu(make_pair_directory, family):
    directory = make_pair_directory(family, 1, dtype="bfloat16")
    pair = mlx_gemma_mtp.load(directory / "target", directory / "assistant")
    arrays = [a for m in (pair.target.model, pair.drafter) for _, a in tree_flatten(m.parameters())]
    assert {a.dtype for a in arrays} <= {mx.float32, mx.int32}
    assert tokens(pair) == tokens(pair, drafts=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_types_run_where_the_cpu_can_and_are_refused_where_it_cannot(make_pair_directory, dtype):
    dense, clusters = make_pair_directory("dense31b"), make_pair_directory("e2b")
    pair = mlx_gemma_mtp.load(dense / "target", dense / "assistant", dtype=dtype)
    assert {str(a.dtype) for _, a in tree_flatten(pair.target.model.parameters())} == {f"mlx.core.{dtype}"}
    assert len(tokens(pair)) == 24  # in 16 bit, verifying several tokens may break ties differently
    with pytest.raises(OptionError, match="float32 only"):
        mlx_gemma_mtp.load(clusters / "target", clusters / "assistant", dtype=dtype)


def quantize_directory(source, out, predicate, bits=4):
    model, config = load_model(source, model_config=load_target_config(source))
    usable = lambda path, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0 and predicate(path, m)
    model, config = quantize_model(model, config, 32, bits, quant_predicate=usable)
    out.mkdir()
    save_model(out, model)
    save_config(config, out / "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_mlx_lm_directories_draft_and_equal_plain_decoding(make_pair_directory, family, tmp_path):
    """Uniform bits, and bits that differ from module to module."""
    directory = make_pair_directory(family)
    mixed = lambda path, m: {"group_size": 32, "bits": 8} if "mlp" in path or "router" in path or "k_proj" in path else True
    for name, predicate in (("uniform", lambda path, m: True), ("mixed", mixed)):
        quantize_directory(directory / "target", tmp_path / name, predicate)
        pair = mlx_gemma_mtp.load(tmp_path / name, directory / "assistant")
        assert isinstance(pair.target.embed_tokens, nn.QuantizedEmbedding)
        assert tokens(pair) == tokens(pair, drafts=0)
        reference, _ = load_model(tmp_path / name, model_config=load_target_config(tmp_path / name))
        reference.set_dtype(mx.float32)
        cache = pair.target.empty_cache()
        cache.reserve(len(PROMPT))
        ours = pair.target.logits(pair.target.hidden(mx.array([PROMPT]), cache.layers(len(PROMPT))))
        assert mx.allclose(ours, reference(mx.array([PROMPT])), atol=1e-4)


@pytest.mark.parametrize("family", ["e2b", "e4b", "dense31b"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_drafters_draft_in_batches_too(make_pair_directory, family, bits, tmp_path):
    """As mlx-community writes them: Hugging Face names, packed weights, one global setting."""
    directory = make_pair_directory(family)
    shutil.copytree(directory / "assistant", tmp_path / "drafter")
    file = tmp_path / "drafter" / "model.safetensors"
    weights = mx.load(str(file))
    packed = {}
    for name, value in weights.items():
        if value.ndim == 2 and value.shape[-1] % 32 == 0:
            base = name.removesuffix(".weight")
            packed |= dict(zip((name, f"{base}.scales", f"{base}.biases"), mx.quantize(value, group_size=32, bits=bits)))
        else:
            packed[name] = value
    mx.eval(packed)
    file.unlink()
    mx.save_safetensors(str(file), packed)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": bits}
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    pair = mlx_gemma_mtp.load(directory / "target", tmp_path / "drafter")
    assert tokens(pair) == tokens(pair, drafts=0)
    x = mx.random.normal((3, 32))
    scores, ids = pair.drafter.candidates(x)
    grid = {"group_size": 32, "bits": bits}
    table = mx.dequantize(*mx.quantize(weights["model.embed_tokens.weight"], **grid), **grid)
    for row in range(3):
        rows = table if ids is None else table[ids[row]]
        assert mx.allclose(scores[row], rows @ x[row], atol=1e-4)


def test_the_cluster_head_scores_what_the_reference_scores(load_pair):
    """Top clusters by centroid, then only their tokens; every row of a batch for itself."""
    pair = load_pair("e4b")
    head = pair.drafter.head
    x = mx.random.normal((5, 32), key=mx.random.key(3))
    scores, ids = head(x)
    for row in range(5):
        best = mx.argsort(-(head.centroids.weight @ x[row]))[: head.scored_clusters]
        assert set(ids[row].tolist()) == set(head.ordering[best].reshape(-1).tolist())
        table = {int(i): w for i, w in zip(head.ordering.reshape(-1), head.tokens.weight.reshape(-1, 32))}
        expected = mx.stack([table[int(i)] @ x[row] for i in ids[row]])
        assert mx.allclose(scores[row], expected, atol=1e-5)


def test_token_ordering_stays_an_integer(load_pair):
    ordering = load_pair("e2b").drafter.head.ordering
    assert ordering.dtype == mx.int32
    assert sorted(ordering.reshape(-1).tolist()) == list(range(512))


@pytest.fixture
def copy(make_pair_directory, tmp_path):
    """A copy of a small pair to spoil."""
    shutil.copytree(make_pair_directory("e2b"), tmp_path / "copy")
    return tmp_path / "copy"


def edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        (config["text_config"] if key in config["text_config"] else config)[key] = value
    path.write_text(json.dumps(config))


def truncate(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def drop_key(directory, key):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["text_config"][key]
    path.write_text(json.dumps(config))


SPOILS = {
    "no config": (lambda d: (d / "target/config.json").unlink(), "no config.json"),
    "broken config": (lambda d: truncate(d / "target/config.json", 40), "not valid JSON"),
    "config of another kind": (lambda d: (d / "target/config.json").write_text('{"model_type": "llama"}'), "llama"),
    "a list as config": (lambda d: (d / "target/config.json").write_text("[]"), "not an object"),
    "unknown layer type": (lambda d: edit_config(d / "target", layer_types=["linear_attention"] * 10), "linear_attention"),
    "layer count": (lambda d: edit_config(d / "target", num_hidden_layers=9), "10 layer types for 9"),
    "missing key": (lambda d: drop_key(d / "target", "num_kv_shared_layers"), "lacks num_kv_shared_layers"),
    "no weights": (lambda d: (d / "target/model.safetensors").unlink(), "no model.*safetensors"),
    "truncated data": (lambda d: truncate(d / "target/model.safetensors", 200_000), "truncated"),
    "truncated header": (lambda d: truncate(d / "target/model.safetensors", 100), "truncated"),
    "empty file": (lambda d: truncate(d / "target/model.safetensors", 0), "truncated"),
    "garbage": (lambda d: (d / "target/model.safetensors").write_bytes(struct.pack("<Q", 4) + b"abcd" * 9), "safetensors"),
    "truncated drafter": (lambda d: truncate(d / "assistant/model.safetensors", 9000), "truncated"),
    "no drafter config": (lambda d: (d / "assistant/config.json").unlink(), "no config.json"),
    "shapes": (lambda d: edit_config(d / "target", intermediate_size=96), "does not fit its config.json"),
    "broken tokenizer": (lambda d: (d / "target/tokenizer.json").write_text("{"), "tokenizer"),
    "a drafter that is a target": (lambda d: shutil.copy(d / "target/config.json", d / "assistant/config.json"), "drafter is"),
    "a target that is a drafter": (lambda d: shutil.copy(d / "assistant/config.json", d / "target/config.json"), "as target"),
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_cannot_be_loaded_is_refused_in_one_line(copy, spoil):
    act, message = SPOILS[spoil]
    act(copy)
    with pytest.raises(CheckpointError, match=message) as caught:
        mlx_gemma_mtp.load(copy / "target", copy / "assistant")
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(tmp_path):
    write_pair(tmp_path, "e2b", 1, shards=3)
    (tmp_path / "target" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        mlx_gemma_mtp.load(tmp_path / "target", None)


@pytest.mark.parametrize(("change", "message"), [
    ({"backbone_hidden_size": 96}, "hidden size 96, target has 64"),
    ({"sliding_window": 32}, "window 32, target has 16"),
    ({"global_head_dim": 64}, "head size of full layers 64, target has 32"),
    ({"head_dim": 32}, "head size of sliding layers 32, target has 16"),
    ({"num_key_value_heads": 2}, "heads of full layers 2, target has 1"),
    ({"vocab_size": 1024}, "vocabulary 1024, target has 512"),
])  # fmt: skip
def test_a_drafter_of_another_size_is_refused_with_both_values(copy, change, message):
    """Decided from the configs, before any weights are read."""
    edit_config(copy / "assistant", **change)
    with pytest.raises(PairMismatch, match=message):
        mlx_gemma_mtp.load(copy / "target", copy / "assistant")


def test_drafters_of_other_families_are_refused(make_pair_directory):
    with pytest.raises(PairMismatch, match="key/value heads"):
        mlx_gemma_mtp.load(make_pair_directory("e2b") / "target", make_pair_directory("e4b") / "assistant")


def test_no_drafter_for_auto_is_said(make_pair_directory):
    with pytest.raises(CheckpointError, match="no drafter belongs to"):
        mlx_gemma_mtp.load(make_pair_directory("e2b") / "target")


def test_weights_larger_than_the_machine_are_refused_with_the_numbers(make_pair_directory, monkeypatch):
    monkeypatch.setattr(checkpoint, "machine_bytes", lambda: 1_000_000)
    with pytest.raises(DoesNotFit, match=r"needs 0\.0 GB .* has 0\.0 GB"):
        mlx_gemma_mtp.load(make_pair_directory("e2b") / "target", None)


def test_an_adapter_changes_the_target_and_drafting_still_equals_plain_decoding(make_pair_directory, tmp_path):
    directory = make_pair_directory("e2b")
    model, _ = load_model(directory / "target", model_config=load_target_config(directory / "target"))
    from mlx_lm.tuner.utils import linear_to_lora_layers

    settings = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.up_proj"]}
    linear_to_lora_layers(model, 4, settings)
    changed = {n: mx.random.normal(a.shape) * 0.2 for n, a in tree_flatten(model.parameters()) if "lora_" in n}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), changed)
    config = {"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": settings}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    adapted = mlx_gemma_mtp.load(directory / "target", directory / "assistant", adapter_path=tmp_path)
    plain = mlx_gemma_mtp.load(directory / "target", directory / "assistant")
    assert tokens(adapted) == tokens(adapted, drafts=0) != tokens(plain)
    with pytest.raises(CheckpointError, match="adapter"):
        mlx_gemma_mtp.load(directory / "target", None, adapter_path=tmp_path / "nowhere")
