"""How a command line ends when something is wrong or it is interrupted: one line on standard error, and a status."""

from __future__ import annotations

import atexit
import contextlib
import errno
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxnn.observe import printable
from jaxnn.run import RESUMABLE as RESUMABLE
from jaxnn.run import Farewell, drop_output, interruptible, leave
from jaxnn.types import ConfigError, JaxnnError, TrainingError

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it
# What the system refuses of a path that a user gave; a file that is missing may as well be a defect.
UNUSABLE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP)
STOPPED_AT_ONCE = "interrupted at once; what was saved before is kept, see `jaxnn runs`"


@contextlib.contextmanager
def sentences(resumed: Path | None = None, *, owns_process: bool = False) -> Iterator[None]:
    """Turns the errors that jaxnn means for its user into one line and an exit; a defect keeps its traceback.

    Args:
        resumed: the record that the command resumes, which is as it was after an interruption before training.
        owns_process: whether an interruption may end the process from outside of Python code, which compilers and
            computations in C++ keep from running.

    Raises:
        SystemExit: 2 for input that cannot be used, 1 after training failed; after a signal 130, or 75 if nothing was
            trained since ``resumed`` was saved.
    """
    early = INTERRUPTED, "interrupted before anything was trained"
    if resumed is not None:
        early = RESUMABLE, f"interrupted before the first step; to resume: --resume {resumed}"
    farewell = Farewell(*early, INTERRUPTED, STOPPED_AT_ONCE)
    if owns_process:
        atexit.register(_ignore_signals)
    with interruptible(farewell if owns_process else None) as interruption:
        try:
            yield
        except BaseException as error:
            if interruption.at_once or isinstance(error, KeyboardInterrupt):
                # Also where another exception took the place of KeyboardInterrupt on its way through C++ code.
                status, text = farewell.after(interruption)
                if not isinstance(error, SystemExit):  # which has said why
                    print(printable(text, lines=False), file=sys.stderr)
                if owns_process:
                    # Python's own way waits for what is still computed.
                    leave(status)
                raise SystemExit(status) from None
            if isinstance(error, JaxnnError):
                end(f"error: {error}", FAILED if isinstance(error, TrainingError) else BAD_INPUT)
            if isinstance(error, BrokenPipeError):
                drop_output()
                end("error: standard output was closed, as by `head`.", FAILED)
            if isinstance(error, OSError) and error.errno in UNUSABLE:
                end(f"error: {error.filename or 'a file'}: {error.strerror}: choose another path.", BAD_INPUT)
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                end(f"error: memory ran out ({error}): make the batch or the model smaller.", FAILED)
            raise


def _ignore_signals() -> None:
    """Keeps the status of a command that is over while JAX cleans up, which takes most of a second."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


def check_text(arguments: Sequence[str]) -> None:
    """Refuses words that are not in the encoding of file names: JAX and the files of a record take text alone.

    Raises:
        ConfigError: one is; it is named with its bytes as escapes.
    """
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{word} is not UTF-8: use another name.") from None


def end(text: str, status: int) -> None:
    """Prints ``text`` on standard error, without control characters, and ends the command.

    Raises:
        SystemExit: always, with ``status``.
    """
    print(printable(text, lines=False), file=sys.stderr)
    raise SystemExit(status) from None
