"""One number of devices: what was measured on it, and what the model says of it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Prediction(NamedTuple):
    """What the model says of a number of devices.

    Attributes:
        num_devices: how many.
        rows: examples each of them gets.
        compute_seconds: of a step, what each device computes by itself.
        collective_seconds: of a step, what its collectives take; none of it is hidden behind computation.
        base_examples_per_second: those of one device, as measured.
    """

    num_devices: int
    rows: int
    compute_seconds: float
    collective_seconds: float
    base_examples_per_second: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute_seconds + self.collective_seconds

    @property
    def share(self) -> float:
        """The share of a step that is in collectives."""
        return self.collective_seconds / self.seconds

    @property
    def examples_per_second(self) -> float:
        """Of all devices together."""
        return self.num_devices * self.rows / self.seconds

    @property
    def speedup(self) -> float:
        """How many times as many examples a second as one device."""
        return self.examples_per_second / self.base_examples_per_second

    @property
    def efficiency(self) -> float:
        """The speed-up, as a share of the number of devices."""
        return self.speedup / self.num_devices


class Point(NamedTuple):
    """What was measured on a number of devices, and what the model says of it.

    Attributes:
        num_devices: how many.
        rows: examples each of them gets.
        seconds: of a step, the median over rounds.
        least: the fastest round's.
        most: the slowest round's.
        examples_per_second: of all devices together, at the median.
        speedup: how many times as many as one device; median of the ratios within a round.
        efficiency: that as a share of the number of devices.
        share: the share of a step that its collectives take: what it lacks where each device trains by itself; median
            over rounds, below 0 where noise is more than that. None for one device.
        predicted: the model's; None for one device.
    """

    num_devices: int
    rows: int
    seconds: float
    least: float
    most: float
    examples_per_second: float
    speedup: float
    efficiency: float
    share: float | None
    predicted: Prediction | None

    @property
    def error(self) -> float | None:
        """How far the predicted seconds are off, as a share of the measured ones; None for one device."""
        return None if self.predicted is None else self.predicted.seconds / self.seconds - 1


def point_json(point: Point) -> dict[str, Any]:
    """A point in JSON's types."""
    predicted = point.predicted and prediction_json(point.predicted)
    return {**point._asdict(), "predicted": predicted, "error": point.error}


def prediction_json(one: Prediction) -> dict[str, Any]:
    """A prediction in JSON's types."""
    names = ("seconds", "share", "examples_per_second", "speedup", "efficiency")
    return {**one._asdict(), **{name: getattr(one, name) for name in names}}
