"""Where windows and calls begin and end: a pure function of the step, so a resumed run cuts time the same way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

# A window that calls do not divide ends in a shorter call, which is a program of its own: so many may be compiled
# before powers of two, of which every length is a sum, come cheaper.
MOST_TAILS = 3


class Plan(NamedTuple):
    """How ``num_steps`` are cut into windows (what is reported) and calls (what is compiled).

    Attributes:
        num_steps: the last step.
        report_every: steps between reports.
        eval_every: steps between evaluations; 0 for one at the end.
        checkpoint_every: steps between checkpoints; 0 for none that are due by step.
        steps_per_call: the most steps one compiled call runs.
        tails: the lengths of shorter calls at the end of windows, longest first; see :func:`with_tails`.
    """

    num_steps: int
    report_every: int
    eval_every: int
    checkpoint_every: int
    steps_per_call: int = 1
    tails: tuple[int, ...] = ()

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
        rest = self.window_end(step) - step
        if rest >= self.steps_per_call:
            return self.steps_per_call
        return next(length for length in (*self.tails, rest) if length <= rest)

    def evaluates(self, step: int) -> bool:
        """Whether held-out data are looked at after ``step``."""
        return step == self.num_steps or _due(step, self.eval_every)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step`` by its number."""
        return _due(step, self.checkpoint_every)

    def call_lengths(self) -> list[int]:
        """The different lengths of call that the run needs, longest first."""
        windows = set(self._windows())
        longest = {self.steps_per_call} if max(windows) >= self.steps_per_call else set()
        return sorted({*longest, *self.tails}, reverse=True)

    def _windows(self) -> Iterator[int]:
        step = 0
        while step < self.num_steps:
            end = self.window_end(step)
            yield end - step
            step = end


def with_tails(plan: Plan) -> Plan:
    """``plan`` with its tails: what windows leave over, or powers of two where that would be many programs."""
    left_over = {window % plan.steps_per_call for window in set(plan._windows())} - {0}
    if len(left_over) > MOST_TAILS:
        left_over = {2**power for power in range(max(left_over).bit_length())}
    return plan._replace(tails=tuple(sorted(left_over, reverse=True)))


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def typical_window(plan: Plan) -> int:
    """What steps per call should divide: the length that divides all windows, or most windows' where that is tiny."""
    common, shortest = math.gcd(*plan.cadences), min(plan.cadences)
    return common if 2 * common >= shortest else shortest


def near_divisor(whole: int, about: int) -> int:
    """The divisor of ``whole`` nearest to ``about`` by ratio, or ``about`` where none is within a factor of two.

    Calls that divide their window spare it a shorter last call, and with it a program of its own; likewise windows.
    """
    about = max(1, min(about, whole))
    divisors = (n for n in range(1, whole + 1) if whole % n == 0)
    nearest = min(divisors, key=lambda n: abs(math.log(n / about)))
    return nearest if about / 2 <= nearest <= about * 2 else about
