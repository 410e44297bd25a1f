"""Signals: the first is acknowledged at once and ends training after its window, the second ends it at once."""

from __future__ import annotations

import _thread
import contextlib
import gc
import math
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from jaxnn.observe import drop_output, say_error

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long Python code may take to clean up before a process that ends at once is ended from outside of it.
GRACE_SECONDS = 1.0
# How long the main thread waits for the one that takes in signals, which is a matter of microseconds.
TAKEN_SECONDS = 0.5
RETRY_SECONDS = 0.01
# What the thread is sent besides the numbers of signals.
OVER, AGAIN = 0, 255
# sysexits' EX_TEMPFAIL, "try again later": the run was interrupted, and can be resumed or started again.
RESUMABLE = 75
# A shell's exit status of a process that a signal ended, less the signal's number.
SIGNALLED = 128
SHOW_CURSOR = "\x1b[?25h"


# From how it was interrupted, the exit status of a process that is stopped at once, and what it then prints.
type Farewell = Callable[[Interruption], tuple[int, str]]


class Interruption:
    """Whether, and by which signal, the run was asked to stop.

    Signals are taken in by a thread, which Python wakes from C: the main thread may be inside XLA's compiler for
    minutes, during which Python calls no handler. A call that never ends is ended with the process.
    """

    def __init__(self, farewell: Farewell | None = None) -> None:
        self.signum: int | None = None  # the signal that asked to stop after what is under way
        self.ended_by: int | None = None  # the one that ends all at once: a second one, or one before training started
        # How the process ends if the main thread does not end it in time; None: a caller's process, which is ended only
        # if the main thread does not come back from C++ code.
        self.farewell = farewell
        self.asked_at = math.inf  # when ``signum`` came, by ``time.monotonic``
        self._warned = False
        self._finishes: str | None = None
        self._breaks_off = self._over = False
        self._taken = self._handled = self._repeated = 0
        self._outbox: socket.socket | None = None
        self._deadline = math.inf

    @property
    def at_once(self) -> bool:
        """Whether everything is to end at once."""
        return self.ended_by is not None

    @contextlib.contextmanager
    def finishing(self, what: str, *, breaks_off: bool = False) -> Iterator[None]:
        """Within the block the first signal asks to stop after ``what``; outside of it, it raises KeyboardInterrupt.

        With ``breaks_off`` it raises KeyboardInterrupt here too, once Python code runs; ``at_once`` stays False.
        """
        # The exception was swallowed by C code that called Python; or a run within the preparation was interrupted.
        if self.at_once or (self._finishes is None and self.signum is not None):
            raise KeyboardInterrupt
        before = self._finishes, self._breaks_off
        self._finishes, self._breaks_off = what, breaks_off
        try:
            yield
        finally:
            self._finishes, self._breaks_off = before
            self._over = self._finishes is None

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

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Python's handler, in the main thread: raises KeyboardInterrupt if everything is to end at once."""
        late = time.monotonic() + TAKEN_SECONDS
        while self._taken == self._handled and time.monotonic() < late:
            time.sleep(1e-4)
        self._handled = self._taken
        if not (self.at_once or self._breaks_off):
            return
        if self._outbox is not None and _is_ignored_in(frame):
            self._outbox.send(bytes([AGAIN]))
            return
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Has a thread take in the signals of the block."""
        inbox, self._outbox = socket.socketpair()
        thread = threading.Thread(target=self._listen, args=(inbox,), name="signals", daemon=True)
        with inbox, self._outbox:
            self._outbox.setblocking(False)
            thread.start()
            before = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)
                self._outbox.send(bytes([OVER]))
                thread.join()

    def _listen(self, inbox: socket.socket) -> None:
        """Takes in signals until `OVER`; ends the process that does not end at once by itself."""
        while True:
            left = self._deadline - time.monotonic()
            inbox.settimeout(None if left == math.inf else max(left, 1e-3))
            try:
                number = inbox.recv(1)[0]
            except TimeoutError:
                self._expire()
                continue
            if number == OVER:
                return
            if number == AGAIN:
                time.sleep(RETRY_SECONDS)
                self._repeated += 1
                _thread.interrupt_main()
            elif number in SIGNALS:
                self._take(number)

    def _take(self, signum: int) -> None:
        answer = None
        if self._repeated:
            self._repeated -= 1
        elif self._over and self._finishes is None and not self.at_once:
            pass  # everything that could be stopped is done and saved
        elif self.signum is None and self._finishes is not None:
            self.signum, self.asked_at = signum, time.monotonic()
            answer = f"stopping after {self._finishes} …; press Ctrl-C again to stop at once"
        elif signum == self.signum == signal.SIGHUP:
            pass  # of the same closed terminal: the system and the shell send one each
        elif self.at_once and self.farewell:
            self._leave()
        else:
            self.ended_by = signum
            self._deadline = time.monotonic() + GRACE_SECONDS
        self._taken += 1
        if answer is not None:
            say_error(answer)

    def _expire(self) -> None:
        """Ends the process, unless it is a caller's whose main thread has got KeyboardInterrupt or may still get it."""
        self._deadline = math.inf
        if self.farewell is not None or (self._handled < self._taken and self._may_end_callers()):
            self._leave()
        if self._handled < self._taken and not self._warned:
            self._warned = True
            say_error("waiting for a computation that Python cannot interrupt; press Ctrl-C again to end the process")

    def _may_end_callers(self) -> bool:
        # An interactive session has more than this call to lose, and its own way to end it.
        return self.ended_by == signal.SIGTERM or (self._warned and not hasattr(sys, "ps1"))

    def give_up(self, why: str) -> NoReturn:
        """Ends the process, which was asked to stop, from another thread: what it waits for may never end."""
        say_error(why)
        self._leave()

    def _leave(self) -> NoReturn:
        """Ends the process at once: C++ code cannot be interrupted, and a record is complete at any time."""
        if self.farewell is None:
            leave(SIGNALLED + (self.ended_by or self.signum or 0))
        status, text = self.farewell(self)
        say_error(text)
        leave(status)


@contextlib.contextmanager
def interruptible(farewell: Farewell | None = None) -> Iterator[Interruption]:
    """Catches SIGINT, SIGTERM and SIGHUP within the block, if Python allows it: in the main thread.

    A block within another one shares its `Interruption`. Without a ``farewell``, a process that is stopped at once
    ends by KeyboardInterrupt, unless C++ code keeps its main thread: then SIGTERM or a second Ctrl-C ends it.
    """
    interruption = Interruption(farewell)
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    outer = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(outer, Interruption):
        yield outer
        return
    # A signal that is ignored stays so, as that of Ctrl-C is for what a shell starts in the background, and SIGHUP for
    # what `nohup` starts.
    before = {signum: handler for signum in SIGNALS if (handler := signal.getsignal(signum)) != signal.SIG_IGN}
    try:
        for signum in before:
            signal.signal(signum, interruption.handle)
        with interruption.listening():
            yield interruption
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _is_ignored_in(frame: FrameType | None) -> bool:
    """Whether Python would report and drop an exception raised in ``frame``: in a callback of the garbage collector.

    JAX has callbacks and finalizers, and signals that arrive during a collection are handled in them.
    """
    callbacks = {getattr(callback, "__code__", None) for callback in (*gc.callbacks, weakref.finalize.__call__)}
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


def leave(status: int) -> NoReturn:
    """Ends the process without waiting for anything; what was printed is seen, and a terminal has its cursor."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
