"""Batches that rows leave and join: each row as if it were alone."""

import pytest
from pairs import FAMILIES, write_pair
from tiny_tokenizer import write_tokenizer

import mlx_gemma_mtp
from mlx_gemma_mtp import Fixed, OptionError, PromptError, Sampling, batch
from mlx_gemma_mtp.batch import cache_bytes

LIMITS = [5, 18, 1, 9, 12, 3, 7, 15, 2]


def words(count, salt):
    return [(salt * 37 + i * i * 11 + i) % 480 + 20 for i in range(count)]


PROMPTS = [words(3 + 11 * i % 70, i) for i in range(len(LIMITS))]


@pytest.fixture(scope="module")
def alone():
    """family -> the tokens of every row by itself, computed once."""
    known = {}

    def compute(pair, family):
        if family not in known:
            one = lambda p, n: pair.generate(p, max_tokens=n, ignore_eos=True, draft_length=0, reuse=False).tokens
            known[family] = [one(p, n) for p, n in zip(PROMPTS, LIMITS)]
        return known[family]

    return compute


@pytest.mark.parametrize(("family", "rows", "drafts"), [
    *((family, 3, 3) for family in FAMILIES), ("e2b", 1, 2), ("e2b", 2, 0), ("e2b", 8, 4), ("e2b", 32, 16),
])  # fmt: skip
def test_rows_that_leave_and_join_equal_the_rows_alone(load_pair, alone, family, rows, drafts):
    pair = load_pair(family)
    done = pair.generate_batch(PROMPTS, max_tokens=LIMITS, ignore_eos=True, rows=rows, draft_length=drafts)
    assert [d.tokens for d in done] == alone(pair, family)
    assert [d.finish_reason for d in done] == ["length"] * len(LIMITS)
    assert [(d.stats.prompt_tokens, d.stats.generated_tokens) for d in done] == [(len(p), n) for p, n in zip(PROMPTS, LIMITS)]


def test_what_rounds_of_a_batch_cost_is_kept_apart(load_pair, alone):
    pair = load_pair("e2b")
    done = pair.generate_batch(PROMPTS, max_tokens=LIMITS, ignore_eos=True, rows=4)
    assert [d.tokens for d in done] == alone(pair, "e2b")
    assert {rows for rows, _ in pair.auto.knowledge.costs} >= {1, 4}


def test_batches_come_in_few_sizes_and_no_more_rows_than_asked_for(load_pair, monkeypatch):
    pair, seen = load_pair("e2b"), set()
    original = batch.decode

    def watch(engine, state, rows, *rest):
        seen.add((state.rows, sum(row.finish_reason is None for row in rows)))
        return original(engine, state, rows, *rest)

    monkeypatch.setattr(batch, "decode", watch)
    pair.generate_batch(PROMPTS, max_tokens=LIMITS, ignore_eos=True, rows=3, draft_length=2)
    assert {size for size, _ in seen} <= {1, 2, 4} and max(active for _, active in seen) == 3


def test_rows_wait_until_the_memory_holds_them(load_pair, alone, monkeypatch):
    pair, most = load_pair("e2b"), []
    original = batch.decode

    def watch(engine, state, rows, *rest):
        most.append(sum(row.finish_reason is None for row in rows))
        return original(engine, state, rows, *rest)

    monkeypatch.setattr(batch, "decode", watch)
    for room, expected in ((0, 1), (2 * cache_bytes(pair.target.empty_cache(), 256), 2)):
        most.clear()
        monkeypatch.setattr(
            mlx_gemma_mtp.pair, "machine_bytes", lambda room=room: 2 * room + mlx_gemma_mtp.pair.mx.get_active_memory()
        )
        done = pair.generate_batch(PROMPTS, max_tokens=LIMITS, ignore_eos=True, rows=8, draft_length=2)
        assert [d.tokens for d in done] == alone(pair, "e2b") and max(most) == expected


def test_rows_have_options_of_their_own(load_pair):
    pair = load_pair("e2b")
    options = [Sampling(temperature=0), Sampling(temperature=1.0, seed=3, top_k=20), Sampling(temperature=0.7, seed=4)]
    options += [Sampling(temperature=0, repetition_penalty=1.3), Sampling(temperature=0, logit_bias={7: 50.0})]
    prompts = PROMPTS[:5]
    done = pair.generate_batch(prompts, max_tokens=8, sampling=options, ignore_eos=True, rows=2, draft_length=3)
    for prompt, own, row in zip(prompts, options, done):
        assert row.tokens == pair.generate(prompt, max_tokens=8, sampling=own, ignore_eos=True, draft_length=2).tokens
    assert done[4].tokens == [7] * 8


def test_a_row_that_cannot_be_run_ends_alone(load_pair, alone):
    pair = load_pair("e2b")
    prompts = [PROMPTS[0], [], PROMPTS[1], [5] * 5000, PROMPTS[3]]
    done = pair.generate_batch(prompts, max_tokens=[LIMITS[0], 5, LIMITS[1], 5, 0], ignore_eos=True, draft_length=2)
    assert [d.finish_reason for d in done] == ["length", "error", "length", "error", "error"]
    assert [type(d.error) for d in done] == [type(None), PromptError, type(None), PromptError, OptionError]
    assert [done[0].tokens, done[2].tokens] == alone(pair, "e2b")[:2]
    assert pair.generate_batch([], draft_length=2) == []
    biased = pair.generate_batch(PROMPTS[:2], max_tokens=5, sampling=[Sampling(logit_bias={9999: 1.0}), None], ignore_eos=True)
    assert isinstance(biased[0].error, OptionError) and len(biased[1].tokens) == 5


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_a_processor_that_raises_ends_its_row_alone(load_pair, alone, drafts, fail_at):
    pair, expected = load_pair("e2b"), alone(load_pair("e2b"), "e2b")

    def fail(tokens, logits):
        if tokens.shape[0] >= len(PROMPTS[1]) + fail_at:
            raise RuntimeError("no")
        return logits

    done = pair.generate_batch(
        PROMPTS[:4], max_tokens=LIMITS[:4], logits_processors=[(), (fail,), (), (lambda t, x: x,)], ignore_eos=True,
        draft_length=drafts, rows=4,
    )  # fmt: skip
    assert [d.finish_reason for d in done] == ["length", "error", "length", "length"]
    assert isinstance(done[1].error, RuntimeError) and done[1].tokens == expected[1][: len(done[1].tokens)]
    assert fail_at - drafts - 1 <= len(done[1].tokens) <= fail_at
    assert [done[i].tokens for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


@pytest.mark.parametrize("options", [
    {"rows": 0}, {"rows": 33}, {"rows": True}, {"max_tokens": [3]}, {"sampling": [None] * 3}, {"logits_processors": [()]},
])  # fmt: skip
def test_options_that_mean_nothing_are_refused(load_pair, options):
    with pytest.raises(OptionError):
        load_pair("e2b").generate_batch(PROMPTS[:2], **options)


def test_texts_stops_and_thoughts_of_rows(tmp_path):
    write_pair(tmp_path, "e2b", 1)
    write_tokenizer(tmp_path / "target", markers=True)
    pair = mlx_gemma_mtp.load(tmp_path / "target", tmp_path / "assistant")
    texts = ["the abc", "abc", "é 🙂 the"]
    free = pair.generate(texts[0], max_tokens=20, draft_length=0, ignore_eos=True)
    stop = free.text[len(free.text) // 2 :][:2]
    open_thought = [
        *pair.tokenizer.encode("hi"),
        pair.tokenizer.markers.thought_start,
        *pair.tokenizer.encode("thought\n", raw=True)[1:],
    ]
    prompts = [*texts, open_thought]
    options = {"max_tokens": 30, "ignore_eos": True, "draft_length": 2, "stop": stop, "thinking": 6}
    done = pair.generate_batch(prompts, rows=2, **options)
    for prompt, row in zip(prompts, done):
        one = pair.generate(prompt, **options, reuse=False)
        assert (row.tokens, row.text, row.thought, row.finish_reason) == (one.tokens, one.text, one.thought, one.finish_reason)
    assert done[0].finish_reason == "stop" and done[3].thought and pair.tokenizer.markers.thought_end in done[3].tokens
    assert Fixed(2).begin().draft_length == 2
