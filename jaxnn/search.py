"""The points of a sweep: values for config fields, as grids, lists, random draws, sums and halvings of these."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxnn.types import ConfigError, check_int

__all__ = ["Halving", "Points", "choice", "grid", "halving", "integers", "log_uniform", "random", "uniform", "zip"]

NAME = "name"  # in a point, the name of its member, unless the config has such a field
LOG_RATIO = 8.0  # of the largest to the smallest value, from which evenly spaced powers get a logarithmic axis
SCALES = ("linear", "log", "nominal")  # points that are joined share the later of theirs


@dataclasses.dataclass(frozen=True)
class Axis:
    """A config field that is swept."""

    name: str  # dotted if nested
    values: tuple[Any, ...]  # distinct
    scale: str  # in plots: log, linear, or nominal, as for seeds and values that are no numbers


@dataclasses.dataclass(frozen=True)
class Points:
    """The members of a sweep before they run; made by `grid`, `zip` and `random`, joined by ``+``.

    >>> len(jn.grid(seed=[0, 1]) + jn.grid(seed=[1, 2]))
    3
    """

    points: tuple[Mapping[str, Any], ...]  # for each member the fields that it sets; nested ones by dotted names
    scales: Mapping[str, str]  # the scale of each field's axis in plots: ``"log"``, ``"linear"`` or ``"nominal"``

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.points)

    def __add__(self, other: Points) -> Points:
        """The points of both without duplicates; ConfigError if they do not set the same fields."""
        if not isinstance(other, Points):
            return NotImplemented
        mine, theirs = sorted(self.scales), sorted(other.scales)
        if mine != theirs:
            missing = sorted({*mine} ^ {*theirs})[0]
            raise ConfigError(
                f"points of {', '.join(mine)} and of {', '.join(theirs)} cannot be joined: give {missing!r} to both."
            )
        # Logarithmic and linear parts share a logarithmic axis.
        scales = {name: max(scale, other.scales[name], key=SCALES.index) for name, scale in self.scales.items()}
        return Points((*self.points, *(point for point in other.points if point not in self.points)), scales)

    def values(self, name: str) -> tuple[Any, ...]:
        """The distinct values of the field ``name``: numbers sorted, others in order of appearance."""
        found = list(dict.fromkeys(_hashable(point[name]) for point in self.points))
        return tuple(sorted(found)) if all(map(_is_number, found)) else tuple(found)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The fields, with their distinct values and scales."""
        return tuple(Axis(name, self.values(name), scale) for name, scale in self.scales.items())


class Distribution(NamedTuple):
    """A distribution of a field's values."""

    sample: Callable[[np.random.Generator, int], list[Any]]
    scale: str


def grid(**axes: Iterable[Any]) -> Points:
    """Returns every combination; the last axis changes fastest.

    ConfigError if there is no axis, or one is empty, holds a value twice or is no list of values.

    >>> len(jn.grid(learning_rate=[1e-3, 1e-2], seed=range(4)))
    8
    """
    columns = _columns("grid", axes)
    return _points(columns, itertools.product(*columns.values()))


def zip(**axes: Iterable[Any]) -> Points:
    """Returns one member per position; ConfigError as `grid`, and if the lengths differ.

    >>> list(jn.search.zip(features=[64, 128], learning_rate=[0.01, 0.001]))
    [{'features': 64, 'learning_rate': 0.01}, {'features': 128, 'learning_rate': 0.001}]
    """
    columns = _columns("zip", axes, distinct=False)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ConfigError(f"zip needs axes of one length, but {listed}: use grid for every combination.")
    return _points(columns, builtins.zip(*columns.values(), strict=True))


def random(num: int, key: int, **axes: Distribution | Iterable[Any]) -> Points:
    """Returns ``num`` independent draws.

    Bergstra & Bengio, "Random Search for Hyper-Parameter Optimization", 2012. Numbers are drawn in float64 and kept as
    drawn; tables print six digits of them.

    >>> len(jn.search.random(20, 0, learning_rate=jn.search.log_uniform(1e-4, 1e-1), seed=range(4)))
    80

    Args:
        num: number of draws.
        key: a seed, an integer of at least 0; it determines all draws.
        **axes: a distribution (`uniform`, `log_uniform`, `integers`, `choice`), or a list: each draw runs with each of
            its values, as for seeds.

    Raises:
        ConfigError: ``num`` or ``key`` is not as above, or an axis is empty or no list of values.
    """
    check_int("random: num", num)
    drawn = {name: axis for name, axis in axes.items() if isinstance(axis, Distribution)}
    if not drawn:
        raise ConfigError("random needs a field to draw, as in rate=jn.search.log_uniform(1e-4, 1e-1); or use jn.grid.")
    rng = np.random.default_rng(check_int("random: key", key, 0))
    listed = _columns("random", {name: axis for name, axis in axes.items() if name not in drawn})
    draws = builtins.zip(*(axis.sample(rng, num) for axis in drawn.values()), strict=True)
    rows = ([*draw, *repeat] for draw in draws for repeat in itertools.product(*listed.values()))
    points = (dict(builtins.zip([*drawn, *listed], row, strict=True)) for row in rows)
    scales = {name: drawn[name].scale if name in drawn else scale_of(name, listed[name]) for name in axes}
    return Points(tuple({name: point[name] for name in axes} for point in points), scales)


def uniform(low: float, high: float) -> Distribution:
    """The uniform distribution of floats between ``low`` and ``high``; ConfigError unless ``low`` is below.

    >>> jn.search.random(2, 0, dropout=jn.search.uniform(0.0, 0.5)).values("dropout")
    (0.134893..., 0.318480...)
    """
    _check_range("uniform", low, high)
    return Distribution(lambda rng, num: rng.uniform(low, high, num).tolist(), "linear")


def log_uniform(low: float, high: float) -> Distribution:
    """The distribution of floats whose logarithms are uniform; ConfigError unless 0 < ``low`` < ``high``.

    >>> jn.search.random(2, 0, learning_rate=jn.search.log_uniform(1e-4, 1e-1)).values("learning_rate")
    (0.00064470..., 0.00814488...)
    """
    _check_range("log_uniform", low, high)
    if low <= 0:
        raise ConfigError(f"log_uniform goes from {low}, which has no logarithm: start above 0.")

    def sample(rng: np.random.Generator, num: int) -> list[float]:
        # The exponential of a logarithm may be a rounding beyond the ends.
        return np.exp(rng.uniform(math.log(low), math.log(high), num)).clip(low, high).tolist()  # type: ignore[no-any-return]

    return Distribution(sample, "log")


def integers(low: int, high: int) -> Distribution:
    """The uniform distribution of integers, both ends included; ConfigError unless integers ``low`` < ``high``.

    >>> jn.search.random(9, 0, num_layers=jn.search.integers(1, 3)).values("num_layers")
    (1, 2, 3)
    """
    _check_range("integers", low, high)
    if not (float(low).is_integer() and float(high).is_integer()):
        raise ConfigError(f"integers needs two integers, not {low} and {high}: use uniform.")
    return Distribution(lambda rng, num: rng.integers(int(low), int(high) + 1, num).tolist(), "linear")


def choice(values: Sequence[Any]) -> Distribution:
    """The uniform distribution over ``values`` of any type; ConfigError if there are none.

    >>> sorted(jn.search.random(9, 0, activation=jn.search.choice(["relu", "gelu"])).values("activation"))
    ['gelu', 'relu']
    """
    values = list(values)
    if not values:
        raise ConfigError("choice has nothing to choose from: give it at least one value.")
    return Distribution(lambda rng, num: [values[index] for index in rng.integers(len(values), size=num)], "nominal")


def override(points: Points, axes: Mapping[str, list[Any]]) -> Points:
    """Returns ``points`` with other values for some fields: each of the rest with each combination of ``axes``."""
    rest: list[dict[str, Any]] = []
    for point in points:
        kept = {name: value for name, value in point.items() if name not in axes}
        if kept not in rest:
            rest.append(kept)
    added = grid(**axes)
    scales = {name: scale for name, scale in points.scales.items() if name not in axes}
    return Points(tuple({**kept, **new} for kept in rest for new in added), {**scales, **added.scales})


def named(points: Mapping[str, Mapping[str, Any] | Points], config: Any) -> Points:
    """Returns the points of a dict, each with its key as ``name``; fields that some lack are as in ``config``.

    A value is the fields of one member, or the points of several with one name, such as seeds. ConfigError if there is
    none, or the config has a field ``name``.
    """
    if not points:
        raise ConfigError("a sweep needs points, and the dict of them is empty.")
    if hasattr(config, NAME):
        raise ConfigError("points have names, and the config a field 'name': sweep that instead, as in grid(name=[…]).")
    rows: list[dict[str, Any]] = []
    for name, given in points.items():
        if not isinstance(given, Mapping | Points):
            raise ConfigError(
                f"the point {name!r} is {given!r:.60}: give its fields as a dict, or points as of jn.grid."
            )
        rows += [{NAME: str(name), **point} for point in (given if isinstance(given, Points) else [given])]

    def default(field: str) -> Any:
        return functools.reduce(lambda owner, part: getattr(owner, part, None), field.split("."), config)

    fields = {field: default(field) for row in rows for field in row}
    columns = {field: [row.get(field, value) for row in rows] for field, value in fields.items()}
    return _points(columns, builtins.zip(*columns.values(), strict=True))


@dataclasses.dataclass(frozen=True)
class Halving:
    """Trains all points a little, the best of each ``eta`` of them ``eta`` times as far, and so on.

    Jamieson & Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2016. With 27
    members and ``eta=3`` that is 27 to 1/27 of the steps, 9 to 1/9, 3 to 1/3 and 1 to the end: the work of 3 full
    runs. Members are ranked one by one, each seed for itself, by the monitored metric; a schedule is that of a full
    run, cut off. ConfigError if ``eta`` is below 2, or ``min_fraction``, the least length of the first rung as a share
    of a run, is not above 0 and at most 1.

    >>> jn.search.halving(jn.grid(seed=range(4)), eta=2).rungs
    [0.25, 0.5, 1.0]
    """

    points: Points
    eta: int = 3
    _: dataclasses.KW_ONLY
    min_fraction: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.points, Points):
            kind = type(self.points).__name__
            raise ConfigError(f"halving needs points, as jn.grid and jn.search.random make, not a {kind}.")
        check_int("halving: eta", self.eta, 2)
        if not 0 < self.min_fraction <= 1:
            raise ConfigError(f"halving's min_fraction is {self.min_fraction!r}, and must be above 0 and at most 1.")

    @property
    def rungs(self) -> list[float]:
        """The ends of the rungs as shares of a run, ascending to 1."""
        most = min(math.log(max(1, len(self.points)), self.eta), math.log(1 / self.min_fraction, self.eta))
        return [self.eta ** -float(left) for left in range(math.floor(most + 1e-9), -1, -1)]

    def survivors(
        self, values: Mapping[int, float], *, higher_is_better: bool, num_started: int | None = None
    ) -> list[int]:
        """One of ``eta`` members, rounded up, best first by their ``values``; ties by number.

        Of ``num_started`` members, which those that diverged are part of; default: those with a value. Values that are
        not finite rank last.
        """
        sign = -1.0 if higher_is_better else 1.0
        scores = {member: sign * value if math.isfinite(value) else math.inf for member, value in values.items()}
        number = len(scores) if num_started is None else num_started
        return sorted(scores, key=lambda member: (scores[member], member))[: -(-number // self.eta)]


halving = Halving


def scale_of(name: str, values: Iterable[Any]) -> str:
    """Returns ``"nominal"`` for seeds and non-numbers, ``"log"`` for evenly spaced powers, else ``"linear"``."""
    values = list(values)
    if name.rpartition(".")[2] == "seed" or not all(map(_is_number, values)):
        return "nominal"
    ordered = np.unique(np.asarray(values, np.float64))
    if ordered[0] <= 0 or ordered[-1] < LOG_RATIO * ordered[0]:
        return "linear"
    # Evenly spaced values have gaps that differ little.
    uneven, log_uneven = (gaps.std() / gaps.mean() for gaps in (np.diff(ordered), np.diff(np.log(ordered))))
    return "log" if log_uneven <= uneven else "linear"


def _columns(where: str, axes: Mapping[str, Any], *, distinct: bool = True) -> dict[str, list[Any]]:
    """The axes as lists of plain values; ``where`` names the caller in errors."""
    if not axes and where != "random":
        raise ConfigError(f"{where} needs at least one axis, such as seed=range(4).")
    columns: dict[str, list[Any]] = {}
    for name, values in axes.items():
        axis = f"the axis {name!r} of {where}"
        if isinstance(values, Distribution):
            raise ConfigError(f"{axis} is a distribution: give a list of values, or use jn.search.random.")
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise ConfigError(f"{axis} is {values!r}, no list of values: write {name}=[{values!r}].")
        # NumPy's and JAX's scalars become Python numbers.
        column = [value.item() if getattr(value, "shape", None) == () else value for value in values]
        if arrays := [value for value in column if hasattr(value, "shape")]:
            raise ConfigError(f"{axis} holds an array of shape {arrays[0].shape}: give numbers, tuples or strings.")
        if not column:
            raise ConfigError(f"{axis} is empty: give it at least one value.")
        twice = next((value for index, value in enumerate(column) if value in column[:index]), None)
        if distinct and twice is not None:
            raise ConfigError(f"{axis} holds {twice!r} twice: give each value once.")
        columns[name] = column
    return columns


def _points(columns: Mapping[str, list[Any]], rows: Iterable[tuple[Any, ...]]) -> Points:
    points = tuple(dict(builtins.zip(columns, row, strict=True)) for row in rows)
    return Points(points, {name: scale_of(name, values) for name, values in columns.items()})


def _check_range(where: str, low: float, high: float) -> None:
    if not (_is_number(low) and _is_number(high) and low < high):
        raise ConfigError(f"{where} goes from {low!r} to {high!r}: give two finite numbers, the smaller one first.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
