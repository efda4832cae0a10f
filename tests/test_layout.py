"""A file imports only from files above it, and hosts wait for the device in one place."""

import ast
import importlib.metadata
from pathlib import Path

import mlx_gemma_mtp

ORDER = [
    "errors", "command", "checkpoint", "config", "cache", "sampling", "knowledge", "draft_length", "joined", "target",
    "cluster_head", "drafter", "prefix", "speculative", "calibration", "tokenizer", "channels", "saved", "conversation",
    "stats", "transcript", "batch", "pair", "hub", "generate", "chat",
]  # fmt: skip
PACKAGE = Path(mlx_gemma_mtp.__file__).parent


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield from [node.module] if node.module else [alias.name for alias in node.names]


def test_a_file_imports_only_from_files_above_it():
    for index, name in enumerate(ORDER):
        assert set(imports_of(PACKAGE / f"{name}.py")) <= set(ORDER[:index]), name


def test_every_file_has_its_place():
    assert {p.stem for p in PACKAGE.glob("*.py")} == {*ORDER, "__init__"}


def test_the_package_does_not_import_its_command():
    """A module and a function of one name make `python -m` warn."""
    assert "generate" not in set(imports_of(PACKAGE / "__init__.py"))


def test_the_host_reads_the_device_in_one_place():
    reads = set()
    for path in PACKAGE.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                names = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
                reads |= {(path.stem, function.name)} if names & {"item", "tolist"} else set()
    assert reads == {("speculative", "_read")}


def test_mlx_lm_is_the_version_whose_modules_we_drive():
    """Its Gemma 4 layers, cache protocol and loader are used from the inside: a new minor version needs a look."""
    version = importlib.metadata.version("mlx-lm")
    assert version.startswith("0.32."), f"tested with mlx-lm 0.32, found {version}: check joined.py, cache.py, target.py"
