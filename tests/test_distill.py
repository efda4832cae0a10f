"""Training trains what decoding runs, survives a kill, and never makes a drafter worse."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from pairs import FAMILIES, WINDOW

import mlx_gemma_mtp
from mlx_gemma_mtp.convert import distill, texts, trainable, tuning
from mlx_gemma_mtp.convert.distill import Tuner
from mlx_gemma_mtp.convert.texts import DataError
from mlx_gemma_mtp.convert.training import (
    PositionMask,
    Recorder,
    exact_attention,
    fast_attention,
    fast_exp,
    training_math,
)
from mlx_gemma_mtp.convert.tuning import Run, Settings
from mlx_gemma_mtp.errors import OptionError
from mlx_gemma_mtp.speculative import prefill

DEMO = Path(mlx_gemma_mtp.__file__).parent / "demo"
STREAM = np.random.default_rng(0).integers(3, 500, 400).astype(np.int32)
SMALL = Settings(steps=6, length=4 * WINDOW, rows=2, anchors=4 * WINDOW, draft_length=3)


def arrays_of(drafter):
    return dict(tree_flatten(drafter.parameters()))


@pytest.fixture(scope="module")
def demo_tokenizer():
    return mlx_gemma_mtp.load(DEMO).tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_drafts_what_decoding_drafts(load_pair, make_pair_directory, family):
    """Hidden states of all chained steps, from anchors before and beyond the window, equal those of the decoding drafter."""
    pair, ids = load_pair(family), mx.array(STREAM[None, : 4 * WINDOW])
    drafter = trainable.load_trainable(make_pair_directory(family) / "assistant")
    with training_math():
        hidden, shared = tuning.teach(pair.target, ids)
        embeddings = [pair.target.embed(mx.pad(ids, [(0, 0), (0, 3)])[:, k : k + 4 * WINDOW]) for k in range(3)]
        before = mx.pad(hidden, [(0, 0), (1, 0), (0, 0)])[:, :-1]
        outputs = tuning.draft_chain(drafter, embeddings, before, 0, shared)
    for position in (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5):
        cache = prefill(pair.target, STREAM[: position + 1].tolist()).cache
        layers = cache.layers(cache.capacity)
        lent = {kind: layers[pair.target.shared_layer(kind)].lend() for kind in pair.drafter.layer_types}
        state = hidden[:, position - 1]
        for k in range(3):
            *_, state = pair.drafter.step(embeddings[k][:, position], state, cache.length, lent)
            trained = drafter.post_projection(outputs[k][:, position])
            assert mx.abs(trained - state).max() < 1e-3 * mx.abs(state).max()


@pytest.mark.parametrize("mask", [PositionMask(), PositionMask(16), PositionMask(16, 0, False), PositionMask(None, 0, False)])
def test_fast_attention_equals_exact_attention(mask):
    queries, keys, values = (mx.random.normal((2, heads, 64, 8), key=mx.random.key(heads)) for heads in (4, 2, 1))
    values = mx.concatenate([values, values + 1], axis=1)
    difference = exact_attention(queries, keys, values, mask=mask) - fast_attention(queries, keys, values, mask=mask)
    assert mx.abs(difference[:, :, 1:]).max() < 1e-5  # without itself, position 0 sees nothing


def test_fast_exp_and_its_gradient():
    x = mx.linspace(-12, 0, 100)
    assert mx.abs(fast_exp(x) / mx.exp(x) - 1).max() < 3e-4
    assert mx.allclose(mx.grad(lambda x: fast_exp(x).sum())(x), fast_exp(x))


def test_training_leaves_decoding_as_it_was(load_pair):
    pair, prompt = load_pair("e2b"), STREAM[:20].tolist()
    tokens = pair.generate(prompt, max_tokens=12).tokens
    with training_math():
        mx.eval(pair.target.hidden(mx.array([prompt]), [Recorder() for _ in pair.target.owners]))
    assert pair.generate(prompt, max_tokens=12).tokens == tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_falls_and_output_stays_that_of_plain_decoding(make_pair_directory, load_pair, tmp_path, family):
    pair, source = load_pair(family), make_pair_directory(family) / "assistant"
    run = Run(pair.target, source, STREAM, replace(SMALL, steps=20, rate=0.02), tmp_path)
    losses = [loss for _, loss in run.steps()]
    run.gradients.close()
    assert sum(losses[-4:]) < sum(losses[:4])
    trainable.save_drafter(run.fused(), source, tmp_path / "tuned", mx.float32)
    tuned = mlx_gemma_mtp.load(make_pair_directory(family) / "target", tmp_path / "tuned")
    prompt = STREAM[:30].tolist()
    plain = pair.generate(prompt, max_tokens=30, draft_length=0, ignore_eos=True).tokens
    assert tuned.generate(prompt, max_tokens=30, draft_length=4, ignore_eos=True).tokens == plain


def quantizable(_, module):
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def test_a_quantized_target_is_a_teacher_too(make_pair_directory, tmp_path):
    directory = make_pair_directory("e2b")
    target = mlx_gemma_mtp.load(directory / "target", None, dtype="float32").target
    nn.quantize(target.model, group_size=32, bits=4, class_predicate=quantizable)
    run = Run(target, directory / "assistant", STREAM, replace(SMALL, steps=20, rate=0.02), tmp_path)
    losses = [loss for _, loss in run.steps()]
    run.gradients.close()
    assert sum(losses[-4:]) < sum(losses[:4])
    trainable.save_drafter(run.fused(), directory / "assistant", tmp_path / "tuned", mx.float32)
    tuned = mlx_gemma_mtp.load(directory / "target", tmp_path / "tuned", dtype="float32")
    pair = mlx_gemma_mtp.Pair(target, tuned.drafter, tuned.tokenizer, "quantized")
    outputs = [pair.generate(STREAM[:30].tolist(), max_tokens=30, draft_length=k, ignore_eos=True).tokens for k in (0, 4)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("family", ["e2b", "dense31b"])
def test_a_quantized_drafter_is_tuned_by_low_rank_deltas(make_pair_directory, load_pair, tmp_path, family):
    directory, source = make_pair_directory(family), tmp_path / "quantized"
    drafter = trainable.load_trainable(directory / "assistant")
    nn.quantize(drafter, group_size=32, bits=8, class_predicate=quantizable)
    trainable.save_drafter(drafter, directory / "assistant", source, mx.float32)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 8}}))
    run = Run(load_pair(family).target, source, STREAM, replace(SMALL, steps=20, rate=0.02, rank=4), tmp_path / "work")
    losses = [loss for _, loss in run.steps()]
    run.gradients.close()
    assert sum(losses[-4:]) < sum(losses[:4])
    trainable.save_drafter(run.fused(), source, tmp_path / "tuned", mx.float32)
    old, new = (mx.load(str(path / "model.safetensors")) for path in (source, tmp_path / "tuned"))
    assert {n: (v.dtype, v.shape) for n, v in old.items()} == {n: (v.dtype, v.shape) for n, v in new.items()}
    mlx_gemma_mtp.load(directory / "target", tmp_path / "tuned").generate(STREAM[:20].tolist(), max_tokens=4)


def test_a_drafter_written_back_is_the_same(make_pair_directory, tmp_path):
    for family in ("e2b", "dense31b"):  # with a cluster head, and without
        source = make_pair_directory(family) / "assistant"
        trainable.save_drafter(trainable.load_trainable(source), source, tmp_path / family, mx.float32)
        old, new = mx.load(str(source / "model.safetensors")), mx.load(str(tmp_path / family / "model.safetensors"))
        assert old.keys() == new.keys()
        assert all(old[name].dtype == new[name].dtype and mx.array_equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("rank", [None, 4])
def test_a_killed_run_ends_like_an_unbroken_one(make_pair_directory, load_pair, tmp_path, rank):
    target, source = load_pair("e2b").target, make_pair_directory("e2b") / "assistant"
    settings = replace(SMALL, rank=rank)
    whole = Run(target, source, STREAM, settings, tmp_path / "whole")
    list(whole.steps())
    broken = Run(target, source, STREAM, settings, tmp_path / "broken")
    for step, _ in broken.steps():
        if step == 2:
            broken.save()
        if step == 4:  # killed here: two steps are lost
            break
    resumed = Run(target, source, STREAM, settings, tmp_path / "broken")
    assert [step for step, _ in resumed.steps()] == [3, 4, 5, 6]
    expected, got = arrays_of(whole.fused()), arrays_of(resumed.fused())
    assert all(mx.array_equal(expected[name], got[name]) for name in expected)
    for run in (whole, broken, resumed):
        run.gradients.close()


def test_a_checkpoint_of_other_settings_is_refused(make_pair_directory, load_pair, tmp_path):
    target, source = load_pair("e2b").target, make_pair_directory("e2b") / "assistant"
    Run(target, source, STREAM, SMALL, tmp_path).save()
    with pytest.raises(OptionError, match="belongs to a run with other data or options"):
        Run(target, source, STREAM[:-1], SMALL, tmp_path)


def test_a_drafter_that_gets_worse_is_not_kept(make_pair_directory, load_pair, tmp_path, monkeypatch):
    pair, source = load_pair("e2b"), make_pair_directory("e2b") / "assistant"
    lengths = iter([2.0, 1.5, 1.9])
    measured = lambda *_: {"rounds": 1, "acceptance_length": next(lengths), "acceptance_by_position": []}
    monkeypatch.setattr(Tuner, "measure", measured)
    run = Run(pair.target, source, STREAM, SMALL, tmp_path / "work")
    report = Tuner(pair.target, source, pair.tokenizer, [], SMALL, tmp_path).run(run, evaluations=2)
    assert report["kept"] == "source"
    old, new = mx.load(str(source / "model.safetensors")), mx.load(str(tmp_path / "model.safetensors"))
    assert all(mx.array_equal(old[name], new[name]) for name in old)


def test_loss_is_zero_where_drafter_and_target_agree(make_pair_directory):
    """With p the drafter's own distribution, what is left of the loss is the clusters' part, which is no negative number."""
    drafter = trainable.load_trainable(make_pair_directory("e2b") / "assistant")
    x = 0.1 * mx.random.normal((1, 2, 32), key=mx.random.key(0))
    p = mx.softmax(x @ trainable.output_table(drafter.head.tokens).T, axis=-1)
    routes = mx.log(p.reshape(1, 2, *drafter.head.ordering.shape).sum(-1))
    drafter.head.centroids = lambda _: routes  # centroids that know the mass of their clusters exactly
    entropy = -(p * mx.log(p)).sum(-1)
    assert mx.abs(tuning.step_loss(drafter, x, p) - entropy).max() < 1e-3


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("empty.txt", "", "empty.txt is empty"),
        ("blank.jsonl", "\n\n", "blank.jsonl is empty"),
        ("cut.jsonl", '{"text": "def f():"}\n{"text": "a', "cut.jsonl, line 2: invalid JSON"),
        ("kind.jsonl", '{"text": "def f():"}\n\n{"words": "a"}', "kind.jsonl, line 3: needs exactly one of"),
        ("number.jsonl", "7", "number.jsonl, line 1: needs exactly one of"),
        ("short.jsonl", '{"text": "def f():"}\n{"text": "("}', "short.jsonl, line 2: 2 tokens with the one that begins"),
        ("latin.txt", b"# one\n# caf\xe9\n", "latin.txt, line 2: not UTF-8"),
        ("roles.jsonl", '{"messages": [{"content": "a"}]}', "roles.jsonl, line 1: the chat template cannot render"),
    ],
)
def test_bad_data_is_refused_with_its_line(demo_tokenizer, tmp_path, name, content, message):
    with pytest.raises(DataError, match=message.replace("(", r"\(")):
        texts.read_documents(write(tmp_path / name, content), demo_tokenizer)


def test_missing_data_is_refused(demo_tokenizer, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        texts.read_documents(str(tmp_path / "nothing"), demo_tokenizer)


def test_texts_chats_and_prompts_are_read(demo_tokenizer, tmp_path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    lines = [{"text": "import os\n"}, {"prompt": "def"}, {"messages": messages}]
    write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))
    write(tmp_path / "b.py", "class A:\n    pass\n")
    documents = texts.read_documents(str(tmp_path), demo_tokenizer)
    assert [d.is_prompt for d in documents] == [False, True, False, False]
    decoded = [demo_tokenizer.wrapper.decode(d.ids) for d in documents]
    assert decoded[2] == "<bos><|turn>user\nHi<turn|>\n<|turn>model\nYo<turn|>\n"
    assert decoded[3] == "<bos>class A:\n    pass\n"


def test_held_out_documents_are_not_trained_on():
    stream, held_out = texts.split_held_out([[i, i] for i in range(40)])
    assert [ids[0] for ids in held_out] == [15, 31] and not set(stream.tolist()) & {15, 31}
    stream, held_out = texts.split_held_out([list(range(100))])
    assert stream.tolist() + held_out[0] == list(range(100))


def test_the_target_continues_prompts_as_plain_decoding_does(load_pair):
    pair, prompts = load_pair("e2b"), [STREAM[:5].tolist(), STREAM[:30].tolist(), STREAM[40:47].tolist()]
    got = texts.continue_prompts(pair.target, prompts, 12, rows=2)
    plain = [pair.generate(p, max_tokens=12, draft_length=0, ignore_eos=True).tokens for p in prompts]
    assert got == [p + tokens for p, tokens in zip(prompts, plain, strict=True)]


def test_the_command_tunes_a_drafter_and_reports(tmp_path, capsys):
    data = write(tmp_path / "data.txt", "def f(x):\n    return x + 1\n" * 60)
    sizes = ["--steps", "2", "--length", "64", "--rows", "2", "--prompts", "2"]
    assert distill.main(["--pair", str(DEMO), "--data", data, "--out", str(tmp_path / "out"), *sizes]) == 0
    assert "tokens per round" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "distill.json").read_text())
    assert report["best"]["acceptance_length"] >= report["before"]["acceptance_length"]
    mlx_gemma_mtp.load(DEMO / "target", tmp_path / "out")


def test_the_command_names_a_users_mistake_in_one_line(tmp_path, capsys):
    assert distill.main(["--pair", str(tmp_path / "no"), "--data", "-", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
