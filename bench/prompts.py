"""Prompts by kind, from files of the Python library held out from the demo pair: no download, the same for a version."""

import ast
import json
import re
import sysconfig
from pathlib import Path

from mlx_gemma_mtp.errors import OptionError
from mlx_gemma_mtp.hub import DEMO
from mlx_gemma_mtp.tokenizer import Tokenizer

KINDS = ("code", "prose", "repetition", "chat")
MODULES = 8
QUESTIONS = (
    "Why is the sky blue, and why is it red at dusk?",
    "Write a Python function that merges two sorted lists, and explain how it works.",
    "Plan a week of dinners for two people who do not eat meat.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Think step by step.",
    "Translate into French and German: The library closes at six, but you may return books at any time.",
    "What are the strongest arguments for and against daylight saving time?",
    "Summarise the plot of Hamlet in five sentences.",
    "List ten names for a small bakery, with a reason for each.",
)


def sources() -> list[str]:
    """Files of the standard library that the demo pair was not trained on, the largest first."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = json.loads((DEMO / "training.json").read_text())["held_out_modules"]
    texts = [(library / name).read_text() for name in names if (library / name).is_file()]
    return sorted(texts, key=len, reverse=True)[:MODULES]


def prompts_of(kind: str, tokenizer: Tokenizer, count: int, length: int = 160) -> list[list[int]]:
    """`count` prompts, of about `length` tokens but for chat.

    kind: code, prose, repetition, chat, or a number of tokens for a long context.
    """
    if kind == "chat":
        messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [tokenizer.encode(messages[index % len(messages)]) for index in range(count)]
    if kind not in KINDS and not kind.isdigit():
        raise OptionError(f"workload {kind!r}: use {', '.join(KINDS)}, or a number of tokens")
    texts = sources()
    if kind == "prose":
        texts = ["\n".join(docs) for docs in map(docstrings, texts)]
    elif kind == "repetition":
        lines = [line for text in texts for line in re.findall(r"^ +self\.\w+ = \w+$", text, re.M)[:1]]
        texts = [(line + "\n") * 200 for line in lines or ["    self.value = value"]]
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
