"""How much of a spoiled drafter's acceptance does the distiller bring back?

    python -m bench.spoil OUT [--pair DIR] [--seed N] [--noise 0.5] [-- --steps 70 --rows 4 --prompts 16 --workers 2]

Adds noise to every matrix of the pair's drafter (`--noise` of its standard deviation), then runs `convert.distill` on files
of the standard library; it prints held-out acceptance before and after. What follows `--` goes to the distiller.
"""

import argparse
import shutil
import sys
import sysconfig
from pathlib import Path

import mlx.core as mx

from mlx_gemma_mtp.convert import distill
from mlx_gemma_mtp.hub import DEMO


def spoil(drafter: Path, out: Path, noise: float, seed: int) -> None:
    """A copy of a drafter's directory with noisy matrices."""
    shutil.copytree(drafter, out, dirs_exist_ok=True)
    weights = mx.load(str(drafter / "model.safetensors"))
    for name, key in zip(sorted(weights), mx.random.split(mx.random.key(seed), len(weights))):
        value = weights[name].astype(mx.float32)
        if value.ndim == 2:
            value += noise * mx.sqrt(value.var()) * mx.random.normal(value.shape, key=key)
            weights[name] = value.astype(weights[name].dtype)
    mx.eval(weights)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "pt"})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pair", type=Path, default=DEMO)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("more", nargs="*", help="options of the distiller")
    options = parser.parse_args()
    spoil(options.pair / "drafter", options.out / "spoiled", options.noise, options.seed)
    data = options.out / "data"
    data.mkdir(exist_ok=True)
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::4]:
        shutil.copy(file, data)
    names = {"pair": options.pair, "drafter": options.out / "spoiled", "data": data, "out": options.out / "tuned"}
    arguments = [part for name, value in names.items() for part in (f"--{name}", str(value))]
    sys.exit(distill.main([*arguments, "--seed", str(options.seed), *options.more]))


if __name__ == "__main__":
    main()
