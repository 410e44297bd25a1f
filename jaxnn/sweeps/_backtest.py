"""Searchers tried on a recorded sweep: what they would have spent, and what they would have found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxnn._text import Table
from jaxnn.search import Points, Searcher, simulate
from jaxnn.sweeps._members import point_key, spread_of
from jaxnn.sweeps._plan import SweepOptions, search_window, share_end
from jaxnn.tasks import check_direction
from jaxnn.types import ConfigError

if TYPE_CHECKING:
    from jaxnn.sweeps._sweep import Sweep

LANES_SHARE = 8  # members per lane by default: a search usually has many more members than lanes


@dataclasses.dataclass(frozen=True, repr=False)
class BackTest:
    """What searchers would have spent and found on the points of a sweep, in random orders."""

    metric: str
    spent: Mapping[str, np.ndarray]  # by searcher, the share of all steps ``[orders]``
    regret: Mapping[str, np.ndarray]  # by searcher, how much worse than the best its best is ``[orders]``

    def table(self) -> Table:
        """Returns a row per searcher, means with their 95 % intervals."""
        rows = []
        for name, regret in self.regret.items():
            kept = f"{np.mean(regret <= 0):.0%}"
            spent = spread_of(100 * self.spent[name])
            ends = "" if math.isnan(spent.low) else f" ({spent.low:.1f} to {spent.high:.1f})"
            rows.append([name, f"{spent.mean:.1f} %{ends}", kept, str(spread_of(regret))])
        orders = len(next(iter(self.spent.values())))
        note = (
            f"{orders} random orders of the members that were trained to the end; means ± deviations (95 % intervals)"
        )
        return Table(["searcher", "steps spent", "found the best", f"regret in {self.metric}"], rows, [note])

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def backtest(
    sweep: Sweep,
    searchers: Mapping[str, Callable[[Points], Searcher]],
    metric: str | None,
    orders: int,
    lanes: int | None,
    key: int,
) -> BackTest:
    """Simulates each searcher on the recorded curves of complete members, as `Sweep.backtest`."""
    metric = sweep.check_metric(metric)
    sign = -1.0 if check_direction(metric, sweep.direction(metric), "direction") == "max" else 1.0
    members = [member for member in sweep.members if member.status == "finished"]
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    reports: dict[int, list[tuple[float, float]]] = {member.index: [] for member in members}
    for line in sweep.lines:
        if line["member"] in reports and metric in line:
            reports[line["member"]].append((line["step"], sign * line[metric]))
    for member in members:
        if found := sorted(reports[member.index]):
            steps, values = np.array(found, float).T
            curves[point_key(member.point)] = steps / member.step, np.where(np.isnan(values), np.inf, values)
    points = [member.point for member in members if point_key(member.point) in curves]
    if len(points) < 2:
        raise ConfigError(
            f"a back-test needs members that finished, with reports of {metric}: the sweep has {len(points)}."
        )

    def curve(point: Mapping[str, Any], share: float) -> float:
        at, values = curves[point_key(point)]
        # The last report by then; the first, if there was none yet.
        return float(values[max(0, int(np.searchsorted(at, share + 1e-9, side="right")) - 1)])

    best = min(curve(point, 1.0) for point in points)
    num_steps = members[0].step
    scales = {axis.name: axis.scale for axis in sweep.axes}
    spent: dict[str, list[float]] = {name: [] for name in searchers}
    regret: dict[str, list[float]] = {name: [] for name in searchers}
    rng = np.random.default_rng(key)
    for _ in range(orders):
        ordered = Points(tuple(points[index] for index in rng.permutation(len(points))), scales)
        for name, make in searchers.items():
            searcher = make(ordered)
            window = search_window(num_steps, searcher.shares[0], SweepOptions())
            ends = [share_end(num_steps, share, window) / num_steps for share in searcher.shares]
            found_by = simulate(searcher, curve, lanes=lanes or max(1, len(points) // LANES_SHARE), ends=ends)
            finished = [member.value for member in found_by.members if member.status == "finished"]
            spent[name].append(found_by.cost / len(points))
            regret[name].append(min(finished, default=math.nan) - best)
    arrays = ({name: np.array(values) for name, values in each.items()} for each in (spent, regret))
    return BackTest(metric, *arrays)
