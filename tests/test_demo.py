"""The shipped pair: small, in Gemma's format, and with acceptance worth showing."""

import ast
import json
import sysconfig
from pathlib import Path

import pytest

import mlx_gemma_mtp

DEMO = Path(mlx_gemma_mtp.__file__).parent / "demo"
RECORD = json.loads((DEMO / "training.json").read_text())
PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def demo():
    return mlx_gemma_mtp.load(DEMO, dtype="float32")


def test_the_demo_pair_is_small():
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) <= 8e6


def test_acceptance_on_held_out_modules_is_as_recorded(demo):
    """Some modules of this interpreter that were not trained on. The record says 128 tokens of context, 96 generated."""
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = [path for name in RECORD["held_out_modules"] if (path := library / name).exists()][::4]
    if not modules:
        pytest.skip("this interpreter has none of the held-out modules")
    rounds = accepted = 0
    for path in modules:
        source = path.read_text()
        ids = demo.tokenizer.encode(source[: len(source) // 2], raw=True)
        stats = demo.generate(ids[:1] + ids[1:][-128:], max_tokens=64, draft_length=4, ignore_eos=True).stats
        rounds, accepted = rounds + stats.rounds, accepted + stats.accepted
    assert 1 + accepted / rounds > RECORD["acceptance"]["acceptance_length"] - 0.5


def test_it_completes_a_function_with_indented_python(demo):
    text = demo.generate(PROMPT, raw=True, max_tokens=64).text
    body = text.split("\n\n\n")[0].rstrip()
    assert body.startswith("\n    ")
    lines = (PROMPT + body).split("\n")
    assert any(_parses("\n".join(lines[:n])) for n in range(2, len(lines) + 1))


def _parses(source):
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize("draft_length", [1, 4, "heuristic"])
def test_drafting_changes_nothing_but_the_number_of_rounds(demo, draft_length):
    plain = demo.generate(PROMPT, raw=True, max_tokens=100, draft_length=0, ignore_eos=True)
    drafted = demo.generate(PROMPT, raw=True, max_tokens=100, draft_length=draft_length, ignore_eos=True)
    assert drafted.tokens == plain.tokens and drafted.stats.rounds < plain.stats.rounds


def test_a_context_of_a_thousand_tokens_is_used(demo):
    """A pattern goes on after a thousand tokens as it did before."""
    ids = demo.tokenizer.encode("x = 1\n" * 250, raw=True)
    assert len(ids) > 1000
    assert demo.generate(ids, max_tokens=12, ignore_eos=True).text.startswith("x = 1\nx = 1\n")


def test_the_chat_template_writes_gemmas_turns(demo):
    render = demo.tokenizer.wrapper.apply_chat_template
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " A "}]
    messages += [{"role": "assistant", "content": "<|channel>thought\nhm\n<channel|>B"}, {"role": "user", "content": "C"}]
    expected = "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nA<turn|>\n<|turn>model\nB<turn|>\n<|turn>user\nC<turn|>\n"
    assert render(messages, tokenize=False, enable_thinking=False) == expected
    thinking = render(messages[1:2], tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert thinking == "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nA<turn|>\n<|turn>model\n"


def test_the_tokenizer_gives_every_text_back(demo):
    for text in ("a  b\n\n\n\tc ", "naïve ☃ 🙂", " x", "\n", "if x:\r\n"):
        ids = demo.tokenizer.encode(text, raw=True)
        assert ids[0] == 2 and demo.tokenizer.wrapper.decode(ids[1:]) == text
    specials = demo.tokenizer.encode("<|turn>user\n<turn|>", raw=True)
    assert specials[1] == 4 and specials[-1] == 5 and {1, 5, 13} == demo.tokenizer.stop_ids
