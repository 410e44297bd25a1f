"""How fast the workers of a sweep are together, seen from outside: by what their records have grown."""

from __future__ import annotations

import time
from collections.abc import Callable

# Two tasks that end together say nothing on the time between.
LEAST_SECONDS = 1.0


class Pace:
    """Steps a second between the last two looks at which there was something new.

    The first new steps tell nothing: programs are compiled before them.

    Args:
        now: where time is read, in seconds.

    Attributes:
        rate: steps a second; None before it is known.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.rate: float | None = None
        self._now = now
        self._steps = 0
        self._since: float | None = None

    def start(self, steps: int) -> None:
        """Takes note of the steps that were done before."""
        self._steps, self._since = steps, None

    def see(self, steps: int) -> None:
        """Takes note of how many steps are done by now."""
        new, now = steps - self._steps, self._now()
        # Fewer: the last steps of a worker that was lost are done again.
        if new < 0 or (new > 0 and self._since is None):
            self._steps, self._since = steps, now
        elif new > 0 and self._since is not None and now - self._since >= LEAST_SECONDS:
            self.rate = new / (now - self._since)
            self._steps, self._since = steps, now
