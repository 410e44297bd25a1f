"""An honest stopwatch: named spans whose seconds add up to wall time, none counted twice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Clock:
    """Seconds spent in named spans; an inner span pauses the one around it.

    Time outside every span is counted nowhere. For one thread, though any other may read ``current``.

    Args:
        now: where time is read, in seconds; it never goes back.

    Attributes:
        now: the same.
        current: the innermost span, None outside all, and since when it goes on or goes on again; replaced as a whole,
            so that another thread never reads the name of one span with the time of another.
        stage: what the innermost span does, in words, None if it has none, and since when; replaced likewise.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.current: tuple[str | None, float] = None, now()
        self.stage: tuple[str | None, float] = self.current
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def span(self, name: str, stage: str | None = None) -> Iterator[None]:
        """Adds the seconds of the ``with`` block to ``name``, less those of spans within it.

        Args:
            name: what the seconds are counted as.
            stage: what is done, in words, for whoever waits for it.
        """
        (outer, _), (outer_stage, _) = self.current, self.stage
        self._switch(name, stage)
        try:
            yield
        finally:
            self._switch(outer, outer_stage)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by name up to now, that of an open span included."""
        name, since = self.current
        spent = {} if name is None else {name: self._seconds.get(name, 0.0) + self.now() - since}
        return self._seconds | spent

    def _switch(self, name: str | None, stage: str | None) -> None:
        now = self.now()
        before, since = self.current
        if before is not None:
            self._seconds[before] = self._seconds.get(before, 0.0) + now - since
        self.current, self.stage = (name, now), (stage, now)
