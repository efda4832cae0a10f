"""Random pairs of every family, loaded once per session. Most tests run uncompiled: on Linux a fused kernel costs seconds."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from pairs import write_pair

import mlx_gemma_mtp

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session", autouse=True)
def own_cache_directory(tmp_path_factory):
    """Costs measured by tests are nobody else's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_GEMMA_MTP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def make_pair_directory(tmp_path_factory):
    """(family, seed, **options) -> directory of a random pair, written once."""
    made = {}

    def make(family, seed=1, **options):
        key = (family, seed, *sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"{family}-{seed}")
            write_pair(made[key], family, seed, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def load_pair(make_pair_directory):
    """(family, seed, **options) -> loaded random pair."""
    loaded = {}

    def load(family, seed=1, **options):
        directory = make_pair_directory(family, seed, **options)
        if directory not in loaded:
            loaded[directory] = mlx_gemma_mtp.load(directory / "target", directory / "assistant", dtype="float32")
        return loaded[directory]

    return load


@pytest.fixture
def goldens():
    """family -> what transformers computed (see make_goldens.py)."""
    return lambda family: json.loads((GOLDENS / f"{family}.json").read_text())


@pytest.fixture(autouse=True)
def uncompiled(request):
    """Every test but those marked `compiled` runs operation by operation."""
    if request.node.get_closest_marker("compiled"):
        yield
    else:
        mx.disable_compile()
        yield
        mx.enable_compile()
