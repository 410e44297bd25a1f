"""What two or more axes do together: a map of two of them, parallel coordinates of more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxnn.sweeps.pictures.axes import BEST, best_result, group_results
from jaxnn.sweeps.pictures.scales import (
    FONT,
    LOST_COLOUR,
    SHORT,
    Scale,
    add_colour_bar,
    label_ticks,
    metric_colours,
    metric_norm,
    plain,
    scale_of,
)
from jaxnn.sweeps.results.outcomes import Outcomes
from jaxnn.sweeps.results.summaries import GroupRow
from jaxnn.sweeps.results.tables import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize

# More numbers than this cannot be read in a panel.
MOST_NUMBERS = 48


def draw_pair(axes: Axes, sweep: Outcomes, metric: str) -> None:
    """Draws the means over the two settings of ``sweep``: a heat map of a grid, coloured points of scattered draws."""
    x, y = (scale_of(axis) for axis in sweep.settings)
    results = group_results(sweep, metric)
    colours, norm = _colours(sweep, metric, results)
    if 2 * len(results) >= len(x.values) * len(y.values):
        _draw_cells(axes, (x, y), results, colours, norm)
        _frame_best(axes, (x, y), best_result(sweep, metric, results))
    else:
        _draw_points(axes, (x, y), results, colours, norm)
        _star_best(axes, (x, y), best_result(sweep, metric, results))
    add_colour_bar(axes, norm, colours, plain(metric))
    several = any(result.n > 1 for result in results)
    axes.set_title("mean over seeds" if several else "members", fontsize="medium")


def draw_parallel(axes: Axes, sweep: Outcomes, metric: str) -> None:
    """Draws a line a group across one upright for each setting and one for the metric (Inselberg 1985)."""
    scales = [scale_of(axis) for axis in sweep.settings]
    results = group_results(sweep, metric)
    colours, norm = _colours(sweep, metric, results)
    sign = 1 if sweep.more_is_better(metric) else -1
    for result in sorted(results, key=lambda result: sign * np.nan_to_num(result.spread.mean, nan=-sign * np.inf)):
        _draw_line(axes, scales, result, colours, norm, bad_edge=0.0 if sign > 0 else 1.0)
    for place, scale in enumerate(scales):
        _draw_upright(axes, place, {float(scale.norm()(at)): label for at, label in _few(scale).items()})
    ends = {0.0: show(float(norm.vmin or 0)), 1.0: show(float(norm.vmax or 0))}
    _draw_upright(axes, len(scales), ends)
    label_ticks(axes.xaxis, dict(enumerate([*(scale.name for scale in scales), plain(metric)])))
    label_ticks(axes.yaxis, {})
    add_colour_bar(axes, norm, colours, plain(metric))
    axes.set_xlim(-0.1, len(scales) + 0.25)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title("every setting, the best darkest", fontsize="medium")


def _colours(sweep: Outcomes, metric: str, results: Sequence[GroupRow]) -> tuple[Colormap, Normalize]:
    from matplotlib import colormaps

    more = sweep.more_is_better(metric)
    norm = metric_norm(np.array([result.spread.mean for result in results], float), more)
    return colormaps[metric_colours(more)], norm


def _draw_cells(
    axes: Axes, scales: tuple[Scale, Scale], results: Sequence[GroupRow], colours: Colormap, norm: Normalize
) -> None:
    x, y = scales
    means = np.full((len(y.values), len(x.values)), np.nan)
    for result in results:
        column, row = x.place(result.point[x.name]), y.place(result.point[y.name])
        means[row, column] = result.spread.mean
        if not result.n:
            mark, colour = ("×", LOST_COLOUR) if result.num_lost else ("○", "0.6")
            axes.text(column, row, mark, color=colour, ha="center", va="center")
        elif means.size <= MOST_NUMBERS:
            # White on what is dark and black on what is light.
            shade = np.dot(colours(norm(result.spread.mean))[:3], (0.3, 0.6, 0.1))
            colour = "white" if shade < 0.5 else "black"
            axes.text(
                column, row, f"{result.spread.mean:.3g}", color=colour, ha="center", va="center", fontsize="x-small"
            )
    axes.imshow(means, cmap=colours, norm=norm, origin="lower", aspect="auto")
    for axis, scale in ((axes.xaxis, x), (axes.yaxis, y)):
        scale._replace(kind="nominal").mark(axis)


def _frame_best(axes: Axes, scales: tuple[Scale, Scale], best: GroupRow | None) -> None:
    from matplotlib.patches import Rectangle

    if best is not None:
        column, row = (scale.place(best.point[scale.name]) for scale in scales)
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, ec="tab:orange", lw=2, label="best"))


def _draw_points(
    axes: Axes, scales: tuple[Scale, Scale], results: Sequence[GroupRow], colours: Colormap, norm: Normalize
) -> None:
    x, y = scales
    there = [(x.position(r.point[x.name]), y.position(r.point[y.name]), r.spread.mean) for r in results if r.n]
    lost = [(x.position(r.point[x.name]), y.position(r.point[y.name])) for r in results if not r.n and r.num_lost]
    short = [(x.position(r.point[x.name]), y.position(r.point[y.name])) for r in results if not (r.n or r.num_lost)]
    if short:
        axes.plot(*zip(*short, strict=True), **SHORT)
    if there:
        columns, rows, means = zip(*there, strict=True)
        axes.scatter(columns, rows, c=means, cmap=colours, norm=norm, s=36, ec="white", lw=0.5)
    if lost:
        axes.plot(*zip(*lost, strict=True), "x", c=LOST_COLOUR, ms=5)
    x.mark(axes.xaxis)
    y.mark(axes.yaxis)
    axes.grid(alpha=0.3)


def _star_best(axes: Axes, scales: tuple[Scale, Scale], best: GroupRow | None) -> None:
    if best is not None:
        x, y = (scale.position(best.point[scale.name]) for scale in scales)
        axes.plot(x, y, label="best", **BEST | {"ms": 14})


def _draw_line(
    axes: Axes, scales: Sequence[Scale], result: GroupRow, colours: Colormap, norm: Normalize, bad_edge: float
) -> None:
    heights = [float(scale.norm()(scale.position(result.point[scale.name]))) for scale in scales]
    places = range(len(scales) + 1)
    if not (result.n or result.num_lost):
        # It ends before the metric, of which it has no result.
        axes.plot(places[:-1], heights, c="0.8", lw=0.7, zorder=1)
        return
    if not result.n:
        axes.plot(places, [*heights, bad_edge], c=LOST_COLOUR, lw=0.7, ls=":", marker="x", markevery=[len(scales)])
        return
    height = float(norm(result.spread.mean))
    axes.plot(places, [*heights, height], c=colours(height), lw=1.2, alpha=0.8)


def _few(scale: Scale) -> dict[float, str]:
    """The labels of an upright: all values of few, else its ends."""
    labels = scale.labels()
    if scale.kind == "nominal" or len(scale.values) == len(labels):
        return labels
    return {scale.position(value): show(value) for value in (scale.values[0], scale.values[-1])}


def _draw_upright(axes: Axes, place: int, labels: dict[float, str]) -> None:
    axes.axvline(place, c="black", lw=0.8, ymin=0.04, ymax=0.96)
    box = {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.6}
    for height, label in labels.items():
        axes.annotate(label, (place, height), (4, 0), textcoords="offset points", va="center", fontsize=FONT, bbox=box)
