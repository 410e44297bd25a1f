"""Plot of the sweep benchmark: member-steps/s over the vmap size, a panel per network."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from jaxnn._text import format_rate

plt.style.use("jaxnn.figure")
OURS, PLANNED, SWEEP, INK = "#1f5fa8", "#d9480f", "#2b8a3e", "#343a40"
# Labels and colours of contenders without a vmap size.
LINES = {
    "jn.fit": ("jn.fit, one by one", "#1098ad"),
    "loop": ("jitted step in a loop", "#7048e8"),
    "torch": ("PyTorch, one by one", "#c2255c"),
    "torch x2": ("PyTorch, 2 processes", "#e8890c"),
}
PANEL_INCHES = (6.4, 4.1)
# Minimum distance of labels, as a share of the panel's height.
APART = 0.062
LEAST_SPAN = 4.0


class Label(NamedTuple):
    """The label at the right end of a line."""

    text: str
    colour: str
    rate: float


def draw(written: Mapping[str, Any], path: Path) -> None:
    """Draws all networks of a results file."""
    networks = written["networks"]
    columns = min(2, len(networks))
    rows = -(-len(networks) // columns)
    size = PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.4
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    panels = list(grid.flat)
    for axes, network in zip(panels, networks.values(), strict=False):
        _draw_panel(axes, network)
    for axes in panels[len(networks) :]:
        axes.set_visible(False)
    devices = f", {written['devices']} devices" if written["devices"] > 1 else ""
    where = f"{written['label']}{devices}, jax {written['versions']['jax']}"
    how = f"median of {written['rounds']}, bands and bars from minimum to maximum"
    lines = f"{where}\n{how}" if len(networks) == 1 else f"{where}, {how}"  # one panel is narrow
    title = f"Member-steps/s by vmap size\n{lines}"
    figure.suptitle(title, fontsize="medium", color=INK)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_panel(axes: Axes, network: Mapping[str, Any]) -> None:
    rates = network["member_steps_per_second"]
    curve = {int(name.removeprefix("width ")): values for name, values in rates.items() if name.startswith("width ")}
    width = network["planned_width"]
    axes.set(xscale="log", yscale="log")
    labels = [_curve(axes, curve)]
    labels += [_line(axes, rates[name], *look) for name, look in LINES.items() if name in rates]
    planned = f"{network['members']} members at the planned vmap size, {width}"
    _mark(axes, width, rates["planned"], planned, PLANNED, "*", markersize=10)
    _mark(
        axes,
        width,
        rates["jn.sweep"],
        "the same in jn.sweep, with its loop",
        SWEEP,
        "o",
        markersize=14,
        fillstyle="none",
    )
    title = f"{network['title']}, batch {network['config']['batch_size']}"
    axes.set_title(title, loc="left", fontsize="medium", fontweight="bold", color=INK)
    _finish(axes, sorted({*curve, width}))
    _label(axes, labels)


def _curve(axes: Axes, curve: Mapping[int, list[float]]) -> Label:
    """Draws populations by vmap size, with a band from minimum to maximum."""
    widths = sorted(curve)
    medians = [statistics.median(curve[width]) for width in widths]
    least, most = ([end(curve[width]) for width in widths] for end in (min, max))
    axes.fill_between(widths, least, most, color=OURS, alpha=0.15, linewidth=0)
    axes.plot(widths, medians, color=OURS, marker="o", markersize=5, linewidth=2, zorder=3)
    return Label(f"population, vmap size {widths[-1]}", OURS, medians[-1])


def _line(axes: Axes, values: list[float], text: str, colour: str) -> Label:
    """Draws a contender without a vmap size as a line with a band."""
    median = statistics.median(values)
    axes.axhspan(min(values), max(values), color=colour, alpha=0.08, linewidth=0)
    axes.axhline(median, color=colour, linewidth=1.5, linestyle=(0, (6, 2)))
    return Label(text, colour, median)


def _mark(axes: Axes, width: int, values: list[float], text: str, colour: str, marker: str, **look: Any) -> None:
    median = statistics.median(values)
    reach = [[median - min(values)], [max(values) - median]]
    axes.errorbar(
        width, median, reach, label=text, color=colour, marker=marker, zorder=4, linestyle="", markeredgewidth=2, **look
    )


def _finish(axes: Axes, widths: list[int]) -> None:
    """Sets ticks and limits, with space for the legend."""
    low, high = axes.get_ylim()
    # A smaller range would exaggerate noise.
    more = max(1.0, (LEAST_SPAN * low / high) ** 0.5)
    low, high = low / more, high * more
    axes.set_ylim(low / (high / low) ** 0.28, high * (high / low) ** 0.04)
    axes.set_xlim(widths[0] / 1.15, widths[-1] * 1.15)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high / low > 10 else (1, 1.5, 2, 3, 4, 6, 8)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: format_rate(rate)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("vmap size (members per device)", fontsize="small", color=INK)
    axes.set_ylabel("member-steps/s", fontsize="small", color=INK)
    axes.legend(loc="lower right", fontsize="small", frameon=False, labelcolor=INK, labelspacing=0.9)


def _label(axes: Axes, labels: list[Label]) -> None:
    """Labels each line at its right end with its rate, without overlaps."""
    low, high = map(math.log, axes.get_ylim())
    labels = sorted(labels, key=lambda label: label.rate)
    heights = _apart([(math.log(label.rate) - low) / (high - low) for label in labels])
    for label, height in zip(labels, heights, strict=True):
        text = f"{format_rate(label.rate)}  {label.text}"
        place: dict[str, Any] = {"xytext": (1.03, height), "textcoords": "axes fraction", "va": "center"}
        stroke = {"arrowstyle": "-", "color": label.colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
        end = 1.0, (math.log(label.rate) - low) / (high - low)
        axes.annotate(
            text, end, xycoords="axes fraction", color=label.colour, fontsize="small", arrowprops=stroke, **place
        )


def _apart(heights: list[float]) -> list[float]:
    """Moves ascending heights at least ``APART`` from each other: the mean of moving up and of moving down."""
    up, down = list(heights), list(heights)
    for index in range(1, len(heights)):
        up[index] = max(up[index], up[index - 1] + APART)
        down[-1 - index] = min(down[-1 - index], down[-index] - APART)
    return [(higher + lower) / 2 for higher, lower in zip(up, down, strict=True)]
