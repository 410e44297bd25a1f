"""What a sweep says of itself while it goes on and at its end."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from jaxnn.loop import format_rate
from jaxnn.sweeps.engine.logs import Log


@dataclasses.dataclass(frozen=True)
class SweepReport:
    """One window of one block of members. All host values.

    Attributes:
        step: updates done so far by all members of the sweep together.
        num_steps: updates they will do at the most.
        member_step: updates done by each of those that are trained now.
        group: which group they are in, and of how many, counted from 1.
        counts: how many members there are of each status.
        best: the best evaluation of any member so far, in words; empty before the first.
        member_steps_per_second: updates a second, of all members in the window together.
        evaluated: whether held-out data were looked at.
    """

    step: int
    num_steps: int
    member_step: int
    group: tuple[int, int]
    counts: dict[str, int]
    best: str
    member_steps_per_second: float
    evaluated: bool

    @property
    def rates(self) -> str:
        """How fast it is."""
        return f"{format_rate(self.member_steps_per_second)} member-steps/s"

    @property
    def numbers(self) -> str:
        """How the members are doing."""
        alive = self.counts.get("running", 0) + self.counts.get("waiting", 0)
        rest = {"alive": alive, **{name: n for name, n in self.counts.items() if name not in ("running", "waiting")}}
        told = ", ".join(f"{count} {name}" for name, count in rest.items() if count)
        return f"{told}{'; best ' if self.best else ''}{self.best}"

    @property
    def is_milestone(self) -> bool:
        """Whether it should stay in sight."""
        return self.evaluated or self.step == self.num_steps

    def __str__(self) -> str:
        group = f"group {self.group[0]}/{self.group[1]}  " if self.group[1] > 1 else ""
        return f"{group}step {self.member_step}  {self.numbers}  {self.rates}"


def count_statuses(logs: Iterable[Log]) -> dict[str, int]:
    """How many members there are of each status, most first."""
    return dict(Counter(log.status for log in logs).most_common())
