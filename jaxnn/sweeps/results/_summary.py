"""Groups of members, such as those that differ in their seed only: mean, spread and interval of every metric."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from jaxnn.observe import Table
from jaxnn.sweeps.results._members import LOST, show, show_field, show_point
from jaxnn.types import ConfigError, suggest

# From this many values on the interval is an interval, and not their range.
ENOUGH = 5
# Numbers that would need more decimals are printed with four digits.
MOST_DECIMALS = 6


@dataclasses.dataclass(frozen=True)
class Spread:
    """One metric over the members of a group.

    Attributes:
        n: members with a result.
        mean: of these; NaN for none.
        deviation: standard deviation with n - 1 degrees of freedom; NaN for fewer than two.
        low: lower end of the 95 % bootstrap interval of the mean; NaN likewise.
        high: its upper end.
    """

    n: int
    mean: float
    deviation: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.n < 2:
            return show(self.mean) if self.n else "–"
        # The deviation's two digits determine the decimals of all.
        decimals = max(0, 1 - math.floor(math.log10(self.deviation))) if self.deviation else MOST_DECIMALS + 1
        form = ".4g" if decimals > MOST_DECIMALS else f".{decimals}f"
        mean, deviation, low, high = (f"{x:{form}}" for x in (self.mean, self.deviation, self.low, self.high))
        return f"{mean} ± {deviation} ({low} to {high})"


@dataclasses.dataclass(frozen=True, repr=False)
class GroupRow:
    """Members that share the values they are grouped by.

    Attributes:
        point: the fields grouped by, and their values.
        members: the numbers of its members.
        left_out: how many members are not part of the means, by their status, such as ``diverged`` or ``pruned``.
        metrics: the spread of each metric, the monitored one first.
    """

    point: Mapping[str, object]
    members: tuple[int, ...]
    left_out: Mapping[str, int]
    metrics: Mapping[str, Spread]

    @property
    def spread(self) -> Spread:
        """The spread of the first metric; an empty one if there is no metric."""
        return next(iter(self.metrics.values()), Spread(0, *[math.nan] * 4))

    @property
    def n(self) -> int:
        """Members with a result in the first metric."""
        return self.spread.n

    @property
    def num_lost(self) -> int:
        """Members that diverged or failed."""
        return sum(self.left_out.get(status, 0) for status in LOST)

    def __repr__(self) -> str:
        shown = [f"n {self.n}", *(f"{count} {status}" for status, count in self.left_out.items())]
        shown += [f"{name} {spread}" for name, spread in self.metrics.items()]
        return f"{show_point(self.point) or 'all'}: {', '.join(shown)}"


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
        """Returns the group with the best mean of ``metric``; default: the first metric, which is the monitored one.

        Groups that lost members, which diverged or failed, rank after all that lost none, and groups with members that
        were cut short after those whose members are complete: means of survivors flatter.

        Raises:
            ConfigError: an unknown metric, or one that no group has a result in.
        """
        metric = metric or next(iter(self.more_is_better), "")
        if metric not in self.more_is_better:
            raise ConfigError(f"the groups have no metric {metric!r}: {suggest(metric, self.more_is_better)}.")
        sign = -1 if self.more_is_better[metric] else 1

        def rank(row: GroupRow) -> tuple[bool, bool, float]:
            return row.num_lost > 0, bool(row.left_out), sign * row.metrics[metric].mean

        rows = [row for row in self.rows if row.metrics[metric].n]
        if not rows:
            raise ConfigError(f"no group has a result in {metric!r}: name another metric.")
        return min(rows, key=rank)

    def table(self) -> Table:
        """Returns the groups as a table with a row per group."""
        counts = list(dict.fromkeys(status for row in self.rows for status in row.left_out))
        rows = [
            [*map(show_field, row.point.values()), str(row.n), *(str(row.left_out.get(name, 0)) for name in counts)]
            + [str(spread) for spread in row.metrics.values()]
            for row in self.rows
        ]
        notes = []
        sizes = {spread.n for row in self.rows for spread in row.metrics.values()}
        if max(sizes, default=0) > 1:
            notes.append("mean ± standard deviation (95 % bootstrap interval of the mean)")
            if any(1 < n < ENOUGH for n in sizes):
                notes.append(f"With fewer than {ENOUGH} members it is their range, which holds the mean less often.")
        return Table([*self.by, "n", *counts, *self.more_is_better], rows, notes)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def spread_of(values: np.ndarray) -> Spread:
    """Returns the spread of the finite ones of ``values [n]``."""
    finite = values[np.isfinite(values)]
    n = len(finite)
    mean = float(finite.mean()) if n else math.nan
    deviation = float(finite.std(ddof=1)) if n > 1 else math.nan
    return Spread(n, mean, deviation, *bootstrap_interval(finite))


def bootstrap_interval(values: ArrayLike) -> tuple[float, float]:
    """Returns the 95 % expanded percentile bootstrap interval of the mean of ``values [n]`` (Hesterberg 2014, 5.3).

    The plain percentile interval is too narrow for few values: by the factor sqrt((n-1)/n), and by that of a normal to
    a Student quantile. The expanded one uses percentiles further out to correct for both. Below five values it is the
    range from the least to the greatest, which holds the mean of a symmetric distribution in 50 % (n = 2), 75 % (3)
    and 88 % (4) of all cases; its ends are NaN for fewer than two. The resamples are drawn with a fixed seed.
    """
    from scipy import stats  # type: ignore[import-untyped]

    sample = np.asarray(values, float)
    n = len(sample)
    if n < 2:
        return math.nan, math.nan
    tail = stats.norm.cdf(-math.sqrt(n / (n - 1)) * stats.t.ppf(0.975, n - 1))
    resampled = stats.bootstrap(
        (sample,), np.mean, confidence_level=1 - 2 * tail, method="percentile", rng=np.random.default_rng(0)
    )
    return float(resampled.confidence_interval.low), float(resampled.confidence_interval.high)
