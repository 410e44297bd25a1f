"""Exit of a command line after an error or an interruption: one line on standard error, and a status."""

from __future__ import annotations

import atexit
import contextlib
import errno
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxnn.observe import printable
from jaxnn.run import RESUMABLE as RESUMABLE
from jaxnn.run import Farewell, drop_output, interruptible, leave
from jaxnn.types import JaxnnError, TrainingError

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it
# Errors of the system about a path that a user gave; a missing file may be a defect.
_UNUSABLE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP)


def status_of(error: BaseException) -> int:
    """The exit status after ``error``, which a process that joined others sends to them."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, KeyboardInterrupt):
        return RESUMABLE  # the others lost a process, as if it had been killed
    return BAD_INPUT if isinstance(error, JaxnnError) and not isinstance(error, TrainingError) else FAILED


@contextlib.contextmanager
def exit_on_user_error(resumed: Path | None = None, *, owns_process: bool = False) -> Iterator[None]:
    """Turns errors meant for the user into one line on standard error and an exit; a defect keeps its traceback.

    Args:
        resumed: the record that the command resumes; an interruption before training leaves it as it was.
        owns_process: whether an interruption may end the process outside of Python code, which compilers and
            computations in C++ keep from running.

    Raises:
        SystemExit: 2 for input that cannot be used, 1 after training failed; after a signal 130, or 75 if nothing was
            trained since ``resumed`` was saved.
    """
    early = INTERRUPTED, "interrupted before anything was trained"
    if resumed is not None:
        early = RESUMABLE, f"interrupted before the first step; to resume: --resume {resumed}"
    at_once = "interrupted at once; what was saved before is kept, see `jaxnn runs`"
    farewell = Farewell(*early, INTERRUPTED, at_once)
    if owns_process:
        atexit.register(_ignore_signals)
    with interruptible(farewell if owns_process else None) as interruption:
        try:
            yield
        except BaseException as error:
            if interruption.at_once or isinstance(error, KeyboardInterrupt):
                # Also if another exception replaced KeyboardInterrupt on its way through C++ code.
                status, text = farewell.after(interruption)
                if not isinstance(error, SystemExit):  # which has printed the reason
                    print(printable(text, lines=False), file=sys.stderr)
                if owns_process:
                    leave(status)  # Python's own way waits for running computations
                raise SystemExit(status) from None
            if isinstance(error, BrokenPipeError):
                drop_output()
            unusable = isinstance(error, OSError) and error.errno in _UNUSABLE
            if isinstance(error, JaxnnError):
                reason = str(error)
            elif isinstance(error, OSError) and unusable:
                reason = f"{error.filename or 'a file'}: {error.strerror}: choose another path."
            elif isinstance(error, BrokenPipeError):
                reason = "standard output was closed, as by `head`."
            elif isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                reason = f"memory ran out ({error}): make the batch or the model smaller."
            else:  # a defect, or an exit that printed its reason
                raise
            print(printable(f"error: {reason}", lines=False), file=sys.stderr)
            raise SystemExit(BAD_INPUT if unusable else status_of(error)) from None


def _ignore_signals() -> None:
    """Keeps the status of a finished command while JAX cleans up, which takes most of a second."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
