"""Plots of the studies: a line for each form and device over a size, on logarithmic axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from articles.studies.study_rows import distinct, measured
from harness import Plain, Quantity, Row, Rows

from jaxnn._figures import label_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A style for each column, a colour for each line.
DASHES: Sequence[Any] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (4, 1, 1, 1)))
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")


def draw_lines(
    axes: Axes,
    columns: Mapping[str, Rows],
    *,
    across: str,
    lines: str,
    quantity: Callable[[Row], Quantity | None] = lambda row: row.rate,
) -> None:
    """Draws a line for each value of ``lines`` and each column, with a band from minimum to maximum.

    Args:
        axes: to draw into.
        columns: the rows to draw, by column.
        across: the name of the x axis in a case.
        lines: the name in a case that distinguishes lines.
        quantity: returns the y value of a row.
    """
    names = list(dict.fromkeys(name for rows in columns.values() for name in distinct(measured(rows), lines)))
    colours, dashes = (dict(zip(of, itertools.cycle(styles))) for of, styles in ((names, COLOURS), (columns, DASHES)))
    for label, rows in columns.items():
        for name, colour in colours.items():
            _draw_line(axes, rows.where(**{lines: name}), across, quantity, colour, dashes[label])
    # A legend of all pairs would cover the lines.
    for name, colour in colours.items():
        axes.plot([], [], label=str(name), c=colour, marker="o", ms=3)
    for label, short in short_labels(columns).items() if names and len(columns) > 1 else ():
        axes.plot([], [], label=short, c="black", ls=dashes[label])
    axes.set_xscale("log")
    axes.set_yscale("log")
    label_ticks(axes.xaxis)
    label_ticks(axes.yaxis)
    if axes.lines:
        axes.legend(fontsize="x-small")


def _draw_line(
    axes: Axes,
    rows: Rows,
    across: str,
    quantity: Callable[[Row], Quantity | None],
    colour: str,
    dashes: Any,
) -> None:
    points = [(row.what[across], found) for row in rows if (found := quantity(row)) is not None]
    if not points:
        return
    places: list[Any] = [place for place, _ in points]
    axes.plot(places, [found.median for _, found in points], c=colour, ls=dashes, marker="o", ms=3)
    axes.fill_between(places, [f.low for _, f in points], [f.high for _, f in points], color=colour, alpha=0.15, lw=0)


def draw_dots(axes: Axes, columns: Mapping[str, Sequence[tuple[str, Quantity | None]]], *, log: bool = True) -> None:
    """Draws a row for each name with a dot for each column, and error bars from minimum to maximum.

    Args:
        axes: to draw into.
        columns: ``(name, quantity)`` by column; names without a quantity keep their row.
        log: whether the x axis is logarithmic; else it starts at 0.
    """
    names = list(dict.fromkeys(name for pairs in columns.values() for name, _ in pairs))
    step = 0.5 / max(1, len(columns))
    for index, ((label, pairs), colour) in enumerate(zip(columns.items(), itertools.cycle(COLOURS), strict=False)):
        known = [(names.index(name) + index * step, found) for name, found in pairs if found is not None]
        if known:
            places, medians = [place for place, _ in known], [found.median for _, found in known]
            spread = [[f.median - f.low for _, f in known], [f.high - f.median for _, f in known]]
            axes.errorbar(medians, places, xerr=spread, label=label, color=colour, fmt="o", ms=6, lw=1.5, capsize=3)
    axes.set_yticks([place + step * (len(columns) - 1) / 2 for place in range(len(names))], names)
    axes.set_ylim(max(1, len(names)) - 0.5, -0.5)
    figures = [found for pairs in columns.values() for _, found in pairs if found is not None]
    if figures:
        axes.legend(fontsize="x-small")
    if not log:
        axes.set_xlim(left=0)
    elif figures:  # an empty logarithmic axis cannot be drawn
        low, high = min(found.low for found in figures), max(found.high for found in figures)
        axes.set_xscale("log")
        # Full decades: labels of a smaller range would overlap.
        axes.set_xlim(10 ** math.floor(math.log10(0.9 * low)), 10 ** math.ceil(math.log10(1.1 * high)))
        label_ticks(axes.xaxis)


def short_labels(labels: Iterable[str]) -> dict[str, str]:
    """Returns short labels of the columns: ``GPU`` if it is the only one, else ``GPU, NVIDIA H100``."""
    labels = list(labels)
    kinds = [label.partition(",")[0] for label in labels]
    return {label: kind if kinds.count(kind) == 1 else label for label, kind in zip(labels, kinds, strict=True)}


def panels(figure: Any, titles: Sequence[Plain], *, across: int | None = None) -> list[Axes]:
    """Returns an axes for each title, ``across`` of them in a row; None: all in one row."""
    width = across or max(1, len(titles))
    height = max(1, math.ceil(len(titles) / width))
    grid: list[Axes] = list(figure.subplots(height, width, squeeze=False).flat)
    figure.set_size_inches(max(6.4, 4.6 * width), 4.2 * height)
    for axes, title in zip(grid, titles, strict=False):
        axes.set_title(str(title), fontsize="medium")
    return grid
