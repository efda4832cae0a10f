"""Conversion at full size: a checkpoint of real shapes and random values, converted under observation, then run.

    python -m bench.convert_full_size WORK [--size E2B] [--recipe mixed]     (from the repository; WORK needs some 15 GB free)
    python -m bench.convert_full_size WORK --clusters                       (a cluster head at 262,144 x 1024)

The last line is JSON. Anonymous memory is what the kernel counts for the converting process, pages of mapped files left out.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_gemma_mtp.checkpoint import Tensor, read_header
from mlx_gemma_mtp.convert import cluster
from mlx_gemma_mtp.convert.container import Entry, Writer
from mlx_gemma_mtp.convert.plan import drafter_facts, facts, target_facts, text_values

BLOCK = 1 << 24  # values made at a time


def write_random(directory: Path, tensors: dict[str, Tensor], config: dict) -> None:
    """A Hugging Face directory with these tensors: bf16, small random values; norms near one, orders shuffled."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text('{"bos_token_id": 2, "eos_token_id": [1, 106]}')
    entries = [[Entry(name, tensor.dtype, tensor.shape)] for name, tensor in tensors.items()]
    mx.random.seed(0)
    noise = mx.random.normal((BLOCK,)) * 0.02
    order = mx.random.permutation(262144)
    with Writer(directory, entries, 1 << 40) as writer:
        for name, tensor in tensors.items():
            left = tensor.size
            while left:
                count = min(left, BLOCK)
                if tensor.dtype == "I64":
                    block = order.astype(mx.int64)
                elif len(tensor.shape) < 2:
                    block = mx.ones((count,), mx.bfloat16)
                else:
                    block = mx.roll(noise, left % 9973)[:count].astype(mx.bfloat16)
                writer.append(name, block)
                left -= count
        writer.finish()


def write_pair(out: Path, size: str) -> None:
    found = facts()[size]
    tensors, config = target_facts(size)
    write_random(out / "target", tensors, config)
    drafter = {key: value for key, value in found["drafter"].items() if key not in ("tensors", "text_config")}
    write_random(
        out / "assistant", drafter_facts(size)[0], drafter | {"text_config": text_values(found["drafter"]["text_config"])}
    )


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process (Linux)."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def measure_conversion(work: Path, size: str, recipe: str) -> dict:
    source, out = work / f"{size}-source", work / f"{size}-converted"
    if not source.exists():
        write_pair(source, size)
    shutil.rmtree(out, ignore_errors=True)
    begun, peak = time.perf_counter(), 0
    command = ["-m", "mlx_gemma_mtp.convert", source / "target", "--drafter", source / "assistant", "--out", out]
    child = subprocess.Popen([sys.executable, *map(str, command), "--recipe", recipe])
    while child.poll() is None:
        peak = max(peak, anonymous_bytes(child.pid))
        time.sleep(0.05)
    seconds = time.perf_counter() - begun
    if child.returncode:
        sys.exit(child.returncode)
    return {
        "size": size,
        "recipe": recipe,
        "source_bytes": sum(f.stat().st_size for f in source.rglob("*.safetensors")),
        "converted_bytes": sum(f.stat().st_size for f in out.rglob("*.safetensors")),
        "seconds": round(seconds, 1),
        "peak_anonymous_bytes": peak,
    }


def generates(pair: Path) -> dict:
    """A few drafted rounds of the converted pair, in bf16 as a Mac would hold it where the CPU can, else in float32."""
    code = (
        "import sys, time, mlx_gemma_mtp; t = time.perf_counter(); p = mlx_gemma_mtp.load(sys.argv[1]); "
        "s = time.perf_counter(); c = p.generate([2, 5, 6], max_tokens=4, draft_length=2, ignore_eos=True); "
        "print(len(c.tokens), c.stats.drafted, round(s - t, 1))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(pair)], capture_output=True, text=True)
    if done.returncode:
        return {"generates": done.stderr.strip().splitlines()[-1]}
    tokens, drafted, seconds = done.stdout.split()
    return {"generates": int(tokens) == 4 and int(drafted) > 0, "load_seconds": float(seconds)}


def measure_clusters(work: Path, vocab: int = 262144, width: int = 1024) -> dict:
    """Time and memory of building a cluster head; values with some structure, so that clusters exist."""
    work.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    groups = random.standard_normal((vocab // 64, width)).astype(np.float32)
    table = groups[random.integers(0, len(groups), vocab)]
    for start in range(0, vocab, 1 << 14):
        table[start : start + (1 << 14)] += 0.7 * random.standard_normal((1 << 14, width), np.float32)
    states = table[random.integers(0, vocab, 1500)] + 2 * random.standard_normal((1500, width), np.float32)
    file = work / "table.safetensors"
    mx.save_safetensors(str(file), {"model.embed_tokens.weight": mx.array(table).astype(mx.bfloat16)})
    del table
    tensor = read_header(file)["model.embed_tokens.weight"]
    begun = time.perf_counter()
    fitted, held_out = mx.array(states[:1000]), mx.array(states[1000:])
    made = cluster.write_clusters(tensor, fitted, work / cluster.CLUSTERS_FILE)
    seconds = time.perf_counter() - begun
    loaded = mx.load(str(work / cluster.CLUSTERS_FILE))
    dense = cluster.dense_choices(tensor, held_out)[:, 0]
    clusters = made[cluster.CENTROIDS + "weight"].shape[0]
    label = np.empty(vocab, int)
    label[np.array(loaded[cluster.ORDERING])] = np.repeat(np.arange(clusters), vocab // clusters)
    routes = np.array(held_out @ loaded[cluster.CENTROIDS + "weight"].T)
    rank = (routes > np.take_along_axis(routes, label[dense][:, None], 1)).sum(1)
    return {
        "table": [vocab, width],
        "clusters": clusters,
        "seconds": round(seconds, 1),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1),
        "clusters_scored_for_99_percent": int(np.quantile(rank, 0.99)) + 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--size", default="E2B")
    parser.add_argument("--recipe", default="mixed")
    parser.add_argument("--clusters", action="store_true")
    options = parser.parse_args()
    if options.clusters:
        print(json.dumps(measure_clusters(options.work)))
        return
    result = measure_conversion(options.work, options.size, options.recipe)
    print(json.dumps(result | generates(options.work / f"{options.size}-converted")))


if __name__ == "__main__":
    main()
