"""Members of a sweep, groups of them with intervals, and how they are printed."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict
from numpy.typing import ArrayLike

from jaxnn._statistics import ROUNDING, mean_interval
from jaxnn._text import Table
from jaxnn.tasks import check_direction
from jaxnn.types import ConfigError, Direction, RecordError, suggest

SEED = "seed"
# Members with these statuses have no result: what they measured before is not averaged or ranked.
LOST = ("diverged", "failed")
# Members with these statuses are complete; what others measured is of fewer steps.
COMPLETE = ("finished", "stopped early")
# Selection tolerance: a float32, or a number printed with six digits, selects the value it stands for.
TOLERANCE = 1e-5
MOST_DECIMALS = 6  # numbers that would need more are printed with significant digits


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a sweep.

    >>> swept.members[3].point
    {'learning_rate': 0.2, 'seed': 1}

    Attributes:
        index: its number, which it keeps in a selection.
        point: the swept fields and their values.
        config: all config fields; nested dataclasses are mappings.
        status: ``waiting``, ``running``, ``finished``, ``stopped early``, ``diverged``, ``paused``, ``pruned``,
            ``failed`` or ``interrupted``.
        step: updates done.
        final: the last value of each metric.
        best: the metrics of the best evaluation by the monitored metric, and its ``step``; empty before the first.
        error: why it failed, or None.
    """

    index: int
    point: Mapping[str, Any]
    config: Mapping[str, Any]
    status: str
    step: int
    final: Mapping[str, float]
    best: Mapping[str, float]
    error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether it finished or stopped early."""
        return self.status in COMPLETE

    @property
    def cut_short(self) -> bool:
        """Whether it is neither complete nor lost: pruned, interrupted, running, waiting."""
        return self.status not in (*COMPLETE, *LOST)

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """The flat config by dotted names, and the point, whose values may be dataclasses."""
        flat: dict[str, Any] = flatten_dict(dict(self.config), sep=".")  # type: ignore[no-untyped-call]
        return flat | dict(self.point)

    def __str__(self) -> str:
        return f"member {self.index}" + (f" ({show_point(self.point)})" if self.point else "")


def grouped(members: Sequence[Member], names: Sequence[str]) -> list[tuple[dict[str, Any], list[int]]]:
    """Returns the values of ``names`` and the positions of the members that share them, in order of appearance."""
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for position, member in enumerate(members):
        fields = member.fields
        if lacking := [name for name in names if name not in fields]:
            raise RecordError(f"the config of member {member.index} lacks {lacking[0]!r}: the record is damaged.")
        point = {name: fields[name] for name in names}
        groups.setdefault(point_key(point), (point, []))[1].append(position)
    return list(groups.values())


def point_key(point: Mapping[str, Any]) -> str:
    """The text of a point that equal ones share: 0 and 0.0, tuples and the lists of a record, but not True and 1."""

    def same(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: same(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [same(each) for each in value]
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        return float(value) if is_number else value

    return repr(same(point))


def selection(wanted: Any, values: Sequence[Any]) -> Callable[[Any], bool]:
    """Returns the test of a selection by a function, by a list, set or range of values, or by one value.

    A float selects the ones of ``values`` that equal it, or those near it if there are none.
    """
    if callable(wanted):
        return lambda value: bool(wanted(value))
    several = isinstance(wanted, list | set | frozenset | range | np.ndarray)
    choices = [tuple(one) if isinstance(one, list) else one for one in (wanted if several else [wanted])]

    def same(value: Any, choice: Any) -> bool:
        if isinstance(value, float) and isinstance(choice, int | float | np.number):
            return value == choice or (choice not in values and math.isclose(value, choice, rel_tol=TOLERANCE))
        # True equals 1 in Python, but is a different setting.
        return isinstance(value, bool) == isinstance(choice, bool | np.bool_) and bool(value == choice)

    return lambda value: any(same(value, choice) for choice in choices)


def count_by_status(members: Iterable[Any]) -> str:
    """Returns ``60 finished, 4 diverged`` of members, or of their logs; ``no members`` for none."""
    counts = Counter(member.status for member in members)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "no members"


def show(value: Any, digits: int = 4) -> str:
    """Returns ``value`` as text: floats with this many significant digits, anything else as Python writes it."""
    if isinstance(value, tuple | list):
        shown = ", ".join(show(item, digits) for item in value)
        return f"({shown},)" if len(value) == 1 else f"({shown})"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


# A config field's value as text: enough digits to select by.
show_field = functools.partial(show, digits=6)


def show_point(point: Mapping[str, Any]) -> str:
    """Returns ``learning_rate 0.001, seed 3``."""
    return ", ".join(f"{name} {show_field(value)}" for name, value in point.items())


@dataclasses.dataclass(frozen=True)
class Spread:
    """One metric over the members of a group."""

    n: int  # seeds with a result
    mean: float  # of these; NaN for none
    deviation: float  # standard deviation with n - 1 degrees of freedom; NaN for fewer than two
    low: float  # lower end of the 95 % interval of the mean, see `mean_interval`; NaN for too few
    high: float  # its upper end

    def __str__(self) -> str:
        if self.n < 2:
            return show(self.mean) if self.n else "–"
        # The deviation's two digits determine the decimals of all.
        known = 0 < self.deviation < math.inf  # squares of values beyond 1e154 are infinite
        decimals = max(0, 1 - math.floor(math.log10(self.deviation))) if known else MOST_DECIMALS + 1
        form = narrow = f".{decimals}f"
        if decimals > MOST_DECIMALS:
            larger = abs(self.mean) / self.deviation if known else 1.0
            form, narrow = f".{max(4, 2 + math.ceil(math.log10(max(larger, 1.0))))}g", ".4g"
        ends = "" if math.isnan(self.low) else f" ({self.low:{form}} to {self.high:{form}})"
        return f"{self.mean:{form}} ± {self.deviation:{narrow}}{ends}"


@dataclasses.dataclass(frozen=True, repr=False)
class GroupRow:
    """Members that share the values they are grouped by."""

    point: Mapping[str, object]  # the fields grouped by, and their values
    members: tuple[int, ...]  # their numbers
    left_out: Mapping[str, int]  # members that are not part of the means, by their status: diverged, pruned, ...
    metrics: Mapping[str, Spread]  # of each metric over the seeds, the monitored one first
    num_settings: int = 1  # the number of settings, at most, that the value of a seed is averaged over
    # Of each metric, the complete members whose value is missing or not finite; they are not part of its mean.
    without: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def show(self, metric: str) -> str:
        """The spread of a metric as text, with the number of complete members that have no result in it."""
        without = self.without.get(metric, 0)
        return f"{self.metrics[metric]}" + (f", {without} without" if without else "")

    @property
    def spread(self) -> Spread:
        """The spread of the first metric; an empty one if there is no metric."""
        return next(iter(self.metrics.values()), Spread(0, *[math.nan] * 4))

    @property
    def n(self) -> int:
        """Seeds with a result in the first metric."""
        return self.spread.n

    @property
    def num_lost(self) -> int:
        """Members that diverged or failed."""
        return sum(self.left_out.get(status, 0) for status in LOST)

    def __repr__(self) -> str:
        shown = [f"n {self.n}", *(f"{count} {status}" for status, count in self.left_out.items())]
        shown += [f"averaged over {self.num_settings} settings"] * (self.num_settings > 1)
        shown += [f"{name} {self.show(name)}" for name in self.metrics]
        return f"{show_point(self.point) or 'all'}: {', '.join(shown)}"


@dataclasses.dataclass(frozen=True, repr=False)
class Groups:
    """The members of a sweep in groups."""

    rows: tuple[GroupRow, ...]  # the groups, in the order of their first members
    by: tuple[str, ...]  # the names of the fields they are grouped by
    directions: Mapping[str, Direction | None]  # of each metric

    def best(self, metric: str | None = None, direction: Direction | None = None) -> GroupRow:
        """Returns the group with the best mean of ``metric``, by default the monitored one: the first of `ranked`."""
        return self.ranked(metric, direction)[0]

    def ranked(self, metric: str | None = None, direction: Direction | None = None) -> list[GroupRow]:
        """Returns the groups that have a result in ``metric``, the best mean first; arguments are as in `Sweep.best`.

        Groups that lost members, which diverged, failed or have no finite value, rank after all that lost none, and
        groups with members that were cut short after those whose members are complete: means of survivors flatter.
        ConfigError if the metric is unknown, or no group has a result in it.
        """
        metric = metric or next(iter(self.directions), "")
        if metric not in self.directions:
            raise ConfigError(f"the groups have no metric {metric!r}: {suggest(metric, self.directions)}.")
        sign = -1 if check_direction(metric, direction or self.directions[metric], "direction") == "max" else 1

        def rank(row: GroupRow) -> tuple[bool, bool, float]:
            lost = row.num_lost + row.without.get(metric, 0)
            return lost > 0, bool(row.left_out), sign * row.metrics[metric].mean

        rows = [row for row in self.rows if row.metrics[metric].n]
        if not rows:
            raise ConfigError(f"no group has a result in {metric!r}: name another metric.")
        return sorted(rows, key=rank)

    def table(self) -> Table:
        """Returns the groups as a table with a row per group."""
        counts = list(dict.fromkeys(status for row in self.rows for status in row.left_out))
        rows = [
            [*map(show_field, row.point.values()), str(row.n), *(str(row.left_out.get(name, 0)) for name in counts)]
            + [row.show(name) for name in row.metrics]
            for row in self.rows
        ]
        notes = []
        sizes = {spread.n for row in self.rows for spread in row.metrics.values()}
        if max(sizes, default=0) > 1:
            notes.append("mean ± standard deviation (95 % interval of the mean, by Student's t)")
        if (most := max((row.num_settings for row in self.rows), default=1)) > 1:
            notes.append(f"Values of a seed are averaged over {'up to ' if counts else ''}{most} settings.")
        return Table([*self.by, "n", *counts, *self.directions], rows, notes)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def seed_means(members: Sequence[Member], scores: ArrayLike) -> tuple[np.ndarray, int]:
    """Returns the mean of the finite ``scores [members]`` of each seed, and how many, at most, one of them is of.

    Settings with the same seed are not independent, so they are not replicates of an interval.
    """
    scores = np.asarray(scores, float)
    parts = [scores[positions] for _, positions in grouped(members, [SEED])] if len(members) > 1 else [scores]
    parts = [part[np.isfinite(part)] for part in parts if np.isfinite(part).any()]
    return np.array([part.mean() for part in parts]), max(map(len, parts), default=0)


def spread_of(values: np.ndarray) -> Spread:
    """Returns the spread of the finite ones of ``values [n]``."""
    finite = values[np.isfinite(values)]
    n = len(finite)
    mean = float(finite.mean()) if n else math.nan
    deviation = float(finite.std(ddof=1)) if n > 1 else math.nan
    if n > 1 and deviation <= ROUNDING**2 * np.abs(finite).max():
        deviation = 0.0  # of equal values
    return Spread(n, mean, deviation, *mean_interval(finite))
