"""Plots of a run against the step, by matplotlib, imported when the first is made; any thread may draw them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from jaxnn.record._record_reader import METRIC_PREFIXES, metrics_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = dict(zip(METRIC_PREFIXES, ("tab:blue", "tab:green", "tab:orange"), strict=True))


def new_figure(**arguments: Any) -> Figure:
    """A ``matplotlib.figure.Figure`` without a window, which a notebook shows even before it imports ``pyplot``."""
    from matplotlib.figure import Figure

    def as_png() -> bytes:
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        return picture.getvalue()

    figure: Any = Figure(**arguments)
    figure._repr_png_ = as_png
    return figure  # type: ignore[no-any-return]


def draw_curves(lines: Sequence[Mapping[str, Any]], title: str = "") -> Figure:
    """One panel per metric with all splits, and one for throughput, of ``lines`` of ``metrics.jsonl``, oldest first.

    The figure belongs to no window; ``savefig`` it, or return it from a notebook's cell.
    """
    names = sorted({key.partition("_")[2] for line in lines for key in metrics_of(line)})
    names.sort(key=lambda name: name != "loss")
    figure = new_figure(figsize=(4.2 * (len(names) + 1), 3.4), layout="constrained")
    panels = figure.subplots(1, len(names) + 1, squeeze=False)[0]
    for name, axes in zip(names, panels, strict=False):
        for prefix, colour in COLOURS.items():
            if points := [(line["step"], line[prefix + name]) for line in lines if prefix + name in line]:
                marker, label = "" if prefix == "train_" else "o", f"{prefix[:-1]} {points[-1][1]:.4g}"
                axes.plot(*zip(*points, strict=True), marker=marker, ms=3, c=colour, label=label)
        if name == "loss" and all(line.get("train_loss", 1.0) > 0 for line in lines):
            axes.set_yscale("log")
    reported = [line for line in lines if isinstance(line.get("steps_per_second"), int | float)]
    steps, rates = [line["step"] for line in reported], [line["steps_per_second"] for line in reported]
    # Windows of a millisecond end when the host wakes up: single ones misstate the speed.
    smooth = [median(rates[max(0, index - 2) : index + 3]) for index in range(len(rates))]
    if smooth:
        panels[-1].plot(steps, rates, c="lightgray")
        panels[-1].plot(steps, smooth, c="tab:gray", label=f"median of five, last {smooth[-1]:,.0f}")
        panels[-1].set_ylim(0, 1.5 * max(smooth))
    for name, axes in zip([*names, "steps per second"], panels, strict=True):
        axes.set_title(name.replace("_", " "), fontsize="medium")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure
