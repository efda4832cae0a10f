"""Sampled sequences follow the target's distribution, whatever the drafter does; checked against exact enumeration."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from pairs import FAMILIES
from scripted import SCRIPTS, ScriptedEngine, run_rows

from mlx_gemma_mtp import Auto, Fixed, OptionError, Sampling, sampling
from mlx_gemma_mtp.cache import Cache
from mlx_gemma_mtp.knowledge import Costs, Knowledge, octave
from mlx_gemma_mtp.sampling import Method, Sampler, method_of
from mlx_gemma_mtp.speculative import Engine

V, LENGTH, ROWS, START = 6, 3, 4000, 2


class Chain:
    """A target whose logits depend on the last token alone, so that every sequence's probability is known."""

    class args:
        num_attention_heads = 1

    dtype = mx.float32

    def __init__(self, table):
        self.table = table

    def empty_cache(self):
        return Cache.empty([], [], [], mx.float32)

    def embed(self, tokens):
        return mx.eye(V)[tokens]

    hidden = lambda self, tokens, layers: self.embed(tokens)
    logits = lambda self, hidden: hidden @ self.table


class ChainDrafter:
    """A drafter of the same kind. ids: it scores the vocabulary in another order, like a cluster head."""

    layer_types = ()

    def __init__(self, table, ids):
        self.table, self.ids = table, ids

    def step(self, embedding, hidden, position, lent):
        scores = embedding @ self.table
        if self.ids is None:
            return scores, None, hidden
        ids = mx.broadcast_to(self.ids, scores.shape)
        return mx.take_along_axis(scores, ids, axis=1), ids, hidden


TABLE = mx.array(np.random.default_rng(5).normal(size=(V, V)) * 1.5, mx.float32)
OTHER = mx.array(np.random.default_rng(6).normal(size=(V, V)) * 1.5, mx.float32)
DRAFTERS = {
    "good": ChainDrafter(TABLE + 0.3 * OTHER, None),
    "bad": ChainDrafter(OTHER, mx.array([[3, 1, 5, 0, 2, 4]])),
    "adversarial": ChainDrafter(-TABLE, None),
    "overconfident": ChainDrafter(12 * TABLE + 8 * OTHER, mx.array([[5, 4, 3, 2, 1, 0]])),
}
WARPS = {
    "none": {}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.2},
    "all": {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
}  # fmt: skip


def exact(options):
    """Probability of each next token by last token [V, V], warped in numpy in transformers' order."""
    logits = np.array(TABLE, np.float64) / options.temperature
    for line in logits:
        if options.top_k:
            line[line < np.sort(line)[-min(options.top_k, V)]] = -np.inf
        p = np.exp(line - line.max())
        p /= p.sum()
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        line[order[before >= options.top_p]] = -np.inf
        line[p < options.min_p * p.max()] = -np.inf
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def p_value(options, sequences):
    """Chi-square of sequences against exact enumeration; cells under 5 expected are one. Wilson and Hilferty 1931."""
    step = exact(options)
    counts, cells, rest = {}, [], [0.0, 0]
    for sequence in sequences:
        counts[tuple(sequence)] = counts.get(tuple(sequence), 0) + 1
    for sequence in itertools.product(range(V), repeat=LENGTH):
        expected = len(sequences) * math.prod(step[a, b] for a, b in zip((START, *sequence), sequence))
        seen = counts.get(sequence, 0)
        if expected == 0 and seen:
            return 0.0
        if expected >= 5:
            cells.append((expected, seen))
        else:
            rest = [rest[0] + expected, rest[1] + seen]
    if rest[0] > 1:
        cells.append(tuple(rest))
    square, freedom = sum((s - e) ** 2 / e for e, s in cells), max(len(cells) - 1, 1)
    z = ((square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


class CutOnConfidence:
    """Verifies drafts up to the first unsure one."""

    draft_length, wants_confidence = 3, True

    def begin(self):
        return self

    def verify(self, drafts, confidence):
        sure = [np.cumprod(np.array(row) > 0.6).sum() for row in confidence]
        return int(max(sure, default=0)) if drafts else 0

    def observe(self, *_):
        pass


def sample(rule, drafter, options, policy=None, engine=Engine, seed=1, rows=ROWS):
    method = method_of([options], V, None)
    method = Method(rule, method.top_k, method.has_top_p, method.has_min_p)
    resolved = [Sampling(seed=seed * rows + i, **vars_of(options)) for i in range(rows)]
    sampler = Sampler(method, sampling.knobs_of(resolved, method, V, ()))
    engine = engine(Chain(TABLE), drafter)
    done = run_rows(engine, [[START]] * rows, [LENGTH] * rows, policy or Fixed(2), sampler=sampler)
    return [row.tokens for row in done]


def vars_of(options):
    return {name: value for name, value in vars(options).items() if name != "seed"}


def options_of(temperature, warp):
    return Sampling(**{"temperature": temperature, "top_k": 0} | WARPS[warp]).resolve({})


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", ["residual", "coupled"])
def test_sampled_sequences_follow_the_target_distribution(rule, drafter, temperature):
    for index, warp in enumerate(WARPS):
        options = options_of(temperature, warp)
        assert p_value(options, sample(rule, DRAFTERS[drafter], options, seed=index + 1)) > 1e-4, warp


@pytest.mark.parametrize("drafter", ["good", "bad"])
@pytest.mark.parametrize("policy", ["cut", "auto"])
def test_a_cut_on_confidence_does_not_bias(policy, drafter):
    """In small batches, where the surest row decides how many drafts of all rows are verified and the width varies."""
    options, widths = options_of(1.0, "none"), set()

    class Watched(Engine):
        def run_round(self, state, *rest):
            widths.add(state.width)
            return super().run_round(state, *rest)

    know = Knowledge({(1, octave(0)): Costs({1: 1.0, 3: 1.5, 5: 2.4, 9: 4.0}, 0.02)})
    chosen = CutOnConfidence() if policy == "cut" else Auto(know)
    sequences = []
    for batch in range(200):
        sequences += sample("residual", DRAFTERS[drafter], options, chosen, Watched, seed=batch, rows=3)
    assert p_value(options, sequences) > 1e-4
    assert len(widths) > 2


class ArgmaxDrafts(Engine):
    """The mistake of several runtimes: the draft is the argmax, q is the softmax."""

    def _draft(self, windows, read, drafts, method):
        honest = super()._draft(windows, read, drafts, method)

        def draft(pending, *rest):
            block, confidence, carried = honest(pending, *rest)
            best = mx.take_along_axis(carried["q_ids"], mx.argmax(carried["log_q"], axis=-1, keepdims=True), axis=-1)[..., 0]
            return mx.concatenate([pending, best.astype(mx.int32)], axis=1), confidence, carried

        return draft


def test_argmax_drafts_against_a_softmax_q_fail_the_same_test():
    options = options_of(1.0, "none")
    assert p_value(options, sample("residual", DRAFTERS["good"], options, engine=ArgmaxDrafts)) < 1e-6


def one_step(count=20000):
    """p = [.5 .3 .2], q = [.1 .6 .3], one draft per row. Returns drafts, accepted counts, first tokens, samples of p."""
    p, q = ([mx.log(mx.array(x))[None, None] for x in ([0.5, 0.3, 0.2], [0.1, 0.6, 0.3])])
    wide = lambda a, n: mx.broadcast_to(a, (count, n, 3))
    ids = mx.broadcast_to(mx.arange(3), (count, 2, 3))
    seed, position = mx.arange(count).astype(mx.uint32), mx.broadcast_to(mx.array([[7, 8]]), (count, 2))
    drafts = sampling._draw(wide(q, 1), ids[:, :1], seed, position[:, :1], sampling.DRAFT)
    n, tokens = sampling._accept_residual(wide(p, 2), ids, drafts, (wide(q, 1), ids[:, :1]), position, seed, dense=True)
    plain = sampling._draw(wide(p, 1), ids[:, :1], seed, position[:, :1], sampling.CHOOSE)
    return tuple(np.array(a).reshape(count, -1)[:, 0] for a in (drafts, n, tokens, plain))


def test_the_accepted_share_of_a_step_is_what_theory_says():
    """Accepted with probability sum(min(p, q)) = .6; the residual is all token 0."""
    _, n, first, _ = one_step()
    assert n.mean() == pytest.approx(0.6, abs=0.015)
    assert np.bincount(first, minlength=3) / len(first) == pytest.approx([0.5, 0.3, 0.2], abs=0.015)
    assert set(first[n == 0]) == {0}


def test_a_cut_that_looks_at_the_draft_itself_is_biased():
    """Why confidence is the largest q, not the draft's own: leaving drafts of small q unverified makes .5 into .45."""
    drafts, _, first, plain = one_step()
    cut = np.where(drafts == 0, plain, first)
    assert (cut == 0).mean() == pytest.approx(0.45, abs=0.012)


@pytest.mark.parametrize("vocab", [10, 64, 1000, 8192, 8197])
@pytest.mark.parametrize("count", [1, 5, 64])
def test_top_candidates_are_the_largest_in_order(vocab, count):
    logits = mx.random.normal((3, 2, vocab), key=mx.random.key(vocab))
    values, ids = sampling.top_candidates(logits, min(count, vocab))
    expected = np.argsort(-np.array(logits), axis=-1)[..., :count]
    assert np.array_equal(np.array(ids), expected)
    assert mx.array_equal(values, mx.take_along_axis(logits, ids, axis=-1))


def test_noise_is_uniform_and_independent_across_seeds_positions_streams_and_ids():
    seed, position = mx.arange(200).astype(mx.uint32), mx.broadcast_to(mx.arange(50), (200, 50))
    ids = mx.broadcast_to(mx.arange(20), (200, 50, 20))
    u = np.array(sampling.uniform(seed, position, sampling.CHOOSE, ids))
    assert u.min() > 0 and u.max() < 1
    assert np.histogram(u, bins=50, range=(0, 1))[0] == pytest.approx(4000, abs=5 * 63)
    other = np.array(sampling.uniform(seed, position, sampling.DRAFT, ids))
    shifts = (u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[..., 1:], u[..., :-1]), (u, other)
    assert all(abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01 for a, b in shifts)


# --- with models -----------------------------------------------------------------------------------------------------

PROMPT = [2, 17, 99, 240, 31, 8, 44, 5, 301, 77, 12, 13, 9]
WARM = Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=11)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_gives_the_same_text_for_every_draft_length_and_drafter(load_pair, family):
    pair, other = load_pair(family), load_pair(family, 2).drafter
    run = lambda k, s=WARM: pair.generate(PROMPT, max_tokens=24, draft_length=k, sampling=s, ignore_eos=True).tokens
    expected = run(0)
    assert all(run(k) == expected for k in (1, 4, 7, "heuristic", None))
    own, pair.engine.drafter = pair.engine.drafter, other
    pair.engine._compiled.clear()
    assert run(4) == expected
    pair.engine.drafter = own
    pair.engine._compiled.clear()
    assert run(4, Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=12)) != expected
    assert run(4) == expected


def test_a_seed_gives_the_same_text_in_any_batch(load_pair):
    pair = load_pair("e2b")
    rows = [
        WARM, Sampling(temperature=0.7, top_k=5, seed=3), Sampling(temperature=0.0), Sampling(temperature=1.2, top_k=9),
        Sampling(temperature=1.0, top_k=0, seed=8), Sampling(temperature=0.8, top_k=0, top_p=0.7, seed=9),
    ]  # fmt: skip
    alone = [pair.generate(PROMPT, max_tokens=20, draft_length=0, sampling=s, ignore_eos=True).tokens for s in rows]
    for chosen in ([0, 1, 2, 3], [0, 1, 2, 4], [2, 4, 5], [5, 0]):
        sampler = Sampler.of([rows[i].resolve({}) for i in chosen], 512)
        batch = run_rows(pair.engine, [PROMPT] * len(chosen), [20] * len(chosen), Fixed(3), sampler=sampler)
        for index, row in zip(chosen, batch):
            assert index == 3 or row.tokens == alone[index]  # row 3 has no seed


def test_a_draw_without_a_seed_is_new_each_time_and_drafting_still_accepts(load_pair):
    pair = load_pair("e2b")
    runs = [
        pair.generate(PROMPT, max_tokens=20, draft_length=3, sampling=Sampling(temperature=1.5), ignore_eos=True)
        for _ in range(3)
    ]
    assert len({tuple(r.tokens) for r in runs}) == 3


def test_the_checkpoint_decides_what_the_user_leaves_open():
    shipped = {"do_sample": True, "temperature": 0.9, "top_k": 64, "top_p": 0.95}
    full = Sampling().resolve(shipped)
    assert (full.temperature, full.top_k, full.top_p) == (0.9, 64, 0.95)
    assert Sampling(temperature=0).resolve(shipped).temperature == 0
    assert Sampling().resolve({"do_sample": False, "temperature": 1.0}).temperature == 0
    assert Sampling().resolve({}).temperature == 0
    assert Sampling(top_k=0).resolve(shipped).top_k == 0


@pytest.mark.parametrize("wrong", [
    {"temperature": -1}, {"temperature": "hot"}, {"top_k": -1}, {"top_k": 1.5}, {"top_p": 1.1}, {"min_p": -0.1},
    {"repetition_penalty": 0}, {"penalty_context": 0}, {"seed": -1}, {"seed": 1 << 32}, {"top_p": True},
    {"temperature": float("nan")},
])  # fmt: skip
def test_values_that_mean_nothing_are_refused(wrong):
    with pytest.raises(OptionError):
        Sampling(**wrong)


def test_a_bias_for_a_token_that_does_not_exist_is_refused(load_pair):
    with pytest.raises(OptionError, match="0 to 511"):
        load_pair("e2b").generate(PROMPT, sampling=Sampling(logit_bias={512: 1.0}))


def reference(pair, options, count, processor=None):
    """Plain greedy decoding with penalties as transformers computes them, one full pass per token."""
    text, out = list(PROMPT), []
    for _ in range(count):
        cache = pair.target.empty_cache()
        cache.reserve(len(text))
        hidden = pair.target.hidden(mx.array([text]), cache.layers(len(text)))
        logits = np.array(pair.target.logits(hidden[:, -1]))[0]
        for token, value in (options.logit_bias or {}).items():
            logits[token] += value
        window = text[-options.penalty_context :]
        for token in set(window):
            penalty = options.repetition_penalty or 1.0
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            logits[token] -= options.presence_penalty + options.frequency_penalty * window.count(token)
        if processor:
            logits = np.array(processor(mx.array(text), mx.array(logits)[None]))[0]
        out.append(int(logits.argmax()))
        text.append(out[-1])
    return out


OPTIONS = {
    "repetition": Sampling(repetition_penalty=1.4),
    "presence and frequency": Sampling(presence_penalty=0.8, frequency_penalty=0.5, penalty_context=10),
    "bias": Sampling(logit_bias={7: 3.0, 8: -50.0, 100: 2.5}),
    "everything": Sampling(repetition_penalty=1.2, frequency_penalty=0.3, penalty_context=33, logit_bias={5: 2.0}),
}


def never_twice_in_a_row(tokens, logits):
    """A custom processor that depends on the history at its position."""
    return mx.where(mx.arange(logits.shape[-1]) == tokens[-1], -1e9, logits + 0.5 * (mx.arange(512) == len(tokens)))


def accepted_drafts(pair, expected, sampler):
    """The same with a drafter that is mostly right, so that the later positions of a block are emitted too."""
    engine = ScriptedEngine(pair.target, pair.drafter, [PROMPT + expected], SCRIPTS["uneven"])
    return run_rows(engine, [PROMPT], [len(expected)], Fixed(4), sampler=sampler)[0].tokens


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_with_drafting_equals_plain_decoding(load_pair, family, name):
    pair, options = load_pair(family), OPTIONS[name]
    expected = reference(pair, options, 20)
    for drafts in (0, 4):
        done = pair.generate(PROMPT, max_tokens=20, draft_length=drafts, sampling=options, ignore_eos=True)
        assert done.tokens == expected, drafts
    assert accepted_drafts(pair, expected, Sampler.of([options.resolve({})], 512)) == expected


@pytest.mark.parametrize("family", ["e2b", "moe26b"])
def test_custom_processors_see_the_right_history_at_every_position(load_pair, family):
    pair, options = load_pair(family), Sampling(repetition_penalty=1.3)
    expected = reference(pair, options, 20, never_twice_in_a_row)
    for drafts in (0, 1, 4):
        common = {"max_tokens": 20, "logits_processors": [never_twice_in_a_row], "ignore_eos": True}
        assert pair.generate(PROMPT, draft_length=drafts, sampling=options, **common).tokens == expected
    sampler = Sampler.of([options.resolve({})], 512, processors=((never_twice_in_a_row,),))
    assert accepted_drafts(pair, expected, sampler) == expected
    with_seed = [pair.generate(PROMPT, draft_length=k, sampling=WARM, **common).tokens for k in (0, 4)]
    assert with_seed[0] == with_seed[1]


@pytest.mark.parametrize("options", [Sampling(temperature=0), WARM, Sampling(temperature=0, repetition_penalty=1.5)])
def test_logprobs_are_those_of_the_target(load_pair, options):
    pair = load_pair("e4b")
    for drafts in (0, 4):
        done = pair.generate(PROMPT, max_tokens=15, draft_length=drafts, sampling=options, logprobs=3, ignore_eos=True)
        assert [entry.token for entry in done.logprobs] == done.tokens
        text = PROMPT + done.tokens
        cache = pair.target.empty_cache()
        cache.reserve(len(text))
        logits = pair.target.logits(pair.target.hidden(mx.array([text]), cache.layers(len(text))))[0]
        logs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        for position, entry in enumerate(done.logprobs, len(PROMPT) - 1):
            assert entry.logprob == pytest.approx(logs[position, entry.token], abs=1e-3)
            best = np.argsort(-logs[position])[:3]
            assert [i for i, _ in entry.top] == best.tolist()
            assert [p for _, p in entry.top] == pytest.approx(logs[position][best].tolist(), abs=1e-3)


def test_no_logprobs_are_computed_unless_asked_for(load_pair):
    done = load_pair("e2b").generate(PROMPT, max_tokens=5, draft_length=2)
    assert done.logprobs == []


def test_image_and_audio_tokens_are_never_emitted(load_pair):
    """They are -inf before anything else, with the suppress_tokens of generation_config.json."""
    pair = load_pair("dense31b")
    free = pair.generate(PROMPT, max_tokens=20, draft_length=2, ignore_eos=True).tokens
    pair.tokenizer.suppressed = tuple(sorted(set(free[:5])))
    try:
        for drafts in (0, 4):
            done = pair.generate(PROMPT, max_tokens=20, draft_length=drafts, ignore_eos=True)
            assert not set(done.tokens) & set(pair.tokenizer.suppressed)
    finally:
        pair.tokenizer.suppressed = ()
