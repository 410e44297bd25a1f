"""Members of a sweep and what they measured: values, rankings, curves and selections."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from jaxnn.engine import more_is_better
from jaxnn.record import metrics_of
from jaxnn.types import ConfigError, suggest

SEED = "seed"
# Members with these statuses have no result: what they measured before is not averaged or ranked.
LOST = ("diverged", "failed")
# Members with these statuses are complete; what others measured is of fewer steps.
COMPLETE = ("finished", "stopped early")
# Selection tolerance: a float32, or a number printed with six digits, selects the value it stands for.
TOLERANCE = 1e-5

type At = Literal["final", "best"]
type Mode = Literal["auto", "min", "max"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """A config field that was swept.

    Attributes:
        name: the field's, dotted if nested.
        values: its distinct values.
        scale: in plots: ``log``, ``linear`` or ``nominal``, as for seeds and values that are no numbers.
    """

    name: str
    values: tuple[Any, ...]
    scale: str


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Attributes:
        index: its number, which it keeps in a selection.
        point: the swept fields and their values.
        config: all config fields; nested dataclasses are mappings.
        status: ``waiting``, ``running``, ``finished``, ``stopped early``, ``diverged``, ``pruned``, ``failed`` or
            ``interrupted``.
        step: updates done.
        final: the last value of each metric.
        best: the metrics of the best evaluation by the monitored metric, and its ``step``; empty before the first.
        error: why it failed, or None.
        dir: its run directory if it was exported, else None.
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
        """Whether it finished or stopped early."""
        return self.status in COMPLETE

    @property
    def cut_short(self) -> bool:
        """Whether it is neither complete nor lost: pruned, interrupted, running, waiting."""
        return self.status not in (*COMPLETE, *LOST)

    @property
    def fields(self) -> dict[str, Any]:
        """The flat config by dotted names, and the point, whose values may be dataclasses."""
        return _flattened(self.config) | dict(self.point)

    def metrics(self, at: At = "final") -> dict[str, float]:
        """Its metrics at the end, or at its best evaluation."""
        return metrics_of(self.final if at == "final" else self.best)

    def __str__(self) -> str:
        point = show_point(self.point)
        return f"member {self.index}" + (f" ({point})" if point else "")


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Outcomes:
    """Members and what they measured; the attributes are those of `Sweep`."""

    members: tuple[Member, ...]
    axes: tuple[Axis, ...]
    lines: tuple[Mapping[str, Any], ...]
    monitor: str
    higher_is_better: bool

    @property
    def settings(self) -> tuple[Axis, ...]:
        """The axes with more than one value except the seed."""
        return tuple(axis for axis in self.axes if axis.name != SEED and len(axis.values) > 1)

    @property
    def lost(self) -> tuple[Member, ...]:
        """The members that diverged or failed."""
        return tuple(member for member in self.members if member.status in LOST)

    @property
    def cut_short(self) -> tuple[Member, ...]:
        """The members that are neither complete nor lost."""
        return tuple(member for member in self.members if member.cut_short)

    def more_is_better(self, metric: str) -> bool:
        """Whether more of ``metric`` is better: by the sweep's options if it is monitored, else by its name."""
        return self.higher_is_better if metric == self.monitor else more_is_better(metric)

    def metric_names(self, at: At = "final") -> tuple[str, ...]:
        """The metrics that any member has, the monitored one first.

        Raises:
            ConfigError: ``at`` is neither ``final`` nor ``best``.
        """
        if at not in ("final", "best"):
            raise ConfigError(f"at is {at!r}, and must be 'final' or 'best'.")
        names = dict.fromkeys(name for member in self.members for name in member.metrics(at))
        return tuple(sorted(names, key=lambda name: name != self.monitor))

    def check_metric(self, metric: str | None, at: At = "final") -> str:
        """Returns ``metric``, or the monitored one for None.

        Raises:
            ConfigError: no member has it.
        """
        metric, known = metric or self.monitor, self.metric_names(at)
        if metric not in known:
            raise ConfigError(f"no member has a metric {metric!r} ({at}): {suggest(metric, known)}.")
        return metric

    def values(self, metric: str, at: At = "final") -> np.ndarray:
        """Returns the metric of every member, ``[members]``; NaN if it has none.

        Raises:
            ConfigError: no member has it.
        """
        self.check_metric(metric, at)
        return np.array([member.metrics(at).get(metric, np.nan) for member in self.members], float)

    def scores(self, metric: str, at: At = "final", *, cut_short: bool = False) -> np.ndarray:
        """Returns the finite values of the complete members, ``[members]``, NaN for all others.

        Args:
            metric: its name.
            at: the ``final`` values, or those of the ``best`` evaluation.
            cut_short: the values of the members that were cut short instead.

        Raises:
            ConfigError: no member has the metric.
        """
        values = self.values(metric, at)
        counted = np.array([one.cut_short if cut_short else one.complete for one in self.members], bool)
        return np.where(np.isfinite(values) & counted, values, np.nan)

    def ranked(self, metric: str | None = None, at: At = "final", mode: Mode = "auto") -> list[Member]:
        """Returns the complete members, best first, then those that were cut short, best first, then the others.

        Args and errors are those of `best`.
        """
        metric = self.check_metric(metric, at)
        if mode not in ("auto", "min", "max"):
            raise ConfigError(f"mode is {mode!r}, and must be one of auto, min, max.")
        sign = -1 if mode == "max" or (mode == "auto" and self.more_is_better(metric)) else 1
        scores, so_far = (sign * self.scores(metric, at, cut_short=cut_short) for cut_short in (False, True))
        # lexsort sorts by the last key first, NaN last.
        return [self.members[position] for position in np.lexsort((so_far, scores))]

    def best(self, metric: str | None = None, *, mode: Mode = "auto", at: At = "final") -> Member:
        """Returns the best member.

        A member that diverged or failed, or whose value is not finite, is never the best; one that was cut short only
        if no member is complete. Among many seeds the best is also the luckiest: to choose a setting compare groups.

        Args:
            metric: by which; default: the monitored one.
            mode: whether less or more of it is better; auto: by its name.
            at: the ``final`` value, or that of the ``best`` evaluation.

        Raises:
            ConfigError: an unknown metric or mode, or a metric that no member has a result in.
        """
        best = self.ranked(metric, at, mode)[0]
        value = best.metrics(at).get(metric or self.monitor, math.nan)
        if best.status in LOST or not math.isfinite(value):
            counts = count_by_status(self.members)
            raise ConfigError(f"no member has a result in {metric or self.monitor!r} ({counts}): name another metric.")
        return best

    def curves(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns a metric against the step.

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

    def select(self, **fields: Any) -> Self:
        """Returns the members whose config fields are as given, as a sweep.

        Args:
            **fields: for a config field its value, several in a list, set or range, or a function that is true of it,
                as in ``select(learning_rate=1e-3, seed=range(4), dropout=lambda rate: rate < 0.5)``; nested fields by
                dotted names, ``select(**{"model.dropout": 0.1})``.

        Raises:
            ConfigError: an unknown field, or no member left.
        """
        members = self.members
        for name, wanted in fields.items():
            known = members[0].fields if members else {}
            if name not in known:
                raise ConfigError(f"the config has no field {name!r} to select by: {suggest(name, known)}.")
            found = [member.fields[name] for member in members]
            test = _selection(wanted)
            members = tuple(member for member, value in zip(members, found, strict=True) if test(value))
            if not members:
                present = ", ".join(dict.fromkeys(map(repr, found)))
                asked = "as asked" if callable(wanted) else f"= {wanted!r}"
                raise ConfigError(f"no member has {name} {asked}: there are {present}.")
        numbers = {member.index for member in members}
        lines = tuple(line for line in self.lines if line["member"] in numbers)
        left = {axis.name: [member.fields[axis.name] for member in members] for axis in self.axes}
        axes = (
            dataclasses.replace(axis, values=tuple(value for value in axis.values if value in left[axis.name]))
            for axis in self.axes
        )
        return dataclasses.replace(self, members=members, lines=lines, axes=tuple(axes))


def _selection(wanted: Any) -> Callable[[Any], bool]:
    """The test of a selection: ``wanted`` is a function, a list, set or range of values, or a value."""
    if callable(wanted):
        return lambda value: bool(wanted(value))
    several = isinstance(wanted, list | set | frozenset | range | np.ndarray)
    choices = [tuple(one) if isinstance(one, list) else one for one in (wanted if several else [wanted])]

    def same(value: Any, choice: Any) -> bool:
        if isinstance(value, float) and isinstance(choice, int | float | np.number):
            return math.isclose(value, choice, rel_tol=TOLERANCE)
        # True equals 1 in Python, but is a different setting.
        return isinstance(value, bool) == isinstance(choice, bool | np.bool_) and bool(value == choice)

    return lambda value: any(same(value, choice) for choice in choices)


def _flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"model": {"dropout": 0.1}}`` as ``{"model.dropout": 0.1}``."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def count_by_status(members: Sequence[Member]) -> str:
    """Returns ``60 finished, 4 diverged``; ``no members`` for none."""
    counts = Counter(member.status for member in members)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "no members"


def show(value: Any, digits: int = 4) -> str:
    """Returns ``value`` as text: floats with this many significant digits, anything else as Python writes it."""
    if isinstance(value, tuple | list):
        shown = ", ".join(show(item, digits) for item in value)
        return f"({shown},)" if len(value) == 1 else f"({shown})"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def show_value(value: Any) -> str:
    """Returns a config field's value as text: floats with six digits, enough to select by."""
    return show(value, digits=6)


def show_point(point: Mapping[str, Any]) -> str:
    """Returns ``learning_rate 0.001, seed 3``."""
    return ", ".join(f"{name} {show_value(value)}" for name, value in point.items())
