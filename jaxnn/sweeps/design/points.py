"""The points of a sweep: which values of which config fields, as grids, lists, draws, and sums of these."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxnn.sweeps.design.sampling import Distribution
from jaxnn.types import ConfigError, suggest

# From this ratio of largest to smallest on, evenly spaced powers are worth a logarithmic axis.
LOG_RATIO = 8.0


@dataclasses.dataclass(frozen=True)
class Points:
    """The members of a sweep before they are run; made by `grid`, `zipped` and `random`, joined by ``+``.

    Attributes:
        points: for each member, the config fields it sets; nested fields by dotted names, ``"model.dropout"``.
        scales: how each field is drawn on an axis: ``"log"``, ``"linear"`` or ``"nominal"``.
    """

    points: tuple[Mapping[str, Any], ...]
    scales: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.points)

    def __add__(self, other: Points) -> Points:
        """The points of both, the repeats among them left out.

        Raises:
            ConfigError: they do not set the same fields.
        """
        if not isinstance(other, Points):
            return NotImplemented
        mine, theirs = sorted(self.scales), sorted(other.scales)
        if mine != theirs:
            odd = sorted({*mine} ^ {*theirs})[0]
            raise ConfigError(
                f"points of {', '.join(mine)} and points of {', '.join(theirs)} cannot be joined: give {odd!r} to both."
            )
        new = [point for point in other.points if point not in self.points]
        scales = {name: _joined(scale, other.scales[name]) for name, scale in self.scales.items()}
        return Points((*self.points, *new), scales)

    def values(self, name: str) -> tuple[Any, ...]:
        """The different values of the field ``name``: sorted where they are numbers, else in order of appearance."""
        found = list(dict.fromkeys(_hashable(point[name]) for point in self.points))
        return tuple(sorted(found)) if all(map(_is_number, found)) else tuple(found)


def grid(**axes: Iterable[Any]) -> Points:
    """Every combination: ``jn.grid(learning_rate=[1e-3, 1e-2], seed=range(4))`` is eight members.

    The last axis changes fastest.

    Raises:
        ConfigError: no axis, or one that is empty, holds a value twice or is no list of values.
    """
    columns = _columns("grid", axes)
    rows = itertools.product(*columns.values())
    return _points(columns, rows)


def zipped(**axes: Iterable[Any]) -> Points:
    """One member a position: ``jn.zipped(features=[64, 128], learning_rate=[1e-2, 1e-3])`` is two members.

    Raises:
        ConfigError: no axis, one that is empty or is no list of values, or lengths that differ.
    """
    columns = _columns("zipped", axes, distinct=False)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ConfigError(f"zipped needs axes of one length, but {told}: use grid for every combination.")
    return _points(columns, zip(*columns.values(), strict=True))


def random(num: int, key: Any, **axes: Distribution | Iterable[Any]) -> Points:
    """``num`` independent draws: ``jn.random(20, 0, learning_rate=jn.log_uniform(1e-4, 1e-1), seed=range(4))``.

    Bergstra & Bengio, "Random Search for Hyper-Parameter Optimization", 2012. Numbers are rounded to six digits, so
    that what is printed is what was run.

    Args:
        num: how many draws.
        key: a seed or a typed PRNG key; it decides all of them.
        **axes: a distribution (`uniform`, `log_uniform`, `integers`, `choice`), or a list: each draw is run with each
            of its values, as for seeds.

    Raises:
        ConfigError: ``num`` is below 1, or an axis is empty or no list of values.
    """
    if num < 1:
        raise ConfigError(f"random needs at least 1 draw, not {num}.")
    drawn = {name: axis for name, axis in axes.items() if isinstance(axis, Distribution)}
    if not drawn:
        raise ConfigError(
            "random needs a field to draw: learning_rate=jn.log_uniform(1e-4, 1e-1), say; or use jn.grid."
        )
    rng = _generator(key)
    draws = {name: axis.sample(rng, num) for name, axis in drawn.items()}
    listed = _columns("random", {name: axis for name, axis in axes.items() if name not in drawn}, least=0)
    points = tuple(
        {name: (chosen | repeat)[name] for name in axes}
        for chosen in (dict(zip(draws, row, strict=True)) for row in zip(*draws.values(), strict=True))
        for repeat in (dict(zip(listed, row, strict=True)) for row in itertools.product(*listed.values()))
    )
    scales = {name: axis.scale for name, axis in drawn.items()} | {
        name: scale_of(name, v) for name, v in listed.items()
    }
    return Points(points, {name: scales[name] for name in axes})


def override(points: Points, axes: Mapping[str, list[Any]]) -> Points:
    """``points`` with other values for some fields: each of the rest with each combination of ``axes``.

    Raises:
        ConfigError: an axis that is empty or holds a value twice.
    """
    rest: list[dict[str, Any]] = []
    for point in points:
        kept = {name: value for name, value in point.items() if name not in axes}
        if kept not in rest:
            rest.append(kept)
    added = grid(**axes)
    scales = {name: scale for name, scale in points.scales.items() if name not in axes} | dict(added.scales)
    return Points(tuple({**kept, **new} for kept in rest for new in added), scales)


def scale_of(name: str, values: Iterable[Any]) -> str:
    """How ``values`` lie: ``"nominal"`` if no numbers, or seeds; ``"log"`` if as powers; else ``"linear"``."""
    values = list(values)
    if name.rpartition(".")[2] == "seed" or not all(map(_is_number, values)):
        return "nominal"
    ordered = np.unique(np.asarray(values, np.float64))
    if ordered[0] <= 0 or ordered[-1] < LOG_RATIO * ordered[0]:
        return "linear"
    return "log" if _unevenness(np.log(ordered)) <= _unevenness(ordered) else "linear"


def check_fields(points: Points, known: Iterable[str]) -> None:
    """Raises ConfigError where ``points`` set a field that is not among ``known``."""
    known = list(known)
    for name in points.scales:
        if name not in known:
            raise ConfigError(f"the config has no field {name!r} to sweep: {suggest(name, known)}.")


def _columns(where: str, axes: Mapping[str, Any], *, least: int = 1, distinct: bool = True) -> dict[str, list[Any]]:
    if len(axes) < least:
        raise ConfigError(f"{where} needs at least one axis, such as seed=range(4).")
    columns = {name: _column(where, name, values) for name, values in axes.items()}
    for name, values in columns.items():
        twice = next((value for index, value in enumerate(values) if value in values[:index]), None)
        if distinct and twice is not None:
            raise ConfigError(f"the axis {name!r} of {where} holds {twice!r} twice: give each value once.")
    return columns


def _column(where: str, name: str, values: Any) -> list[Any]:
    if isinstance(values, Distribution):
        raise ConfigError(f"the axis {name!r} of {where} is a distribution: give a list of values, or use jn.random.")
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"the axis {name!r} of {where} is {values!r}, no list of values: write {name}=[{values!r}].")
    column = [value.item() if isinstance(value, np.generic) or _is_scalar_array(value) else value for value in values]
    if not column:
        raise ConfigError(f"the axis {name!r} of {where} is empty: give it at least one value.")
    return column


def _is_scalar_array(value: Any) -> bool:
    return getattr(value, "shape", None) == () and hasattr(value, "item")


def _points(columns: Mapping[str, list[Any]], rows: Iterable[tuple[Any, ...]]) -> Points:
    points = tuple(dict(zip(columns, row, strict=True)) for row in rows)
    return Points(points, {name: scale_of(name, values) for name, values in columns.items()})


def _generator(key: Any) -> np.random.Generator:
    if isinstance(key, int | np.integer):
        return np.random.default_rng(int(key))
    import jax

    data = jax.random.key_data(key) if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return np.random.default_rng(np.asarray(data).ravel().tolist())


def _joined(one: str, other: str) -> str:
    """The scale of an axis whose parts have these: a logarithmic one is drawn so throughout."""
    return one if one == other else "log" if {one, other} == {"log", "linear"} else "nominal"


def _unevenness(ordered: np.ndarray) -> float:
    gaps = np.diff(ordered)
    return float(gaps.std() / gaps.mean())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
