"""What a random sweep draws from: uniform, log-uniform, integers, choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxnn.types import ConfigError


class Distribution(NamedTuple):
    """Something to draw a field's values from.

    Attributes:
        sample: ``(generator, num) -> values``.
        scale: how the values are drawn on an axis: ``"log"``, ``"linear"`` or ``"nominal"``.
    """

    sample: Callable[[np.random.Generator, int], list[Any]]
    scale: str


def uniform(low: float, high: float) -> Distribution:
    """Floats between ``low`` and ``high``, all alike.

    Raises:
        ConfigError: ``low`` is not below ``high``.
    """
    _check("uniform", low, high)
    return Distribution(lambda rng, num: _rounded(rng.uniform(low, high, num)), "linear")


def log_uniform(low: float, high: float) -> Distribution:
    """Floats between ``low`` and ``high`` whose logarithms are all alike: as many from 1e-4 to 1e-3 as from 0.1 to 1.

    Raises:
        ConfigError: ``low`` is not above 0, or not below ``high``.
    """
    _check("log_uniform", low, high)
    if low <= 0:
        raise ConfigError(f"log_uniform goes from {low}, which has no logarithm: begin above 0.")
    return Distribution(lambda rng, num: _rounded(np.exp(rng.uniform(math.log(low), math.log(high), num))), "log")


def integers(low: int, high: int) -> Distribution:
    """Whole numbers from ``low`` to ``high``, both included.

    Raises:
        ConfigError: they are no whole numbers, or ``low`` is not below ``high``.
    """
    _check("integers", low, high)
    if not (float(low).is_integer() and float(high).is_integer()):
        raise ConfigError(f"integers go from {low} to {high}, which are no whole numbers: use uniform.")
    return Distribution(lambda rng, num: rng.integers(int(low), int(high) + 1, num).tolist(), "linear")


def choice(values: Sequence[Any]) -> Distribution:
    """One of ``values``, all alike; they may be of any kind a config field holds.

    Raises:
        ConfigError: there are none.
    """
    values = list(values)
    if not values:
        raise ConfigError("choice has nothing to choose from: give it at least one value.")
    return Distribution(lambda rng, num: [values[index] for index in rng.integers(len(values), size=num)], "nominal")


def _check(where: str, low: float, high: float) -> None:
    if not low < high or not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{where} goes from {low} to {high}: the first must be below the second, and both finite.")


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
