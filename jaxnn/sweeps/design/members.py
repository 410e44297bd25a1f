"""The members of a sweep as configs: each point's fields put into the experiment's config, or why they cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxnn.loop import check_config, check_parts
from jaxnn.record import config_json
from jaxnn.sweeps.design.points import Points, check_fields
from jaxnn.types import ConfigError, Experiment, JaxnnError


class Planned(NamedTuple):
    """A member before it is run.

    Attributes:
        number: its place in the sweep.
        point: the fields it sets.
        experiment: with its config; that of the sweep where it failed.
        error: why it cannot be run, or None.
    """

    number: int
    point: Mapping[str, Any]
    experiment: Experiment[Any]
    error: str | None = None


def field_names(config: Any, prefix: str = "") -> Iterator[str]:
    """The names of a config's fields, those of nested dataclasses dotted."""
    for field in (field for field in dataclasses.fields(config) if field.init):
        value = getattr(config, field.name)
        yield prefix + field.name
        if _is_config(value):
            yield from field_names(value, f"{prefix}{field.name}.")


def field_value(config: Any, name: str) -> Any:
    """The value of the field ``name``, which may be dotted."""
    head, _, rest = name.partition(".")
    value = getattr(config, head)
    return field_value(value, rest) if rest else value


def with_fields(config: Any, point: Mapping[str, Any]) -> Any:
    """The config with other values for some fields, by name; names may be dotted."""
    changes = {name: value for name, value in point.items() if "." not in name}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in point.items():
        head, _, rest = name.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
    for head, inner in nested.items():
        changes[head] = with_fields(changes.get(head, getattr(config, head)), inner)
    # All at once: a config that checks its fields against each other must not see half of them.
    return dataclasses.replace(config, **changes)


def plan_members(experiment: Experiment[Any], points: Points) -> list[Planned]:
    """Every point as a member; a point that fails to build keeps the reason and hinders no other.

    Raises:
        ConfigError: a field the config does not have, or one that is a dataclass.
    """
    check_fields(points, field_names(experiment.config))
    for name in points.scales:
        if _is_config(value := field_value(experiment.config, name)):
            inner = next(field_names(value), "…")
            raise ConfigError(f"the field {name!r} is a dataclass: sweep its own fields, as in '{name}.{inner}'.")
    return [_plan_member(experiment, number, point) for number, point in enumerate(points)]


def _plan_member(experiment: Experiment[Any], number: int, point: Mapping[str, Any]) -> Planned:
    try:
        point = {name: _as_default(value, field_value(experiment.config, name)) for name, value in point.items()}
        config = with_fields(experiment.config, point)
        config_json(config)
        check_config(config)
        member = dataclasses.replace(experiment, config=config)
        check_parts(member)
    # Whatever a user's functions raise for one point is no reason to lose the others.
    except Exception as error:
        return Planned(number, point, experiment, reason(error))
    return Planned(number, point, member)


def reason(error: Exception) -> str:
    """An exception as the sentence that a record keeps."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MemoryError):
        return f"memory ran out ({text}): sweep fewer members at a time, as with shard='1/4'"
    return text if isinstance(error, JaxnnError) else f"{type(error).__name__}: {text}"


def _as_default(value: Any, default: Any) -> Any:
    """``value`` of the kind that the field holds: a float for ``1`` where it is a float, a tuple for a list."""
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
