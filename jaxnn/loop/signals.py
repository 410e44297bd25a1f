"""SIGINT and SIGTERM as a wish to stop at the end of the window; a second one stops at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interruption:
    """Whether, and by which signal, the run was asked to stop.

    Attributes:
        signum: the signal's number, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Notes the first signal; raises KeyboardInterrupt at the second."""
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Catches SIGINT and SIGTERM within the block, where Python allows it: in the main thread."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {signum: signal.signal(signum, interruption.handle) for signum in signals}
    try:
        yield interruption
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
