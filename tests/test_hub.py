"""Names, the hub's cache, downloads: against a directory laid out as huggingface-hub does it, and a server on this machine."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

import mlx_gemma_mtp
from mlx_gemma_mtp import CheckpointError, HubError, generate, hub
from mlx_gemma_mtp.convert import __main__ as command

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TARGET, DRAFTER = "google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant"
READY = "mlx-community/gemma-4-e2b-it-4bit"
IDS = [5, 6, 7]


def tokens(pair, count=8):
    return pair.generate(IDS, max_tokens=count, ignore_eos=True).tokens


@pytest.mark.parametrize(
    ("name", "target", "drafter"),
    [
        ("E2B", "google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant"),
        ("e4b-it", "google/gemma-4-E4B-it", "google/gemma-4-E4B-it-assistant"),
        ("gemma-4-12b", "google/gemma-4-12B-it", "google/gemma-4-12B-it-assistant"),
        ("26b-a4b-base", "google/gemma-4-26B-A4B", "google/gemma-4-26B-A4B-it-assistant"),
        ("31B-qat", "google/gemma-4-31B-it-qat-q4_0-unquantized", "google/gemma-4-31B-it-qat-q4_0-unquantized-assistant"),
        (READY, READY, "google/gemma-4-E2B-it-assistant"),
        ("mlx-community/gemma-4-26B-A4B-it-qat-4bit",) * 2 + ("google/gemma-4-26B-A4B-it-qat-q4_0-unquantized-assistant",),
        ("someone/another-model", "someone/another-model", ""),
    ],
)
def test_names_stand_for_ids_and_ids_have_drafters(name, target, drafter):
    assert hub.hub_id(name) == target
    assert hub.drafter_id(target) == drafter


@pytest.mark.parametrize("name", ["E9", "E2B-it-it", "a/b/c", "/tmp/none", "./none", "../x/y", "~/x", ""])
def test_other_names_stand_for_nothing(name):
    assert hub.hub_id(name) is None
    with pytest.raises(CheckpointError, match="is not a directory: give the path of"):
        hub.find(name + "nonexistent" if name in ("", "~/x") else name, "auto")


def test_converted_pairs_are_kept_where_the_system_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_GEMMA_MTP_CACHE", str(tmp_path))
    assert hub.cache_directory() == tmp_path
    monkeypatch.delenv("MLX_GEMMA_MTP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert hub.cache_directory() == tmp_path / "xdg" / "mlx_gemma_mtp"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert hub.cache_directory() == Path.home() / "Library" / "Caches" / "mlx_gemma_mtp"


def put_in_cache(cache: Path, repository: str, source: Path) -> None:
    """A downloaded repository, as huggingface-hub lays it out: blobs, links to them, a reference."""
    root = cache / f"models--{repository.replace('/', '--')}"
    for part in ("blobs", f"snapshots/{COMMIT}", "refs"):
        (root / part).mkdir(parents=True)
    for file in source.iterdir():
        blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        (root / "snapshots" / COMMIT / file.name).symlink_to(os.path.relpath(blob, root / "snapshots" / COMMIT))
    (root / "refs" / "main").write_text(COMMIT)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """An empty hub cache and an empty cache of ours, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("MLX_GEMMA_MTP_CACHE", str(tmp_path / "ours"))
    return tmp_path


def test_a_size_is_converted_from_the_hubs_cache_once_and_then_found(offline, make_pair_directory, capsys, monkeypatch):
    pair = make_pair_directory("e2b")
    put_in_cache(offline / "hub", TARGET, pair / "target")
    put_in_cache(offline / "hub", DRAFTER, pair / "assistant")
    first = mlx_gemma_mtp.load("E2B")
    told = capsys.readouterr().err
    assert f"converting {TARGET} and its drafter" in told and "10.4 GB of weights to download become 3.5 GB" in told
    made = json.loads((offline / "ours" / "gemma-4-E2B-it" / "pair.json").read_text())
    assert (made["target"]["source"], made["target"]["revision"], made["target"]["recipe"]) == (TARGET, COMMIT, "mixed")
    monkeypatch.setattr(hub, "fetch", None)  # not even asked again
    second = mlx_gemma_mtp.load("gemma-4-e2b")
    assert capsys.readouterr().err == ""
    assert tokens(second) == tokens(first) and second.drafter is not None
    assert mlx_gemma_mtp.load("E2B", None).drafter is None


def test_the_command_line_takes_a_size(offline, make_pair_directory, capsys):
    pair = make_pair_directory("e2b")
    put_in_cache(offline / "hub", TARGET, pair / "target")
    put_in_cache(offline / "hub", DRAFTER, pair / "assistant")
    assert command.main(["e2b", "--recipe", "8bit"]) == 0
    assert (offline / "ours" / "gemma-4-E2B-it" / "pair.json").exists()
    assert generate.main(["--model", "E2B", "--prompt", "x"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err, "it was found and loaded"


def test_a_ready_target_is_taken_as_it_is_with_the_drafter_of_its_size(offline, make_pair_directory, capsys):
    pair = make_pair_directory("e2b")
    put_in_cache(offline / "hub", READY, pair / "target")
    put_in_cache(offline / "hub", DRAFTER, pair / "assistant")
    loaded = mlx_gemma_mtp.load(READY)
    assert loaded.drafter is not None
    assert tokens(loaded) == tokens(mlx_gemma_mtp.load(pair / "target", pair / "assistant"))
    assert not list((offline / "ours").rglob("pair.json"))


def test_a_drafter_may_be_named_by_its_id_or_size(offline, make_pair_directory):
    pair = make_pair_directory("e2b")
    put_in_cache(offline / "hub", DRAFTER, pair / "assistant")
    for name in (DRAFTER, "E2B"):
        assert mlx_gemma_mtp.load(pair / "target", name).drafter is not None


def test_what_is_not_there_offline_is_an_error_that_names_the_command(offline, make_pair_directory):
    with pytest.raises(HubError, match=r"`python -m mlx_gemma_mtp.convert E4B --out DIR`"):
        mlx_gemma_mtp.load("E4B")
    with pytest.raises(HubError, match=f"`hf download {READY}`"):
        mlx_gemma_mtp.load(READY)
    put_in_cache(offline / "hub", READY, make_pair_directory("e2b") / "target")
    with pytest.raises(HubError, match=f"`hf download {DRAFTER}`"):
        mlx_gemma_mtp.load(READY)
    with pytest.raises(CheckpointError, match="no drafter belongs to someone/model"):
        put_in_cache(offline / "hub", "someone/model", make_pair_directory("e2b") / "target")
        mlx_gemma_mtp.load("someone/model")


def test_an_interrupted_download_does_not_pass_for_a_checkpoint(offline, make_pair_directory):
    put_in_cache(offline / "hub", READY, make_pair_directory("e2b") / "target")
    for file in (offline / "hub").rglob("model.safetensors"):
        file.unlink()
    with pytest.raises(HubError, match="hf download"):
        mlx_gemma_mtp.load(READY)


class Hub(ThreadingHTTPServer):
    """As much of the hub's interface as a download needs. Breaks off each file in `broken` once, in the middle."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.broken, self.sent, self.ranges = repositories, set(), 0, []
        self.asked: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool):
        path = self.path.split("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/\w+/?", path):
            directory = self.server.repositories.get(found[1])
            if directory is None:
                return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            files = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": etag(f)} for f in sorted(directory.iterdir())
            ]
            siblings = [{"rfilename": f["path"]} for f in files]
            info = {"id": found[1], "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            return self.reply(200, json.dumps(files if found[2] == "tree" else info).encode())
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path)
        file = found and self.server.repositories[found[1]] / found[2]
        if not file or not file.exists():
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        data, status, headers = file.read_bytes(), 200, {"ETag": f'"{etag(file)}"', "X-Repo-Commit": COMMIT}
        self.server.asked.add(file.name)
        if body and (wanted := self.headers.get("Range")):
            start = int(re.match(r"bytes=(\d+)-", wanted)[1])
            self.server.ranges.append((file.name, start))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        return self.reply(status, data, headers, body, file)

    def reply(self, status, data, headers=None, body=True, file=None):
        self.send_response(status)
        for key, value in {"Content-Length": len(data), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if not body:
            return
        if file in self.server.broken:
            self.server.broken.discard(file)
            data = data[: len(data) // 2]
            self.close_connection = True
        if file:
            self.server.sent += len(data)
        self.wfile.write(data)
        self.wfile.flush()
        if self.close_connection:
            self.connection.close()


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def server(make_pair_directory, tmp_path):
    pair = make_pair_directory("e2b", vocab=32768)  # huggingface-hub keeps whole chunks of 10 MB only
    for side in ("target", "assistant"):
        shutil.copytree(pair / side, tmp_path / "hub" / side)
        (tmp_path / "hub" / side / "README.md").write_text("never asked for")
    running = Hub({TARGET: tmp_path / "hub" / "target", DRAFTER: tmp_path / "hub" / "assistant"})
    yield running
    running.shutdown()
    running.server_close()


def run_online(server, tmp_path, *arguments, **environment):
    """A process of its own: huggingface-hub reads its settings when it is imported."""
    settings = {
        "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "MLX_GEMMA_MTP_CACHE": str(tmp_path / "ours"),
        "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-m", *arguments], env=inherited | settings | environment, capture_output=True, text=True, timeout=120
    )


def test_a_download_is_announced_resumed_and_converted(server, tmp_path):
    server.broken = {server.repositories[TARGET] / "model.safetensors"}
    done = run_online(server, tmp_path, "mlx_gemma_mtp.convert", "E2B", "--dtype", "float32", "--recipe", "bf16")
    assert done.returncode == 0, done.stderr
    assert f"{TARGET}: downloading 0.03 GB into {tmp_path / 'hf' / 'hub'}" in done.stderr
    assert "model.safetensors" in {name for name, _ in server.ranges}, "the rest was asked for, not the whole again"
    sizes = sum(f.stat().st_size for d in server.repositories.values() for f in d.iterdir() if f.name != "README.md")
    assert sizes <= server.sent < 1.3 * sizes and "README.md" not in server.asked
    made = json.loads((tmp_path / "ours" / "gemma-4-E2B-it" / "pair.json").read_text())
    assert (made["target"]["revision"], made["drafter"]["source"]) == (COMMIT, DRAFTER)
    before = server.sent
    again = run_online(server, tmp_path, "mlx_gemma_mtp.convert", "E2B", "--force", "--recipe", "bf16")
    assert again.returncode == 0 and "downloading" not in again.stderr and server.sent == before
    assert run_online(server, tmp_path, "mlx_gemma_mtp.convert", "E2B", "--force", HF_HUB_OFFLINE="1").returncode == 0


def test_a_repository_that_does_not_exist_is_one_line(server, tmp_path):
    done = run_online(server, tmp_path, "mlx_gemma_mtp.generate", "--model", "someone/gemma-4-E2B-x", "--prompt", "hi")
    assert done.returncode == 2 and done.stderr.startswith("error: someone/gemma-4-E2B-x is not on this machine")
    assert done.stderr.count("\n") == 1
