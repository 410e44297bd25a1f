"""What each member of a sweep has come to so far."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxnn.loop import evaluations_since_best
from jaxnn.record import final_metrics, metrics_of

WAITING, RUNNING = "waiting", "running"


@dataclasses.dataclass
class Log:
    """One member.

    Attributes:
        status: ``waiting``, ``running``, or how it ended.
        lines: what it reported, oldest first: ``step``, metrics, and the ``seconds`` of the window.
        error: why it failed, or None.
        dir: its run directory within the sweep's, or None.
    """

    status: str = WAITING
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    error: str | None = None
    dir: str | None = None

    @property
    def goes_on(self) -> bool:
        """Whether it is still to be trained."""
        return self.status in (WAITING, RUNNING)

    @property
    def failed(self) -> bool:
        """Whether it cannot be run."""
        return self.status == "failed"

    @property
    def step(self) -> int:
        """Updates done, as far as was reported."""
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def final(self) -> dict[str, float]:
        """The last value of each metric."""
        return final_metrics(self.lines)

    def best(self, monitored: str, *, higher_is_better: bool) -> dict[str, float]:
        """The evaluation that was best by the monitored metric, and its ``step``; empty before the first."""
        lines = [line for line in self.lines if monitored in line]
        values = [line[monitored] for line in lines]
        since = evaluations_since_best(values, higher_is_better=higher_is_better)
        if since >= len(lines):
            return {}
        line = lines[len(lines) - 1 - since]
        split = monitored.partition("_")[0]
        return {"step": line["step"], **{name: v for name, v in metrics_of(line).items() if name.startswith(split)}}
