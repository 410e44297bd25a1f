"""The points of a sweep: values for config fields, as grids, lists, random draws, and sums of these."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from jaxnn._fields import SEEDS
from jaxnn.search._distributions import Distribution, is_number
from jaxnn.types import ConfigError, check_int

type SpaceAxis = Distribution | Callable[[Mapping[str, Any]], Any] | Iterable[Any]

LOG_RATIO = 8.0  # of the largest to the smallest value, from which evenly spaced powers get a logarithmic axis
SCALES = ("linear", "log", "nominal")  # points that are joined share the later of theirs


@dataclasses.dataclass(frozen=True)
class Axis:
    """A config field that is swept.

    >>> jn.grid(learning_rate=[1e-3, 1e-2, 1e-1]).axes
    (Axis(name='learning_rate', values=(0.001, 0.01, 0.1), scale='log'),)
    """

    name: str  # dotted if nested
    values: tuple[Any, ...]  # distinct
    scale: str  # in plots: log, linear, or nominal, as for seeds and values that are no numbers

    @staticmethod
    def scale_of(name: str, values: Iterable[Any]) -> str:
        """Returns ``"nominal"`` for seeds and non-numbers, ``"log"`` for evenly spaced powers, else ``"linear"``."""
        values = list(values)
        if name.rpartition(".")[2] in SEEDS or not all(map(is_number, values)):
            return "nominal"
        ordered = np.unique(np.asarray(values, np.float64))
        if ordered[0] <= 0 or ordered[-1] < LOG_RATIO * ordered[0]:
            return "linear"
        # Evenly spaced values have gaps that differ little.
        uneven, log_uneven = (gaps.std() / gaps.mean() for gaps in (np.diff(ordered), np.diff(np.log(ordered))))
        return "log" if log_uneven <= uneven else "linear"


@dataclasses.dataclass(frozen=True)
class Points:
    """The members of a sweep before they run; made by `grid`, `zip` and `random`, joined by ``+``.

    >>> len(jn.grid(seed=[0, 1]) + jn.grid(seed=[1, 2]))
    3
    """

    points: tuple[Mapping[str, Any], ...]  # for each member the fields that it sets; nested ones by dotted names
    scales: Mapping[str, str]  # the scale of each field's axis in plots: ``"log"``, ``"linear"`` or ``"nominal"``
    NAME: ClassVar[str] = "name"  # in a point, the name of its member, unless the config has such a field

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
        return tuple(sorted(found)) if all(map(is_number, found)) else tuple(found)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The fields, with their distinct values and scales."""
        return tuple(Axis(name, self.values(name), scale) for name, scale in self.scales.items())

    def override(self, axes: Mapping[str, list[Any]]) -> Points:
        """Returns points with other values for some fields: each of the rest with each combination of ``axes``."""
        rest: list[dict[str, Any]] = []
        for point in self.points:
            kept = {name: value for name, value in point.items() if name not in axes}
            if kept not in rest:
                rest.append(kept)
        added = grid(**axes)
        scales = {name: scale for name, scale in self.scales.items() if name not in axes}
        return Points(tuple({**kept, **new} for kept in rest for new in added), {**scales, **added.scales})

    @classmethod
    def named(cls, points: Mapping[str, Mapping[str, Any] | Points], config: Any) -> Points:
        """Returns the points of a dict, each with its key as ``name``; fields that some lack are as in ``config``.

        A value is the fields of one member, or the points of several with one name, such as seeds. ConfigError if there
        is none, or the config has a field ``name``.
        """
        if not points:
            raise ConfigError("a sweep needs points, and the dict of them is empty.")
        if hasattr(config, cls.NAME):
            raise ConfigError(
                "points have names, and the config a field 'name': sweep that instead, as in grid(name=[…])."
            )
        rows: list[dict[str, Any]] = []
        for name, given in points.items():
            if not isinstance(given, Mapping | Points):
                raise ConfigError(
                    f"the point {name!r} is {given!r:.60}: give its fields as a dict, or points as of jn.grid; a space "
                    "is searched as in jn.search.asha(space, num=64)."
                )
            rows += [{cls.NAME: str(name), **point} for point in (given if isinstance(given, Points) else [given])]

        def default(field: str) -> Any:
            return functools.reduce(lambda owner, part: getattr(owner, part, None), field.split("."), config)

        fields = {field: default(field) for row in rows for field in row}
        columns = {field: [row.get(field, value) for row in rows] for field, value in fields.items()}
        return _points(columns, builtins.zip(*columns.values(), strict=True))


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


def random(num: int, key: int, **axes: SpaceAxis) -> Points:
    """Returns ``num`` independent draws.

    Bergstra & Bengio, "Random Search for Hyper-Parameter Optimization", 2012. Numbers are drawn in float64 and kept as
    drawn; tables print six digits of them.

    >>> len(jn.search.random(20, 0, learning_rate=jn.search.log_uniform(1e-4, 1e-1), seed=range(4)))
    80

    Args:
        num: number of draws.
        key: a seed, an integer of at least 0; it determines all draws.
        **axes: a distribution (`uniform`, `log_uniform`, `integers`, `choice`); or a function of the fields that are
            drawn before, a dict, to a distribution or a value, for a field that depends on them; or a list: each draw
            runs with each of its values, as for seeds.

    Raises:
        ConfigError: ``num`` or ``key`` is not as above, or an axis is empty or no list of values.
    """
    check_int("random: num", num)
    rng = np.random.default_rng(check_int("random: key", key, 0))
    # Field by field; those that depend on others afterwards.
    columns = {name: axis.sample(rng, num) for name, axis in axes.items() if isinstance(axis, Distribution)}

    def draw(index: int, name: str, axis: Distribution) -> Any:
        return columns[name][index] if name in columns else axis.sample(rng, 1)[0]

    return _drawn("random", num, axes, draw)


def sobol(num: int, key: int, **axes: SpaceAxis) -> Points:
    """Returns ``num`` points that fill the space evenly: a scrambled Sobol sequence, which ``key`` determines.

    Owen, "Scrambling Sobol' and Niederreiter-Xing points", 1998, by SciPy. Arguments and errors are those of `random`.

    >>> sorted(jn.search.sobol(4, 0, dropout=jn.search.uniform(0.0, 1.0)).values("dropout"))  # one in each quarter
    [0.15..., 0.40..., 0.55..., 0.75...]
    """
    from scipy.stats import qmc  # type: ignore[import-untyped]

    check_int("sobol: num", num)
    names = [name for name, axis in axes.items() if _is_drawn(axis)]
    sequence = qmc.Sobol(max(1, len(names)), scramble=True, rng=check_int("sobol: key", key, 0))
    # Only powers of two are balanced; a part of one is nearly so.
    shares = sequence.random_base2((num - 1).bit_length())

    def draw(index: int, name: str, axis: Distribution) -> Any:
        return axis.at(float(shares[index, names.index(name)]))

    return _drawn("sobol", num, axes, draw)


def _is_drawn(axis: Any) -> bool:
    return isinstance(axis, Distribution) or callable(axis)


def _drawn(where: str, num: int, axes: Mapping[str, Any], draw: Callable[[int, str, Distribution], Any]) -> Points:
    """``num`` draws, each with every combination of the listed values; ``draw(index, name, axis)`` is a value."""
    if not any(map(_is_drawn, axes.values())):
        raise ConfigError(
            f"{where} needs a field to draw, as in rate=jn.search.log_uniform(1e-4, 1e-1); or use jn.grid."
        )
    listed = _columns(where, {name: axis for name, axis in axes.items() if not _is_drawn(axis)})
    scales = {name: Axis.scale_of(name, listed[name]) if name in listed else "linear" for name in axes}
    points = list[dict[str, Any]]()
    # Fields that depend on others are drawn after them.
    ordered = sorted(((name, axes[name]) for name in axes if name not in listed), key=lambda one: callable(one[1]))
    for index in range(num):
        point: dict[str, Any] = {}
        for name, axis in ordered:
            found = axis(dict(point)) if callable(axis) else axis
            is_distribution = isinstance(found, Distribution)
            point[name] = draw(index, name, found) if is_distribution else found
            scale = found.scale if is_distribution else Axis.scale_of(name, [found])
            scales[name] = max(scales[name], scale, key=SCALES.index)
        for values in itertools.product(*listed.values()):
            whole = point | dict(builtins.zip(listed, values, strict=True))
            points.append({name: whole[name] for name in axes})
    return Points(tuple(points), scales)


def _columns(where: str, axes: Mapping[str, Any], *, distinct: bool = True) -> dict[str, list[Any]]:
    """The axes as lists of plain values; ``where`` names the caller in errors."""
    if not axes and where in ("grid", "zip"):
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
    return Points(points, {name: Axis.scale_of(name, values) for name, values in columns.items()})


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
