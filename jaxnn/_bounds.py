"""Bounds of numbers: fields of dataclasses carry them, one function checks them."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxnn.types import ConfigError, check_int


def check_range(where: str, name: str, value: Any, high: float = math.inf, *, positive: bool = False) -> None:
    """Raises ConfigError unless ``value`` is a number in 0…``high``, > 0 if ``positive``.

    Arrays of one number, and tracers of them, pass.
    """
    if isinstance(value, jax.Array | np.ndarray):
        is_inside = value.ndim == 0 and jax.dtypes.issubdtype(value.dtype, np.number)
    else:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        is_inside = is_number and 0 <= float(value) <= high and (float(value) > 0 or not positive)
    if not is_inside:
        allowed = "> 0" if positive else ">= 0"
        if high < math.inf:
            allowed = f"> 0 and <= {high:g}" if positive else f"in 0…{high:g}"
        raise ConfigError(f"{where}: {name} must be a number {allowed}, not {value!r}.")


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    least: int | None = None,
    most: float | None = None,
    positive: bool | None = None,
    choices: tuple[Any, ...] = (),
    **marks: Any,
) -> Any:
    """A field of a dataclass with the bounds that `check_fields` reads.

    Args:
        default: its value if none is given; a default of None is within all bounds.
        least: it is a whole number, and at least this.
        most: the largest number that it may be.
        positive: it is a number above 0; False: of at least 0.
        choices: the values that it may have.
        marks: further metadata.
    """
    bounds = {"least": least, "most": most, "positive": positive, "choices": choices}
    return dataclasses.field(default=default, metadata=bounds | marks)


def check_fields(values: Any, where: str = "") -> None:
    """Raises ConfigError for a field of a dataclass that is not within the bounds of its `bounded`.

    >>> options = dataclasses.make_dataclass("Options", [("size", int, bounded(1, least=1, most=9))])
    >>> check_fields(options(size=10), "mine")
    Traceback (most recent call last):
    jaxnn.types.ConfigError: mine: size must be an integer in 1…9, not 10.
    """
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        least, most, positive, choices = map(field.metadata.get, ("least", "most", "positive", "choices"))
        if value is None and field.default is None:
            continue
        name = f"{where}: {field.name}" if where else field.name
        if least is not None:
            check_int(name, value, least, most)
        if positive is not None:
            check_range(where or type(values).__name__, field.name, value, most or math.inf, positive=positive)
        if choices and value not in choices:
            raise ConfigError(f"{name} is {value!r}, and must be one of {', '.join(map(str, choices))}.")


def positive_ints(name: str, values: Any, example: str, *, nonempty: bool = False) -> tuple[int, ...]:
    """Returns a sequence of integers >= 1, empty unless ``nonempty``, as a tuple; ``example`` is a valid value."""
    if not isinstance(values, Sequence) or not all(map(_is_count, values)):
        raise ConfigError(f"{name} must be a tuple of integers >= 1, as {example}, not {values!r}.")
    if nonempty and not values:
        raise ConfigError(f"{name} is empty: give at least one, as {example}.")
    return tuple(map(int, values))


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def check_rate(rate: ArrayLike) -> None:
    """Raises ConfigError if a dropout rate is a plain number outside 0…1 or NaN; JAX arrays and tracers pass."""
    if isinstance(rate, numbers.Real) and not 0 <= rate <= 1:
        raise ConfigError(f"a dropout rate must be a probability in 0…1, not {rate!r}.")
