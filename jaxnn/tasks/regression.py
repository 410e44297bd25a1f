"""Regression: mean squared error against float targets, with the mean absolute error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnn.nn import Policy
from jaxnn.tasks.supervised import supervised
from jaxnn.types import Array, ConfigError, Task


def regression(model: Any, *, policy: Policy | None = None) -> Task:
    """Trains ``model`` to predict numbers.

    Metrics are ``loss``, the squared error, and ``mean_absolute_error``, both means over a target's components
    and in the targets' units (squared for the loss).

    Args:
        model: outputs ``[batch, ...]`` shaped like the targets; ``[batch, 1]`` also does for targets ``[batch]``.
        policy: the precision to compute in.

    Raises:
        ConfigError: when traced, outputs and targets of different shapes.
    """
    squared = _componentwise(jnp.square)
    measures = {"loss": squared, "mean_absolute_error": _componentwise(jnp.abs)}
    return supervised(model, squared, measures, policy)


def _componentwise(
    penalty: Callable[[jax.Array], jax.Array],
) -> Callable[[Array, Array], jax.Array]:
    def per_example(outputs: Array, targets: Array) -> jax.Array:
        errors = penalty(jnp.asarray(_aligned(outputs, targets) - targets))
        return jnp.mean(errors.reshape(errors.shape[0], -1), axis=-1)

    return per_example


def _aligned(outputs: Array, targets: Array) -> Array:
    # [batch, 1] - [batch] would broadcast to [batch, batch] and train on nonsense.
    if outputs.shape == (*targets.shape, 1):
        outputs = outputs[..., 0]
    if outputs.shape != targets.shape:
        raise ConfigError(
            f"regression needs outputs shaped like the targets, not outputs {list(outputs.shape)} for targets "
            f"{list(targets.shape)}: change the model's last layer."
        )
    return outputs
