"""Where windows and calls begin and end: a pure function of the step, so a resumed run cuts time the same way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Plan(NamedTuple):
    """How ``num_steps`` are cut into windows (what is reported) and calls (what is compiled).

    Attributes:
        num_steps: the last step.
        report_every: steps between reports.
        eval_every: steps between evaluations; 0 for one at the end.
        checkpoint_every: steps between checkpoints; 0 for none that are due by step.
        steps_per_call: the most steps one compiled call runs.
    """

    num_steps: int
    report_every: int
    eval_every: int
    checkpoint_every: int
    steps_per_call: int

    @property
    def cadences(self) -> tuple[int, ...]:
        """The distances at which windows must end."""
        due = (self.report_every, self.eval_every, self.checkpoint_every)
        return tuple(every for every in due if every)

    def window_end(self, step: int) -> int:
        """The end of the window that starts at or contains ``step``."""
        return min(self.num_steps, *((step // every + 1) * every for every in self.cadences))

    def call_length(self, step: int) -> int:
        """How many steps the call that begins at ``step`` runs."""
        return min(self.steps_per_call, self.window_end(step) - step)

    def evaluates(self, step: int) -> bool:
        """Whether held-out data are looked at after ``step``."""
        return step == self.num_steps or _due(step, self.eval_every)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step`` by its number."""
        return _due(step, self.checkpoint_every)

    def call_lengths(self, step: int = 0) -> list[int]:
        """The different lengths of call that the run from ``step`` on needs, longest first."""
        return sorted(set(self._calls(step)), reverse=True)

    def _calls(self, step: int) -> Iterator[int]:
        while step < self.num_steps:
            length = self.call_length(step)
            yield length
            step += length


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def typical_window(plan: Plan) -> int:
    """The number of steps most windows have: what steps per call should divide."""
    return math.gcd(*plan.cadences) if len(set(plan.cadences)) > 1 else plan.cadences[0]


def call_candidate(window: int, about: int) -> int:
    """The divisor of ``window`` nearest to ``about`` by ratio, or ``about`` where none is within a factor of two.

    A divisor spares the window a shorter last call, and with it a program of its own.
    """
    about = max(1, min(about, window))
    divisors = (n for n in range(1, window + 1) if window % n == 0)
    nearest = min(divisors, key=lambda n: abs(math.log(n / about)))
    return nearest if about / 2 <= nearest <= about * 2 else about
