"""The command as a user runs it: output on stdout, the rest on stderr, one line and exit code 2 for a mistake."""

import json
import signal
import subprocess
import sys
import time

import pytest
from pairs import write_pair
from tiny_tokenizer import write_tokenizer

from mlx_gemma_mtp import generate


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli")
    write_pair(directory, "e2b", 1)
    write_tokenizer(directory / "target")
    (directory / "assistant").rename(directory / "drafter")
    return directory


def run(capsys, *arguments):
    code = generate.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_text_goes_to_stdout_and_statistics_to_stderr(model, capsys):
    code, out, err = run(capsys, "--model", model, "--prompt", "the abc", "--max-tokens", 12, "--ignore-eos")
    assert code == 0 and out.endswith("\n") and "tokens/s" in err and "tokens/s" not in out


def test_json_is_one_object_with_text_tokens_and_stats(model, capsys):
    code, out, err = run(capsys, "--model", model, "--prompt", "the abc", "--max-tokens", 12, "--ignore-eos", "--json")
    done = json.loads(out)
    assert code == 0 and err == "" and len(done["tokens"]) == 12 and done["finish_reason"] == "length"
    assert {"rounds", "drafted", "accepted", "accepted_by_position", "acceptance_length"} <= set(done["stats"])


@pytest.mark.parametrize("length", ["0", "1", "heuristic", None])
def test_every_draft_length_gives_the_same_text(model, capsys, length):
    base = ["--model", model, "--prompt", "the abc", "--max-tokens", 20, "--ignore-eos"]
    expected = run(capsys, *base, "--drafter", "none")[1]
    assert run(capsys, *base, *(["--draft-length", length] if length else []))[1] == expected


def test_a_system_message_is_part_of_the_prompt(model, capsys):
    base = ["--model", model, "--prompt", "the abc", "--max-tokens", 5, "--json"]
    count = lambda *more: json.loads(run(capsys, *base, *more)[1])["stats"]["prompt_tokens"]
    assert count("--system", "abc") > count() > count("--raw")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--prompt", ""], "empty"),
    (["--prompt", "x", "--max-tokens", "0"], "max_tokens"),
    (["--prompt", "x", "--max-tokens", "99999"], "beyond the context"),
    (["--prompt", "x", "--draft-length", "40"], "0 (plain decoding) to 16"),
    (["--prompt", "x", "--draft-length", "-3"], "0 (plain decoding) to 16"),
    (["--prompt", "x", "--drafter", "/nowhere"], "not a directory"),
    (["--prompt", "x", "--system", "y", "--raw"], "--system"),
    (["--prompt", "x", "--adapter-path", "/nowhere"], "adapter"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(model, capsys, arguments, message):
    code, out, err = run(capsys, "--model", model, *arguments)
    assert code == 2 and out == "" and message in err and len(err.strip().splitlines()) == 1


def command(*arguments):
    line = [sys.executable, "-m", "mlx_gemma_mtp.generate", *map(str, arguments)]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.compiled
def test_a_pipe_is_the_prompt_and_bytes_that_are_no_text_are_refused(model):
    good = command("--model", model, "--raw", "--max-tokens", 3, "--ignore-eos")
    out, err = good.communicate("the é".encode(), timeout=300)
    assert good.returncode == 0 and out.strip() and b"Traceback" not in err
    bad = command("--model", model)
    out, err = bad.communicate(b"abc\xff\xfe", timeout=300)
    assert (bad.returncode, out) == (2, b"") and b"not UTF-8 text (byte 3)" in err


@pytest.mark.compiled
def test_ctrl_c_ends_cleanly_with_what_was_generated(model):
    process = command("--model", model, "--prompt", "abc", "--max-tokens", 4000, "--ignore-eos")
    first = process.stdout.read(5)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130 and first and rest.endswith(b"\n")
    assert b"tokens/s" in err and b"Traceback" not in err


@pytest.mark.compiled
def test_a_reader_that_goes_away_is_no_traceback(model):
    process = command("--model", model, "--prompt", "abc", "--max-tokens", 2000, "--ignore-eos")
    process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=120)
    assert b"Traceback" not in err and b"Exception" not in err


def test_help_and_import_name_no_runpy_warning():
    done = subprocess.run([sys.executable, "-W", "error", "-m", "mlx_gemma_mtp.generate", "--help"], capture_output=True)
    assert done.returncode == 0 and b"--draft-length" in done.stdout and b"RuntimeWarning" not in done.stderr
