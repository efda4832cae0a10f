"""Prompts by kind, from the running Python's own library: no download, the same on every machine of that version."""

import ast
import importlib.util
import re
from pathlib import Path

from mlx_gemma_mtp.tokenizer import Tokenizer

# Not among the files the demo pair was trained on (see demo/held_out.json).
MODULES = (
    "logging.config", "multiprocessing.pool", "unittest.case", "urllib.request", "zipfile", "statistics", "pickle", "uuid",
)  # fmt: skip


def sources() -> list[str]:
    found = (importlib.util.find_spec(name) for name in MODULES)
    return [Path(spec.origin).read_text() for spec in found if spec and spec.origin]


def prompts_of(kind: str, tokenizer: Tokenizer, count: int, length: int = 160) -> list[list[int]]:
    """`count` prompts of about `length` tokens. kind: code, prose, repetition, or a number of tokens for long contexts."""
    texts = sources()
    if kind == "prose":
        texts = ["\n".join(docs) for docs in map(docstrings, texts)]
    elif kind == "repetition":
        texts = [(line + "\n") * 200 for text in texts for line in re.findall(r"^ +self\.\w+ = \w+$", text, re.M)[:1]]
    elif kind.isdigit():
        texts, length = ["\n".join(texts)] * count, int(kind)
    prompts = []
    for index in range(count):
        ids = tokenizer.encode(texts[index % len(texts)], raw=True)
        start = (index * 997 + 400) % max(len(ids) - length, 1)
        prompts.append([tokenizer.bos_id, *ids[start + 1 : start + length]])
    return prompts


def docstrings(source: str) -> list[str]:
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return [doc for doc in map(ast.get_docstring, nodes) if doc]
