"""A searcher from what a record says of it: the built-in ones, whose settings are plain data."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxnn.search._distributions import Distribution, choice, integers, log_uniform, uniform
from jaxnn.search._optuna import optuna
from jaxnn.search._parzen import tpe
from jaxnn.search._points import Points
from jaxnn.search._populations import pbt
from jaxnn.search._searchers import Searcher, asha, halving, listed
from jaxnn.search._stopping import extrapolated, patience
from jaxnn.types import ConfigError


def rebuilt(described: Mapping[str, Any]) -> Searcher:
    """Returns the searcher that ``described`` says.

    ConfigError if it has code of the script's own, which no record holds; KeyError, TypeError or ValueError if it is
    none.
    """
    name, given = described["name"], {key: value for key, value in described.items() if key != "name"}
    if name == "points":
        columns = {field: _numbers([point[field] for point in given["points"]]) for field in given["scales"]}
        rows = zip(*columns.values(), strict=True)
        points = tuple(dict(zip(columns, row, strict=True)) for row in rows)
        return listed(Points(points, dict(given["scales"])))
    pruning: dict[str, Callable[..., Searcher]] = {
        "asha": asha,
        "halving": halving,
        "patience": patience,
        "extrapolated": extrapolated,
    }
    if name in pruning:
        source = rebuilt(given.pop("of"))
        return pruning[name](source, **given)
    space = {field: _axis(axis) for field, axis in given.get("space", {}).items()}
    if name in ("pbt", "tpe") and None not in space.values():
        return (pbt if name == "pbt" else tpe)(**{**given, "space": space})
    if name == "optuna" and None not in space.values() and given.pop("sampler") is None:
        return optuna(**{**given, "space": space})
    raise ConfigError(f"the searcher {name} has code that its record does not hold: give the same to jn.sweep.")


def _numbers(values: Iterable[Any]) -> list[Any]:
    """Values as they were: JSON has names for infinities and NaN, which may be text among text."""
    values = list(values)
    if not any(isinstance(value, float) for value in values):
        return values
    return [float(value) if value in ("nan", "inf", "-inf") else value for value in values]


def _axis(axis: Any) -> Distribution | list[Any] | None:
    """A distribution or a list; None for a function."""
    if isinstance(axis, Mapping):
        ends = axis["low"], axis["high"]
        made = {"uniform": uniform, "log_uniform": log_uniform, "integers": integers}
        return choice(_numbers(axis["values"])) if axis["kind"] == "choice" else made[axis["kind"]](*ends)
    return list(axis) if isinstance(axis, list | tuple) else None
