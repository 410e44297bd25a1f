"""Clock of named spans whose seconds add up to wall time, and the steady throughput of training windows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np


class Clock:
    """Seconds spent in named spans; an inner span pauses the one around it, so no second is counted twice.

    Time outside every span is ``other``. One thread opens spans; any thread may read ``current``, which is replaced
    as one value. ``now`` returns the time in seconds and never decreases.
    """

    # When the process of a script started, by ``time.perf_counter``; None: budgets count from the clock's start.
    process_started: ClassVar[float | None] = None

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        # The innermost span, None outside all; its stage, None if it has none; and when it started or resumed.
        self.current: tuple[str | None, str | None, float] = None, None, now()
        self._seconds: dict[str, float] = {}
        self._started = now()

    @contextlib.contextmanager
    def span(self, name: str, stage: str | None = None) -> Iterator[None]:
        """Adds the seconds of the block to ``name``, less those of inner spans; ``stage`` describes it to the user."""
        outer, outer_stage, _ = self.current
        self._switch(name, stage)
        try:
            yield
        finally:
            self._switch(outer, outer_stage)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by name, up to now; together the wall time since the clock was made."""
        name, _, since = self.current
        return self._seconds | {name or "other": self._seconds.get(name or "other", 0.0) + self.now() - since}

    @property
    def passed(self) -> float:
        """Seconds that a budget of time counts: since the process of a script started, else since the clock did."""
        if Clock.process_started is not None:
            return time.perf_counter() - Clock.process_started
        return self.now() - self._started

    def _switch(self, name: str | None, stage: str | None) -> None:
        self._seconds, self.current = self.seconds, (name, stage, self.now())


class Throughput(NamedTuple):
    """Steady speed of training: the median over windows, and the interquartile range as a fraction of it."""

    steps_per_second: float
    spread: float
    num_windows: int

    @staticmethod
    def of(rates: Sequence[float]) -> Throughput | None:
        """Returns median and spread of the steps/s of windows, quartiles as in ``numpy.percentile``; None for none."""
        if not rates:
            return None
        lower, median, upper = np.percentile(rates, [25, 50, 75])
        return Throughput(float(median), float((upper - lower) / median), len(rates))
