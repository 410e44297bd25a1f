"""Whether the values of a config's fields are of the types that its class says."""

from __future__ import annotations

import dataclasses
import numbers
import types
import typing
from typing import Any

from jaxnn.types import ConfigError

# What a field of a simple type takes; the numbers of NumPy are among them.
SIMPLE: dict[Any, type | tuple[type, ...]] = {
    int: numbers.Integral,
    float: numbers.Real,
    str: str,
    tuple: (tuple, list),
    types.NoneType: types.NoneType,
}


def check_types(config: Any, prefix: str = "") -> None:
    """Checks the fields of a dataclass that are numbers, strings, booleans or tuples, and those of dataclasses in it.

    Raises:
        ConfigError: a value is of another type, such as the string of a number; the field is named.
    """
    try:
        kinds = typing.get_type_hints(type(config))
    except (NameError, TypeError):  # of a class made in a function, or with names for type checkers alone
        return
    for field in dataclasses.fields(config):
        value, name, kind = getattr(config, field.name), prefix + field.name, kinds.get(field.name)
        if not _fits(value, kind):
            told = getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind)
            raise ConfigError(
                f"{name} is {value!r}, of type {type(value).__name__}, and the config {type(config).__name__} says "
                f"{told}: give it one."
            )
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_types(value, f"{name}.")


def _fits(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of ``kind``; True where that is not simple."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(kind))
    kind = typing.get_origin(kind) or kind
    if getattr(value, "ndim", None) == 0 and kind in (int, float, bool):  # an array of one number
        return True
    if isinstance(value, bool):
        return kind not in SIMPLE
    return isinstance(value, bool) if kind is bool else isinstance(value, SIMPLE.get(kind, object))
