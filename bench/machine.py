"""What was measured on: the machine in words, and whether its times mean anything."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from mlx_gemma_mtp.checkpoint import machine_bytes

HOW = """    apt-get install libopenblas0-pthread
    LD_PRELOAD=/usr/lib/$(uname -m)-linux-gnu/openblas-pthread/libblas.so.3 """


def check_blas() -> None:
    """Refuses to time MLX's slow reference BLAS, which makes several rows cost several times one."""
    maps = Path("/proc/self/maps")
    if mx.default_device() != mx.cpu or not maps.exists():
        return
    mx.eval(mx.ones((2, 2)) @ mx.ones((2, 2)))
    files = {Path(line.split()[-1]) for line in maps.read_text().splitlines() if "blas" in line}
    # Not numpy's own copy, which is always there and which MLX does not use.
    if not any(f.name.startswith("libopenblas") or "openblas" in f.parent.name for f in files if "numpy" not in str(f)):
        sys.exit(f"error: times without a fast BLAS mean nothing; run it so:\n{HOW}{' '.join(sys.orig_argv)}")


def machine() -> dict[str, str]:
    """Chip, memory, system and versions."""
    facts = {
        "chip": f"{mx.device_info().get('device_name') or platform.machine()}, {os.cpu_count()} CPU cores",
        "memory": f"{machine_bytes() / 2**30:.0f} GB",
        "system": f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.system(),
        "runs on": str(mx.default_device()),
        "Python": platform.python_version(),
    }
    for package in ("mlx", "mlx-lm", "mlx-vlm", "mlx-gemma-mtp"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def describe(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
