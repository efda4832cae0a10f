"""Training text: files of plain text, prompts or chats -> token ids, and what the target writes after prompts."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_gemma_mtp.draft_length import Fixed
from mlx_gemma_mtp.errors import MtpError
from mlx_gemma_mtp.speculative import Engine, Row, decode, prefill, stack
from mlx_gemma_mtp.target import Target
from mlx_gemma_mtp.tokenizer import Tokenizer

HELD_OUT_SHARE = 1 / 16


class DataError(MtpError):
    """Training data that cannot be used; the message names file and line."""


@dataclass(frozen=True)
class Document:
    """One text as ids. where: file and line for messages.  is_prompt: the target is to continue it."""

    where: str
    ids: list[int]
    is_prompt: bool = False


def read_documents(source: str, tokenizer: Tokenizer) -> list[Document]:
    """The documents in a file, a directory (all files in it) or standard input ("-").

    A .jsonl file holds one object a line: {"text": …}, {"messages": […]} or {"prompt": …}, which the target continues.
    Any other file is one plain text.
    Raises DataError.
    """
    if source == "-":
        files = [("standard input", sys.stdin.buffer.read())]
    else:
        path = Path(source)
        if not path.exists():
            raise DataError(f"{source} does not exist: give a file or directory of training texts")
        paths = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        files = [(str(p), p.read_bytes()) for p in paths]
    documents = [document for name, data in files for document in _read_file(name, data, tokenizer)]
    if not documents:
        raise DataError(f"{source} holds no text: give texts to train on")
    return documents


def _read_file(name: str, data: bytes, tokenizer: Tokenizer) -> list[Document]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{name}, line {line}: not UTF-8 text: convert it to UTF-8") from None
    if not text.strip():
        raise DataError(f"{name} is empty: give texts to train on")
    if not name.endswith(".jsonl"):
        return [_document(f"{name}, line 1", text, "text", tokenizer)]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [_read_line(f"{name}, line {number}", line, tokenizer) for number, line in lines]


def _read_line(where: str, line: str, tokenizer: Tokenizer) -> Document:
    kinds = {"text": str, "messages": list, "prompt": str}
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: invalid JSON ({error.msg} at column {error.colno}): mend or remove the line") from None
    found = [kind for kind in kinds if isinstance(value, dict) and isinstance(value.get(kind), kinds[kind])]
    if len(found) != 1:
        raise DataError(f'{where}: needs exactly one of "text" (string), "messages" (list) and "prompt" (string)')
    return _document(where, value[found[0]], found[0], tokenizer)


def _document(where: str, value: str | list, kind: str, tokenizer: Tokenizer) -> Document:
    try:
        ids = _chat_ids(value, tokenizer) if kind == "messages" else tokenizer.encode(value, raw=True)
    except MtpError as error:
        raise DataError(f"{where}: {error}") from error
    is_prompt = kind == "prompt"
    if len(ids) - (tokenizer.bos_id is not None) < (1 if is_prompt else 2):
        raise DataError(f"{where}: {len(ids)} tokens with the one that begins every text: a text needs two or more of its own")
    return Document(where, ids, is_prompt)


def _chat_ids(messages: list, tokenizer: Tokenizer) -> list[int]:
    """A whole conversation, without the opening of another turn."""
    if tokenizer.wrapper is None or not tokenizer.wrapper.has_chat_template:
        raise DataError("this checkpoint has no chat template: give plain texts")
    try:
        text = tokenizer.wrapper.apply_chat_template(messages, tokenize=False, enable_thinking=False)
    except Exception as error:  # a template is a program of the checkpoint and may raise anything
        raise DataError(f"the chat template cannot render these messages ({error})") from error
    return tokenizer.encode(text, raw=True)


def continue_prompts(target: Target, prompts: list[list[int]], tokens: int, stop_ids=frozenset(), rows=64, done=None):
    """The target's own greedy continuations. prompts: ids.  done: called with the number of prompts finished.

    Returns prompt + continuation, at most `tokens` longer, in the order of the prompts.
    """
    engine, results = Engine(target, None), []
    for start in range(0, len(prompts), rows):
        part = prompts[start : start + rows]
        batch = [Row(list(p), tokens, stop_ids) for p in part]
        state = stack([prefill(target, p) for p in part])
        for _ in decode(engine, state, batch, Fixed(0).begin()):
            pass
        results += [p + row.tokens for p, row in zip(part, batch, strict=True)]
        if done:
            done(len(part))
    return results


def split_held_out(documents: list[list[int]]) -> tuple[np.ndarray, list[list[int]]]:
    """(training ids as one array, held-out documents): every 16th document, or the end of the only one."""
    period = min(round(1 / HELD_OUT_SHARE), len(documents))
    if len(documents) == 1:
        ids = documents[0]
        cut = max(1, int(len(ids) * (1 - HELD_OUT_SHARE)))
        return np.array(ids[:cut], np.int32), [ids[cut:]] if len(ids) - cut > 1 else [ids]
    held_out = documents[period - 1 :: period]
    training = [ids for i, ids in enumerate(documents) if i % period != period - 1]
    return np.concatenate([np.array(ids, np.int32) for ids in training]), held_out
