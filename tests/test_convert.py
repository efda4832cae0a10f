"""Converted pairs of every family: the same output where nothing is quantized, mlx-lm's logits where something is."""

import json
import os
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pairs
import pytest
from mlx_lm.utils import dequantize_model, load_model
from pairs import FAMILIES, write_pair

import mlx_gemma_mtp
from mlx_gemma_mtp import CheckpointError, OptionError, PairMismatch
from mlx_gemma_mtp.checkpoint import read_tensors
from mlx_gemma_mtp.cluster_head import ClusterHead
from mlx_gemma_mtp.config import load_target_config
from mlx_gemma_mtp.convert import __main__ as command
from mlx_gemma_mtp.convert import build, cluster, grid, parts
from mlx_gemma_mtp.convert.build import Options, convert
from mlx_gemma_mtp.convert.check import check
from mlx_gemma_mtp.convert.container import Entry, Writer, shard
from mlx_gemma_mtp.hub import Source

PROMPT = [3, 14, 15, 92, 65] * 7  # beyond the window
QUANTIZED = ("4bit", "mixed", "8bit")
SPELLINGS = {
    "published": {},
    "transformers 5.2x": {"per_layer_config": True, "shards": 3},
    "with unused tensors and towers": {"unused_kv": True, "towers": True, "shards": 2},
}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Few calibration prompts, and no waiting for the disk, which other processes may keep busy."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(cluster, "CALIBRATION_TOKENS", 12)


def convert_pair(directory, out, **options):
    quiet = lambda line: None
    options = Options(prompts=cluster.PROMPTS[:3], **options)
    return convert(Source(directory / "target", "target"), Source(directory / "assistant", "drafter"), out, options, quiet)


def generate(pair, draft_length=4, tokens=24):
    return pair.generate(PROMPT, max_tokens=tokens, draft_length=draft_length, ignore_eos=True).tokens


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_unquantized_pair_gives_the_tokens_of_its_source(make_pair_directory, tmp_path, family, spelling):
    source = make_pair_directory(family, 1, **SPELLINGS[spelling])
    made = convert_pair(source, tmp_path / "out", recipe="bf16", drafter_recipe="bf16", dtype="float32")
    before = mlx_gemma_mtp.load(source / "target", source / "assistant", dtype="float32")
    after = mlx_gemma_mtp.load(tmp_path / "out")
    assert generate(after) == generate(before)
    # The same drafts, too: every weight of the drafter is in its place.
    x = mx.random.normal((3, 32))
    scores, ids = after.drafter.candidates(x)
    expected, expected_ids = before.drafter.candidates(x)
    if ids is None:
        assert mx.array_equal(scores, expected)
    else:
        assert mx.array_equal(mx.sort(ids), mx.sort(expected_ids)) and mx.allclose(mx.sort(scores), mx.sort(expected))
    assert made["target"]["dropped"] == len(list(dropped_names(source)))


def dropped_names(source):
    config = json.loads((source / "target" / "config.json").read_text())["text_config"]
    owners = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    for name in read_tensors(source / "target"):
        key = re.search(r"language_model\.layers\.(\d+)\.self_attn\.[kv]_", name)
        if "language_model" not in name or (key and int(key[1]) >= owners):
            yield name


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_pair_has_the_logits_of_mlx_lm_and_mtp_equals_plain_decoding(make_pair_directory, tmp_path, family, recipe):
    convert_pair(make_pair_directory(family, 1, unused_kv=True), tmp_path / "out", recipe=recipe, dtype="float32")
    pair = mlx_gemma_mtp.load(tmp_path / "out")
    reference, config = load_model(tmp_path / "out" / "target", strict=True)
    cache = pair.target.empty_cache()
    cache.reserve(len(PROMPT))
    hidden = pair.target.hidden(mx.array([PROMPT]), cache.layers(len(PROMPT)))
    assert mx.allclose(pair.target.logits(hidden), reference(mx.array([PROMPT])), atol=1e-4)
    assert config["quantization"] == config["quantization_config"]
    assert generate(pair, 4) == generate(pair, 0)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_recipes_give_their_bits_to_every_module_and_routers_at_least_eight(make_pair_directory, tmp_path, recipe):
    convert_pair(make_pair_directory("moe26b"), tmp_path / "out", recipe=recipe)
    model, _ = load_model(tmp_path / "out" / "target", lazy=True)
    bits = {path: module.bits for path, module in model.named_modules() if hasattr(module, "bits")}
    small, mlp = (8 if recipe == "8bit" else 4), (4 if recipe == "4bit" else 8)
    for path, found in bits.items():
        assert found == (8 if path.endswith("router.proj") else mlp if ".mlp." in path else small), path
    left = [path for path, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    assert not left, "every product is quantized"


@pytest.mark.parametrize(("bits", "kind"), [(8, nn.QuantizedEmbedding), (16, nn.Embedding)])
def test_the_per_layer_embedding_table_has_its_own_bits(tmp_path, make_pair_directory, bits, kind):
    convert_pair(make_pair_directory("e2b"), tmp_path / "out", recipe="4bit", per_layer_bits=bits)
    model, _ = load_model(tmp_path / "out" / "target", lazy=True)
    table = model.language_model.model.embed_tokens_per_layer
    assert type(table) is kind and getattr(table, "bits", 16) == bits


def test_the_drafters_table_is_stored_once_and_by_cluster(make_pair_directory, tmp_path):
    source = make_pair_directory("e2b")
    convert_pair(source, tmp_path / "out", drafter_recipe="bf16", dtype="float32")
    made, given = read_tensors(tmp_path / "out" / "drafter"), read_tensors(source / "assistant")
    assert not any("embed" in name for name in made)
    assert made["head.tokens.weight"].shape == (16, 32, 32) and made["head.ordering"].dtype == "I32"
    table = np.array(parts.read_rows(given["model.embed_tokens.weight"], slice(None)))
    order = np.array(parts.read_rows(made["head.ordering"], slice(None)))
    assert np.array_equal(table[order], np.array(parts.read_rows(made["head.tokens.weight"], slice(None))))


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_quantized_cluster_head_equals_dequantized_arithmetic(bits, group_size, rows):
    mx.random.seed(bits + group_size)
    head = ClusterHead(64, 512, 16, 4)
    head.ordering = mx.random.permutation(512).reshape(16, 32)
    plain = ClusterHead(64, 512, 16, 4)
    plain.ordering = head.ordering
    nn.quantize(head, group_size, bits)
    for name in ("tokens", "centroids"):
        module = head[name]
        weight = mx.dequantize(module.weight, module.scales, module.biases, group_size, bits)
        plain[name].weight = weight
    hidden = mx.random.normal((rows, 64))
    scores, ids = head(hidden)
    expected, expected_ids = plain(hidden)
    assert mx.array_equal(ids, expected_ids) and mx.allclose(scores, expected, atol=1e-4)


@pytest.mark.parametrize("recipe", ["8bit", "4bit", "mixed"])
def test_quantized_cluster_drafters_draft_what_their_dequantized_weights_would(make_pair_directory, tmp_path, recipe):
    """For one row and for three, through the whole drafter."""
    convert_pair(make_pair_directory("e4b"), tmp_path / "out", recipe="bf16", drafter_recipe=recipe, dtype="float32")
    pair = mlx_gemma_mtp.load(tmp_path / "out")
    drafter, target = pair.drafter, pair.target
    plain = dequantize_model(mlx_gemma_mtp.load(tmp_path / "out").drafter)
    cache = target.empty_cache(3)
    cache.reserve(20)
    layers = cache.layers(20)
    hidden = target.hidden(mx.array([PROMPT[i : i + 20] for i in range(3)]), layers)[:, -1]
    cache.commit(layers, mx.array([20, 18, 15], mx.int32))
    layers = cache.layers(20)

    def step(model, rows):
        lent = {kind: layers[target.shared_layer(kind)].lend() for kind in model.layer_types}
        lent = {kind: tuple(array[rows] for array in arrays) for kind, arrays in lent.items()}
        embedding = target.embed(mx.array([7, 8, 9]))[rows]
        return model.step(embedding, hidden[rows], cache.length[rows], lent)

    together, expected = step(drafter, slice(0, 3)), step(plain, slice(0, 3))
    assert mx.array_equal(together[1], expected[1]), "the same clusters"
    assert mx.allclose(together[0], expected[0], atol=1e-4) and mx.allclose(together[2], expected[2], atol=1e-4)
    for row in range(3):
        for one, many in zip(step(drafter, slice(row, row + 1)), together):
            assert mx.allclose(one[0], many[row], atol=1e-4)


@pytest.mark.parametrize("family", ["unified12b", "moe26b", "dense31b"])
def test_a_dense_head_becomes_clusters_and_the_output_stays(make_pair_directory, tmp_path, family):
    source = make_pair_directory(family)
    made = convert_pair(source, tmp_path / "out", recipe="bf16", drafter_recipe="clusters", dtype="float32")
    head = made["drafter"]["head"]
    assert head["built"] and head["top1_agreement"] >= 0.99 and head["scored_clusters"] <= head["clusters"]
    assert head["top1_agreement_all_clusters"] == 1
    before = mlx_gemma_mtp.load(source / "target", source / "assistant", dtype="float32")
    after = mlx_gemma_mtp.load(tmp_path / "out")
    assert isinstance(after.drafter.head, ClusterHead) and after.drafter.head.scored_clusters == head["scored_clusters"]
    assert generate(after) == generate(before)
    assert not (tmp_path / "out" / cluster.CLUSTERS_FILE).exists()


def test_all_clusters_of_a_built_head_score_as_the_dense_head(make_pair_directory, tmp_path):
    source = make_pair_directory("dense31b")
    convert_pair(source, tmp_path / "out", recipe="bf16", drafter_recipe="clusters", dtype="float32")
    dense = mlx_gemma_mtp.load(source / "target", source / "assistant", dtype="float32").drafter
    built = mlx_gemma_mtp.load(tmp_path / "out").drafter
    built.head.scored_clusters = 128
    x = mx.random.normal((4, 32))
    scores, ids = built.candidates(x)
    assert mx.array_equal(mx.sort(ids), mx.broadcast_to(mx.arange(512), ids.shape))
    assert mx.allclose(mx.take_along_axis(dense.candidates(x)[0], ids, axis=1), scores, atol=1e-5)


@pytest.mark.parametrize(("vocab", "clusters", "size"), [(262144, 2048, 128), (512, 128, 4), (4096, 256, 16)])
def test_built_clusters_are_of_equal_size_and_hold_every_token_once(vocab, clusters, size):
    assert cluster.cluster_count(vocab) == clusters == vocab // size
    if vocab < 10000:
        order = cluster.balanced_order(np.random.default_rng(0).standard_normal((vocab, 16)).astype(np.float32), clusters)
        assert np.array_equal(np.sort(order), np.arange(vocab))


def test_balanced_clusters_find_clusters_that_are_there():
    random = np.random.default_rng(1)
    centers = 10 * random.standard_normal((16, 24))
    labels = random.permutation(np.repeat(np.arange(16), 32))
    table = (centers[labels] + random.standard_normal((512, 24))).astype(np.float32)
    found = labels[cluster.balanced_order(table, 16)].reshape(16, 32)
    assert np.mean([np.bincount(row).max() / 32 for row in found]) > 0.85
    order = cluster.refine(table, cluster.balanced_order(table, 16), 16)
    assert np.array_equal(np.sort(order), np.arange(512))
    assert np.mean([np.bincount(row).max() / 32 for row in labels[order].reshape(16, 32)]) > 0.9


@pytest.fixture
def grid_pair(tmp_path, monkeypatch):
    """dtype -> a pair whose matrices are on a Q4_0 grid, as ggml makes it: scales that are powers of two times 129 .. 255."""

    def on_grid(name, shape, seed):
        given = values(name, shape, seed)
        if given.dtype != np.float32 or len(shape) < 2 or shape[-1] % 32:
            return given
        random = np.random.default_rng(len(name))
        scale = random.integers(128, 256, (*shape[:-1], shape[-1] // 32, 1)) * np.float32(2.0**-13)
        return (scale * random.integers(-8, 8, (*scale.shape[:-1], 32))).reshape(shape).astype(np.float32)

    values = pairs.values

    def make(dtype):
        monkeypatch.setattr(pairs, "values", on_grid)
        write_pair(tmp_path / dtype, "e2b", 1, dtype=dtype)
        return tmp_path / dtype

    return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", ["4bit", "mixed"])
def test_weights_on_a_q4_0_grid_come_through_with_their_values_unchanged(grid_pair, tmp_path, dtype, recipe):
    source = grid_pair(dtype)
    made = convert_pair(source, tmp_path / "out", recipe=recipe)
    assert made["target"]["on_grid"] > 50 and made["drafter"]["on_grid"] > 15
    config = load_target_config(source / "target")
    before = load_model(source / "target", lazy=True, model_config=config)[0]
    after = load_model(tmp_path / "out" / "target", lazy=True)[0]
    plain, count = dict(before.named_modules()), 0
    for path, module in after.named_modules():
        if getattr(module, "bits", None) and module.group_size == 32 and module.bits == 4:
            scales, biases = (a.astype(mx.float32) for a in (module.scales, module.biases))
            values = mx.dequantize(module.weight, scales, biases, 32, 4)
            assert mx.array_equal(values.astype(plain[path].weight.dtype), plain[path].weight), path
            count += 1
    assert count == made["target"]["on_grid"]


def test_only_q4_0_weights_are_taken_for_such():
    random = np.random.default_rng(0)
    codes = random.integers(-8, 8, (8, 64)).astype(np.float32)
    scales = np.repeat(random.random((8, 2)).astype(np.float16).astype(np.float32), 32, axis=1)
    assert grid.lies_on_grid(mx.array(scales * codes)) and grid.lies_on_grid(mx.array(scales * codes).astype(mx.bfloat16))
    assert not grid.lies_on_grid(mx.array(random.standard_normal((8, 64)).astype(np.float32)).astype(mx.bfloat16))
    assert not grid.lies_on_grid(mx.zeros((8, 64))) and not grid.lies_on_grid(mx.ones((8, 48)))


@pytest.mark.parametrize("multiple", [7, -7, 3, 1])
def test_a_grid_is_found_whatever_the_largest_value_is_a_multiple_of(multiple):
    codes = np.random.default_rng(2).integers(-abs(multiple), abs(multiple) + 1, (4, 32)).astype(np.float32)
    codes[:, 0] = multiple
    weights = mx.array(codes * np.float32(0.01171875))
    packed, scales, biases = grid.pack(weights, mx.bfloat16)
    assert mx.array_equal(mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), 32, 4), weights)


def test_large_tensors_are_read_in_slices_and_come_out_the_same(make_pair_directory, tmp_path, monkeypatch):
    moe, clustered = make_pair_directory("moe26b", dtype="bfloat16"), make_pair_directory("e2b", dtype="bfloat16")
    mixed_sources = tmp_path / "source"
    mixed_sources.mkdir()
    (mixed_sources / "target").symlink_to(moe / "target")
    (mixed_sources / "assistant").symlink_to(clustered / "assistant")
    monkeypatch.setattr(build, "check_pair", lambda *_: None)  # experts on one side, clusters on the other
    convert_pair(mixed_sources, tmp_path / "whole", recipe="4bit")
    monkeypatch.setattr(parts, "WHOLE_BYTES", 6000)
    monkeypatch.setattr(parts, "SLICE_BYTES", 3000)
    convert_pair(mixed_sources, tmp_path / "sliced", recipe="4bit")
    for side in ("target", "drafter"):
        assert (tmp_path / "whole" / side / "model.safetensors").read_bytes() == (
            tmp_path / "sliced" / side / "model.safetensors"
        ).read_bytes()


def test_shards_are_bounded_and_readable(tmp_path):
    entries = [[Entry(f"t{i}", "F32", (10, 5))] for i in range(7)] + [[Entry("large", "I32", (400,))]]
    assert [len(files) for files in shard(entries, 500)] == [2, 2, 2, 1, 1]
    with Writer(tmp_path, entries, 500) as writer:
        for group in reversed(entries):
            for entry in group:
                kind = mx.float32 if entry.dtype == "F32" else mx.int32
                for row in range(entry.shape[0]):
                    writer.append(entry.name, mx.full((1, *entry.shape[1:]), row, kind))
        writer.finish()
    loaded = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        loaded |= mx.load(str(file))
    assert len(loaded) == 8 and set(read_tensors(tmp_path)) == set(loaded)
    assert mx.array_equal(loaded["large"], mx.arange(400)) and mx.array_equal(loaded["t3"][:, 0], mx.arange(10))


def test_a_quantized_source_is_taken_as_it_is(make_pair_directory, tmp_path):
    convert_pair(make_pair_directory("e2b"), tmp_path / "first", recipe="mixed", dtype="float32")
    target, drafter = (Source(tmp_path / "first" / side, side) for side in ("target", "drafter"))
    convert(target, drafter, tmp_path / "second", Options(), lambda line: None)
    for side in ("target", "drafter"):
        first, second = (tmp_path / n / side / "model.safetensors" for n in ("first", "second"))
        one, two = mx.load(str(first)), mx.load(str(second))
        assert one.keys() == two.keys() and all(mx.array_equal(one[n], two[n]) for n in one)
    assert generate(mlx_gemma_mtp.load(tmp_path / "second")) == generate(mlx_gemma_mtp.load(tmp_path / "first"))
    with pytest.raises(OptionError, match="quantized already"):
        convert(target, drafter, tmp_path / "third", Options(recipe="4bit"), lambda line: None)


def edit_config(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_sources_that_do_not_fit_are_refused_before_anything_is_written(tmp_path):
    write_pair(tmp_path / "a", "e2b", 1)
    write_pair(tmp_path / "b", "dense31b", 1)
    mixed = [Source(tmp_path / "a" / "target", "a"), Source(tmp_path / "b" / "assistant", "b")]
    with pytest.raises(PairMismatch):
        convert(*mixed, tmp_path / "out", Options(), print)
    text = json.loads((tmp_path / "a" / "target" / "config.json").read_text())["text_config"]
    edit_config(tmp_path / "a" / "target", text_config=text | {"intermediate_size": 64})
    with pytest.raises(CheckpointError, match=r"down_proj.* is \[64, 128\], config.json makes it \[64, 64\]"):
        convert_pair(tmp_path / "a", tmp_path / "out")
    edit_config(tmp_path / "a" / "target", text_config=text, quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(CheckpointError, match="compressed-tensors"):
        convert_pair(tmp_path / "a", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("options", [{"recipe": "5bit"}, {"drafter_recipe": "x"}, {"dtype": "int8"}, {"agreement": 2.0}])
def test_options_without_a_meaning_are_errors(make_pair_directory, tmp_path, options):
    with pytest.raises(OptionError):
        convert_pair(make_pair_directory("e2b"), tmp_path / "out", **options)


def test_a_per_layer_table_that_is_not_there_has_no_bits(make_pair_directory, tmp_path):
    with pytest.raises(OptionError, match="no per-layer-embedding"):
        convert_pair(make_pair_directory("dense31b"), tmp_path / "out", per_layer_bits=8)


def test_check_accepts_a_whole_pair_and_names_what_is_wrong_with_another(make_pair_directory, tmp_path, capsys):
    out = tmp_path / "out"
    convert_pair(make_pair_directory("e2b"), out, recipe="4bit", dtype="float32")
    assert command.main(["--check", str(out)]) == 0
    weights = out / "target" / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=f"has {len(whole) - 100} bytes of {len(whole)}"):
        check(out)
    tensor = read_tensors_of(whole, weights)["language_model.model.norm.weight"]
    nan = np.array([np.nan], np.float32).tobytes()
    weights.write_bytes(whole[: tensor.start] + nan + whole[tensor.start + 4 :])
    with pytest.raises(CheckpointError, match="norm.weight holds values that are not finite"):
        check(out)
    weights.write_bytes(whole)
    edit_config(out / "drafter", centroid_intermediate_top_k=3)
    with pytest.raises(CheckpointError, match="scores 3 clusters, pair.json says 8"):
        check(out)
    (out / "pair.json").unlink()
    assert command.main(["--check", str(out)]) == 2
    assert "has no pair.json" in capsys.readouterr().err


def read_tensors_of(data, path):
    path.write_bytes(data)
    return read_tensors(path.parent)


def test_the_command_converts_and_says_what_is_missing(make_pair_directory, tmp_path, capsys):
    source, out = make_pair_directory("e2b", dtype="bfloat16"), tmp_path / "out"
    arguments = [str(source / "target"), "--drafter", str(source / "assistant"), "--out", str(out)]
    assert command.main(arguments) == 0
    made = json.loads((out / "pair.json").read_text())
    assert (made["target"]["recipe"], made["drafter"]["recipe"]) == ("mixed", "8bit")
    assert made["target"]["source"] == str(source / "target")
    for missing, message in (
        ([str(source / "target"), "--out", str(out)], "no drafter is known"),
        ([str(source / "target"), "--drafter", "none"], "--out DIR is needed"),
        ([], "no SOURCE"),
        (["E9"], "E9 is not a directory"),
        (arguments, "--force"),
    ):
        capsys.readouterr()
        assert command.main(missing) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert command.main([str(source / "target"), "--drafter", "none", "--out", str(tmp_path / "alone")]) == 0
    alone = mlx_gemma_mtp.load(tmp_path / "alone", None)
    assert generate(alone, 0, 4) == generate(mlx_gemma_mtp.load(out), 2, 4)
