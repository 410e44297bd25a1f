"""Distributions of the values of a config field: how they are drawn, spread evenly and perturbed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxnn.types import ConfigError

# Jaderberg et al., "Population Based Training of Neural Networks", 2017, appendix A: factors of a perturbation.
FACTORS = 0.8, 1.2


class Distribution(NamedTuple):
    """A distribution of a field's values; made by `uniform`, `log_uniform`, `integers` and `choice`.

    >>> jn.search.uniform(0.0, 0.5).at(0.5)
    0.25
    """

    kind: Literal["uniform", "log_uniform", "integers", "choice"]
    low: float = 0.0
    high: float = 0.0
    values: tuple[Any, ...] = ()  # of a choice

    @property
    def scale(self) -> str:
        """The scale of the field's axis in plots."""
        return {"log_uniform": "log", "choice": "nominal"}.get(self.kind, "linear")

    @property
    def num_values(self) -> int:
        """The number of values of integers or a choice; 0: they are not countable."""
        if self.kind == "integers":
            return int(self.high - self.low) + 1
        return len(self.values)

    def sample(self, rng: np.random.Generator, num: int) -> list[Any]:
        """Returns ``num`` independent draws."""
        if self.kind == "choice":
            return [self.values[index] for index in rng.integers(len(self.values), size=num)]
        if self.kind == "integers":
            return rng.integers(int(self.low), int(self.high) + 1, num).tolist()  # type: ignore[no-any-return]
        if self.kind == "uniform":
            return rng.uniform(self.low, self.high, num).tolist()  # type: ignore[no-any-return]
        # The exponential of a logarithm may be a rounding beyond the ends.
        drawn = np.exp(rng.uniform(math.log(self.low), math.log(self.high), num))
        return drawn.clip(self.low, self.high).tolist()  # type: ignore[no-any-return]

    def at(self, share: float) -> Any:
        """Returns the value below which a ``share`` of the draws are, from 0 to below 1: its quantile function."""
        if self.kind == "choice":
            return self.values[int(share * len(self.values))]
        if self.kind == "integers":
            return int(self.low) + int(share * (int(self.high) - int(self.low) + 1))
        if self.kind == "uniform":
            return self.low + share * (self.high - self.low)
        value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return min(max(value, self.low), self.high)

    def near(self, value: Any, rng: np.random.Generator) -> Any:
        """Returns ``value`` times 0.8 or 1.2, within the ends; of a choice, another draw."""
        if self.kind == "choice":
            return self.sample(rng, 1)[0]
        moved = min(max(value * FACTORS[int(rng.integers(2))], self.low), self.high)
        return round(moved) if self.kind == "integers" else moved


def uniform(low: float, high: float) -> Distribution:
    """The uniform distribution of floats between ``low`` and ``high``; ConfigError unless ``low`` is below.

    >>> jn.search.random(2, 0, dropout=jn.search.uniform(0.0, 0.5)).values("dropout")
    (0.134893..., 0.318480...)
    """
    _check_range("uniform", low, high)
    return Distribution("uniform", low, high)


def log_uniform(low: float, high: float) -> Distribution:
    """The distribution of floats whose logarithms are uniform; ConfigError unless 0 < ``low`` < ``high``.

    >>> jn.search.random(2, 0, learning_rate=jn.search.log_uniform(1e-4, 1e-1)).values("learning_rate")
    (0.00064470..., 0.00814488...)
    """
    _check_range("log_uniform", low, high)
    if low <= 0:
        raise ConfigError(f"log_uniform goes from {low}, which has no logarithm: start above 0.")
    return Distribution("log_uniform", low, high)


def integers(low: int, high: int) -> Distribution:
    """The uniform distribution of integers, both ends included; ConfigError unless integers ``low`` < ``high``.

    >>> jn.search.random(9, 0, num_layers=jn.search.integers(1, 3)).values("num_layers")
    (1, 2, 3)
    """
    _check_range("integers", low, high)
    if not (float(low).is_integer() and float(high).is_integer()):
        raise ConfigError(f"integers needs two integers, not {low} and {high}: use uniform.")
    if max(-low, high) >= 2**53:  # as floats they would not be exact
        raise ConfigError(f"integers goes from {low} to {high}: stay below 2**53.")
    return Distribution("integers", int(low), int(high))


def choice(values: Sequence[Any]) -> Distribution:
    """The uniform distribution over ``values`` of any type; ConfigError if there are none.

    >>> sorted(jn.search.random(9, 0, activation=jn.search.choice(["relu", "gelu"])).values("activation"))
    ['gelu', 'relu']
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"choice has {values!r:.40}, no list of values: write choice([{values!r:.40}, …]).")
    values = tuple(values)
    if not values:
        raise ConfigError("choice has nothing to choose from: give it at least one value.")
    if twice := [text for text, count in Counter(map(repr, values)).items() if count > 1]:
        raise ConfigError(f"choice holds {twice[0]:.40} twice: give each value once.")
    return Distribution("choice", values=values)


def check_space(where: str, space: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scales of a space's axes; ConfigError, naming the searcher ``where``, if a field is not drawn."""
    if not isinstance(space, Mapping):
        raise ConfigError(
            f"{where} proposes from a space, a dict of fields with distributions, not from a {type(space).__name__}."
        )
    if not space:
        raise ConfigError(f"{where} needs a field to draw, as in {{'rate': jn.search.log_uniform(1e-4, 1e-1)}}.")
    for name, axis in space.items():
        if not (isinstance(axis, Distribution) or callable(axis)):
            raise ConfigError(
                f"{where}: the field {name!r} has {axis!r:.40}, and is drawn: give a distribution, as "
                f"jn.search.choice([…]), in the shell {name}=A,B in the --space."
            )
    return {name: axis.scale if isinstance(axis, Distribution) else "nominal" for name, axis in space.items()}


def described_space(space: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a space, fields with their distributions, lists or functions, in a record."""

    def described(axis: Any) -> Any:
        if isinstance(axis, Distribution):
            return axis._asdict()
        return named(axis) if callable(axis) else list(axis)

    return {name: described(axis) for name, axis in space.items()}


def named(function: Any) -> str | None:
    """The name of a function in a record, or its type if it has none; None for None."""
    return None if function is None else getattr(function, "__qualname__", None) or type(function).__qualname__


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number, and no boolean."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def _check_range(where: str, low: float, high: float) -> None:
    if not (is_number(low) and is_number(high) and low < high):
        raise ConfigError(f"{where} goes from {low!r} to {high!r}: give two finite numbers, the smaller one first.")
    if not math.isfinite(high - low):
        raise ConfigError(f"{where} goes from {low!r} to {high!r}, whose difference is no float: bring them nearer.")
