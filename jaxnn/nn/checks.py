"""Sizes of layers, checked where a model is made."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from jaxnn.types import ConfigError


def positive_int(name: str, value: Any) -> int:
    """``value`` as an ``int``.

    Raises:
        ConfigError: it is not an integer of at least 1; ``name`` says whose it is.
    """
    if not _is_count(value):
        raise ConfigError(f"{name} must be an integer >= 1, not {value!r}.")
    return int(value)


def positive_ints(name: str, values: Any, example: str) -> tuple[int, ...]:
    """``values`` as a tuple of ``int``; it may be empty.

    Raises:
        ConfigError: it is not a sequence of integers of at least 1; ``name`` says whose,
        ``example`` shows a good one.
    """
    if not isinstance(values, Sequence) or not all(map(_is_count, values)):
        raise ConfigError(f"{name} must be a tuple of integers >= 1, as {example}, not {values!r}.")
    return tuple(map(int, values))


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1
