"""The figure of a sweep: curves, the metric against each axis, and the joint effect of several axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxnn.record import metrics_of, new_figure
from jaxnn.sweeps.results._outcomes import count_by_status, show_value
from jaxnn.sweeps.results._summary import ENOUGH, grouped, spread_of
from jaxnn.sweeps.results._sweep_panels import (
    FONT,
    Scale,
    add_colour_bar,
    draw_axis,
    draw_pair,
    draw_parallel,
    draw_seeds,
    finish,
    label_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxnn.sweeps.results._sweep import Sweep

PANELS_A_ROW = 3
PANEL_INCHES = (4.6, 3.6)
# Up to this many groups are named in a legend, in columns; more are coloured by value.
MOST_NAMED = 8
COLUMN = 4
# Viridis ends here: its light end is invisible on white.
VISIBLE = 0.92


def draw_sweep(sweep: Sweep, metric: str | None = None) -> Figure:
    """Draws curves of ``metric``, its last value against each axis, and a map of two axes or parallel coordinates.

    Means are over members that differ in their seed only. Members that diverged or failed are not part of them and are
    marked with a cross; members that were cut short neither, and are rings at their last value.

    Args:
        sweep: the members.
        metric: which; default: the monitored one.

    Returns:
        A figure without a window; ``savefig`` it, or return it from a notebook's cell.

    Raises:
        ConfigError: no member has the metric.
    """
    metric = sweep.check_metric(metric)
    panels: list[Callable[[Axes, Sweep, str], None]] = [partial(draw_axis, axis=axis) for axis in sweep.settings] or [
        draw_seeds
    ]
    if any(metric in metrics_of(line) for line in sweep.lines):
        panels.insert(0, draw_curves)
    if len(sweep.settings) == 2:
        panels.append(draw_pair)
    columns = 2 if len(panels) == 4 else min(PANELS_A_ROW, len(panels))
    rows = -(-len(panels) // columns)
    height = rows + (len(sweep.settings) > 2)
    figure = new_figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * height), layout="constrained")
    grid = figure.add_gridspec(height, columns)
    for index, panel in enumerate(panels):
        panel(figure.add_subplot(grid[divmod(index, columns)]), sweep, metric)
    if height > rows:
        draw_parallel(figure.add_subplot(grid[rows, :]), sweep, metric)
    marks = {"×": sweep.lost, "○": sweep.cut_short}
    marked = ", ".join(f"{mark} {count_by_status(members)}" for mark, members in marks.items() if members)
    title = f"{metric.replace('_', ' ')} of {len(sweep.members)} members" + (f" ({marked})" if marked else "")
    figure.suptitle(title, fontsize="large")
    return figure


class Curve(NamedTuple):
    """A group's metric against the step: mean and ends of the interval, ``[reports]``, over ``n`` members."""

    point: dict[str, Any]
    n: int
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def draw_curves(axes: Axes, sweep: Sweep, metric: str) -> None:
    """Draws the metric against the step: the mean of each group, with bands if the groups are few.

    The mean is over the complete members, or those that were cut short if none is complete, and ends where the first
    of them stops: from there on it would jump. The other members that were cut short are thin and grey.
    """
    steps, values = sweep.curves(metric)
    values = np.where(np.isfinite(values), values, np.nan)
    curves = []
    for point, positions in grouped(sweep.members, [axis.name for axis in sweep.settings]):
        cut_short = [position for position in positions if sweep.members[position].cut_short]
        drawn = [position for position in positions if sweep.members[position].complete] or cut_short
        counts = np.isfinite(values[drawn]).sum(axis=0)
        measured = (counts > 0) & (counts == counts.max(initial=0))
        if measured.any():
            spreads = [spread_of(column) for column in values[drawn][:, measured].T]
            ends = np.array([(spread.mean, spread.low, spread.high) for spread in spreads]).T
            curves.append(Curve(point, spreads[0].n, steps[measured], *ends))
        for position in cut_short if drawn != cut_short else ():
            there = np.isfinite(values[position])
            axes.plot(steps[there], values[position][there], c="0.75", lw=0.7, zorder=1)
    named = len(curves) <= MOST_NAMED
    (_draw_named if named else _draw_coloured)(axes, [Scale.of(axis) for axis in sweep.settings], curves)
    several = [curve.n for curve in curves if curve.n > 1]
    title = "mean over seeds" if several else "curves"
    if several and named:
        ranges = "the range of the seeds" if max(several) < ENOUGH else f"its 95 % interval (range below {ENOUGH})"
        title += f", with {'its 95 % interval' if min(several) >= ENOUGH else ranges}"
    axes.set_xlabel("step")
    means = np.concatenate([curve.mean for curve in curves]) if curves else np.empty(0)
    finish(axes, sweep, metric, means, [member.step for member in sweep.lost], title)


def _draw_named(axes: Axes, scales: Sequence[Scale], curves: list[Curve]) -> None:
    """Draws up to eight groups with bands and a legend."""
    from matplotlib import colormaps

    # Numbers have an order, which colours can show; settings without order get distinct colours.
    ordered = [scale.kind for scale in scales] in (["log"], ["linear"])
    if ordered:
        curves.sort(key=lambda curve: curve.point[scales[0].name])
    for index, curve in enumerate(curves):
        colour = colormaps["viridis"](VISIBLE * index / max(1, len(curves) - 1)) if ordered else f"C{index}"
        label = ", ".join(show_value(value) for value in curve.point.values())
        marker = "o" if len(curve.steps) == 1 else ""
        axes.plot(curve.steps, curve.mean, c=colour, marker=marker, ms=3, label=label or None)
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.2, lw=0)
    if scales and curves:
        title = ", ".join(scale.name for scale in scales)
        columns = 1 + (len(curves) > COLUMN)
        axes.legend(fontsize=FONT, title=title, title_fontsize=FONT, ncols=columns, handlelength=1)


def _draw_coloured(axes: Axes, scales: Sequence[Scale], curves: list[Curve]) -> None:
    """Draws many groups, coloured by their value on the first numeric axis."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    scale = next((scale for scale in scales if scale.kind != "nominal"), scales[0])
    norm, colours = scale.norm(), ListedColormap(colormaps["viridis"](np.linspace(0, VISIBLE, 256)))
    for curve in curves:
        colour = colours(norm(scale.position(curve.point[scale.name])))
        marker = "o" if len(curve.steps) == 1 else ""
        axes.plot(curve.steps, curve.mean, c=colour, marker=marker, ms=3, lw=1, alpha=0.8)
    bar = add_colour_bar(axes, norm, colours, scale.name)
    if scale.kind == "nominal":
        label_ticks(bar.ax.yaxis, scale.labels())
