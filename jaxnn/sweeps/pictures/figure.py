"""A sweep at a glance: curves, its metric against each axis, and what several axes do together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from jaxnn.record import metrics_of
from jaxnn.sweeps.pictures.axes import draw_axis, draw_seeds
from jaxnn.sweeps.pictures.curves import draw_curves
from jaxnn.sweeps.pictures.grid import draw_pair, draw_parallel
from jaxnn.sweeps.pictures.scales import plain, told_marks
from jaxnn.sweeps.results.outcomes import Outcomes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_A_ROW = 3
PANEL_INCHES = (4.6, 3.6)

type Panel = Callable[[Axes], None]


def draw_sweep(sweep: Outcomes, metric: str | None = None) -> Figure:
    """Curves of ``metric``, its last value against each axis, and a map of two axes or parallel coordinates of more.

    Means are over members that differ in their seed alone. Members that diverged or failed are no part of them and are
    marked with a cross, nor are those that were cut short, which are rings at what they had got to.

    Args:
        sweep: the members.
        metric: which; default: the monitored one.

    Returns:
        A figure that belongs to no window; ``savefig`` it, or return it from a notebook's cell.

    Raises:
        ConfigError: no member has the metric.
    """
    from jaxnn.record import new_figure

    metric = sweep.check_metric(metric)
    panels = _panels(sweep, metric)
    wide = partial(draw_parallel, sweep=sweep, metric=metric) if len(sweep.settings) > 2 else None
    columns = 2 if len(panels) == 4 else min(PANELS_A_ROW, len(panels))
    rows = -(-len(panels) // columns)
    height = rows + (1 if wide else 0)
    figure = new_figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * height), layout="constrained")
    grid = figure.add_gridspec(height, columns)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        panel(figure.add_subplot(grid[row, column]))
    if wide:
        wide(figure.add_subplot(grid[rows, :]))
    figure.suptitle(f"{plain(metric)} of {len(sweep.members)} members{told_marks(sweep)}", fontsize="large")
    return figure


def _panels(sweep: Outcomes, metric: str) -> list[Panel]:
    """The panels of one cell each."""
    panels: list[Panel] = []
    if any(metric in metrics_of(line) for line in sweep.lines):
        panels.append(partial(draw_curves, sweep=sweep, metric=metric))
    panels += [partial(draw_axis, sweep=sweep, metric=metric, axis=axis) for axis in sweep.settings]
    if not sweep.settings:
        panels.append(partial(draw_seeds, sweep=sweep, metric=metric))
    if len(sweep.settings) == 2:
        panels.append(partial(draw_pair, sweep=sweep, metric=metric))
    return panels
