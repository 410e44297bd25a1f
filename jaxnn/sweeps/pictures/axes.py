"""The last value of a metric, a point a member: against one axis, or seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxnn.sweeps.pictures.scales import (
    MOST_LABELS,
    SHORT,
    Scale,
    finish,
    label_ticks,
    mark_lost,
    plain,
    scale_of,
    spans_decade,
)
from jaxnn.sweeps.results.outcomes import SEED, Axis, Outcomes
from jaxnn.sweeps.results.summaries import GroupRow, best_row, group_members, spread_of
from jaxnn.sweeps.results.tables import show, show_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS: dict[str, Any] = {"s": 16, "alpha": 0.5, "lw": 0}
BEST: dict[str, Any] = {"marker": "*", "c": "black", "ms": 11, "mec": "white", "ls": "none", "zorder": 5}


def group_results(sweep: Outcomes, metric: str) -> tuple[GroupRow, ...]:
    """The groups of members that differ in their seed alone, those without a result among them."""
    return group_members(sweep, [axis.name for axis in sweep.settings], metric).rows


def best_result(sweep: Outcomes, metric: str, results: Sequence[GroupRow]) -> GroupRow | None:
    """The best group; None where none has a result."""
    return best_row(results, metric, more_is_better=sweep.more_is_better(metric))


def draw_axis(axes: Axes, sweep: Outcomes, metric: str, axis: Axis) -> None:
    """Draws all members against ``axis``, and the means over seeds of the groups that are like the best but for it."""
    scale, scores = scale_of(axis), sweep.scores(metric)
    positions = np.array([scale.position(member.fields[axis.name]) for member in sweep.members])
    axes.scatter(positions, scores, **POINTS)
    so_far = sweep.scores_so_far(metric)
    _draw_cut_short(axes, positions, so_far)
    results = group_results(sweep, metric)
    if (best := best_result(sweep, metric, results)) is not None:
        _draw_means(axes, scale, _slice(results, best, axis.name))
        axes.plot(scale.position(best.point[axis.name]), best.spread.mean, **BEST)
    if spans_decade([*scores, *so_far], sweep.more_is_better(metric)):
        axes.set_yscale("log")
    scale.mark(axes.xaxis)
    lost = [scale.position(member.fields[axis.name]) for member in sweep.lost]
    mark_lost(axes, sweep, metric, lost)
    axes.set_ylabel(plain(metric))
    finish(axes, _told(best, axis.name))


def draw_seeds(axes: Axes, sweep: Outcomes, metric: str) -> None:
    """Draws every member beside its fellows, and their mean with its interval."""
    scores, so_far = sweep.scores(metric), sweep.scores_so_far(metric)
    axes.scatter(np.arange(len(scores)), scores, s=22)
    _draw_cut_short(axes, np.arange(len(scores)), so_far)
    spread = spread_of(scores)
    if spread.n > 1:
        axes.axhline(spread.mean, c="tab:blue", lw=1.2)
        axes.axhspan(spread.low, spread.high, color="tab:blue", alpha=0.15, lw=0)
    if spans_decade([*scores, *so_far], sweep.more_is_better(metric)):
        axes.set_yscale("log")
    mark_lost(axes, sweep, metric, [sweep.members.index(member) for member in sweep.lost])
    every = -(-len(scores) // MOST_LABELS)
    members = list(enumerate(sweep.members))[::every]
    label_ticks(axes.xaxis, {place: show(member.fields.get(SEED, member.index)) for place, member in members})
    axes.set_xlabel(SEED)
    axes.set_ylabel(plain(metric))
    finish(axes, f"{spread.n} seeds: {spread}" if spread.n > 1 else "last value")


def _draw_cut_short(axes: Axes, positions: np.ndarray, values: np.ndarray) -> None:
    there = np.isfinite(values)
    if there.any():
        axes.plot(positions[there], values[there], label="cut short", zorder=1, **SHORT)


def _slice(results: Sequence[GroupRow], best: GroupRow, name: str) -> list[GroupRow]:
    """The groups with a result whose other fields are those of the best."""

    def others(result: GroupRow) -> dict[str, Any]:
        return {key: value for key, value in result.point.items() if key != name}

    return [result for result in results if result.n and others(result) == others(best)]


def _draw_means(axes: Axes, scale: Scale, results: Sequence[GroupRow]) -> None:
    results = sorted(results, key=lambda result: scale.position(result.point[scale.name]))
    positions = [scale.position(result.point[scale.name]) for result in results]
    line = "none" if scale.kind == "nominal" else "-"
    axes.plot(positions, [result.spread.mean for result in results], c="tab:blue", ls=line, marker="o", ms=4, lw=1.2)
    low, high = ([getattr(result.spread, end) for result in results] for end in ("low", "high"))
    axes.vlines(positions, low, high, color="tab:blue", lw=1.5)


def _told(best: GroupRow | None, name: str) -> str:
    if best is None:
        return "no result"
    told = f"★ {show(best.spread.mean)} at {show_value(best.point[name])}"
    if left_out := best.told_left_out():
        return f"{told}, {best.n} of {len(best.members)} seeds ({left_out})"
    return f"{told}, mean over {best.n} seeds" if best.n > 1 else told
