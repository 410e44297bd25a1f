"""A study of scaling drawn: speed-up, efficiency and time in collectives against the number of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxnn.scaling.cases import KINDS, Kind
from jaxnn.scaling.measurements import Measurements
from jaxnn.scaling.points import Point, Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STRONG, WEAK, IDEAL, CORES = "tab:blue", "tab:orange", "tab:gray", "tab:red"
COLOURS: dict[Kind, str] = {"strong": STRONG, "weak": WEAK}
MEASURED: dict[str, Any] = {"marker": "o", "ms": 5, "lw": 1.6, "zorder": 3}
PREDICTED: dict[str, Any] = {"ls": (0, (4, 2)), "marker": "o", "ms": 3, "mfc": "white", "lw": 1.2}


def draw_study(study: Measurements) -> Figure:
    """Three panels, each with what was measured and, dashed, what the model says.

    Returns:
        A figure that belongs to no window.
    """
    from jaxnn.record.figure import ShownFigure

    figure = ShownFigure(figsize=(13.2, 4.2), layout="constrained")
    speedup, efficiency, share = figure.subplots(1, 3)
    _draw_speedup(speedup, study)
    _draw_efficiency(efficiency, study)
    _draw_share(share, study)
    counts = _counts(study.points(), [one for kind in KINDS for one in study.predictions(kind)])
    for axes in (speedup, efficiency, share):
        _finish(axes, counts)
    figure.suptitle(_title(study), fontsize="medium")
    return figure


def _title(study: Measurements) -> str:
    machine, model = study.machine, "dashed: predicted from one device's step and α–β of all-reduces"
    where = f"{model}, of this machine, not of a cluster" if machine.shared_cores is not None else model
    busy = "; the machine was busy" if machine.is_busy else ""
    return f"{study.name}, strategy {study.strategy}, {machine}{busy}\n{where}"


def _draw_speedup(axes: Axes, study: Measurements) -> None:
    """Of strong scaling."""
    points, predicted = study.points("strong"), _all_predicted(study, "strong")
    counts = _counts(points, predicted)
    axes.plot(counts, counts, c=IDEAL, lw=1, label="ideal")
    if (cores := study.machine.shared_cores) is not None:
        axes.axhline(cores, c=CORES, lw=1, ls=":", label=f"{cores} cores")
    _draw(axes, points, predicted, lambda one: one.speedup, STRONG, f"{study.sizes.batch_size:,} examples in all")
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    # The ideal of a thousand devices would press all else together.
    top = max([point.speedup for point in points] + [one.speedup for one in predicted])
    axes.set_ylim(low, min(high, max(16.0, 4 * top)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("strong scaling: speed-up", fontsize="medium")


def _draw_efficiency(axes: Axes, study: Measurements) -> None:
    """Of weak scaling."""
    points, predicted = study.points("weak"), _all_predicted(study, "weak")
    axes.axhline(1.0, c=IDEAL, lw=1, label="ideal")
    if (cores := study.machine.shared_cores) is not None:
        counts = _counts(points, predicted)
        limits = [min(1.0, cores / count) for count in counts]
        axes.plot(counts, limits, c=CORES, lw=1, ls=":", label=f"{cores} cores")
    _draw(axes, points, predicted, lambda one: one.efficiency, WEAK, f"{study.sizes.batch_per_device:,} on each device")
    _percent(axes)
    axes.set_title("weak scaling: efficiency", fontsize="medium")


def _draw_share(axes: Axes, study: Measurements) -> None:
    """What is not there when each device trains by itself, and what collectives alone should take; of both."""
    for kind in KINDS:
        points = [point for point in study.points(kind) if point.share is not None]
        told = f"{kind}: in collectives, by the model"
        _draw(
            axes, points, _all_predicted(study, kind), lambda one: one.share, COLOURS[kind], f"{kind}: measured", told
        )
    _percent(axes)
    axes.set_title("share of a step lost to spreading it", fontsize="medium")


def _counts(points: Sequence[Point], predicted: Sequence[Prediction]) -> list[int]:
    """All numbers of devices, ascending."""
    return sorted({point.num_devices for point in points} | {one.num_devices for one in predicted})


def _all_predicted(study: Measurements, kind: Kind) -> list[Prediction]:
    """For the numbers of devices that were measured, and for larger ones."""
    measured = [point.predicted for point in study.points(kind) if point.predicted is not None]
    return [*measured, *study.predictions(kind)]


def _draw(
    axes: Axes,
    points: Sequence[Point],
    predicted: Sequence[Prediction],
    value: Callable[[Any], float],
    colour: str,
    label: str,
    predicted_label: str = "predicted",
) -> None:
    axes.plot([one.num_devices for one in points], list(map(value, points)), c=colour, label=label, **MEASURED)
    told = predicted_label if predicted else None
    axes.plot([one.num_devices for one in predicted], list(map(value, predicted)), c=colour, label=told, **PREDICTED)


def _percent(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), max(1.05, high))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _finish(axes: Axes, counts: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(counts[0] / 1.2, counts[-1] * 1.2)
    axes.set_xticks(counts, list(map(str, counts)), fontsize="small")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("devices")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
