"""Successive halving: many members for a few steps, the best of them for more, the best of these to the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxnn.sweeps.search._points import Points
from jaxnn.types import ConfigError


@dataclasses.dataclass(frozen=True)
class Halving:
    """Points of which only the best are trained to the end; made by `halving`.

    Attributes:
        points: all of them.
        eta: one of ``eta`` members continues after each rung.
        min_fraction: least share of a run that any member gets.
    """

    points: Points
    eta: int
    min_fraction: float


def halving(points: Points, eta: int = 3, *, min_fraction: float = 0.01) -> Halving:
    """Trains all points a little, one of ``eta`` of them ``eta`` times as far, and so on, by the monitored metric.

    Jamieson & Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2016. With 27
    members and ``eta=3`` that is 27 to 1/27 of the steps, 9 to 1/9, 3 to 1/3 and 1 to the end: the work of 3 full
    runs. Members are ranked one by one, each seed for itself; a schedule is that of a full run, cut off.

    Args:
        points: from `grid`, `zipped` or `random`.
        eta: number of members that compete for a place in the next rung.
        min_fraction: least length of the first rung, as a share of a run.

    Raises:
        ConfigError: ``eta`` is below 2, or ``min_fraction`` is not above 0 and at most 1.
    """
    if not isinstance(points, Points):
        raise ConfigError(f"halving needs points, as jn.grid and jn.random make, not a {type(points).__name__}.")
    if not isinstance(eta, int) or eta < 2:
        raise ConfigError(f"halving's eta is {eta!r}, and must be a whole number of at least 2.")
    if not 0 < min_fraction <= 1:
        raise ConfigError(f"halving's min_fraction is {min_fraction!r}, and must be above 0 and at most 1.")
    return Halving(points, eta, min_fraction)


def rungs(halving: Halving | None) -> list[float]:
    """Returns the ends of the rungs as shares of a run, ascending to 1; ``[1.0]`` without halving."""
    if halving is None:
        return [1.0]
    most = min(math.log(max(1, len(halving.points)), halving.eta), math.log(1 / halving.min_fraction, halving.eta))
    return [halving.eta ** -float(left) for left in range(math.floor(most + 1e-9), -1, -1)]


def rung_step(share: float, num_steps: int, window: int) -> int:
    """Returns the step at which a rung ends in a run of ``num_steps``: the end of a window of ``window`` steps."""
    if share == 1.0:
        return num_steps
    return min(num_steps, max(1, round(share * num_steps / window)) * window)


def survivors(values: Mapping[int, float], eta: int, *, higher_is_better: bool) -> Sequence[int]:
    """Returns the members that continue: one of ``eta``, rounded up, best first; NaN ranks last, ties by number.

    Args:
        values: the monitored metric of each member at the end of the rung.
        eta: number of members that compete for a place.
        higher_is_better: whether more of the metric is better.
    """
    sign = -1.0 if higher_is_better else 1.0

    def rank(member: int) -> tuple[bool, float, int]:
        value = values[member]
        return (math.isnan(value), 0.0 if math.isnan(value) else sign * value, member)

    return sorted(values, key=rank)[: -(-len(values) // eta)]
