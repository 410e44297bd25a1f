"""Signals and how a process ends: the first signal stops training after its window, the second at once."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from jaxnn._text import drop_output, say_error
from jaxnn.types import printable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What the thread is sent besides the numbers of signals.
WAKE, OVER = b"\x00", b"\xff"
# How long Python code may clean up in a process that ends at once.
GRACE_SECONDS = 1.0
# Exit status. sysexits' EX_TEMPFAIL, "try again later": the run was interrupted, and can be resumed or started again.
RESUMABLE = 75
INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it
SHOW_CURSOR = "\x1b[?25h"


class Interruption:
    """Whether, and by which signal, the run was asked to stop.

    Python writes the number of each signal to a ``pipe``, from C, and calls `handle` in the main thread, which may be
    inside C++ code for minutes. A thread then takes in the signals, and ends the process after the second.
    """

    def __init__(
        self, pipe: tuple[int, int] = (-1, -1), *, owns_process: bool = False, resumed: Path | None = None
    ) -> None:
        self.signum: int | None = None  # the signal that asked to stop
        self.at_once = False  # after a second one, or one before training started
        self._owns_process, self._resumed = owns_process, resumed
        self._finishes: str | None = None
        self._started = False
        self._num_signals = 0
        self._raised = False  # whether the main thread got KeyboardInterrupt
        self.inbox, self.outbox = pipe
        self._lock = threading.RLock()  # a signal may arrive while the main thread takes in another one

    @contextlib.contextmanager
    def finishing(self, what: str) -> Iterator[None]:
        """Within the block the first signal asks to stop after ``what``; outside of it, it raises KeyboardInterrupt."""
        # The exception was swallowed by C code that called Python; or a run within the preparation was interrupted.
        if self.at_once or (self._finishes is None and self.signum is not None):
            raise KeyboardInterrupt
        before, self._finishes = self._finishes, what
        self._started = True
        try:
            yield
        finally:
            self._finishes = before

    @contextlib.contextmanager
    def stopping_if_unread(self, *, ended: bool = False) -> Iterator[None]:
        """Asks to stop as a first signal does, if standard output turns out to be closed: nothing trained is lost.

        ``ended``: training is over, and there is nothing to stop.
        """
        try:
            yield
        except BrokenPipeError:
            # Its reader has ended, as `tee` does when its disk is full.
            self.signum = self.signum or signal.SIGPIPE
            drop_output()
            say_error(f"standard output was closed{'' if ended else ': stopping after the current window'}")

    def ending(self) -> tuple[int, str]:
        """The exit status of a process that ends at once, and its last line on standard error."""
        if self._started:
            return INTERRUPTED, "interrupted at once; what was saved before is kept, see `jaxnn runs`"
        if self._resumed is not None:
            text = f"interrupted before the first step; to resume: --resume {self._resumed}"
            return RESUMABLE, printable(text, lines=False)
        # SIGTERM is a scheduler's, which may try again, and SIGHUP a lost connection's.
        status = RESUMABLE if self.signum in (signal.SIGTERM, signal.SIGHUP) else INTERRUPTED
        return status, "interrupted before anything was trained"

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Python's handler, in the main thread: raises KeyboardInterrupt if everything is to end at once."""
        self._take_in()
        if self.at_once:
            self._raised = True
            os.write(self.outbox, WAKE)  # the thread waits for the end of the process
            raise KeyboardInterrupt

    def _take_in(self) -> bool:
        """Takes in the signals that have arrived; returns False after `OVER`."""
        with self._lock:
            try:
                arrived = os.read(self.inbox, 64)
            except BlockingIOError:  # the other thread was faster
                return True
            for signum in filter(SIGNALS.__contains__, arrived):
                self._take(signum)
        return OVER not in arrived

    def _take(self, signum: int) -> None:
        if signum == self.signum == signal.SIGHUP:
            return  # of the same closed terminal: the system and the shell send one each
        self._raised = False
        self._num_signals += 1
        if self.signum is None and self._finishes is not None:
            self.signum = signum
            say_error(f"stopping after {self._finishes} …; press Ctrl-C again to stop at once")
        else:
            self.at_once, self.signum = True, self.signum or signum

    def listen(self) -> None:
        """Takes in signals until `OVER`; ends the process that does not end at once by itself."""
        timeout: float | None = None
        poll = select.poll()
        poll.register(self.inbox, select.POLLIN)
        while True:
            if poll.poll(timeout):
                if not self._take_in():
                    return
                timeout = 1000 * GRACE_SECONDS if self.at_once else None
            else:
                timeout = None
                self._end_process()

    def _end_process(self) -> None:
        """Ends the process in C++ code, which cannot be interrupted; a record is complete at any time.

        A caller's process, which has more to lose, ends only by a second signal that does not reach its Python code.
        An interactive session is left to its user.
        """
        interactive = hasattr(sys, "ps1")
        if self._owns_process or (self._num_signals > 1 and not self._raised and not interactive):
            status, text = self.ending()
            say_error(text)
            leave(status)
        if not self._raised:
            again = "" if interactive else "; press Ctrl-C again to end the process"
            say_error(f"waiting for a computation that Python cannot interrupt{again}")


# Global, as a process's signal handlers are.
_current: Interruption | None = None
_restored = contextlib.ExitStack()  # the handlers before, and where Python wrote signals
# A forked process shares the pipe: its parent would take its signals for requests to stop.
os.register_at_fork(after_in_child=_restored.close)


@contextlib.contextmanager
def interruptible(*, owns_process: bool = False, resumed: Path | None = None) -> Iterator[Interruption]:
    """Catches SIGINT, SIGTERM and SIGHUP within the block, if Python allows it: in the main thread.

    A block within another one shares its `Interruption`. What is to end at once ends by KeyboardInterrupt. A process
    that the library owns, as a script's that may have ``resumed`` a record, has a second for that; then it is ended.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()
        return
    if _current is not None:
        yield _current
        return
    interruption = Interruption(pipe := os.pipe(), owns_process=owns_process, resumed=resumed)
    for end in pipe:
        os.set_blocking(end, False)
    thread = threading.Thread(target=interruption.listen, name="signals", daemon=True)
    thread.start()
    try:
        _current = interruption
        _restored.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(interruption.outbox, warn_on_full_buffer=False))
        for signum in SIGNALS:
            # A signal that is ignored stays so, as that of Ctrl-C is for what a shell starts in the background, and
            # SIGHUP for what `nohup` starts. None: a handler of C code.
            if (handler := signal.getsignal(signum)) not in (signal.SIG_IGN, None):
                _restored.callback(signal.signal, signum, handler)
                signal.signal(signum, interruption.handle)
            if owns_process:
                # Keeps the status of a finished command while JAX cleans up, which takes most of a second.
                atexit.register(signal.signal, signum, signal.SIG_IGN)
        yield interruption
    finally:
        _restored.close()
        _current = None
        os.write(interruption.outbox, OVER)
        thread.join()
        for end in pipe:
            os.close(end)


def leave(status: int) -> NoReturn:
    """Ends the process without waiting for anything; what was printed is seen, and a terminal has its cursor."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
