"""A directory that is there whole or not at all: written beside its place, renamed when complete.

Of `DIR`, `.DIR.partial` is being written, `.DIR.old` is what --force replaces, `.DIR.lock` keeps a second writer away. A
process killed at any moment leaves some of these, and the next one to write DIR puts them right.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from mlx_gemma_mtp.errors import OutputError

PAIR = "pair.json"
SPARE_BYTES = 64 << 20  # what headers, tokenizer and file system take besides the weights


@contextmanager
def new_directory(out: Path, needed_bytes: int, force: bool) -> Iterator[Path]:
    """A directory to write into that becomes `out` when the block ends, and vanishes when it raises.

    needed_bytes: what will be written.  force: replace a finished pair at `out`.
    Raises OutputError when `out` is taken or being written, when the disk is too small, and when it fills up.
    """
    out = Path(os.path.abspath(out))
    partial, old = (out.with_name(f".{out.name}.{end}") for end in ("partial", "old"))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out.with_name(f".{out.name}.lock"), timeout=0)
        with lock:
            try:
                _clean_up(out, partial, old)
                _check_free(out, force)
                _check_space(out.parent, needed_bytes)
                partial.mkdir()
                yield partial
                _sync(partial)
                _put_in_place(partial, out, old)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                Path(lock.lock_file).unlink(missing_ok=True)  # before release: who waits for this file sees it gone
    except Timeout:
        raise OutputError(f"{out} is being written by another conversion: wait for it, or choose another --out") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(f"the disk of {out.parent} is full: free {_gigabytes(needed_bytes)} and start again") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise OutputError(f"{error.filename or out} cannot be written ({error.strerror}): choose another --out") from None
        raise


def _clean_up(out: Path, partial: Path, old: Path) -> None:
    """Removes what a killed run left; puts back what it was about to replace."""
    if partial.exists():
        shutil.rmtree(partial)
    if old.exists():
        if out.exists():
            shutil.rmtree(old)
        else:
            old.rename(out)


def _check_free(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / PAIR).is_file():
        raise OutputError(f"{out} exists and is no converted pair: choose another --out")
    if not force:
        raise OutputError(f"{out} holds a converted pair already: use it, or give --force to replace it")


def _check_space(directory: Path, needed_bytes: int) -> None:
    free, needed = shutil.disk_usage(directory).free, needed_bytes + SPARE_BYTES
    if free < needed:
        raise OutputError(f"{directory} has {_gigabytes(free)} free, conversion needs {_gigabytes(needed)}: free some space")


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _sync(directory: Path) -> None:
    """Everything written is on the disk before the directory gets its name."""
    for path in [*directory.rglob("*"), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _put_in_place(partial: Path, out: Path, old: Path) -> None:
    if (out / PAIR).exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
