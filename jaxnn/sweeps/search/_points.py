"""The points of a sweep: values for config fields, as grids, lists, random draws, and sums of these."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxnn.types import ConfigError

# From this ratio of the largest to the smallest value on, evenly spaced powers get a logarithmic axis.
LOG_RATIO = 8.0


@dataclasses.dataclass(frozen=True)
class Points:
    """The members of a sweep before they run; made by `grid`, `zipped` and `random`, joined by ``+``.

    Attributes:
        points: for each member, the config fields it sets; nested fields by dotted names, ``"model.dropout"``.
        scales: the scale of each field's axis in plots: ``"log"``, ``"linear"`` or ``"nominal"``.
    """

    points: tuple[Mapping[str, Any], ...]
    scales: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.points)

    def __add__(self, other: Points) -> Points:
        """The points of both without duplicates.

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
        scales = dict(self.scales)
        for name, scale in other.scales.items():
            if scale != scales[name]:
                # Logarithmic and linear parts share a logarithmic axis.
                scales[name] = "log" if {scale, scales[name]} == {"log", "linear"} else "nominal"
        return Points((*self.points, *(point for point in other.points if point not in self.points)), scales)

    def values(self, name: str) -> tuple[Any, ...]:
        """The distinct values of the field ``name``: numbers sorted, others in order of appearance."""
        found = list(dict.fromkeys(_hashable(point[name]) for point in self.points))
        return tuple(sorted(found)) if all(map(_is_number, found)) else tuple(found)


class Distribution(NamedTuple):
    """A distribution of a field's values.

    Attributes:
        sample: ``(generator, num) -> values``.
        scale: the scale of the field's axis in plots.
    """

    sample: Callable[[np.random.Generator, int], list[Any]]
    scale: str


def grid(**axes: Iterable[Any]) -> Points:
    """Returns every combination: ``jn.grid(learning_rate=[1e-3, 1e-2], seed=range(4))`` has eight members.

    The last axis changes fastest.

    Raises:
        ConfigError: no axis, or one that is empty, holds a value twice or is no list of values.
    """
    columns = _columns("grid", axes)
    return _points(columns, itertools.product(*columns.values()))


def zipped(**axes: Iterable[Any]) -> Points:
    """Returns one member per position: ``jn.zipped(features=[64, 128], learning_rate=[1e-2, 1e-3])`` has two members.

    Raises:
        ConfigError: no axis, one that is empty or is no list of values, or lengths that differ.
    """
    columns = _columns("zipped", axes, distinct=False)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ConfigError(f"zipped needs axes of one length, but {listed}: use grid for every combination.")
    return _points(columns, zip(*columns.values(), strict=True))


def random(num: int, key: Any, **axes: Distribution | Iterable[Any]) -> Points:
    """Returns ``num`` independent draws: ``jn.random(20, 0, learning_rate=jn.log_uniform(1e-4, 1e-1), seed=range(4))``.

    Bergstra & Bengio, "Random Search for Hyper-Parameter Optimization", 2012. Numbers are rounded to six digits, so
    that the printed value is the value that runs.

    Args:
        num: number of draws.
        key: a seed or a typed PRNG key; it determines all draws.
        **axes: a distribution (`uniform`, `log_uniform`, `integers`, `choice`), or a list: each draw runs with each of
            its values, as for seeds.

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
    draws = _points({name: axis.sample(rng, num) for name, axis in drawn.items()})
    listed = _columns("random", {name: axis for name, axis in axes.items() if name not in drawn}, least=0)
    repeats = _points(listed, itertools.product(*listed.values()))
    scales = {**repeats.scales, **{name: axis.scale for name, axis in drawn.items()}}
    points = ({**draw, **repeat} for draw in draws for repeat in repeats)
    return Points(
        tuple({name: point[name] for name in axes} for point in points), {name: scales[name] for name in axes}
    )


def uniform(low: float, high: float) -> Distribution:
    """The uniform distribution of floats between ``low`` and ``high``.

    Raises:
        ConfigError: ``low`` is not below ``high``.
    """
    _check_range("uniform", low, high)
    return Distribution(lambda rng, num: _rounded(rng.uniform(low, high, num)), "linear")


def log_uniform(low: float, high: float) -> Distribution:
    """The distribution of floats between ``low`` and ``high`` whose logarithms are uniform.

    Raises:
        ConfigError: ``low`` is not above 0, or not below ``high``.
    """
    _check_range("log_uniform", low, high)
    if low <= 0:
        raise ConfigError(f"log_uniform goes from {low}, which has no logarithm: start above 0.")
    return Distribution(lambda rng, num: _rounded(np.exp(rng.uniform(math.log(low), math.log(high), num))), "log")


def integers(low: int, high: int) -> Distribution:
    """The uniform distribution of integers from ``low`` to ``high``, both included.

    Raises:
        ConfigError: they are no whole numbers, or ``low`` is not below ``high``.
    """
    _check_range("integers", low, high)
    if not (float(low).is_integer() and float(high).is_integer()):
        raise ConfigError(f"integers go from {low} to {high}, which are no whole numbers: use uniform.")
    return Distribution(lambda rng, num: rng.integers(int(low), int(high) + 1, num).tolist(), "linear")


def choice(values: Sequence[Any]) -> Distribution:
    """The uniform distribution over ``values``, which may be of any kind that a config field holds.

    Raises:
        ConfigError: there are none.
    """
    values = list(values)
    if not values:
        raise ConfigError("choice has nothing to choose from: give it at least one value.")
    return Distribution(lambda rng, num: [values[index] for index in rng.integers(len(values), size=num)], "nominal")


def override(points: Points, axes: Mapping[str, list[Any]]) -> Points:
    """Returns ``points`` with other values for some fields: each of the rest with each combination of ``axes``.

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
    """Returns ``"nominal"`` for seeds and non-numbers, ``"log"`` for evenly spaced powers, else ``"linear"``."""
    values = list(values)
    if name.rpartition(".")[2] == "seed" or not all(map(_is_number, values)):
        return "nominal"
    ordered = np.unique(np.asarray(values, np.float64))
    if ordered[0] <= 0 or ordered[-1] < LOG_RATIO * ordered[0]:
        return "linear"

    def unevenness(positions: np.ndarray) -> float:
        gaps = np.diff(positions)
        return float(gaps.std() / gaps.mean())

    return "log" if unevenness(np.log(ordered)) <= unevenness(ordered) else "linear"


def field_names(config: Any, prefix: str = "") -> Iterator[str]:
    """Yields the names of a config's fields; those of nested dataclasses are dotted and follow their owner's."""
    for field in (field for field in dataclasses.fields(config) if field.init):
        value = getattr(config, field.name)
        yield prefix + field.name
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from field_names(value, f"{prefix}{field.name}.")


def field_value(config: Any, name: str) -> Any:
    """Returns the value of the field ``name``, which may be dotted."""
    head, _, rest = name.partition(".")
    value = getattr(config, head)
    return field_value(value, rest) if rest else value


def with_fields(config: Any, point: Mapping[str, Any]) -> Any:
    """Returns the config with other values for some fields, by name; names may be dotted."""
    changes = {name: value for name, value in point.items() if "." not in name}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in point.items():
        head, _, rest = name.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
    for head, inner in nested.items():
        changes[head] = with_fields(changes.get(head, getattr(config, head)), inner)
    # In one call: a config that checks its fields against each other must not see half of the changes.
    return dataclasses.replace(config, **changes)


def _columns(where: str, axes: Mapping[str, Any], *, least: int = 1, distinct: bool = True) -> dict[str, list[Any]]:
    """The axes as lists of plain values; ``where`` names the caller in errors."""
    if len(axes) < least:
        raise ConfigError(f"{where} needs at least one axis, such as seed=range(4).")
    columns: dict[str, list[Any]] = {}
    for name, values in axes.items():
        axis = f"the axis {name!r} of {where}"
        if isinstance(values, Distribution):
            raise ConfigError(f"{axis} is a distribution: give a list of values, or use jn.random.")
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise ConfigError(f"{axis} is {values!r}, no list of values: write {name}=[{values!r}].")
        # NumPy's and JAX's scalars become Python numbers.
        column = [value.item() if getattr(value, "shape", None) == () else value for value in values]
        if not column:
            raise ConfigError(f"{axis} is empty: give it at least one value.")
        twice = next((value for index, value in enumerate(column) if value in column[:index]), None)
        if distinct and twice is not None:
            raise ConfigError(f"{axis} holds {twice!r} twice: give each value once.")
        columns[name] = column
    return columns


def _points(columns: Mapping[str, list[Any]], rows: Iterable[tuple[Any, ...]] | None = None) -> Points:
    rows = zip(*columns.values(), strict=True) if rows is None else rows
    points = tuple(dict(zip(columns, row, strict=True)) for row in rows)
    return Points(points, {name: scale_of(name, values) for name, values in columns.items()})


def _generator(key: Any) -> np.random.Generator:
    if isinstance(key, int | np.integer):
        return np.random.default_rng(int(key))
    import jax

    data = jax.random.key_data(key) if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return np.random.default_rng(np.asarray(data).ravel().tolist())


def _check_range(where: str, low: float, high: float) -> None:
    if not low < high or not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{where} goes from {low} to {high}: the first must be below the second, and both finite.")


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
