"""What the members of a sweep came to, and the questions that need no more than that."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxnn.loop import more_is_better
from jaxnn.record import metrics_of
from jaxnn.types import ConfigError, suggest

SEED = "seed"
# Members of these have no result: what they measured before is no number to be proud of, or to average.
LOST = ("diverged", "failed")
# Only members of these came to their end: what the others measured is of fewer steps, or of the luckiest.
COMPLETE = ("finished", "stopped early")

type At = Literal["final", "best"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """A config field that was swept.

    Attributes:
        name: the field's, dotted where it is nested.
        values: the different values it took.
        scale: how they are drawn: ``log``, ``linear`` or ``nominal``, as seeds and everything that is no number.
    """

    name: str
    values: tuple[Any, ...]
    scale: str


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Attributes:
        index: its number, which it keeps in a selection too.
        point: the swept fields and their values.
        config: all config fields; nested dataclasses are mappings.
        status: ``waiting``, ``running``, ``finished``, ``stopped early``, ``diverged``, ``pruned``, ``failed`` or
            ``interrupted``.
        step: updates done.
        final: the last value of each metric.
        best: the metrics of the best evaluation by the monitored metric, and its ``step``; empty before the first.
        error: why it failed, or None.
        dir: its run directory, or None.
    """

    index: int
    point: Mapping[str, Any]
    config: Mapping[str, Any]
    status: str
    step: int
    final: Mapping[str, float]
    best: Mapping[str, float]
    error: str | None = None
    dir: Path | None = None

    @property
    def complete(self) -> bool:
        """Whether it came to its end: it finished, or stopped early."""
        return self.status in COMPLETE

    @property
    def cut_short(self) -> bool:
        """Whether it is neither at its end nor lost: pruned, interrupted, running, waiting."""
        return self.status not in (*COMPLETE, *LOST)

    @property
    def fields(self) -> dict[str, Any]:
        """The config without nesting, by dotted names, and the point, whose fields may be whole dataclasses."""
        return flattened(self.config) | dict(self.point)

    def metrics(self, at: At = "final") -> dict[str, float]:
        """Its metrics at the end, or at its best evaluation."""
        return metrics_of(self.final if at == "final" else self.best)


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"model": {"dropout": 0.1}}`` as ``{"model.dropout": 0.1}``."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Outcomes:
    """Members and what they measured.

    Attributes:
        members: in the order of their numbers.
        axes: the fields that were swept, in the order they were given.
        lines: what ``metrics.jsonl`` holds: a mapping a member and report, with ``member``, ``step`` and the metrics.
        monitor: the metric that says which evaluation is best, such as ``test_loss``.
        higher_is_better: whether more of it is better.
    """

    members: tuple[Member, ...]
    axes: tuple[Axis, ...]
    lines: tuple[Mapping[str, Any], ...]
    monitor: str
    higher_is_better: bool

    @property
    def settings(self) -> tuple[Axis, ...]:
        """The axes with more than one value, without the seed: what a sweep is to decide between."""
        return tuple(axis for axis in self.axes if axis.name != SEED and len(axis.values) > 1)

    @property
    def lost(self) -> tuple[Member, ...]:
        """The members that diverged or failed."""
        return tuple(member for member in self.members if member.status in LOST)

    @property
    def cut_short(self) -> tuple[Member, ...]:
        """The members that are neither at their end nor lost."""
        return tuple(member for member in self.members if member.cut_short)

    def more_is_better(self, metric: str) -> bool:
        """Whether more of ``metric`` is better: as the sweep was told of the monitored one, by its name of others."""
        return self.higher_is_better if metric == self.monitor else more_is_better(metric)

    def metric_names(self, at: At = "final") -> tuple[str, ...]:
        """The metrics any member has, the monitored one first.

        Raises:
            ConfigError: ``at`` is neither ``final`` nor ``best``.
        """
        if at not in ("final", "best"):
            raise ConfigError(f"at is {at!r}, and must be 'final' or 'best'.")
        names = dict.fromkeys(name for member in self.members for name in member.metrics(at))
        return tuple(sorted(names, key=lambda name: name != self.monitor))

    def check_metric(self, metric: str | None, at: At = "final") -> str:
        """``metric``, or the monitored one for None.

        Raises:
            ConfigError: no member has it.
        """
        metric, known = metric or self.monitor, self.metric_names(at)
        if metric not in known:
            raise ConfigError(f"no member has a metric {metric!r} ({at}): {suggest(metric, known)}.")
        return metric

    def values(self, metric: str, at: At = "final") -> np.ndarray:
        """The metric of every member, ``[members]``; NaN where one has none.

        Raises:
            ConfigError: no member has it.
        """
        self.check_metric(metric, at)
        return np.array([member.metrics(at).get(metric, np.nan) for member in self.members], float)

    def scores(self, metric: str, at: At = "final") -> np.ndarray:
        """The same where it is a result: NaN where it is infinite, and for members that did not come to their end."""
        values = self.values(metric, at)
        complete = np.array([member.complete for member in self.members], bool)
        return np.where(np.isfinite(values) & complete, values, np.nan)

    def scores_so_far(self, metric: str, at: At = "final") -> np.ndarray:
        """The finite values of the members that were cut short, NaN for the others: what they had got to."""
        values = self.values(metric, at)
        cut_short = np.array([member.cut_short for member in self.members], bool)
        return np.where(np.isfinite(values) & cut_short, values, np.nan)

    def ranked(self, metric: str, at: At = "final") -> list[Member]:
        """The members with a result, best first, then those that were cut short, best first, then the others."""
        sign = -1 if self.more_is_better(metric) else 1
        scores, so_far = sign * self.scores(metric, at), sign * self.scores_so_far(metric, at)
        # The last key is the first to sort by; NaN comes last.
        order = np.lexsort((so_far, scores))
        return [self.members[position] for position in order]

    def best(
        self, metric: str | None = None, *, mode: Literal["auto", "min", "max"] = "auto", at: At = "final"
    ) -> Member:
        """The best member.

        NaN is never best, nor is a member that diverged or failed; one that was pruned, or has not come to its end, is
        best only where no member has. Among many seeds the best is also the luckiest: compare groups, not members, to
        choose a setting.

        Args:
            metric: by which; default: the monitored one.
            mode: whether less or more of it is better; auto: by its name.
            at: its ``final`` value, or that of the ``best`` evaluation.

        Raises:
            ConfigError: an unknown metric, or one that no member has a result in.
        """
        metric = self.check_metric(metric, at)
        if mode not in ("auto", "min", "max"):
            raise ConfigError(f"mode is {mode!r}, and must be one of auto, min, max.")
        scores = self.scores(metric, at)
        if np.isnan(scores).all():
            scores = self.scores_so_far(metric, at)
        if np.isnan(scores).all():
            raise ConfigError(
                f"no member has a result in {metric!r} ({count_by_status(self.members)}): name another metric."
            )
        more = self.more_is_better(metric) if mode == "auto" else mode == "max"
        return self.members[int(np.nanargmax(scores) if more else np.nanargmin(scores))]

    def curves(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """A metric against the step.

        Returns:
            The steps ``[reports]`` at which any member measured it, and the values ``[members, reports]``, NaN where
            a member has none.

        Raises:
            ConfigError: it was never measured.
        """
        known = {name for line in self.lines for name in metrics_of(line)}
        if metric not in known:
            raise ConfigError(f"no report has a metric {metric!r}: {suggest(metric, known)}.")
        measured = [line for line in self.lines if metric in line]
        steps = sorted({line["step"] for line in measured})
        columns = {step: column for column, step in enumerate(steps)}
        rows = {member.index: row for row, member in enumerate(self.members)}
        values = np.full((len(rows), len(columns)), np.nan)
        for line in measured:
            if line["member"] in rows:
                values[rows[line["member"]], columns[line["step"]]] = line[metric]
        return np.array(steps), values


def count_by_status(members: Sequence[Member]) -> str:
    """``60 finished, 4 diverged``; ``no members`` for none."""
    counts: dict[str, int] = {}
    for member in members:
        counts[member.status] = counts.get(member.status, 0) + 1
    return (
        ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), key=lambda c: -c[1])) or "no members"
    )
