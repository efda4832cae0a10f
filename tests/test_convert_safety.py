"""Killed, out of disk, twice at once: nothing half-written at the place asked for, and the next run puts things right."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from pairs import write_pair

import mlx_gemma_mtp
from mlx_gemma_mtp import OutputError
from mlx_gemma_mtp.convert import directory as directory_module
from mlx_gemma_mtp.convert.build import Options, convert
from mlx_gemma_mtp.convert.check import check
from mlx_gemma_mtp.convert.directory import new_directory
from mlx_gemma_mtp.hub import Source

# Starts when told to, so that a test can kill it at any moment of the conversion and not of Python's start.
CHILD = """
import sys
from pathlib import Path
from mlx_gemma_mtp.convert.build import Options, convert
from mlx_gemma_mtp.hub import Source
pair, out, force = Path(sys.argv[1]), Path(sys.argv[2]), len(sys.argv) > 3
print("ready", flush=True)
sys.stdin.readline()
sources = Source(pair / "target", "t"), Source(pair / "assistant", "d")
convert(*sources, out, Options(recipe="4bit", force=force), lambda line: None)
"""


def start(pair, out, *force):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(pair), str(out), *force],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    return child


def go(child):
    child.stdin.write("\n")
    child.stdin.flush()


def convert_here(pair, out, **options):
    source = Source(pair / "target", "t"), Source(pair / "assistant", "d")
    return convert(*source, out, Options(recipe="4bit", **options), lambda line: None)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Large enough for its conversion to be hit."""
    made = tmp_path_factory.mktemp("source")
    write_pair(made, "e2b", 1, vocab=16384, dtype="bfloat16")
    return made


@pytest.fixture(scope="module")
def seconds(pair, tmp_path_factory):
    """How long a conversion takes in a process of its own."""
    child = start(pair, tmp_path_factory.mktemp("timed") / "out")
    begun = time.monotonic()
    go(child)
    assert child.wait() == 0
    return time.monotonic() - begun


@pytest.mark.parametrize("batch", range(4))
def test_killed_at_any_moment_there_is_nothing_or_the_finished_pair(pair, seconds, tmp_path, batch):
    """Twenty moments over all batches, spread over the whole conversion."""
    moments = random.Random(batch)
    finished = 0
    out = tmp_path / "out"
    children = [start(pair, out) for _ in range(5)]
    for index, child in enumerate(children):
        go(child)
        time.sleep(seconds * (4 * index + batch + moments.random()) / 20)
        child.send_signal(signal.SIGKILL)
        child.wait()
        if out.exists():
            check(out)
            finished += 1
            shutil.rmtree(out)
    assert finished < 5
    convert_here(pair, out)
    check(out)
    assert names(tmp_path) == ["out"], "a run cleans up what killed ones left"


def test_killed_while_replacing_the_old_pair_or_the_new_one_is_there(pair, seconds, tmp_path):
    out = tmp_path / "out"
    convert_here(pair, out)
    (out / "old").touch()
    moments = random.Random(9)
    for _ in range(4):
        child = start(pair, out, "force")
        go(child)
        time.sleep(seconds * moments.random())
        child.send_signal(signal.SIGKILL)
        child.wait()
        check(out)
    convert_here(pair, out, force=True)
    assert names(tmp_path) == ["out"] and not (out / "old").exists()


def test_a_kill_between_the_two_renames_of_a_replacement_is_mended(pair, tmp_path):
    out = tmp_path / "out"
    convert_here(pair, out)
    (out / "old").touch()
    shutil.copytree(out, tmp_path / ".out.partial")
    out.rename(tmp_path / ".out.old")
    with pytest.raises(OutputError, match="--force"):
        convert_here(pair, out)
    assert names(tmp_path) == ["out"] and (out / "old").exists()


def test_two_conversions_into_one_directory_do_not_meet(pair, tmp_path):
    out = tmp_path / "out"
    with (
        new_directory(out, 0, force=False) as partial,
        pytest.raises(OutputError, match="being written by another conversion"),
    ):
        convert_here(pair, out)
    assert partial.name == ".out.partial" and names(out) == []


def test_of_conversions_started_together_one_wins_and_the_rest_say_so(pair, tmp_path):
    out = tmp_path / "out"
    children = [start(pair, out) for _ in range(3)]
    for child in children:
        go(child)
    errors = [child.communicate()[1].strip().splitlines()[-1:] for child in children]
    codes = [child.returncode for child in children]
    assert codes.count(0) == 1, errors
    assert all("another conversion" in e[0] or "already" in e[0] for e, code in zip(errors, codes) if code)
    check(out)
    assert names(tmp_path) == ["out"]


def test_nothing_is_overwritten_without_force_and_only_a_pair_with_it(pair, tmp_path):
    out = tmp_path / "out"
    convert_here(pair, out)
    before = (out / "target" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(OutputError, match="--force"):
        convert_here(pair, out)
    assert (out / "target" / "model.safetensors").stat().st_mtime_ns == before
    convert_here(pair, out, force=True)
    assert (out / "target" / "model.safetensors").stat().st_mtime_ns != before
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1").write_text("irreplaceable")
    with pytest.raises(OutputError, match="is no converted pair"):
        convert_here(pair, other, force=True)
    assert (other / "chapter1").read_text() == "irreplaceable"
    assert names(tmp_path) == ["out", "thesis"]


def test_a_disk_too_small_is_noticed_before_anything_is_read(pair, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(directory_module.shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(OutputError, match=r"0\.00 GB free, conversion needs 0\.\d\d GB"):
        convert_here(pair, tmp_path / "out")
    assert names(tmp_path) == []


@pytest.mark.parametrize("writes", [1, 2, 7, 100, 200])
def test_a_disk_that_fills_up_leaves_nothing(pair, tmp_path, monkeypatch, writes):
    real, count = os.pwrite, 0

    def pwrite(*arguments):
        nonlocal count
        count += 1
        if count >= writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OutputError, match="is full"):
            convert_here(pair, tmp_path / "out")
    assert names(tmp_path) == []
    convert_here(pair, tmp_path / "out")
    check(tmp_path / "out")


def test_a_real_disk_that_fills_up_leaves_nothing(pair, tmp_path, monkeypatch):
    """A file system of 1 MB; needs the right to mount one."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no right to mount a file system")
    try:
        with pytest.raises(OutputError, match="conversion needs"):
            convert_here(pair, disk / "out")
        monkeypatch.setattr(directory_module, "_check_space", lambda *_: None)
        with pytest.raises(OutputError, match="is full"):
            convert_here(pair, disk / "out")
        assert names(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_error_in_the_middle_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "a" / "out", 0, force=False) as partial:
        (partial / "file").touch()
        raise KeyboardInterrupt
    assert names(tmp_path / "a") == []


def test_a_finished_pair_is_found_whole_while_it_is_replaced(pair, tmp_path):
    out = tmp_path / "out"
    convert_here(pair, out)
    with new_directory(out, 0, force=True) as partial:
        assert mlx_gemma_mtp.load(out).generate([5, 6], max_tokens=3).tokens
        shutil.copytree(out, partial, dirs_exist_ok=True)
    check(out)
