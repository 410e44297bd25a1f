"""The best evaluation of any member so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Leader:
    """Who leads, by the monitored metric.

    Args:
        monitored: the metric, as reports name it.
        higher_is_better: whether more of it is better.
    """

    def __init__(self, monitored: str, *, higher_is_better: bool) -> None:
        self.monitored = monitored
        self.higher_is_better = higher_is_better
        self._value = -math.inf if higher_is_better else math.inf
        self._point: Mapping[str, Any] = {}

    def see(self, point: Mapping[str, Any], line: Mapping[str, Any]) -> None:
        """Takes note of a member's report."""
        value = line.get(self.monitored, math.nan)
        if value > self._value if self.higher_is_better else value < self._value:
            self._value, self._point = value, point

    def __str__(self) -> str:
        """``test accuracy 0.981 (learning_rate 0.01, seed 2)``; empty before the first evaluation."""
        if math.isinf(self._value):
            return ""
        point = ", ".join(f"{name} {value}" for name, value in self._point.items())
        return f"{self.monitored.replace('_', ' ')} {self._value:.4g} ({point})"
