"""The drafter reads the cache without a copy, a round is one evaluation, and memory stays flat."""

import mlx.core as mx
import mlx.nn as nn
import pairs
import pytest
from mlx.utils import tree_flatten
from pairs import write_pair
from scripted import SCRIPTS, ScriptedEngine

import mlx_gemma_mtp
from mlx_gemma_mtp import Auto, Fixed, speculative
from mlx_gemma_mtp.cache import bucket
from mlx_gemma_mtp.knowledge import Costs, Knowledge, octave
from mlx_gemma_mtp.speculative import Row, State, decode, prefill

LONG = 12_288


@pytest.fixture(scope="module")
def wide_pair(tmp_path_factory):
    """A pair of two layers with one head of size 512, so that keys are large and scores small: G x E >= 20 x H x T."""
    original = pairs.target_text_config

    def wide(family, vocab):
        return original(family, vocab) | {
            "num_attention_heads": 1, "num_key_value_heads": 1, "num_global_key_value_heads": 1, "head_dim": 128,
            "global_head_dim": 512, "num_hidden_layers": 2, "layer_types": [pairs.SLIDING, pairs.FULL],
        }  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "target_text_config", wide)
        directory = tmp_path_factory.mktemp("wide")
        write_pair(directory, "dense31b", 1)
    return mlx_gemma_mtp.load(directory / "target", directory / "assistant", dtype="float32")


def long_state(pair, length):
    """A state of `length` committed tokens, with random keys and values in place of a long prefill."""
    cache = pair.target.empty_cache()
    cache.reserve(length + 64)
    for arrays in (cache.keys, cache.values):
        arrays[:] = [mx.random.normal(a.shape) for a in arrays]
    cache.length = mx.array([length], mx.int32)
    state = State(cache, mx.array([[5]], mx.int32), mx.zeros((1, 0)))
    mx.eval(cache.arrays)
    return state


def peak_of_rounds(pair, state, rounds, hold_view=False):
    """Largest memory beyond live memory during a round with K = 4, and the bytes of its scores and of one buffer."""
    active, worst = mx.ones((1,), mx.int32), 0
    for count in range(rounds + 2):
        view = state.cache.keys[-1][:, :, :8] if hold_view else None
        mx.eval([] if view is None else view)
        mx.reset_peak_memory()
        live = mx.get_active_memory()
        read = bucket(LONG + 5 * (rounds + 2))
        done = pair.engine.run_round(state, active, read, 4)
        mx.eval(done, state.block, *state.cache.arrays)
        if count >= 2:  # the first have another width, or make the graph
            worst = max(worst, mx.get_peak_memory() - live)
        del view
    return worst, 1 * 5 * read * 4, state.cache.keys[-1].nbytes


@pytest.mark.compiled
def test_the_drafter_reads_the_cache_without_a_copy(wide_pair):
    peak, scores, buffer = peak_of_rounds(wide_pair, long_state(wide_pair, LONG), 4)
    assert peak - scores < 0.05 * buffer


@pytest.mark.compiled
def test_the_bound_on_copies_fails_when_a_view_is_kept(wide_pair):
    peak, scores, buffer = peak_of_rounds(wide_pair, long_state(wide_pair, LONG), 4, hold_view=True)
    assert peak - scores > 0.9 * buffer


@pytest.mark.compiled
@pytest.mark.parametrize("drafts", [0, 4])
def test_plain_decoding_and_drafting_hold_no_copy_of_the_cache_while_they_run_ahead(wide_pair, drafts):
    state = long_state(wide_pair, LONG)
    row = Row([5] * (LONG + 1), 30)
    running = decode(wide_pair.engine, state, [row], Fixed(drafts).begin())
    for _ in range(5):
        next(running)
    mx.reset_peak_memory()
    live = mx.get_active_memory()
    for _ in running:
        pass
    assert mx.get_peak_memory() - live < 0.15 * state.cache.keys[-1].nbytes


@pytest.mark.compiled
def test_memory_is_flat_over_five_thousand_rounds(wide_pair):
    engine = ScriptedEngine(wide_pair.target, wide_pair.drafter, [[3] * 6000], SCRIPTS["wrong"])
    state = prefill(engine.target, [5, 6, 7])
    row, used = Row([5, 6, 7], 5001), []
    for count, _ in enumerate(decode(engine, state, [row], Fixed(1).begin())):
        if count in (1000, 4990):
            used.append(mx.get_active_memory() - sum(a.nbytes for a in state.cache.arrays))
    assert len(row.tokens) == 5001
    assert abs(used[1] - used[0]) < 200_000


class Count:
    """Counts evaluations and host reads, those hidden in conversions of arrays to numbers included."""

    READS = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__", "__complex__", "__iter__")

    def __init__(self, patch):
        self.evaluations = self.reads = 0
        for module_name in ("eval", "async_eval"):
            patch.setattr(mx, module_name, self._wrap(getattr(mx, module_name), "evaluations"))
        for name in self.READS:
            if name in vars(mx.array):
                patch.setattr(mx.array, name, self._wrap(getattr(mx.array, name), "reads"))

    def _wrap(self, function, counter):
        def counted(*arguments, **options):
            setattr(self, counter, getattr(self, counter) + 1)
            return function(*arguments, **options)

        return counted


AUTO = Auto(Knowledge({(1, octave(0)): Costs({1: 1.0, 9: 1.1}, 0.01)}))


@pytest.mark.parametrize(("policy", "reads"), [(Fixed(0), 1), (Fixed(4), 1), (AUTO, 2)])
def test_a_round_is_one_evaluation_and_reads_its_report_once(load_pair, policy, reads, monkeypatch):
    """The automatic draft length reads the confidences too, at the same sync."""
    pair = load_pair("e2b")
    state = prefill(pair.target, [5, 6, 7, 8])
    controller = policy.begin()
    count = Count(monkeypatch)
    rounds = list(decode(pair.engine, state, [Row([5, 6, 7, 8], 40)], controller))
    assert len(rounds) > 10
    assert count.evaluations == len(rounds)
    assert count.reads == reads * len(rounds)


def test_the_count_sees_hidden_reads(monkeypatch):
    count = Count(monkeypatch)
    int(mx.array(3)), bool(mx.array(True)), mx.array([1]).tolist(), mx.array(1.0).item()
    mx.eval(mx.array(1) + 1)
    assert (count.reads, count.evaluations) == (4, 1)


@pytest.mark.parametrize("family", ["e2b", "dense31b"])
def test_the_drafter_reads_the_embedding_array_of_the_target(load_pair, family, monkeypatch):
    """It holds none of that size; and what is written into the target's array, also a quantized one, it reads."""
    pair = load_pair(family)
    args, sizes = pair.target.args, [a.size for _, a in tree_flatten(pair.drafter.parameters())]
    assert args.vocab_size * args.hidden_size not in sizes
    seen = []
    step = type(pair.drafter).step
    monkeypatch.setattr(type(pair.drafter), "step", lambda self, e, *rest: (seen.append(e), step(self, e, *rest))[1])
    quantized = nn.QuantizedEmbedding.from_embedding(pair.target.embed_tokens, group_size=32, bits=8)
    for table in (pair.target.embed_tokens, quantized):
        monkeypatch.setattr(pair.target, "embed_tokens", table)
        table_before = dict(table)
        for scale in (1.0, 2.0):
            for name in ("weight",) if table is not quantized else ("scales", "biases"):
                table[name] = table_before[name] * scale
            state = State(pair.target.empty_cache(), mx.array([[5]], mx.int32), mx.zeros((1, 0)))
            state.cache.reserve(8)
            draft = pair.engine._draft((None, None), 8, 1, speculative.GREEDY.method)
            layers = [pair.target.shared_layer(kind) for kind in pair.drafter.layer_types]
            keys, values = [state.cache.keys[i] for i in layers], [state.cache.values[i] for i in layers]
            draft(state.block, mx.zeros((1, args.hidden_size)), mx.array([1]), keys, values, {})
        table.update(table_before)
        assert mx.allclose(2 * seen[-2], seen[-1]) and seen[-1].abs().max() > 0
