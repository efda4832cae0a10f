"""How every command ends: one line for what a user can mend, silence when it is interrupted or its reader has gone."""

import os
import signal
import sys
from collections.abc import Callable

from .errors import MtpError


def exit_code(run: Callable[[], int | None], interrupted: str = "") -> int:
    """What `run` returns; 2 for a user's mistake or a full disk, 130 after Ctrl-C, which `interrupted` is said of."""
    try:
        return run() or 0
    except MtpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if interrupted:
            print(interrupted, file=sys.stderr)
        return 130
    except OSError as error:  # keep the interpreter from writing to this output again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"error: {error}", file=sys.stderr)
        return 2
