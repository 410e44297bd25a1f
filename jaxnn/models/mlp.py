"""A multilayer perceptron."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
from flax import linen
from jax.typing import ArrayLike

from jaxnn.nn import Dense, Dropout, check_rate, positive_ints
from jaxnn.types import ConfigError, DataError


class MLP(linen.Module):
    """Dense layers on flattened inputs, with activation and dropout after all but the last.

    ``MLP((512, 512, 10))`` has two hidden layers of 512 units and 10 outputs. Parameters:
    ``Dense_0``, ``Dense_1``, ….

    Attributes:
        features: the units of each layer, outputs last.
        activation: an elementwise function, after each layer but the last.
        dropout: ``[]`` the rate after each activation, 0…1; may be a tracer.

    Raises:
        ConfigError: no features, features that are not positive integers, or a dropout rate outside
        0…1.
    """

    features: tuple[int, ...]
    _: dataclasses.KW_ONLY
    activation: Callable[[jax.Array], jax.Array] = linen.relu
    dropout: ArrayLike = 0.0

    def __post_init__(self) -> None:
        self.features = positive_ints("MLP: features", self.features, "(512, 10)")
        if not self.features:
            raise ConfigError("MLP: features is empty: give at least the outputs, such as (10,).")
        check_rate(self.dropout)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, ...]`` to ``[batch, features[-1]]``.

        Args:
            x: ``[batch, ...]``, flattened to ``[batch, -1]``.
            train: whether dropout is active; it then needs ``rngs={"dropout": key}``.

        Raises:
            DataError: an input without an axis of the batch.
        """
        if x.ndim < 1:
            raise DataError("MLP needs inputs [batch, ...], not a single number.")
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        *hidden, outputs = self.features
        for width in hidden:
            x = self.activation(Dense(width)(x))
            x = Dropout(self.dropout)(x, train=train)
        return Dense(outputs)(x)
