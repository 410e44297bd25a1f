"""The figure of ``jn.spread``: the metric of each member by source, and standard deviations with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxnn._figures import label_ticks, new_figure
from jaxnn.decisions._deviations import VarianceSource

JITTER = 0.16  # of dots, in rows
BAR = 0.3  # half the height of the bar at a mean


def draw_spread(rows: Sequence[VarianceSource], metric: str, mean: float, title: str) -> Figure:
    """Draws two panels with a row per source; those without values are at the ``mean`` of the ``metric``."""
    figure = new_figure(figsize=(10.0, 1.6 + 0.45 * len(rows)), layout="constrained")
    values, deviations = (figure.add_subplot(1, 2, place) for place in (1, 2))
    for row, source in enumerate(rows):
        _draw_values(values, mean, source, row)
        _draw_deviation(deviations, source, row)
    for axes in (values, deviations):
        axes.set_ylim(len(rows) - 0.5, -0.5)
    values.set_xlabel(metric)
    values.set_yticks(range(len(rows)), [source.name for source in rows])
    deviations.set_yticks(range(len(rows)), [""] * len(rows))
    values.set_title("members, mean ± standard deviation", fontsize="medium")
    deviations.set_title("standard deviation, and share of the variance", fontsize="medium")
    deviations.set_xlim(left=0)
    label_ticks(values.xaxis, metric)
    figure.suptitle(title, fontsize="large")
    return figure


def _draw_values(axes: Axes, mean: float, source: VarianceSource, row: int) -> None:
    colour, deviation = f"C{row}", source.deviation.value
    if source.values:
        mean = float(np.mean(source.values))
        # Equal values would hide each other; the dots have the same places in each drawing.
        heights = row + JITTER * np.sin(2.4 * np.arange(len(source.values)))
        axes.plot(source.values, heights, ls="none", marker="o", ms=4, c=colour, alpha=0.6)
    if math.isfinite(deviation):
        axes.errorbar(mean, row, xerr=deviation, c="black" if source.values else colour, capsize=3, lw=1.2)
        axes.plot([mean, mean], [row - BAR, row + BAR], c="black" if source.values else colour, lw=1.2)


def _draw_deviation(axes: Axes, source: VarianceSource, row: int) -> None:
    value, (low, high), share = source.deviation.value, source.deviation.interval, source.share[0]
    if not math.isfinite(value):
        axes.text(0, row, " not known", va="center", fontsize="small")
        return
    axes.plot(value, row, marker="o", ms=6, c=f"C{row}")
    if math.isfinite(low):
        axes.plot([low, high], [row, row], c=f"C{row}")
    if math.isfinite(share):
        axes.annotate(
            f"{100 * share:.0f} %",
            (value, row),
            xytext=(0, 7),
            textcoords="offset points",
            fontsize="small",
            ha="left" if value == 0 else "center",
        )
