"""Prompts by kind, from files of the Python library held out from the demo pair: no download, the same for a version."""

import ast
import json
import re
import sysconfig
from pathlib import Path

from mlx_gemma_mtp.hub import DEMO
from mlx_gemma_mtp.tokenizer import Tokenizer

MODULES = 8


def sources() -> list[str]:
    """Files of the standard library that the demo pair was not trained on, the largest first."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = json.loads((DEMO / "training.json").read_text())["held_out_modules"]
    texts = [(library / name).read_text() for name in names if (library / name).is_file()]
    return sorted(texts, key=len, reverse=True)[:MODULES]


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
