"""An honest stopwatch: named spans whose seconds add up to wall time, none counted twice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Clock:
    """Seconds spent in named spans; an inner span pauses the one around it.

    Time outside every span is counted nowhere. For one thread.

    Args:
        now: where time is read, in seconds; it never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since = now()
        self._current: str | None = None
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Adds the seconds of the ``with`` block to ``name``, less those of spans within it."""
        outer = self._current
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by name up to now, that of an open span included."""
        self._switch(self._current)
        return dict(self._seconds)

    def _switch(self, name: str | None) -> None:
        now = self._now()
        if self._current is not None:
            self._seconds[self._current] = self._seconds.get(self._current, 0.0) + now - self._since
        self._current, self._since = name, now
