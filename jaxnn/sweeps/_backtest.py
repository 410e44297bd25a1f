"""Searchers tried on a recorded sweep: what they would have spent, and what they would have found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxnn._text import Table
from jaxnn.search import Points, Searcher, asha, extrapolated, halving, patience, simulate
from jaxnn.sweeps._members import point_key, spread_of
from jaxnn.sweeps._plan import DEFAULT_LANES, SweepOptions, search_window, share_end
from jaxnn.tasks import check_direction
from jaxnn.types import ConfigError, warn

if TYPE_CHECKING:
    from jaxnn.sweeps._sweep import Sweep

SEARCHERS: Mapping[str, Callable[[Points], Searcher]] = {
    "halving": halving,
    "asha": asha,
    "patience": patience,
    "extrapolated": extrapolated,
}


@dataclasses.dataclass(frozen=True, repr=False)
class BackTest:
    """What searchers would have spent and found on the points of a sweep, in random orders."""

    metric: str
    spent: Mapping[str, np.ndarray]  # by searcher, the share of the sweep's steps ``[orders]``
    regret: Mapping[str, np.ndarray]  # by searcher, how much worse than the best its best is ``[orders]``
    tested: str  # on how many members, in how many lanes

    def table(self) -> Table:
        """Returns a row per searcher, means with their 95 % intervals."""
        rows = []
        for name, regret in self.regret.items():
            kept = f"{np.mean(regret <= 0):.0%}"
            spent = spread_of(100 * self.spent[name])
            ends = "" if math.isnan(spent.low) else f" ({spent.low:.1f} to {spent.high:.1f})"
            rows.append([name, f"{spent.mean:.1f} %{ends}", kept, str(spread_of(regret))])
        orders = len(next(iter(self.spent.values())))
        note = f"{orders} random orders of {self.tested}; means ± deviations (95 % intervals)"
        return Table(["searcher", "steps spent", "found the best", f"regret in {self.metric}"], rows, [note])

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def backtest(
    sweep: Sweep,
    searchers: Mapping[str, Callable[[Points], Searcher]] | None,
    metric: str | None,
    orders: int,
    lanes: int | None,
    key: int,
) -> BackTest:
    """Simulates each searcher on the recorded curves, as `Sweep.backtest`."""
    metric = sweep.check_metric(metric)
    sign = -1.0 if check_direction(metric, sweep.direction(metric), "direction") == "max" else 1.0
    curves = _curves(sweep, metric, sign)
    members = [member for member in sweep.members if point_key(member.point) in curves]
    points = [member.point for member in members]
    num_steps = max((member.step for member in members), default=0)

    def curve(point: Mapping[str, Any], share: float) -> float:
        steps, values = curves[point_key(point)]
        # The last report by then; the first, if there was none yet.
        return float(values[max(0, int(np.searchsorted(steps, share * num_steps + 1e-6, side="right")) - 1)])

    best = min((curve(point, 1.0) for point in points), default=math.inf)
    if len(points) < 2 or best == math.inf:
        raise ConfigError(
            f"a back-test needs members that finished, with reports of {metric}: the sweep has {len(points)}."
        )
    first = max(steps[0] for steps, values in curves.values() if np.isfinite(values[0]))
    total = sum(member.step for member in members)
    scales = {axis.name: axis.scale for axis in sweep.axes}
    searchers = SEARCHERS if searchers is None else searchers
    if not searchers or not isinstance(searchers, Mapping) or not all(callable(make) for make in searchers.values()):
        raise ConfigError(
            f"a back-test needs functions from points to a searcher, by name, not {searchers!r:.60}: give "
            '{"asha": jn.search.asha}.'
        )
    lanes = lanes or min(DEFAULT_LANES, len(points))
    spent: dict[str, list[float]] = {name: [] for name in searchers}
    regret: dict[str, list[float]] = {name: [] for name in searchers}
    rng = np.random.default_rng(key)
    for number in range(orders):
        ordered = Points(tuple(points[index] for index in rng.permutation(len(points))), scales)
        for name, make in searchers.items():
            searcher = make(ordered)
            # As a search trains: in windows, with members in all lanes.
            window = search_window(num_steps, searcher.shares[0], SweepOptions())
            ends = [share_end(num_steps, share, window) / num_steps for share in searcher.shares]
            if number == 0 and first > ends[0] * num_steps:
                warn(
                    f"{name} compares members after step {ends[0] * num_steps:.0f}, and the sweep has no {metric} "
                    f"before step {first:.0f}: the back-test flatters it. Record a sweep with a smaller eval_every."
                )
            found_by = simulate(searcher, curve, lanes=lanes, ends=ends)
            spent[name].append(found_by.cost * num_steps / total)
            regret[name].append(found_by.best().value - best)
    shares, regrets = ({name: np.array(values) for name, values in each.items()} for each in (spent, regret))
    tested = f"{len(points)} of {len(sweep.members)} members, which finished or diverged, in {lanes} lanes"
    return BackTest(metric, shares, regrets, tested)


def _curves(sweep: Sweep, metric: str, sign: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By its point the steps and values, the lower the better, of each member that finished or diverged."""
    reports: dict[int, list[tuple[float, float]]] = {
        member.index: [] for member in sweep.members if member.status in ("finished", "diverged")
    }
    for line in sweep.lines:
        if line["member"] in reports and metric in line:
            reports[line["member"]].append((line["step"], sign * line[metric]))
    curves = {}
    for member in sweep.members:
        found = sorted(reports.get(member.index, ()))
        if member.status == "diverged":
            found.append((member.step, math.inf))
        if found:
            steps, values = np.array(found, float).T
            curves[point_key(member.point)] = steps, np.where(np.isnan(values), np.inf, values)
    return curves
