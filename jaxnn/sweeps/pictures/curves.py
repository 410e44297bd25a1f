"""A metric against the step: a line a group of members that differ in their seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxnn.sweeps.pictures.scales import (
    FONT,
    add_colour_bar,
    finish,
    label_ticks,
    mark_lost,
    plain,
    scale_of,
    spans_decade,
)
from jaxnn.sweeps.results.outcomes import Outcomes
from jaxnn.sweeps.results.summaries import ENOUGH, Spread, grouped, spread_of
from jaxnn.sweeps.results.tables import show_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# So many groups have a name each; more are told apart by the colour of a value.
MOST_NAMED = 8
# So many names are under each other in the legend.
COLUMN = 4
# Of viridis: its light end cannot be seen on white.
VISIBLE = 0.92


class Curve(NamedTuple):
    """The mean of a group against the step.

    Attributes:
        point: the values its members share.
        steps: ``[reports]``.
        spreads: of its members, at each.
    """

    point: dict[str, Any]
    steps: np.ndarray
    spreads: list[Spread]

    def column(self, name: str) -> np.ndarray:
        """One number of the spreads, ``[reports]``."""
        return np.array([getattr(spread, name) for spread in self.spreads], float)


def draw_curves(axes: Axes, sweep: Outcomes, metric: str) -> None:
    """Draws the mean curve of each group; members that were lost are marked at the step they were lost at."""
    curves = group_curves(sweep, metric)
    named = len(curves) <= MOST_NAMED
    (_draw_named if named else _draw_coloured)(axes, sweep, curves)
    _draw_cut_short(axes, sweep, metric)
    means = [spread.mean for curve in curves for spread in curve.spreads]
    if spans_decade(means, sweep.more_is_better(metric)):
        axes.set_yscale("log")
    mark_lost(axes, sweep, metric, [member.step for member in sweep.lost])
    axes.set_xlabel("step")
    axes.set_ylabel(plain(metric))
    finish(axes, _title([curve.spreads[0].n for curve in curves], banded=named))


def group_curves(sweep: Outcomes, metric: str) -> list[Curve]:
    """The curve of each group, while all of it runs; a group that measured nothing has none.

    It is over the members that came to their end, and over those that were cut short where none did.
    """
    steps, values = sweep.curves(metric)
    curves = []
    for point, positions in grouped(sweep.members, [axis.name for axis in sweep.settings]):
        rows = np.where(np.isfinite(values), values, np.nan)[_drawn(sweep, positions)]
        counts = np.isfinite(rows).sum(axis=0)
        # Where some have stopped, the mean is one of those that are left, and would jump.
        measured = (counts > 0) & (counts == counts.max(initial=0))
        if measured.any():
            curves.append(Curve(point, steps[measured], [spread_of(column) for column in rows[:, measured].T]))
    return curves


def _drawn(sweep: Outcomes, positions: Sequence[int]) -> list[int]:
    """Those of a group that its curve is over."""
    complete = [position for position in positions if sweep.members[position].complete]
    return complete or [position for position in positions if sweep.members[position].cut_short]


def _draw_cut_short(axes: Axes, sweep: Outcomes, metric: str) -> None:
    """Draws the members that were cut short and are in no group's curve, thin and grey."""
    steps, values = sweep.curves(metric)
    for _, positions in grouped(sweep.members, [axis.name for axis in sweep.settings]):
        drawn = _drawn(sweep, positions)
        for position in positions:
            if sweep.members[position].cut_short and position not in drawn:
                there = np.isfinite(values[position])
                axes.plot(steps[there], values[position][there], c="0.75", lw=0.7, zorder=1)


def _title(counts: Sequence[int], *, banded: bool) -> str:
    """What is drawn of groups of so many members."""
    several = [count for count in counts if count > 1]
    if not several or not banded:
        return "mean over seeds" if several else "curves"
    if min(several) >= ENOUGH:
        return "mean over seeds, with its 95 % interval"
    ranges = "the range of the seeds" if max(several) < ENOUGH else f"its 95 % interval (range below {ENOUGH})"
    return f"mean over seeds, with {ranges}"


def _draw_named(axes: Axes, sweep: Outcomes, curves: Sequence[Curve]) -> None:
    from matplotlib import colormaps

    # Numbers have an order, which colours can show; settings that have none are to differ.
    ordered = [scale_of(axis).kind for axis in sweep.settings] in (["log"], ["linear"])
    names = [axis.name for axis in sweep.settings]
    curves = sorted(curves, key=lambda curve: curve.point[names[0]]) if ordered else curves
    for index, curve in enumerate(curves):
        share = VISIBLE * index / max(1, len(curves) - 1)
        colour = colormaps["viridis"](share) if ordered else f"C{index}"
        label = ", ".join(show_value(curve.point[name]) for name in names)
        marker = "o" if len(curve.steps) == 1 else ""
        axes.plot(curve.steps, curve.column("mean"), c=colour, marker=marker, ms=3, label=label or None)
        axes.fill_between(curve.steps, curve.column("low"), curve.column("high"), color=colour, alpha=0.2, lw=0)
    if names and curves:
        columns = 1 + (len(curves) > COLUMN)
        axes.legend(fontsize=FONT, title=", ".join(names), title_fontsize=FONT, ncols=columns, handlelength=1)


def _draw_coloured(axes: Axes, sweep: Outcomes, curves: Sequence[Curve]) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    scales = [scale_of(axis) for axis in sweep.settings]
    scale = next((scale for scale in scales if scale.kind != "nominal"), scales[0])
    norm, colours = scale.norm(), ListedColormap(colormaps["viridis"](np.linspace(0, VISIBLE, 256)))
    for curve in curves:
        colour = colours(norm(scale.position(curve.point[scale.name])))
        marker = "o" if len(curve.steps) == 1 else ""
        axes.plot(curve.steps, curve.column("mean"), c=colour, marker=marker, ms=3, lw=1, alpha=0.8)
    bar = add_colour_bar(axes, norm, colours, scale.name)
    if scale.kind == "nominal":
        label_ticks(bar.ax.yaxis, scale.labels())
