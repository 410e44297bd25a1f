"""Which members a selection means: those whose config fields are as asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxnn.sweeps.results.outcomes import Member
from jaxnn.types import ConfigError, suggest

# What a float32 or the six digits that are printed of a number are apart from it.
TOLERANCE = 1e-5


def select_members(members: Sequence[Member], wanted: Mapping[str, Any]) -> list[Member]:
    """The members whose fields are as ``wanted``: equal to a value, among several, or as a function says.

    Raises:
        ConfigError: an unknown field, or no member left.
    """
    kept = list(members)
    for name, asked in wanted.items():
        kept = _select(kept, name, asked)
    return kept


def _select(members: list[Member], name: str, asked: Any) -> list[Member]:
    known = members[0].fields if members else {}
    if name not in known:
        raise ConfigError(f"the config has no field {name!r} to select by: {suggest(name, known)}.")
    found = [member.fields[name] for member in members]
    test = _test(asked, found)
    kept = [member for member, value in zip(members, found, strict=True) if test(value)]
    if not kept:
        there = ", ".join(dict.fromkeys(map(repr, found)))
        told = "as asked" if callable(asked) else f"= {asked!r}"
        raise ConfigError(f"no member has {name} {told}: there are {there}.")
    return kept


def _test(asked: Any, found: Sequence[Any]) -> Callable[[Any], bool]:
    if callable(asked):
        return lambda value: bool(asked(value))
    choices = _choices(asked, found)
    return lambda value: any(_same(value, choice) for choice in choices)


def _choices(asked: Any, found: Sequence[Any]) -> list[Any]:
    """The values that ``asked`` stands for: several if it is a collection, unless the field itself holds such."""
    if isinstance(asked, str | Mapping) or not hasattr(asked, "__iter__"):
        return [asked]
    items = list(asked)
    if any(isinstance(value, tuple) for value in found) and not any(isinstance(item, tuple | list) for item in items):
        return [tuple(items)]
    return items


def _same(value: Any, choice: Any) -> bool:
    if isinstance(choice, list):
        choice = tuple(choice)
    # True equals 1 in Python, but is another setting.
    if isinstance(value, bool) or isinstance(choice, bool | np.bool_):
        return isinstance(value, bool) and bool(value == choice) and isinstance(choice, bool | np.bool_)
    if isinstance(value, float) and isinstance(choice, int | float | np.number):
        return math.isclose(value, choice, rel_tol=TOLERANCE)
    return bool(value == choice)
