"""What the pictures of a sweep share: where values lie, their colours, and the marks of members that were lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxnn.sweeps.design import points
from jaxnn.sweeps.results.outcomes import Axis, Outcomes, count_by_status
from jaxnn.sweeps.results.tables import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as DrawnAxis
    from matplotlib.colors import Normalize

# From this ratio on, losses are drawn in powers.
DECADE = 10.0
# More labels than this, or more letters in a row of them, would run into each other.
MOST_LABELS = 8
MOST_LETTERS = 30
FONT = "small"
LOST_COLOUR = "tab:red"
# Members that were cut short: where they had got to.
SHORT: dict[str, Any] = {"marker": "o", "mfc": "none", "mec": "0.7", "mew": 0.8, "ms": 4, "ls": "none"}


class Scale(NamedTuple):
    """How one axis is drawn.

    Attributes:
        name: the axis's.
        values: its values, least first where they are numbers.
        kind: ``log``, ``linear`` or ``nominal``: one after another at equal distances.
    """

    name: str
    values: tuple[Any, ...]
    kind: str

    def position(self, value: Any) -> float:
        """Where ``value`` lies: itself, or its place among the values."""
        return float(self.place(value)) if self.kind == "nominal" else float(value)

    def place(self, value: Any) -> int:
        """Its place among the values."""
        return self.values.index(value)

    def norm(self) -> Normalize:
        """What takes positions to 0…1."""
        from matplotlib.colors import LogNorm, Normalize

        positions = [self.position(value) for value in self.values]
        kind = LogNorm if self.kind == "log" else Normalize
        return kind(min(positions), max(positions))

    def labels(self) -> dict[float, str]:
        """The positions of the values and how they are told; of too many, every so manieth."""
        every = -(-len(self.values) // MOST_LABELS)
        return {self.position(value): show(value) for value in self.values[::every]}

    def mark(self, axis: DrawnAxis) -> None:
        """Scales and labels an axis of a panel."""
        from matplotlib.axis import XAxis

        across = isinstance(axis, XAxis)
        if self.kind == "log":
            (axis.axes.set_xscale if across else axis.axes.set_yscale)("log")
        if self.kind == "nominal":
            label_ticks(axis, self.labels())
            if across and sum(map(len, self.labels().values())) > MOST_LETTERS:
                axis.set_tick_params(labelrotation=40)
            (axis.axes.set_xmargin if across else axis.axes.set_ymargin)(0.15)
        axis.set_label_text(self.name)


def scale_of(axis: Axis) -> Scale:
    """How ``axis`` is drawn: as its sweep says, where its values allow that."""
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in axis.values)
    values = tuple(sorted(axis.values)) if numeric else axis.values
    possible = numeric and all(map(math.isfinite, values)) and (axis.scale != "log" or values[0] > 0)
    # Zero and then powers: a logarithm has no place for the one, and a line none for the others.
    mixed = possible and values[0] == 0 and len(values) > 2 and points.scale_of(axis.name, values[1:]) == "log"
    return Scale(axis.name, values, axis.scale if possible and not mixed else "nominal")


def label_ticks(axis: DrawnAxis, labels: Mapping[float, str]) -> None:
    """Ticks at these positions and no others."""
    axis.set_ticks(list(labels), labels=list(labels.values()))
    axis.set_ticks([], minor=True)


def spans_decade(values: Sequence[float] | np.ndarray, more_is_better: bool) -> bool:
    """Whether a metric's ``values``, of which NaN does not count, are a loss's that powers tell better apart."""
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    return not more_is_better and len(finite) > 0 and bool(0 < DECADE * finite.min() < finite.max())


def metric_norm(values: np.ndarray, more_is_better: bool) -> Normalize:
    """Takes the values of a metric, of which NaN does not count, to 0…1."""
    from matplotlib.colors import LogNorm, Normalize

    finite = values[np.isfinite(values)]
    kind = LogNorm if spans_decade(values, more_is_better) else Normalize
    return kind(finite.min(), finite.max()) if len(finite) else Normalize(0, 1)


def metric_colours(more_is_better: bool) -> str:
    """A colour map in which what is better is darker, as it has to stand out on white."""
    return "viridis_r" if more_is_better else "viridis"


def add_colour_bar(axes: Axes, norm: Normalize, colours: Any, label: str) -> Any:
    """A colour bar beside ``axes``."""
    from matplotlib.cm import ScalarMappable

    return axes.figure.colorbar(ScalarMappable(norm, colours), ax=axes, label=label, pad=0.02)


def mark_lost(axes: Axes, sweep: Outcomes, metric: str, positions: Sequence[float]) -> None:
    """Marks the lost members of ``sweep`` at the bad edge of a panel, at ``positions`` on its x axis."""
    if sweep.lost:
        # They have no value: their y is a share of the panel's height.
        edge = 0.03 if sweep.more_is_better(metric) else 0.97
        transform = axes.get_xaxis_transform()
        style: dict[str, Any] = {"c": LOST_COLOUR, "ms": 5, "clip_on": False}
        axes.plot(
            positions, [edge] * len(positions), "x", transform=transform, label=count_by_status(sweep.lost), **style
        )


def told_marks(sweep: Outcomes) -> str:
    """What crosses and rings are: `` (× 4 diverged, ○ 18 pruned)``; empty where there are none."""
    marks = {"×": sweep.lost, "○": sweep.cut_short}
    told = ", ".join(f"{mark} {count_by_status(members)}" for mark, members in marks.items() if members)
    return f" ({told})" if told else ""


def plain(name: str) -> str:
    """``test loss`` for ``test_loss``."""
    return name.replace("_", " ")


def finish(axes: Axes, title: str) -> None:
    """Title and grid."""
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
