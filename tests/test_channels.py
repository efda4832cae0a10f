"""Thoughts, answers and tool calls from scripted streams of tokens; prompts against rendered goldens."""

import itertools
import json
from pathlib import Path

import mlx.core as mx
import pytest
from pairs import write_pair
from tiny_tokenizer import MARKERS, write_tokenizer

import mlx_gemma_mtp
from mlx_gemma_mtp import OptionError, PromptError
from mlx_gemma_mtp.channels import ChannelParser, ToolCall, parse_tool_call

FACTS = Path(__file__).parent / "facts"
TEMPLATES = {"large": "gemma4_large", "small": "gemma4_small", "E2B-9dbdf8a8": "gemma4_e2b_9dbdf8a8"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TURN = lambda role, content, **more: {"role": role, "content": content, **more}
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}}
RESULT = TURN("tool", '{"t": 20}', tool_call_id="1", name="get_weather")
SYSTEM = [TURN("system", "Be brief."), TURN("user", "A"), TURN("assistant", "B"), TURN("user", "C")]
CASES = {
    "plain": dict(messages=[TURN("user", "Hi")]),
    "thinking": dict(messages=[TURN("user", "Hi")], thinking=True),
    "system+multi-turn": dict(messages=SYSTEM),
    "history reasoning field": dict(
        messages=[TURN("user", "A"), TURN("assistant", "B", reasoning="hidden"), TURN("user", "C")], thinking=True
    ),
    "tools turn 1": dict(messages=[TURN("user", "Weather?")], tools=[WEATHER]),
    "tool result": dict(messages=[TURN("user", "Weather?"), TURN("assistant", "", tool_calls=[CALL]), RESULT], tools=[WEATHER]),
    "tool result thinking": dict(
        messages=[TURN("user", "Weather?"), TURN("assistant", "", reasoning="need tool", tool_calls=[CALL]), RESULT],
        tools=[WEATHER],
        thinking=True,
    ),
    "continue (no gen prompt)": dict(messages=[TURN("user", "A"), TURN("assistant", "B")], open_turn=False),
}


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory):
    made = {}

    def make(template="large"):
        if template not in made:
            directory = tmp_path_factory.mktemp("channels")
            write_pair(directory, "e2b", 1)
            write_tokenizer(directory / "target", (FACTS / f"{TEMPLATES[template]}.jinja").read_text(), markers=True)
            made[template] = mlx_gemma_mtp.load(directory / "target", directory / "assistant")
        return made[template]

    return make


@pytest.fixture(scope="module")
def tokenizer(make_pair):
    return make_pair().tokenizer


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("case", CASES)
def test_prompts_are_rendered_as_the_goldens_say(make_pair, template, case):
    golden = json.loads((FACTS / "chat_goldens.json").read_text())[case][template]
    assert make_pair(template).tokenizer.render(**CASES[case]) == golden


def test_arguments_in_json_text_become_objects(make_pair):
    call = {"id": "1", "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 2}'}}
    messages = [TURN("user", "Weather?"), TURN("assistant", "", tool_calls=[call]), RESULT]
    render = make_pair().tokenizer.render
    assert render(messages, tools=[WEATHER]) == render(**CASES["tool result"])


def test_thinking_without_a_template_is_refused(make_pair):
    with pytest.raises(PromptError, match="template"):
        make_pair().generate("x", raw=True, thinking=True)
    for budget in (0, -1, 1.5, "yes"):
        with pytest.raises(OptionError, match="thinking"):
            make_pair().generate("x", thinking=budget)


# --- the parser --------------------------------------------------------------------------------------------------------


def ids_of(tokenizer, text):
    return tokenizer.wrapper.encode(text, add_special_tokens=False)


def parse(tokenizer, tokens, sizes, stops=(), prompt=(), budget=None):
    """What comes out of tokens that come in blocks of `sizes`: answer, thought, calls, tokens taken."""
    parser = ChannelParser(tokenizer, stops, tokenizer.markers, list(prompt), budget)
    said, calls, taken = {"answer": "", "thought": ""}, [], []
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(tokens):
            break
        segments, count, end = parser.add(tokens[at : at + size])
        at += size
        for segment in segments:
            said[segment.channel] += segment.text
            taken += segment.tokens
            calls += [segment.tool_call] if segment.tool_call else []
        if end:
            return said["answer"], said["thought"], calls, taken, end
    rest = parser.finish()
    said[rest.channel] += rest.text
    return said["answer"], said["thought"], calls, taken, None


STREAM = (
    "<|channel>thought\nthe 🙂 abc\n\nmore\n<channel|>Let me é see."
    '<|tool_call>call:get_weather{city:<|"|>Pa}r{is🙂<|"|>,days:-2}<tool_call|><|tool_call>call:now{}<tool_call|>'
)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_thought_answer_and_calls_are_told_apart_whatever_the_blocks(tokenizer, size):
    tokens = ids_of(tokenizer, STREAM)
    answer, thought, calls, taken, _ = parse(tokenizer, tokens, [size])
    assert (answer, thought) == ("Let me é see.", "the 🙂 abc\n\nmore")
    assert calls == [ToolCall("get_weather", {"city": "Pa}r{is🙂", "days": -2}), ToolCall("now", {})]
    assert taken == tokens


def test_a_call_is_the_same_split_at_every_token_border(tokenizer):
    tokens = ids_of(tokenizer, STREAM)
    whole = parse(tokenizer, tokens, [len(tokens)])
    for border in range(1, len(tokens)):
        assert parse(tokenizer, tokens, [border, len(tokens)]) == whole


def test_an_empty_thought_is_nothing_and_a_thought_may_be_open_already(tokenizer):
    empty = ids_of(tokenizer, "<|channel>thought\n<channel|>Yes")
    assert parse(tokenizer, empty, [2])[:2] == ("Yes", "")
    opened = ids_of(tokenizer, "<|channel>thought\n")
    assert parse(tokenizer, ids_of(tokenizer, "hm\n<channel|>Yes"), [2], prompt=opened)[:2] == ("Yes", "hm")
    assert parse(tokenizer, ids_of(tokenizer, "Yes"), [2], prompt=empty)[:2] == ("Yes", "")


def test_a_thought_that_never_ends_is_still_a_thought(tokenizer):
    assert parse(tokenizer, ids_of(tokenizer, "<|channel>thought\nhm é"), [1])[:2] == ("", "hm é")


def test_a_broken_call_is_shown_as_text(tokenizer):
    answer, _, calls, _, _ = parse(tokenizer, ids_of(tokenizer, "a<|tool_call>call:x{y:<tool_call|>b"), [1])
    assert (answer, calls) == ("acall:x{y:b", [])


def test_text_that_only_looks_like_a_marker_is_text(tokenizer):
    tokens = [t for c in "<|channel>a" for t in ids_of(tokenizer, c)]
    assert parse(tokenizer, tokens, [3])[0] == "<|channel>a"


def test_stop_strings_end_the_answer_and_not_the_thought(tokenizer):
    tokens = ids_of(tokenizer, "<|channel>thought\nEND\n<channel|>abc END def")
    for size in (1, 3, 100):
        answer, thought, _, _, end = parse(tokenizer, tokens, [size], stops=("END",))
        assert (answer, thought, end) == ("abc ", "END", "stop")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("budget", [1, 2, 5])
def test_the_budget_ends_at_the_same_token_whatever_the_blocks(tokenizer, size, budget):
    tokens = ids_of(tokenizer, "<|channel>thought\nabababab\n<channel|>yes")
    head = len(ids_of(tokenizer, "<|channel>thought\n"))
    *_, taken, end = parse(tokenizer, tokens, [size], budget=budget)
    assert end == "budget" and taken == tokens[: head + budget]


@pytest.mark.parametrize(("text", "expected"), [
    ("call:f{}", {}),
    ('call:f{a:<|"|>x<|"|>}', {"a": "x"}),
    ('call:f{a:<|"|>{"k": [1, 2], b:3}<|"|>,c:true}', {"a": '{"k": [1, 2], b:3}', "c": True}),
    ('call:f{n:-1.5e3,z:null,l:[1,<|"|>a,b<|"|>,[]],o:{x-y:{},<|"|>q r<|"|>:false}}',
     {"n": -1500.0, "z": None, "l": [1, "a,b", []], "o": {"x-y": {}, "q r": False}}),
    ('call:f{ a : 1 , b : [ 1 , 2 ] }', {"a": 1, "b": [1, 2]}),
    ('call:f{a:<|"|>line\n"quoted" \\ <b><|"|>}', {"a": 'line\n"quoted" \\ <b>'}),
])  # fmt: skip
def test_arguments_are_objects(text, expected):
    assert parse_tool_call(text) == ToolCall("f", expected)


@pytest.mark.parametrize("text", [
    "", "f{}", "call:{}", "call:f", "call:f{", "call:f{a:1", "call:f{a}", 'call:f{a:<|"|>x}', "call:f{a:1}b", "call:f{a:1 2}",
    "call:f{a:[1}", "call:f{a:yes}",
])  # fmt: skip
def test_text_that_is_no_call_is_refused(text):
    with pytest.raises(ValueError):
        parse_tool_call(text)


# --- in a generation ---------------------------------------------------------------------------------------------------


def scripted(tokenizer, text, stop=1):
    """A logits processor under which the model says `text` after its prompt, whatever it would say."""
    script = [*ids_of(tokenizer, text), stop]

    def process(start):
        def function(tokens, logits):
            at = tokens.shape[0] - start
            return mx.where(mx.arange(logits.shape[-1]) == script[min(at, len(script) - 1)], 100.0, -100.0)[None]

        return function

    return process


def say(pair, text, prompt="hi", **options):
    ids = pair.tokenizer.encode(prompt, thinking=bool(options.get("thinking")))
    processor = scripted(pair.tokenizer, text)(len(ids))
    return pair.stream(prompt, logits_processors=[processor], **{"max_tokens": 200, "draft_length": 2} | options)


def test_pieces_carry_their_channel_and_calls(make_pair):
    stream = say(make_pair(), STREAM, thinking=True)
    pieces = list(stream)
    done = stream.completion()
    answer, thought = ("".join(p.text for p in pieces if p.channel == c) for c in ("answer", "thought"))
    assert (answer, thought) == (done.text, done.thought) == ("Let me é see.", "the 🙂 abc\n\nmore")
    assert [p.tool_call for p in pieces if p.tool_call] == done.tool_calls
    assert [c.name for c in done.tool_calls] == ["get_weather", "now"] and done.finish_reason == "stop"
    assert [t for p in pieces for t in p.tokens] == done.tokens


def test_the_call_of_a_completion_is_rendered_as_the_model_wrote_it(make_pair):
    pair = make_pair()
    call = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
    stream = say(pair, call)
    list(stream)
    message = TURN("assistant", "", tool_calls=[c.as_message() for c in stream.completion().tool_calls])
    assert call in pair.tokenizer.render([TURN("user", "Weather?"), message, RESULT], tools=[WEATHER])


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_at_the_budget_the_thought_is_closed_and_the_answer_follows(make_pair, drafts, reuse):
    """The model's own tokens before and after: the same for every draft length as by hand."""
    pair = make_pair("E2B-9dbdf8a8")
    prompt = pair.tokenizer.encode("hi", thinking=True) + ids_of(pair.tokenizer, "<|channel>thought\n")
    free = pair.generate(prompt, max_tokens=12, draft_length=0, ignore_eos=True, reuse=False).tokens
    forced = list(pair.tokenizer.markers.closing)
    answer = pair.generate(prompt + free + forced, max_tokens=9, draft_length=0, ignore_eos=True, reuse=False).tokens
    options = dict(max_tokens=12 + len(forced) + 9, draft_length=drafts, ignore_eos=True, thinking=12, reuse=reuse)
    stream = pair.stream(prompt, **options)
    pieces = list(stream)
    done = stream.completion()
    assert done.tokens == free + forced + answer
    assert [t for p in pieces for t in p.tokens] == done.tokens
    assert pair.tokenizer.markers.thought_end not in free and done.thought and done.finish_reason == "length"
    again = pair.generate(prompt + done.tokens + [20, 21], max_tokens=5, draft_length=drafts, ignore_eos=True, reuse=reuse)
    cold = pair.generate(prompt + done.tokens + [20, 21], max_tokens=5, draft_length=0, ignore_eos=True, reuse=False)
    assert again.tokens == cold.tokens
    assert again.stats.reused_tokens == (len(prompt) + len(done.tokens) - 1 if reuse else 0)


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_max_tokens_is_exact_around_a_budget(make_pair, spare):
    pair = make_pair()
    prompt = pair.tokenizer.encode("hi", thinking=True) + ids_of(pair.tokenizer, "<|channel>thought\n")
    done = pair.generate(prompt, max_tokens=6 + spare, draft_length=3, ignore_eos=True, thinking=6)
    assert len(done.tokens) == 6 + spare and done.finish_reason == "length"


def test_a_tokenizer_without_markers_gives_all_as_answer(tmp_path):
    write_pair(tmp_path, "e2b", 1)
    write_tokenizer(tmp_path / "target")
    pair = mlx_gemma_mtp.load(tmp_path / "target", None)
    assert pair.tokenizer.markers is None and len(MARKERS) == 9
    assert pair.generate("hi", max_tokens=5).thought == ""
