"""Steady throughput: the median over windows, with its spread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Window(NamedTuple):
    """A stretch of training closed by one block.

    Attributes:
        num_steps: updates done.
        seconds: wall time they took.
    """

    num_steps: int
    seconds: float


class Throughput(NamedTuple):
    """How fast, and how sure.

    Attributes:
        steps_per_second: the median over windows.
        spread: the distance of the quartiles as a fraction of the median; 0.0 for one window.
        num_windows: how many windows it rests on.
    """

    steps_per_second: float
    spread: float
    num_windows: int


def steady_throughput(windows: Iterable[Window]) -> Throughput | None:
    """Median and spread of steps per second over the windows.

    Quartiles are interpolated linearly, as ``numpy.percentile`` does. Windows of no steps or no
    time are left out too.

    Returns:
        None if no window is left to tell.
    """
    rates = [window.num_steps / window.seconds for window in windows if window.num_steps > 0 and window.seconds > 0]
    if not rates:
        return None
    lower, median, upper = np.percentile(rates, [25, 50, 75])
    return Throughput(float(median), float((upper - lower) / median), len(rates))
