"""Prompts in every form, streamed text, stop strings."""

import threading

import pytest
from pairs import write_pair
from tiny_tokenizer import EOT, TEMPLATE, write_tokenizer

import mlx_gemma_mtp
from mlx_gemma_mtp import OptionError, PromptError
from mlx_gemma_mtp.channels import TextStream
from mlx_gemma_mtp.tokenizer import Tokenizer

BOS = 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    write_pair(directory, "e2b", 1)
    write_tokenizer(directory / "target")
    return mlx_gemma_mtp.load(directory / "target", directory / "assistant")


def decode(pair, ids):
    return pair.tokenizer.wrapper.decode(ids)


@pytest.mark.parametrize("prompt", ["the abc", "<bos>the abc", [{"role": "user", "content": "the abc"}]])
@pytest.mark.parametrize("raw", [True, False])
def test_bos_comes_exactly_once(pair, prompt, raw):
    ids = pair.tokenizer.encode(prompt, raw)
    assert ids[0] == BOS
    assert ids.count(BOS) == (2 if prompt == "<bos>the abc" and not raw else 1)  # a user's own "<bos>" is content


def test_token_ids_are_taken_as_they_are(pair):
    assert pair.tokenizer.encode([BOS, 7, 8]) == [BOS, 7, 8]
    assert pair.tokenizer.encode([7, 8]) == [7, 8]


def test_text_is_a_user_message_and_thinking_is_off(pair):
    assert decode(pair, pair.tokenizer.encode("the abc")) == "<bos><|turn>user\nthe abc<turn|>\n<|turn>model\n"
    assert decode(pair, pair.tokenizer.encode("the abc", raw=True)) == "<bos>the abc"


def test_messages_are_rendered_with_their_roles(pair):
    roles = [("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v")]
    ids = pair.tokenizer.encode([{"role": r, "content": c} for r, c in roles])
    turns = "".join(f"<|turn>{r.replace('assistant', 'model')}\n{c}<turn|>\n" for r, c in roles)
    expected = f"<bos>{turns}<|turn>model\n"
    assert decode(pair, ids) == expected


@pytest.mark.parametrize("prompt", ["", [], [1, "a"], [5, 512], [-1], None, [True, None], "\udcff"])
def test_prompts_that_mean_nothing_are_refused(pair, prompt):
    with pytest.raises(PromptError):
        pair.generate(prompt)


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(pair):
    with pytest.raises(PromptError, match="5000 tokens.*4096"):
        pair.generate([5] * 5000)
    with pytest.raises(PromptError, match="at most 96 tokens"):
        pair.generate([5] * 4000, max_tokens=97)


@pytest.mark.parametrize("options", [
    {"max_tokens": 0}, {"max_tokens": 1.5}, {"draft_length": -1}, {"draft_length": 17}, {"draft_length": "fast"},
    {"draft_length": True}, {"stop": [""]}, {"stop": [3]}, {"stop": None}, {"stop": 5}, {"max_tokens": True},
    {"sampling": {}}, {"logits_processors": print}, {"logits_processors": [3]}, {"logprobs": True}, {"logprobs": -1},
])  # fmt: skip
def test_options_that_mean_nothing_are_refused(pair, options):
    with pytest.raises(OptionError):
        pair.generate([5, 6], **options)


def test_stop_ids_come_from_generation_config_then_config(tmp_path):
    write_pair(tmp_path, "e2b", 1)
    target = tmp_path / "target"
    load = lambda: mlx_gemma_mtp.load(target, None).tokenizer.stop_ids
    (target / "generation_config.json").write_text('{"eos_token_id": [1, 106, 50]}')
    assert load() == {1, 106, 50}
    (target / "generation_config.json").unlink()
    assert load() == {1}


def tokens_of(pair, text):
    return pair.tokenizer.wrapper.encode(text, add_special_tokens=False)


def run(pair, tokens, stops=(), size=1):
    """Pieces of text from a stream of tokens, `size` at a time; and the token that completed a stop string."""
    stream, pieces = TextStream(pair.tokenizer, stops, frozenset([EOT])), []
    for start in range(0, len(tokens), size):
        text, complete = stream.add(tokens[start : start + size])
        pieces.append(text)
        if complete is not None:
            return pieces, start + complete
    return [*pieces, stream.finish()], None


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_piece_ends_in_half_a_character(pair, size):
    text = "the 🙂 日本 é\n\u202bعربى"
    tokens = tokens_of(pair, text)
    assert len(tokens) > len(text), "the text must need byte tokens"
    pieces, _ = run(pair, tokens, size=size)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_becomes_a_replacement_character(pair):
    pieces, _ = run(pair, tokens_of(pair, "a🙂")[:-1])
    assert "".join(pieces).startswith("a\ufffd")


def test_an_id_that_the_tokenizer_does_not_know_has_no_text(pair):
    """As a target with a padded vocabulary may emit."""
    first, second = tokens_of(pair, "some EN"), tokens_of(pair, "D text")
    pieces, _ = run(pair, [*first, 10**6, *second])
    assert "".join(pieces) == "".join(run(pair, [*first, *second])[0])


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("stops", [("END",), ("xx", "END"), ("D!", "END"), ("🙂",)])
def test_stop_strings_work_across_tokens_and_pieces(pair, stops, size):
    text = "some E EN text🙂 END! after"
    tokens = tokens_of(pair, text)
    pieces, complete = run(pair, tokens, stops, size)
    first = min(text.find(s) for s in stops if s in text)
    assert "".join(pieces) == text[:first]
    whole = decode(pair, tokens[:complete])
    assert any(s in whole for s in stops) and not any(s in decode(pair, tokens[: complete - 1]) for s in stops)


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(pair):
    pieces, complete = run(pair, tokens_of(pair, "some EN"), ("END",))
    assert "".join(pieces) == "some EN" and complete is None


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_stop_string_ends_the_generation_at_the_token_that_completes_it(pair, drafts):
    free = pair.generate("the abc", max_tokens=60, draft_length=0, ignore_eos=True)
    stop = free.text[len(free.text) // 2 :][:2]
    done = pair.generate("the abc", max_tokens=60, draft_length=drafts, ignore_eos=True, stop=stop)
    assert done.finish_reason == "stop"
    assert done.text == free.text[: free.text.index(stop)]
    assert done.tokens == free.tokens[: len(done.tokens)]
    assert stop in decode(pair, done.tokens) and stop not in decode(pair, done.tokens[:-1])


def test_a_stop_id_is_not_part_of_the_text(pair):
    free = pair.generate("the abc", max_tokens=30, ignore_eos=True)
    stopping = Tokenizer(pair.tokenizer.wrapper, 512, BOS, frozenset([free.tokens[4]]))
    other = mlx_gemma_mtp.Pair(pair.target, pair.drafter, stopping, "other")
    done = other.generate("the abc", max_tokens=30)
    count = free.tokens.index(free.tokens[4])
    assert (done.tokens, done.finish_reason) == (free.tokens[: count + 1], "stop")
    assert done.text == decode(pair, done.tokens[:-1])


@pytest.mark.parametrize("drafts", [0, 3])
def test_text_held_back_comes_out_once_when_a_stop_id_ends_the_row(pair, drafts):
    """Plain decoding has a round in flight then, which must not flush the text again."""
    free = pair.generate("the abc", max_tokens=30, draft_length=0, ignore_eos=True)
    at = next(i for i in range(6, 30) if free.tokens[i] not in free.tokens[:i])
    expected = decode(pair, free.tokens[:at])
    stopping = Tokenizer(pair.tokenizer.wrapper, 512, BOS, frozenset([free.tokens[at]]))
    other = mlx_gemma_mtp.Pair(pair.target, pair.drafter, stopping, "other")
    done = other.generate("the abc", max_tokens=30, draft_length=drafts, stop=expected[-2:] + "no such text")
    plain = other.generate("the abc", max_tokens=30, draft_length=drafts)
    assert done.tokens == free.tokens[: at + 1] and done.text == plain.text


def test_a_checkpoint_without_tokenizer_takes_ids_and_says_so_for_text(load_pair):
    plain = load_pair("e2b")
    assert len(plain.generate([5, 6], max_tokens=3, ignore_eos=True).tokens) == 3
    with pytest.raises(PromptError, match="no tokenizer"):
        plain.generate("text")


def test_a_template_that_raises_is_a_prompt_error(tmp_path):
    write_pair(tmp_path, "e2b", 1)
    write_tokenizer(tmp_path / "target", "{{ raise_exception('roles must alternate') }}" + TEMPLATE)
    broken = mlx_gemma_mtp.load(tmp_path / "target", None)
    with pytest.raises(PromptError, match="roles must alternate"):
        broken.generate("hi")


def test_pieces_add_up_to_the_completion(pair):
    stream = pair.stream("the abc", max_tokens=30, draft_length=3, ignore_eos=True)
    pieces = list(stream)
    done = stream.completion()
    assert "".join(p.text for p in pieces) == done.text
    assert [t for p in pieces for t in p.tokens] == done.tokens


def test_two_streams_can_be_interleaved(pair):
    prompts = ["the abc", "a completely different prompt"]
    alone = [pair.generate(p, max_tokens=25, ignore_eos=True).tokens for p in prompts]
    streams = [pair.stream(p, max_tokens=25, draft_length=2, ignore_eos=True) for p in prompts]
    running = list(streams)
    while running:
        running = [s for s in running if next(s, None) is not None]
    assert [s.completion().tokens for s in streams] == alone


@pytest.mark.compiled
def test_streams_run_in_worker_threads(pair):
    expected = pair.generate("the abc", max_tokens=12, draft_length=2, ignore_eos=True).tokens
    results = {}

    def work(index):
        results[index] = pair.generate("the abc", max_tokens=12, draft_length=2, ignore_eos=True).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == dict.fromkeys(range(3), expected)


@pytest.mark.compiled
def test_one_stream_may_be_advanced_by_different_threads(pair):
    expected = pair.generate("the abc", max_tokens=12, draft_length=2, ignore_eos=True).tokens
    stream = pair.stream("the abc", max_tokens=12, draft_length=2, ignore_eos=True)
    errors = []

    def advance():
        try:
            next(stream, None)
        except BaseException as error:
            errors.append(error)

    for _ in range(14):
        thread = threading.Thread(target=advance)
        thread.start()
        thread.join()
    assert not errors and stream.completion().tokens == expected


def test_statistics_count_what_happened(pair):
    done = pair.generate("the abc", max_tokens=31, draft_length=3, ignore_eos=True)
    stats = done.stats
    assert stats.generated_tokens == len(done.tokens) == 31
    assert stats.prompt_tokens == len(pair.tokenizer.encode("the abc"))
    assert stats.drafted == 3 * stats.rounds and stats.accepted == sum(stats.accepted_by_position)
    assert 0 <= 1 + stats.rounds + stats.accepted - 31 <= 3  # the last block may be cut
    assert stats.acceptance_length == pytest.approx(1 + stats.accepted / stats.rounds)
    assert "tokens/s" in repr(done)


def test_a_long_prompt_reports_its_progress(pair, monkeypatch):
    monkeypatch.setattr(mlx_gemma_mtp.speculative, "PREFILL_TOKENS", 16)
    seen = []
    pair.generate([5] * 50, max_tokens=1, on_prefill=lambda *a: seen.append(a))
    assert seen == [(16, 50), (32, 50), (48, 50), (49, 50)]
