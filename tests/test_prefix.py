"""Prompts that begin like earlier ones: the same tokens as computed afresh, and nothing computed twice."""

import mlx.core as mx
import pytest
from pairs import FAMILIES, WINDOW

from mlx_gemma_mtp.cache import SLACK
from mlx_gemma_mtp.pair import Pair
from mlx_gemma_mtp.prefix import Branch, PrefixStore, common_prefix

OPENING = [11, 12, 13]  # of a model's turn, shared by the next rendering
EMPTY_THOUGHT = [14, 15]  # only in the prompt, never in the history


@pytest.fixture
def fresh(load_pair):
    """family -> a pair with an empty store."""

    def make(family, limit=1 << 30):
        loaded = load_pair(family)
        pair = Pair(loaded.target, loaded.drafter, loaded.tokenizer, family)
        pair.prefixes.limit_bytes = limit
        return pair

    return make


def words(count, salt):
    return [(salt * 37 + i * i * 11 + i) % 480 + 20 for i in range(count)]


def run(pair, prompt, **options):
    """Generates with and without what was kept; both must agree. Returns the completion."""
    options = {"max_tokens": 6, "draft_length": 3, "ignore_eos": True} | options
    warm = pair.generate(prompt, **options)
    cold = pair.generate(prompt, reuse=False, **options)
    assert warm.tokens == cold.tokens and cold.stats.reused_tokens == 0
    return warm


@pytest.mark.parametrize(("family", "thought"), [("e2b", 0), *((family, 5) for family in FAMILIES)])
def test_ten_turns_give_the_tokens_of_a_cold_prefill_and_compute_only_what_is_new(fresh, family, thought):
    """thought: tokens generated that the next rendering leaves out, with the empty thought block of the prompt."""
    pair, history, last = fresh(family), [2], []
    for turn in range(10):
        shared = len(history)  # all of it was in the cache, or is the answer without its thought
        opening = OPENING + (EMPTY_THOUGHT if thought else [])
        prompt = history + words(3 + 4 * turn % 23, turn) + opening
        done = run(pair, prompt, draft_length=turn % 5, max_tokens=7 + turn % 4)
        if turn:
            answered = len(last) - thought if thought else 1
            assert len(prompt) - done.stats.reused_tokens <= len(prompt) - shared + answered + 1
        last = done.tokens
        history = prompt[: len(prompt) - len(opening)] + OPENING + last[thought:]
    assert len(history) > 2 * (WINDOW + SLACK)


@pytest.mark.parametrize("length", range(WINDOW - 4, WINDOW + SLACK + 4))
def test_a_second_turn_is_the_same_wherever_the_first_ends(fresh, length):
    pair = fresh("dense31b")
    first = pair.generate(words(length, 1), draft_length=16, max_tokens=5, ignore_eos=True)
    second = run(pair, words(length, 1) + first.tokens + words(3, 2), draft_length=16)
    assert second.stats.reused_tokens == length + 4


@pytest.mark.parametrize("back", [0, 20, SLACK + 1, SLACK + 2])
def test_a_prompt_can_be_left_as_far_back_as_the_slack_reaches(fresh, back):
    pair = fresh("moe26b")
    prompt = words(90, 1)
    run(pair, prompt)
    done = run(pair, prompt[: 89 - back] + words(6, 2))
    assert done.stats.reused_tokens == (89 - back if back <= SLACK + 1 else 0)


@pytest.mark.parametrize(("drafts", "stop_at"), [(0, 2), (4, 0), (4, 1), (4, 3), (16, 2)])
def test_a_stop_id_inside_a_block_leaves_a_state_that_is_continued(fresh, drafts, stop_at, monkeypatch):
    pair, prompt = fresh("e2b"), words(60, 3)
    free = pair.generate(prompt, max_tokens=20, ignore_eos=True, reuse=False).tokens
    monkeypatch.setattr(pair.tokenizer, "stop_ids", frozenset([free[stop_at]]))
    done = run(pair, prompt, ignore_eos=False, draft_length=drafts)
    assert done.finish_reason == "stop"
    again = run(pair, prompt + done.tokens + words(4, 5), draft_length=drafts)
    assert again.stats.reused_tokens == len(prompt) + len(done.tokens) - 1


@pytest.mark.parametrize(("drafts", "pieces"), [(0, 1), (0, 3), (4, 1), (4, 3), (16, 2)])
def test_a_stream_closed_half_way_leaves_a_state_that_is_continued(fresh, drafts, pieces):
    pair, prompt = fresh("e4b"), words(70, 4)
    stream = pair.stream(prompt, max_tokens=60, draft_length=drafts, ignore_eos=True)
    for _ in range(pieces):
        next(stream)
    stream.close()
    tokens = stream.completion().tokens
    again = run(pair, prompt + tokens + words(4, 5), draft_length=drafts)
    assert again.stats.reused_tokens == len(prompt) + len(tokens) - 1


def test_undo_and_retry_find_older_rings_and_leave_the_newer_branch_alone(fresh):
    pair, prompts = fresh("dense31b"), [words(70, 1)]
    for turn in range(2):
        answer = run(pair, prompts[-1], max_tokens=30).tokens
        prompts.append(prompts[-1] + answer + words(8, 10 + turn))
    assert run(pair, prompts[1]).stats.reused_tokens == len(prompts[1]) - 1  # retry
    other = prompts[0] + words(3, 77)  # undo, say something else
    assert run(pair, other).stats.reused_tokens == len(prompts[0]) - 1
    assert run(pair, prompts[1] + words(1, 9)).stats.reused_tokens >= len(prompts[1]) - 1
    assert run(pair, other + words(1, 8)).stats.reused_tokens >= len(other) - 1


def test_another_conversation_with_the_same_beginning_leaves_the_first_alone(fresh):
    pair, system = fresh("e2b"), words(100, 1)
    run(pair, system)
    first = system + words(60, 2)
    second = system + words(60, 3)
    assert run(pair, first).stats.reused_tokens in (len(system) - 1, len(system))
    assert run(pair, second).stats.reused_tokens in (len(system) - 1, len(system))
    assert run(pair, first).stats.reused_tokens == len(first) - 1
    assert run(pair, second).stats.reused_tokens == len(second) - 1


@pytest.mark.parametrize("limit", [0, 200_000])
def test_the_store_keeps_within_its_limit_but_for_the_newest_prompt(fresh, limit):
    pair = fresh("e2b", limit)
    for salt in range(4):
        prompt = words(80, salt)
        answer = run(pair, prompt).tokens
        done = run(pair, prompt + answer[:2] + words(20, salt + 9))
        assert done.stats.reused_tokens >= len(prompt) - 1
    assert pair.prefixes.nbytes <= limit or len(pair.prefixes) == 1
    assert limit or len(pair.prefixes._kept[0].rings) == 1


def test_a_generation_that_fails_while_it_reads_its_prompt_loses_nothing_older(fresh):
    pair, prompt = fresh("e2b"), words(60, 1)
    answer = run(pair, prompt).tokens

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.generate(prompt + answer + words(40, 2), on_prefill=fail)
    assert run(pair, prompt + words(3, 3)).stats.reused_tokens >= len(prompt) - 1


def test_continuing_a_conversation_copies_no_full_layer(fresh):
    pair = fresh("e2b")
    prompt = words(1500, 1)
    answer = pair.generate(prompt, max_tokens=5, ignore_eos=True).tokens
    [kept] = pair.prefixes._kept
    weight = sum(a.nbytes for a in kept.full)
    del kept
    before = mx.get_active_memory()
    stream = pair.stream(prompt + answer + words(5, 2), max_tokens=30, draft_length=0, ignore_eos=True)
    for _ in range(10):
        next(stream)
    assert len(pair.prefixes) == 0 and mx.get_active_memory() - before < 0.3 * weight
    stream.close()


def test_streams_of_one_prompt_at_once_do_not_share_arrays(fresh):
    pair, prompt = fresh("e2b"), words(90, 1)
    expected = run(pair, prompt, max_tokens=20).tokens
    streams = [pair.stream(prompt, max_tokens=20, draft_length=d, ignore_eos=True) for d in (0, 2, 4)]
    running = list(streams)
    while running:
        running = [s for s in running if next(s, None) is not None]
    assert [s.completion().tokens for s in streams] == [expected] * 3


def test_the_common_prefix_of_lists():
    for a, b in ([[], [1]], [[1, 2, 3], [1, 2, 4]], [[1, 2], [1, 2, 3]], [[5], [6]], [list(range(99)), list(range(70))]):
        assert common_prefix(a, b) == next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_an_empty_store_gives_an_empty_branch(load_pair):
    store = PrefixStore(load_pair("e2b").target.empty_cache)
    branch = store.take([1, 2, 3])
    assert isinstance(branch, Branch) and branch.reused == 0 and branch.cache.capacity == 0
