"""Panels of a sweep's figure: the last value of a metric against one axis, seed by seed, or against several axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxnn.sweeps.results._outcomes import SEED, Axis, count_by_status, show, show_value
from jaxnn.sweeps.results._summary import GroupRow, spread_of
from jaxnn.sweeps.search import scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as DrawnAxis
    from matplotlib.colors import Colormap, Normalize

    from jaxnn.sweeps.results._sweep import Sweep

# From this ratio on, losses are drawn on a logarithmic scale.
DECADE = 10.0
# More labels, letters in a row of labels, or numbers in a panel than this would be unreadable.
MOST_LABELS = 8
MOST_LETTERS = 30
MOST_NUMBERS = 48
FONT = "small"
LOST_COLOUR = "tab:red"
# Members that were cut short, at their last value.
SHORT: dict[str, Any] = {"marker": "o", "mfc": "none", "mec": "0.7", "mew": 0.8, "ms": 4, "ls": "none"}
BEST: dict[str, Any] = {"marker": "*", "c": "black", "ms": 11, "mec": "white", "ls": "none", "zorder": 5}


class Scale(NamedTuple):
    """How one axis is drawn.

    Attributes:
        name: the axis's.
        values: its values, ascending if they are numbers.
        kind: ``log``, ``linear`` or ``nominal``: at equal distances.
    """

    name: str
    values: tuple[Any, ...]
    kind: str

    @classmethod
    def of(cls, axis: Axis) -> Scale:
        """Returns the axis's own scale if its values allow that, else a nominal one."""
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in axis.values)
        values = tuple(sorted(axis.values)) if numeric else axis.values
        possible = numeric and all(map(math.isfinite, values)) and (axis.scale != "log" or values[0] > 0)
        # Zero and then powers fit neither a logarithmic nor a linear axis.
        mixed = possible and values[0] == 0 and len(values) > 2 and scale_of(axis.name, values[1:]) == "log"
        return cls(axis.name, values, axis.scale if possible and not mixed else "nominal")

    def position(self, value: Any) -> float:
        """Returns ``value`` itself, or its index among the values of a nominal axis."""
        return float(self.values.index(value) if self.kind == "nominal" else value)

    def norm(self) -> Normalize:
        """Returns the map of positions to 0…1."""
        from matplotlib.colors import LogNorm, Normalize

        positions = [self.position(value) for value in self.values]
        return (LogNorm if self.kind == "log" else Normalize)(min(positions), max(positions))

    def labels(self) -> dict[float, str]:
        """Returns the labels of the positions of at most eight values, evenly chosen."""
        every = -(-len(self.values) // MOST_LABELS)
        return {self.position(value): show(value) for value in self.values[::every]}

    def mark(self, axis: DrawnAxis) -> None:
        """Scales and labels an axis of a panel."""
        across = axis is axis.axes.xaxis
        if self.kind == "log":
            (axis.axes.set_xscale if across else axis.axes.set_yscale)("log")
        if self.kind == "nominal":
            label_ticks(axis, self.labels())
            if across and sum(map(len, self.labels().values())) > MOST_LETTERS:
                axis.set_tick_params(labelrotation=40)
            (axis.axes.set_xmargin if across else axis.axes.set_ymargin)(0.15)
        axis.set_label_text(self.name)


def draw_axis(axes: Axes, sweep: Sweep, metric: str, axis: Axis) -> None:
    """Draws all members against ``axis``, and the means of the groups that equal the best in all other settings."""
    scale = Scale.of(axis)
    positions = [scale.position(member.fields[axis.name]) for member in sweep.members]
    values = _draw_members(axes, sweep, metric, positions, s=16, alpha=0.5, lw=0)
    groups = sweep.group([axis.name for axis in sweep.settings], metric)
    title = "no result"
    if any(row.n for row in groups.rows):
        best = groups.best()
        others = {**best.point, axis.name: None}
        line = [row for row in groups.rows if row.n and {**row.point, axis.name: None} == others]
        line.sort(key=lambda row: scale.position(row.point[axis.name]))
        x = [scale.position(row.point[axis.name]) for row in line]
        style = "none" if scale.kind == "nominal" else "-"
        axes.plot(x, [row.spread.mean for row in line], c="tab:blue", ls=style, marker="o", ms=4, lw=1.2)
        axes.vlines(
            x, *zip(*((row.spread.low, row.spread.high) for row in line), strict=True), color="tab:blue", lw=1.5
        )
        axes.plot(scale.position(best.point[axis.name]), best.spread.mean, **BEST)
        title = f"★ {show(best.spread.mean)} at {show_value(best.point[axis.name])}"
        if left_out := best.show_left_out():
            title += f", {best.n} of {len(best.members)} seeds ({left_out})"
        elif best.n > 1:
            title += f", mean over {best.n} seeds"
    scale.mark(axes.xaxis)
    finish(axes, sweep, metric, values, [scale.position(member.fields[axis.name]) for member in sweep.lost], title)


def draw_seeds(axes: Axes, sweep: Sweep, metric: str) -> None:
    """Draws every member by itself, and their mean with its interval."""
    values = _draw_members(axes, sweep, metric, range(len(sweep.members)), s=22)
    spread = spread_of(sweep.scores(metric))
    if spread.n > 1:
        axes.axhline(spread.mean, c="tab:blue", lw=1.2)
        axes.axhspan(spread.low, spread.high, color="tab:blue", alpha=0.15, lw=0)
    members = list(enumerate(sweep.members))[:: -(-len(sweep.members) // MOST_LABELS)]
    label_ticks(axes.xaxis, {place: show(member.fields.get(SEED, member.index)) for place, member in members})
    axes.set_xlabel(SEED)
    lost = [sweep.members.index(member) for member in sweep.lost]
    finish(axes, sweep, metric, values, lost, f"{spread.n} seeds: {spread}" if spread.n > 1 else "last value")


def _draw_members(axes: Axes, sweep: Sweep, metric: str, positions: Sequence[float], **style: Any) -> np.ndarray:
    """Draws complete members as points and those that were cut short as rings; returns the values of both."""
    scores, so_far = sweep.scores(metric), sweep.scores(metric, cut_short=True)
    axes.scatter(positions, scores, **style)
    there = np.isfinite(so_far)
    if there.any():
        axes.plot(np.array(positions)[there], so_far[there], label="cut short", zorder=1, **SHORT)
    return np.concatenate([scores, so_far])


def draw_pair(axes: Axes, sweep: Sweep, metric: str) -> None:
    """Draws the means over two settings: a heat map of a grid, or coloured points of scattered draws."""
    from matplotlib.patches import Rectangle

    x, y = (Scale.of(axis) for axis in sweep.settings)
    groups = sweep.group([x.name, y.name], metric)
    colours, norm = _metric_colours(sweep, metric, groups.rows)
    cells = 2 * len(groups.rows) >= len(x.values) * len(y.values)
    if cells:
        x, y = x._replace(kind="nominal"), y._replace(kind="nominal")
    places = [(x.position(row.point[x.name]), y.position(row.point[y.name])) for row in groups.rows]
    if cells:
        means = np.full((len(y.values), len(x.values)), np.nan)
        for (column, line), row in zip(places, groups.rows, strict=True):
            mean = means[int(line), int(column)] = row.spread.mean
            text, colour = ("×", LOST_COLOUR) if row.num_lost else ("○", "0.6")
            if row.n:
                dark = np.dot(colours(norm(mean))[:3], (0.3, 0.6, 0.1)) < 0.5
                text, colour = f"{mean:.3g}" if means.size <= MOST_NUMBERS else "", "white" if dark else "black"
            size = "x-small" if row.n else None
            axes.text(column, line, text, color=colour, ha="center", va="center", fontsize=size)
        axes.imshow(means, cmap=colours, norm=norm, origin="lower", aspect="auto")
    else:
        kinds = np.array(["result" if row.n else "lost" if row.num_lost else "short" for row in groups.rows])
        at, means = np.array(places), np.array([row.spread.mean for row in groups.rows])
        axes.plot(*at[kinds == "short"].T, **SHORT)
        there = kinds == "result"
        axes.scatter(at[there, 0], at[there, 1], c=means[there], cmap=colours, norm=norm, s=36, ec="white", lw=0.5)
        axes.plot(*at[kinds == "lost"].T, "x", c=LOST_COLOUR, ms=5)
        axes.grid(alpha=0.3)
    x.mark(axes.xaxis)
    y.mark(axes.yaxis)
    if any(row.n for row in groups.rows):
        best = groups.best()
        column, line = x.position(best.point[x.name]), y.position(best.point[y.name])
        if cells:
            frame: dict[str, Any] = {"fill": False, "ec": "tab:orange", "lw": 2, "label": "best"}
            axes.add_patch(Rectangle((column - 0.5, line - 0.5), 1, 1, **frame))
        else:
            axes.plot(column, line, label="best", **BEST | {"ms": 14})
    add_colour_bar(axes, norm, colours, metric.replace("_", " "))
    axes.set_title("mean over seeds" if any(row.n > 1 for row in groups.rows) else "members", fontsize="medium")


def draw_parallel(axes: Axes, sweep: Sweep, metric: str) -> None:
    """Draws a line per group across one vertical axis per setting and one for the metric (Inselberg 1985)."""
    scales = [Scale.of(axis) for axis in sweep.settings]
    rows = sweep.group([scale.name for scale in scales], metric).rows
    colours, norm = _metric_colours(sweep, metric, rows)
    more = sweep.more_is_better(metric)
    sign = 1 if more else -1
    # The best is drawn last, over the others.
    for row in sorted(rows, key=lambda row: sign * np.nan_to_num(row.spread.mean, nan=-sign * np.inf)):
        heights = [float(scale.norm()(scale.position(row.point[scale.name]))) for scale in scales]
        places = range(len(scales) + 1)
        if row.n:
            height = float(norm(row.spread.mean))
            axes.plot(places, [*heights, height], c=colours(height), lw=1.2, alpha=0.8)
        elif row.num_lost:
            style: dict[str, Any] = {"c": LOST_COLOUR, "lw": 0.7, "ls": ":", "marker": "x", "markevery": [len(scales)]}
            axes.plot(places, [*heights, 0.0 if more else 1.0], **style)
        else:
            # A group without a result ends before the metric.
            axes.plot(places[:-1], heights, c="0.8", lw=0.7, zorder=1)
    uprights = []
    for scale in scales:
        labels, ends = scale.labels(), (scale.values[0], scale.values[-1])
        if scale.kind != "nominal" and len(scale.values) > len(labels):
            labels = {scale.position(value): show(value) for value in ends}
        uprights.append({float(scale.norm()(position)): label for position, label in labels.items()})
    uprights.append({0.0: show(float(norm.vmin or 0)), 1.0: show(float(norm.vmax or 0))})
    box = {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.6}
    for place, labels in enumerate(uprights):
        axes.axvline(place, c="black", lw=0.8, ymin=0.04, ymax=0.96)
        for height, label in labels.items():
            style = {"textcoords": "offset points", "va": "center", "fontsize": FONT, "bbox": box}
            axes.annotate(label, (place, height), (4, 0), **style)
    label_ticks(axes.xaxis, dict(enumerate([*(scale.name for scale in scales), metric.replace("_", " ")])))
    label_ticks(axes.yaxis, {})
    add_colour_bar(axes, norm, colours, metric.replace("_", " "))
    axes.set_xlim(-0.1, len(scales) + 0.25)
    axes.spines[:].set_visible(False)
    axes.set_title("every setting, the best darkest", fontsize="medium")


def label_ticks(axis: DrawnAxis, labels: Mapping[float, str]) -> None:
    """Sets ticks at these positions and no others."""
    axis.set_ticks(list(labels), labels=list(labels.values()))
    axis.set_ticks([], minor=True)


def _is_wide(values: Sequence[float] | np.ndarray, more_is_better: bool) -> bool:
    """Whether the finite ``values`` are of a loss, positive, and span more than a decade."""
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    return not more_is_better and len(finite) > 0 and bool(0 < DECADE * finite.min() < finite.max())


def _metric_colours(sweep: Sweep, metric: str, rows: Sequence[GroupRow]) -> tuple[Colormap, Normalize]:
    """A colour map in which better is darker, and the map of the groups' means to 0…1."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    more = sweep.more_is_better(metric)
    means = np.array([row.spread.mean for row in rows if row.n])
    kind = LogNorm if _is_wide(means, more) else Normalize
    norm = kind(means.min(), means.max()) if len(means) else Normalize(0, 1)
    return colormaps["viridis_r" if more else "viridis"], norm


def add_colour_bar(axes: Axes, norm: Normalize, colours: Colormap, label: str) -> Any:
    """Adds a colour bar beside ``axes``."""
    from matplotlib.cm import ScalarMappable

    return axes.figure.colorbar(ScalarMappable(norm, colours), ax=axes, label=label, pad=0.02)


def finish(axes: Axes, sweep: Sweep, metric: str, values: np.ndarray, lost: Sequence[float], title: str) -> None:
    """Scales and labels a panel whose y axis is the metric, and marks lost members at the bad edge.

    Args:
        axes: the panel.
        sweep: whose panel it is.
        metric: on the y axis.
        values: those that are drawn.
        lost: the x positions of the members that diverged or failed.
        title: of the panel.
    """
    more = sweep.more_is_better(metric)
    if _is_wide(values, more):
        axes.set_yscale("log")
    if lost:
        # They have no value: y is a share of the panel's height.
        style: dict[str, Any] = {"c": LOST_COLOUR, "ms": 5, "clip_on": False, "transform": axes.get_xaxis_transform()}
        axes.plot(lost, [0.03 if more else 0.97] * len(lost), "x", label=count_by_status(sweep.lost), **style)
    axes.set_ylabel(metric.replace("_", " "))
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
