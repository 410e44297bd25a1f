"""The figure of a sweep: curves, the last value of a metric against each axis, and the joint effect of two axes."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis as DrawnAxis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from jaxnn._figures import format_value, label_ticks, new_panels, write_in_cells
from jaxnn._json import metrics_of
from jaxnn.search import Axis
from jaxnn.sweeps._importance import FEW_MEMBERS, Importance, field_importance, is_wide
from jaxnn.sweeps._members import SEED, count_by_status, grouped, show, show_field, spread_of
from jaxnn.types import ConfigError

if TYPE_CHECKING:
    from jaxnn.sweeps._sweep import Sweep

MOST_NAMED = 8  # groups with bands and a legend; more are coloured by value
MOST_LABELS = 8  # on an axis
MOST_BARS = 10  # the most important fields
MOST_LETTERS = 30  # in a horizontal row of labels
MOST_CELLS_WITH_NUMBERS = 8  # in a row or a column of a heat map
VISIBLE = 0.92  # the light end of viridis is invisible on white
LOST_COLOUR = "C5"
# Members that were cut short, at their last value.
SHORT: dict[str, Any] = {"marker": "o", "mfc": "none", "mec": "0.7", "mew": 0.8, "ms": 4, "ls": "none", "zorder": 1}
BEST: dict[str, Any] = {"marker": "*", "c": "black", "ms": 11, "mec": "white", "ls": "none", "zorder": 5}


def draw_sweep(sweep: Sweep, metric: str | None = None) -> Figure:
    """Draws curves of ``metric``, its last value against each axis, and a map of two axes."""
    metric = sweep.check_metric(metric)
    seeds = tuple(dict.fromkeys(member.fields.get(SEED) for member in sweep.members))
    panels = [partial(draw_axis, axis=axis) for axis in sweep.settings or [Axis(SEED, seeds, "nominal")]]
    if any(metric in metrics_of(line) for line in sweep.lines):
        panels.insert(0, partial(draw_curves))
    if len(sweep.settings) == 2:
        panels.append(partial(draw_pair))
    if "lanes_in_use" in sweep.summary and sweep.direction(metric) is not None:
        panels.append(partial(draw_search))
    if (importance := _shown_importance(sweep, metric)) is not None:
        panels.append(partial(draw_importance, importance=importance))
    figure, subplots = new_panels(len(panels))
    for panel, axes in zip(panels, subplots, strict=True):
        panel(axes, sweep, metric)
    marks = {"×": sweep.lost, "○": [member for member in sweep.members if member.cut_short]}
    marked = ", ".join(f"{mark} {count_by_status(members)}" for mark, members in marks.items() if members)
    title = f"{metric.replace('_', ' ')} of {len(sweep.members)} members" + (f" ({marked})" if marked else "")
    figure.suptitle(title, fontsize="large")
    return figure


def _drawable(axis: Axis) -> Axis:
    """The axis with its numbers sorted; nominal if its values do not allow its scale."""
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in axis.values)
    values = tuple(sorted(axis.values)) if numeric else axis.values
    possible = numeric and all(map(math.isfinite, values)) and (axis.scale != "log" or values[0] > 0)
    # Zero and then powers fit neither a logarithmic nor a linear axis.
    mixed = possible and values[0] == 0 and len(values) > 2 and Axis.scale_of(axis.name, values[1:]) == "log"
    return Axis(axis.name, values, axis.scale if possible and not mixed else "nominal")


def _position(axis: Axis, value: Any) -> float:
    """``value`` itself, or its index among the values of a nominal axis."""
    return float(axis.values.index(value) if axis.scale == "nominal" else value)


def _mark(axis: Axis, drawn: DrawnAxis) -> None:
    """Scales and labels an axis of a panel, or of a colour bar; of many nominal values some."""
    panel, across = drawn.axes, drawn is drawn.axes.xaxis
    if axis.scale == "log":
        (panel.set_xscale if across else panel.set_yscale)("log")
        label_ticks(drawn)
    if axis.scale == "nominal" or (axis.scale == "log" and len(axis.values) <= MOST_LABELS):
        shown = axis.values[:: -(-len(axis.values) // MOST_LABELS)]
        labels = [show(value) for value in shown]
        drawn.set_ticks([_position(axis, value) for value in shown], labels=labels)
        drawn.set_minor_locator(NullLocator())
        if across and sum(map(len, labels)) > MOST_LETTERS:
            drawn.set_tick_params(labelrotation=40)
        (panel.set_xmargin if across else panel.set_ymargin)(0.15 if axis.scale == "nominal" else 0.05)
    drawn.set_label_text(axis.name)


def draw_curves(axes: Axes, sweep: Sweep, metric: str) -> None:
    """Draws the mean of each group against the step, with bands if the groups are few.

    It is over complete members, else over those cut short, until the first of them stops; others cut short are grey.
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
            curves.append((point, steps[measured], [spread_of(column) for column in values[drawn][:, measured].T]))
        for row in values[cut_short] if drawn != cut_short else ():
            axes.plot(steps[np.isfinite(row)], row[np.isfinite(row)], c="0.75", lw=0.7, zorder=1)
    settings, named = [_drawable(axis) for axis in sweep.settings], len(curves) <= MOST_NAMED
    coloured = next((axis for axis in settings if axis.scale != "nominal"), None if named else settings[0])
    colours = ListedColormap(colormaps["viridis"](np.linspace(0, VISIBLE, 256)))
    if coloured is not None:
        places = [_position(coloured, value) for value in coloured.values]
        norm = (LogNorm if coloured.scale == "log" else Normalize)(min(places), max(places))
    if settings:
        curves.sort(key=lambda curve: _position(settings[0], curve[0][settings[0].name]))
    for index, (point, at, spreads) in enumerate(curves):
        # Numbers have an order, which colours can show; a few settings without order get distinct colours.
        colour: Any = f"C{index}"
        if coloured is not None and len(curves) > 1 and (len(settings) == 1 or not named):
            colour = colours(norm(_position(coloured, point[coloured.name])))
        label, marker = ", ".join(map(show_field, point.values())) if named else "", "o" if len(at) <= 3 else ""
        axes.plot(at, [spread.mean for spread in spreads], c=colour, marker=marker, ms=3, lw=1.2, label=label or None)
        if named:
            ends = [spread.low for spread in spreads], [spread.high for spread in spreads]
            axes.fill_between(at, *ends, color=colour, alpha=0.2, lw=0)
    if named and settings and curves:
        title = ", ".join(axis.name for axis in settings)
        axes.legend(fontsize="small", title=title, title_fontsize="small", ncols=1 + (len(curves) > 4), handlelength=1)
    elif coloured is not None and not named:
        _mark(coloured, axes.figure.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.02).ax.yaxis)
    sizes = [spreads[0].n for _, _, spreads in curves if spreads[0].n > 1]
    title = "mean over seeds" if sizes else "curves"
    if sizes and named:
        title += ", with its 95 % interval"
    axes.set_xlabel("step")
    means = np.array([spread.mean for _, _, spreads in curves for spread in spreads])
    _finish(axes, sweep, metric, means, [member.step for member in sweep.lost], title)


def draw_axis(axes: Axes, sweep: Sweep, metric: str, axis: Axis) -> None:
    """Draws all members against ``axis``, and the means of the groups that equal the best in all other settings."""
    axis, values, scores = _drawable(axis), sweep.values(metric), sweep.scores(metric)
    places = np.array([_position(axis, member.fields.get(axis.name)) for member in sweep.members])
    axes.scatter(places, scores, s=16, alpha=0.5, lw=0)
    short = np.isfinite(values) & np.array([member.cut_short for member in sweep.members], bool)
    if short.any():
        axes.plot(places[short], values[short], label="cut short", **SHORT)
    spread, title = spread_of(scores), "last value"
    if axis.name == SEED and spread.n > 1:
        title = f"{spread.n} seeds: " + (f"{spread_of(100 * scores)} %" if metric.endswith("accuracy") else str(spread))
        axes.axhline(spread.mean, c="C0", lw=1.2)
        axes.axhspan(spread.low, spread.high, color="C0", alpha=0.15, lw=0)
    elif axis.name != SEED and spread.n:
        groups = sweep.group([setting.name for setting in sweep.settings], metric)
        direction = sweep.direction(metric)
        best = groups.best(direction=direction or "min")
        others = {**best.point, axis.name: None}
        line = [row for row in groups.rows if row.n and {**row.point, axis.name: None} == others]
        line.sort(key=lambda row: _position(axis, row.point[axis.name]))
        x, means = [_position(axis, row.point[axis.name]) for row in line], [row.spread.mean for row in line]
        style = "none" if axis.scale == "nominal" else "-"
        axes.plot(x, means, c="C0", ls=style, marker="o", ms=4, lw=1.2)
        axes.vlines(x, [row.spread.low for row in line], [row.spread.high for row in line], color="C0", lw=1.5)
        if direction is not None:
            axes.plot(_position(axis, best.point[axis.name]), best.spread.mean, **BEST)
            title = f"★ {format_value(metric, best.spread.mean)} at {show(best.point[axis.name])}"
        if direction is not None and len(best.members) > 1:
            title += f" (mean of {best.n}" + (f" of {len(best.members)} seeds)" if best.left_out else " seeds)")
    _mark(axis, axes.xaxis)
    lost = [_position(axis, member.fields.get(axis.name)) for member in sweep.lost]
    _finish(axes, sweep, metric, values[np.isfinite(scores) | short], lost, title)


def draw_search(axes: Axes, sweep: Sweep, metric: str) -> None:
    """Draws the best value that any member had so far against the steps of all members together."""
    lines = sorted((line for line in sweep.lines if metric in line), key=lambda line: line.get("elapsed", 0.0))
    steps, values, done = list[int](), list[float](), dict[int, int]()
    for line in lines:
        # A copy begins where its parent was.
        before = done.get(line["member"], line["step"] - round(line["seconds"] * line["steps_per_second"]))
        steps.append(line["step"] - before)
        values.append(line[metric])
        done[line["member"]] = line["step"]
    finite = np.where(np.isfinite(values), values, np.nan)
    best = (np.fmax if sweep.direction(metric) == "max" else np.fmin).accumulate(finite)
    axes.step(np.cumsum(steps), best, c="C0", lw=1.2, where="post")
    axes.set_xlabel("steps of all members")
    _finish(axes, sweep, metric, best[np.isfinite(best)], [], "best so far")


def _shown_importance(sweep: Sweep, metric: str) -> Importance | None:
    """The importance of two fields or more, unless the members are too few for it."""
    if len(sweep.settings) < 2 or np.isfinite(sweep.values(metric)).sum() < FEW_MEMBERS:
        return None
    try:
        found = field_importance(sweep, metric)
    except ConfigError:
        return None
    return found if len(found.fields) > 1 and len(found.members) >= FEW_MEMBERS else None


def draw_importance(axes: Axes, sweep: Sweep, metric: str, importance: Importance) -> None:
    """Draws the share of the variation that each field explains, the largest on top, with its interval."""
    shares = list(importance.fields.items())[:MOST_BARS]
    places, values = np.arange(len(shares))[::-1], np.array([share.value for _, share in shares])
    ends = np.abs(np.array([share[1:] for _, share in shares]).T - values)
    axes.barh(places, 100 * values, xerr=100 * ends, height=0.6, color="C0", alpha=0.6, ecolor="C0", capsize=2)
    axes.set_yticks(places, [name for name, _ in shares])
    axes.set_xlabel("% of the variation" + ("" if importance.step is None else f" after {importance.step:,} steps"))
    axes.set_title(f"importance (all fields: {100 * importance.total.value:.0f} %)", fontsize="medium")


def draw_pair(axes: Axes, sweep: Sweep, metric: str) -> None:
    """Draws the means over two settings: a heat map of a grid, or coloured points of scattered draws."""
    x, y = (_drawable(axis) for axis in sweep.settings)
    groups = sweep.group([x.name, y.name], metric)
    results = np.array([row.spread.mean for row in groups.rows if row.n] or [0.0, 1.0])
    more = sweep.direction(metric) == "max"
    shown = _without_outliers(results, more)
    norm = (LogNorm if is_wide(shown, more) else Normalize)(shown.min(), shown.max())
    colours = colormaps["viridis_r" if more else "viridis"]  # better is darker, in every picture
    cells = 2 * len(groups.rows) >= len(x.values) * len(y.values)
    if cells:
        x, y = (dataclasses.replace(axis, scale="nominal") for axis in (x, y))
    places = [tuple(_position(axis, row.point[axis.name]) for axis in (x, y)) for row in groups.rows]
    means = np.full((len(y.values), len(x.values)), np.nan)
    for row, (column, line) in zip(groups.rows, places, strict=True):
        mean = row.spread.mean
        if row.n and cells:
            means[int(line), int(column)] = mean
        elif row.n:
            axes.plot(column, line, "o", c=colours(norm(mean)), ms=6, mec="white", mew=0.5)
        else:
            axes.plot(column, line, **{"marker": "x", "c": LOST_COLOUR, "ms": 5} if row.num_lost else SHORT)
    if cells:
        axes.imshow(means, cmap=colours, norm=norm, origin="lower", aspect="auto")
        axes.grid(visible=False)
        if max(means.shape) <= MOST_CELLS_WITH_NUMBERS:
            write_in_cells(
                axes, means, lambda at: colours(norm(means[at])), lambda at: format_value(metric, means[at]), above=0.25
            )
    _mark(x, axes.xaxis)
    _mark(y, axes.yaxis)
    if any(row.n for row in groups.rows) and sweep.direction(metric) is not None:
        axes.plot(*places[groups.rows.index(groups.best())], **BEST)
    label = metric.replace("_", " ") + (" (darker is better)" if sweep.direction(metric) is not None else "")
    ends = {(False, False): "neither", (True, False): "min", (False, True): "max"}
    beyond = ends[bool(results.min() < norm.vmin), bool(results.max() > norm.vmax)]
    bar = axes.figure.colorbar(ScalarMappable(norm, colours), ax=axes, label=label, pad=0.02, extend=beyond)
    label_ticks(bar.ax.yaxis, metric)
    axes.set_title("mean over seeds" if any(row.n > 1 for row in groups.rows) else "members", fontsize="medium")


def _without_outliers(values: np.ndarray, more_is_better: bool) -> np.ndarray:
    """``values`` without those far on the bad side, by Tukey's outer fence: a diverged seed would take all colours."""
    low, high = np.percentile(values, [25, 75])
    if not (reach := 3 * (high - low)):
        return values
    near: np.ndarray = values[values >= low - reach if more_is_better else values <= high + reach]
    return near


def _finish(axes: Axes, sweep: Sweep, metric: str, values: np.ndarray, lost: list[float], title: str) -> None:
    """Scales and labels a panel with the metric's ``values``; marks lost members, at these x, at the bad edge."""
    more = sweep.direction(metric) == "max"
    if is_wide(values, more):
        axes.set_yscale("log")
    if lost:
        style: dict[str, Any] = {"c": LOST_COLOUR, "ms": 5, "clip_on": False, "transform": axes.get_xaxis_transform()}
        axes.plot(lost, [0.03 if more else 0.97] * len(lost), "x", label=count_by_status(sweep.lost), **style)
    axes.set_ylabel(metric.replace("_", " "))
    axes.set_title(title if len(values) else "no results", fontsize="medium")
    label_ticks(axes.yaxis, metric)
    if not len(values):
        axes.set_yticks([])
