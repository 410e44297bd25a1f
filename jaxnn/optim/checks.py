"""Arguments of schedules and combinators, checked where they are plain numbers."""

from __future__ import annotations

import math
import numbers
from typing import Any

from jaxnn.types import ConfigError


def check_count(where: str, name: str, value: Any, minimum: int) -> None:
    """Checks a count, which shapes the program and so is never traced.

    Raises:
        ConfigError: ``value`` is not an integer, or is below ``minimum``; ``where`` and ``name``
        say whose it is.
    """
    if not isinstance(value, numbers.Integral) or int(value) < minimum:
        raise ConfigError(f"{where}: {name} must be an integer >= {minimum}, not {value!r}.")


def check_range(where: str, name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Checks that a number lies in ``low``…``high``, both included; JAX arrays and tracers pass.

    Raises:
        ConfigError: it does not, or is NaN; ``where`` and ``name`` say whose it is.
    """
    if isinstance(value, numbers.Real) and not low <= float(value) <= high:
        allowed = f">= {low:g}" if high == math.inf else f"in {low:g}…{high:g}"
        raise ConfigError(f"{where}: {name} must be a number {allowed}, not {value!r}.")


def check_positive(where: str, name: str, value: Any) -> None:
    """Checks that a number is above zero; JAX arrays and tracers pass.

    Raises:
        ConfigError: it is not, or is NaN; ``where`` and ``name`` say whose it is.
    """
    if isinstance(value, numbers.Real) and not float(value) > 0:
        raise ConfigError(f"{where}: {name} must be a number > 0, not {value!r}.")
