"""Conversations: what is kept of turns, what the shell obeys, and the terminal as a person sees it."""

import json
import os
import shutil
import subprocess
import sys
import time

import mlx.core as mx
import pytest
from pairs import write_pair
from tiny_tokenizer import write_tokenizer

import mlx_gemma_mtp
from mlx_gemma_mtp import MtpError, OptionError, PromptError, Sampling
from mlx_gemma_mtp import chat as command

PACKAGE = os.path.dirname(os.path.dirname(mlx_gemma_mtp.__file__))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat")
    write_pair(directory, "e2b", 1)
    write_tokenizer(directory / "target", markers=True)
    (directory / "assistant").rename(directory / "drafter")
    return directory


@pytest.fixture
def pair(model):
    return mlx_gemma_mtp.load(model)


def chat_of(pair, **options):
    return pair.chat(**{"max_tokens": 8, "sampling": Sampling(temperature=0), "draft_length": 2} | options)


def text_of(turn):
    return "".join(p.text for p in turn if p.channel == "answer")


def test_turns_become_messages_and_every_prompt_is_made_of_them(pair):
    chat = chat_of(pair, system="abc")
    for text in ("the", "abc é"):
        before = list(chat.messages)
        said = text_of(chat.send(text))
        assert chat.messages == [*before, {"role": "user", "content": text}, {"role": "assistant", "content": said}]
    cold = pair.generate(chat.messages[:-1], max_tokens=8, draft_length=0, sampling=Sampling(temperature=0), reuse=False)
    assert cold.text == chat.messages[-1]["content"]


def test_later_turns_read_only_what_is_new(pair):
    """The last answer may be read again: random text is not always made of the tokens it would be written with."""
    chat, read, before = chat_of(pair, max_tokens=20), [], 0
    for index in range(4):
        turn = chat.send("the abc " * (5 + index))
        list(turn)
        stats = turn.completion().stats
        read.append(stats.prompt_tokens - stats.reused_tokens <= stats.prompt_tokens - before + 1)
        before = stats.prompt_tokens
    assert all(read)


def test_an_answer_that_is_closed_half_way_stays(pair):
    chat = chat_of(pair, max_tokens=60)
    turn = chat.send("the abc")
    said = next(turn).text + next(turn).text
    turn.close()
    assert chat.messages[1:] == [{"role": "assistant", "content": said}]
    assert text_of(chat.send("more")) == chat.messages[-1]["content"]


def test_undo_system_and_reset(pair):
    chat = chat_of(pair)
    assert chat.undo() is None and chat.system is None
    text_of(chat.send("one")), text_of(chat.send("two"))
    chat.system = "be brief"
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.undo() == "two" and len(chat.messages) == 3
    chat.system = "other"
    assert chat.system == "other" and len(chat.messages) == 3
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "other"}]


def test_a_conversation_is_saved_and_read_again(pair, tmp_path):
    chat = chat_of(pair)
    text_of(chat.send("the 🙂"))
    chat.save(tmp_path / "a.json")
    other = chat_of(pair)
    other.load(tmp_path / "a.json")
    assert other.messages == chat.messages
    (tmp_path / "b.json").write_text("[]")
    for bad in ("b.json", "missing.json"):
        with pytest.raises(PromptError):
            other.load(tmp_path / bad)
    with pytest.raises(MtpError, match="cannot be written"):
        chat.save(tmp_path / "missing" / "a.json")
    assert other.messages == chat.messages


def test_a_saved_cache_is_gone_on_with_in_another_process(pair, model, tmp_path):
    chat, file = chat_of(pair, max_tokens=20), tmp_path / "a.safetensors"
    for text in ("the abc " * 20, "abc " * 9):
        list(chat.send(text))
    chat.save(file)
    read, answers = [], []
    for start in (None, file):
        fresh = mlx_gemma_mtp.load(model)
        other = chat_of(fresh, max_tokens=20, messages=list(chat.messages))
        if start:
            other.messages = []
            other.load(start)
        turn = other.send("the")
        answers.append(text_of(turn))
        read.append(turn.completion().stats.reused_tokens)
    assert answers[0] == answers[1] and read[0] == 0 and read[1] > 150
    assert other.messages[:4] == chat.messages
    again = tmp_path / "b.safetensors"
    other.save(again)
    chat.load(again)
    assert chat.messages == other.messages


def test_a_cache_of_another_model_or_a_damaged_file_is_refused(pair, tmp_path):
    chat, file = chat_of(pair), tmp_path / "a.safetensors"
    list(chat.send("the abc"))
    chat.save(file)
    write_pair(tmp_path / "other", "e2b", 2)
    write_tokenizer(tmp_path / "other" / "target", markers=True)
    other = chat_of(mlx_gemma_mtp.load(tmp_path / "other" / "target", None), draft_length=0)
    with pytest.raises(PromptError, match="another model"):
        other.load(file)
    content = file.read_bytes()
    for damaged in (content[:-9], content[:100], b"", content.replace(b"conversation/1", b"conversation/9")):
        file.write_bytes(damaged)
        with pytest.raises(PromptError, match="no conversation"):
            chat.load(file)
    assert len(chat.messages) == 2


def test_a_full_context_stops_or_slides(pair):
    long = "abc the " * 400
    chat = chat_of(pair, max_tokens=4)
    with pytest.raises(PromptError, match=r"fills the context of 4096"):
        for _ in range(20):
            list(chat.send(long))
    kept = len(chat.messages)
    assert kept >= 2
    chat.on_full = "slide"
    chat.system = "abc"
    list(chat.send(long))
    assert len(chat.messages) <= kept and chat.system == "abc" and chat.messages[1]["role"] == "user"
    with pytest.raises(PromptError, match="fills"):
        chat.send("z " * 5000)
    with pytest.raises(OptionError):
        chat_of(pair, on_full="wrap")


def test_memory_is_bounded_over_many_turns(pair):
    chat = chat_of(pair, max_tokens=3, on_full="slide")
    pair.prefixes.limit_bytes = 8_000_000
    used = []
    for _ in range(60):
        list(chat.send("abc the " * 25))
        used.append(mx.get_active_memory())
        assert pair.prefixes.nbytes <= pair.prefixes.limit_bytes
    assert len(chat.messages) < 120 and max(used[30:]) - max(used[:30]) < 4_000_000


def test_tool_results_go_on_in_the_turn_of_the_call(pair):
    chat = chat_of(pair)
    with pytest.raises(PromptError, match="1 results for 0 tool calls"):
        chat.send_results(["x"])
    call = {"id": "call_0", "type": "function", "function": {"name": "now", "arguments": {}}}
    chat.messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    said = text_of(chat.send_results(["12:00"]))
    assert chat.messages[2] == {"role": "tool", "tool_call_id": "call_0", "name": "now", "content": "12:00"}
    assert chat.messages[3]["content"] == said
    chat.messages = chat.messages[:2]
    text_of(chat.send_results([{"hour": 12}]))
    assert chat.messages[2]["content"] == '{"hour": 12}'


def test_a_turn_shows_itself_in_a_notebook(pair, capsys):
    chat = chat_of(pair)
    chat.send("the abc")._ipython_display_()
    assert capsys.readouterr().out.rstrip("\n") == chat.messages[-1]["content"].rstrip("\n")


# --- the shell ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(pair):
    return command.Shell(chat_of(pair), is_terminal=False, thoughts=True)


def test_the_shell_obeys_its_commands(shell, capsys, tmp_path):
    say = lambda line: (shell.obey(line), capsys.readouterr())[1]
    answer = say("the abc").out
    assert answer.strip() and say("/retry").out == answer
    assert "tokens/s" in say("/stats").err
    assert "written" in say(f"/save {tmp_path / 'a b.json'}").err
    assert "taken back: the abc" in say("/undo").err and shell.chat.messages == []
    assert "nothing" in say("/undo").err and "nothing" in say("/retry").err
    assert "2 messages" in say(f"/load {tmp_path / 'a b.json'}").err and len(shell.chat.messages) == 2
    say("/system be brief"), say("/reset"), say("/think 50"), say("/draft 1"), say("/temp 0.5"), say("/topk 3"), say("/seed 7")
    chat = shell.chat
    assert (chat.system, len(chat.messages), chat.thinking, chat.draft_length) == ("be brief", 1, 50, 1)
    assert (chat.sampling.temperature, chat.sampling.top_k, chat.sampling.seed) == (0.5, 3, 7)
    say("/think off"), say("/draft auto")
    assert (chat.thinking, chat.draft_length) == (False, "auto")
    assert not shell.failed and "/undo" in say("/help").err
    assert shell.obey("/quit") is False


@pytest.mark.parametrize("line", [
    "/bogus", "/temp", "/temp hot", "/temp -1", "/think", "/think 0", "/draft 99", "/draft x", "/save", "/load /nowhere",
    "/seed 1.5",
])  # fmt: skip
def test_a_mistake_is_one_line_and_the_conversation_goes_on(shell, capsys, line):
    assert shell.obey(line) and shell.failed
    err = capsys.readouterr().err
    assert err.startswith("error: ") and len(err.splitlines()) == 1


def test_a_model_cannot_send_escape_codes_to_the_terminal(shell, capsys):
    shell.is_terminal = True
    shell.show("a\x1b[31mb\x07\tc\n\x9b2J")
    assert capsys.readouterr().out == "a\ufffd[31mb\ufffd\tc\n\ufffd2J"


def start(model, *arguments):
    line = [sys.executable, "-m", "mlx_gemma_mtp.chat", "--model", str(model), "--max-tokens", "6", "--temp", "0", *arguments]
    return subprocess.run(
        line, input="the abc\n\n/draft 0\né 🙂\n/bogus\n".encode(), capture_output=True, timeout=300,
        env=os.environ | {"MLX_DISABLE_COMPILE": "1"},
    )  # fmt: skip


def test_a_pipe_is_one_prompt_a_line_and_plain_text(model):
    done = start(model)
    assert done.returncode == 2 and b"/bogus is no command" in done.stderr
    assert b"\x1b" not in done.stdout and b"Traceback" not in done.stderr and len(done.stdout.splitlines()) >= 2
    assert b"error: thinking 'x'" in start(model, "--think", "x").stderr


class Terminal:
    """The chat in a tmux window of its own server."""

    def __init__(self, directory, *arguments):
        self.socket = str(directory / "tmux")
        self.buffer = directory / "paste"
        settings = f"MLX_DISABLE_COMPILE=1 MLX_GEMMA_MTP_CACHE={directory}"
        line = f"{settings} {sys.executable} -m mlx_gemma_mtp.chat {' '.join(arguments)}; echo left with $?; sleep 600"
        self.run("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "40", line)

    def run(self, *arguments):
        environment = os.environ | {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
        return subprocess.run(
            ["tmux", "-u", "-S", self.socket, *arguments],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
            cwd=PACKAGE,
        ).stdout

    def screen(self):
        return self.run("capture-pane", "-p", "-J", "-S", "-2000")

    def type(self, text, *keys):
        self.run("send-keys", "-l", text)
        self.run("send-keys", *(keys or ("Enter",)))

    def paste(self, text):
        self.buffer.write_text(text)
        self.run("load-buffer", str(self.buffer))
        self.run("paste-buffer", "-p")

    def wait(self, text, count=1, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (screen := self.screen()).count(text) >= count:
                return screen
            time.sleep(0.1)
        raise AssertionError(f"{text!r} did not come {count} times:\n{self.screen()}")

    def wait_for_more_than(self, text, seconds=60):
        """Until some characters came after the last `text`."""
        end = time.monotonic() + seconds
        while True:
            _, found, after = self.screen().rpartition(text)
            if found and len(after.strip()) >= 8:
                return
            assert time.monotonic() < end, self.screen()
            time.sleep(0.1)

    def close(self):
        self.run("kill-server")


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_session_in_a_terminal(model, tmp_path):
    pytest.importorskip("prompt_toolkit")
    endless = shutil.copytree(model, tmp_path / "endless")
    (endless / "target" / "generation_config.json").write_text('{"bos_token_id": 2, "eos_token_id": []}')
    terminal = Terminal(tmp_path, "--model", str(endless), "--temp", "0", "--draft-length", "2", "--max-tokens", "3000")
    try:
        terminal.wait("Ctrl-D leaves", seconds=120)
        terminal.wait("\n>")
        terminal.type("the abc")
        terminal.wait_for_more_than("the abc")
        terminal.run("send-keys", "C-c")
        screen = terminal.wait("stopped · ")
        assert "tokens/s" in screen and "per round" in screen and "Traceback" not in screen
        terminal.type("/save " + str(tmp_path / "a.json"))
        terminal.wait("2 messages written")
        terminal.type("/undo")
        terminal.wait("taken back: the abc")
        terminal.type("/load " + str(tmp_path / "a.json"))
        terminal.wait("2 messages read")
        saved = json.loads((tmp_path / "a.json").read_text())["messages"]
        assert saved[0]["content"] == "the abc" and saved[1]["content"]
        terminal.run("send-keys", "Up")  # history
        terminal.wait("> /load " + str(tmp_path)[:40], count=2)
        terminal.run("send-keys", "C-c")
        terminal.run("resize-window", "-x", "60", "-y", "20")
        terminal.type("🙂 عربى עברית", "M-Enter")
        terminal.type("second line")
        terminal.wait_for_more_than("second line")
        terminal.run("send-keys", "C-c")
        terminal.wait("stopped · ", count=2)
        terminal.paste("line one\n" + "pasted text " * 1700)  # 20 kB: more than the context holds, sent only by Enter
        time.sleep(0.5)
        terminal.run("send-keys", "Enter")
        terminal.wait("fills the context", seconds=120)
        terminal.type("/save " + str(tmp_path / "b.json"))
        terminal.wait("4 messages written")
        saved = json.loads((tmp_path / "b.json").read_text())["messages"]
        assert saved[2]["content"] == "🙂 عربى עברית\nsecond line"
        terminal.run("send-keys", "C-d")
        screen = terminal.wait("left with 0")
        assert "Traceback" not in screen
    finally:
        (tmp_path / "screen.txt").write_text(terminal.screen())
        terminal.close()
