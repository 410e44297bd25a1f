"""Members that differ in their seed alone as one result: mean, spread and interval of every metric."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxnn.sweeps.results.outcomes import SEED, At, Member, Outcomes
from jaxnn.sweeps.results.statistics import bootstrap_interval
from jaxnn.sweeps.results.tables import Table, show_point, show_spread, show_value
from jaxnn.types import ConfigError, RecordError, suggest

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

# From so many values on the interval is one, and not their range.
ENOUGH = 5
# The columns of members that have no part in the means.
LEFT_OUT = ("diverged", "failed", "pruned", "unfinished")


@dataclasses.dataclass(frozen=True)
class Spread:
    """One metric over the members of a group.

    Attributes:
        n: members with a result.
        mean: theirs; NaN for none.
        deviation: their standard deviation, with n - 1 below; NaN for fewer than two.
        low: the lower end of the 95 % bootstrap interval of the mean; NaN likewise.
        high: its upper end.
    """

    n: int
    mean: float
    deviation: float
    low: float
    high: float

    def __str__(self) -> str:
        return show_spread(self.mean, self.deviation, self.low, self.high)


@dataclasses.dataclass(frozen=True, repr=False)
class GroupRow:
    """Members that share the values they are grouped by.

    Attributes:
        point: the fields grouped by, and their values.
        members: the numbers of its members.
        num_diverged: how many of them diverged: they have no part in the means.
        num_failed: how many failed: nor have they.
        num_pruned: how many were pruned: nor have they.
        num_unfinished: how many were interrupted, run or wait: nor have they.
        metrics: the spread of each metric, the monitored one first.
    """

    point: Mapping[str, Any]
    members: tuple[int, ...]
    num_diverged: int
    num_failed: int
    num_pruned: int
    num_unfinished: int
    metrics: Mapping[str, Spread]

    @property
    def n(self) -> int:
        """Members with a result in the first metric; 0 where there is none."""
        return next((spread.n for spread in self.metrics.values()), 0)

    @property
    def spread(self) -> Spread:
        """The spread of the first metric."""
        return next(iter(self.metrics.values()))

    @property
    def num_lost(self) -> int:
        """How many diverged or failed."""
        return self.num_diverged + self.num_failed

    @property
    def left_out(self) -> dict[str, int]:
        """How many members have no part in the means, by what became of them."""
        counts = (self.num_diverged, self.num_failed, self.num_pruned, self.num_unfinished)
        return dict(zip(LEFT_OUT, counts, strict=True))

    def told_left_out(self) -> str:
        """``3 diverged, 1 pruned``; empty where all have a part in the means."""
        return ", ".join(f"{count} {name}" for name, count in self.left_out.items() if count)

    def __repr__(self) -> str:
        told = [f"n {self.n}", *filter(None, [self.told_left_out()])]
        told += [f"{name} {spread}" for name, spread in self.metrics.items()]
        return f"{show_point(self.point) or 'all'}: {', '.join(told)}"


@dataclasses.dataclass(frozen=True, repr=False)
class Groups:
    """The members of a sweep in groups.

    Attributes:
        rows: the groups, in the order of their first members.
        by: the names of the fields they are grouped by.
        more_is_better: for each metric, whether more of it is better.
    """

    rows: tuple[GroupRow, ...]
    by: tuple[str, ...]
    more_is_better: Mapping[str, bool]

    def best(self, metric: str | None = None) -> GroupRow:
        """The group with the best mean of ``metric``; default: the first, which is the monitored one.

        A group that lost members, which diverged or failed, comes after all that lost none, and one with members that
        were cut short after all whose members came to their end: means of survivors flatter.

        Raises:
            ConfigError: an unknown metric, or one that no group has a result in.
        """
        metric = metric or next(iter(self.more_is_better), "")
        if metric not in self.more_is_better:
            raise ConfigError(f"the groups have no metric {metric!r}: {suggest(metric, self.more_is_better)}.")
        best = best_row(self.rows, metric, more_is_better=self.more_is_better[metric])
        if best is None:
            raise ConfigError(f"no group has a result in {metric!r}: name another metric.")
        return best

    def frame(self) -> pandas.DataFrame:
        """The groups as a pandas table: a row a group; of each metric ``_mean``, ``_std``, ``_low``, ``_high``.

        Raises:
            ConfigError: pandas is not installed.
        """
        return data_frame([_flat_row(row) for row in self.rows])

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        counts = [name for name in LEFT_OUT if any(row.left_out[name] for row in self.rows)]
        header = [*self.by, "n", *counts, *self.more_is_better]
        rows = [
            [show_value(value) for value in row.point.values()]
            + [str(row.n), *(str(row.left_out[name]) for name in counts)]
            + [str(spread) if spread.n else "–" for spread in row.metrics.values()]
            for row in self.rows
        ]
        return Table(header, rows, self._notes())

    def _notes(self) -> list[str]:
        counts = {spread.n for row in self.rows for spread in row.metrics.values()}
        if max(counts, default=0) < 2:
            return []
        notes = ["mean ± standard deviation (95 % bootstrap interval of the mean)"]
        if any(2 <= n < ENOUGH for n in counts):
            notes.append(f"Of fewer than {ENOUGH} members it is their range, and holds the mean less often than 95 %.")
        return notes


def group_members(
    outcomes: Outcomes, by: str | Sequence[str] | None = None, metric: str | None = None, at: At = "final"
) -> Groups:
    """The members grouped by the fields ``by``, with the spread of ``metric`` or of all metrics.

    Args:
        outcomes: a sweep.
        by: names of config fields; default: all that were swept but the seed.
        metric: one metric; default: all.
        at: their ``final`` values, or those of the ``best`` evaluation.

    Raises:
        ConfigError: an unknown field or metric.
    """
    if by is None:
        by = [axis.name for axis in outcomes.axes if axis.name != SEED]
    names = (by,) if isinstance(by, str) else tuple(by)
    known = outcomes.members[0].fields if outcomes.members else {}
    for name in names:
        if outcomes.members and name not in known:
            raise ConfigError(f"the config has no field {name!r} to group by: {suggest(name, known)}.")
    metrics = [outcomes.check_metric(metric, at)] if metric else outcomes.metric_names(at)
    scores = {name: outcomes.scores(name, at) for name in metrics}
    rows = (_row(outcomes, point, positions, scores) for point, positions in grouped(outcomes.members, names))
    return Groups(tuple(rows), names, {name: outcomes.more_is_better(name) for name in metrics})


def best_row(rows: Sequence[GroupRow], metric: str, *, more_is_better: bool) -> GroupRow | None:
    """The row with the best mean; of those that lost members, or have some that were cut short, only if need be."""
    sign = -1 if more_is_better else 1

    def rank(row: GroupRow) -> tuple[bool, bool, float]:
        return row.num_lost > 0, bool(row.told_left_out()), sign * row.metrics[metric].mean

    return min((row for row in rows if row.metrics[metric].n), key=rank, default=None)


def grouped(members: Sequence[Member], names: Sequence[str]) -> list[tuple[dict[str, Any], list[int]]]:
    """The positions of the members that share the fields ``names``, with these, in order of appearance."""
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for position, member in enumerate(members):
        fields = member.fields
        if lacking := [name for name in names if name not in fields]:
            raise RecordError(f"the config of member {member.index} lacks {lacking[0]!r}: the record is damaged.")
        point = {name: fields[name] for name in names}
        # By its text, since a value may be a nested config, which has no hash.
        groups.setdefault(repr(point), (point, []))[1].append(position)
    return list(groups.values())


def spread_of(values: np.ndarray) -> Spread:
    """The spread of ``values [n]``, of which those that are NaN do not count."""
    finite = values[np.isfinite(values)]
    n = len(finite)
    mean = float(finite.mean()) if n else np.nan
    deviation = float(finite.std(ddof=1)) if n > 1 else np.nan
    return Spread(n, mean, deviation, *bootstrap_interval(finite))


def data_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """A pandas table.

    Raises:
        ConfigError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("a data frame needs pandas, which is not installed: pip install pandas") from error
    return pandas.DataFrame(rows)


def _row(
    outcomes: Outcomes, point: Mapping[str, Any], positions: Sequence[int], scores: Mapping[str, np.ndarray]
) -> GroupRow:
    members = [outcomes.members[position] for position in positions]
    counts = Counter(member.status for member in members)
    return GroupRow(
        point,
        tuple(member.index for member in members),
        num_diverged=counts["diverged"],
        num_failed=counts["failed"],
        num_pruned=counts["pruned"],
        num_unfinished=sum(member.cut_short for member in members) - counts["pruned"],
        metrics={name: spread_of(values[list(positions)]) for name, values in scores.items()},
    )


def _flat_row(row: GroupRow) -> dict[str, Any]:
    flat = {**row.point, "n": row.n, **row.left_out}
    for name, spread in row.metrics.items():
        numbers = {"mean": spread.mean, "std": spread.deviation, "low": spread.low, "high": spread.high}
        flat |= {f"{name}_{what}": number for what, number in numbers.items()}
    return flat
