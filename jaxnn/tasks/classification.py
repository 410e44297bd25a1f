"""Classification: softmax cross-entropy against integer labels, with accuracy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxnn.nn import Policy
from jaxnn.nn.cross_entropy import cross_entropy as softmax_cross_entropy
from jaxnn.tasks.supervised import supervised
from jaxnn.types import Array, ConfigError, Task


def classification(model: Any, *, label_smoothing: float | jax.Array = 0.0, policy: Policy | None = None) -> Task:
    """Trains ``model`` to tell classes apart.

    Metrics are ``loss``, the cross-entropy in nats, and ``accuracy``, a fraction. The training loss is smoothed,
    the evaluated one is not, so that runs with different smoothing compare.

    Args:
        model: outputs logits ``[batch, classes]`` for targets ``[batch]`` of integers.
        label_smoothing: the share of a target spread evenly over all classes (Szegedy et al. 2016,
            "Rethinking the Inception Architecture"), 0 to below 1; may be a tracer.
        policy: the precision to compute in.

    Raises:
        ConfigError: a smoothing outside 0…1, or when traced, outputs and targets that do not fit together.
    """
    if not isinstance(label_smoothing, jax.core.Tracer) and not 0 <= label_smoothing < 1:
        raise ConfigError(f"label_smoothing is {label_smoothing}, and must be at least 0 and below 1.")

    def objective(logits: Array, labels: Array) -> jax.Array:
        return cross_entropy(logits, labels, label_smoothing)

    measures = {"loss": cross_entropy, "accuracy": correct}
    return supervised(model, objective, measures, policy)


def cross_entropy(logits: Array, labels: Array, label_smoothing: float | jax.Array = 0.0) -> jax.Array:
    """`nn.cross_entropy` for one label an example: ``[batch, classes]``, ``[batch]`` → ``[batch]`` in nats."""
    _check(logits, labels)
    return softmax_cross_entropy(jnp.asarray(logits), jnp.asarray(labels), label_smoothing)


def correct(logits: Array, labels: Array) -> jax.Array:
    """1.0 where the largest logit is the label's, else 0.0: ``[batch]``."""
    _check(logits, labels)
    return (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)


def _check(logits: Array, labels: Array) -> None:
    if not jnp.issubdtype(labels.dtype, jnp.integer) or labels.ndim != 1:
        raise ConfigError(
            f"classification needs targets of integers [batch], not {labels.dtype} {list(labels.shape)}: "
            "pass one label an example, or use tasks.regression."
        )
    if logits.ndim != 2 or logits.shape[0] != labels.shape[0]:
        raise ConfigError(
            f"classification needs a model whose outputs are logits [batch, classes], not {list(logits.shape)} "
            f"for {labels.shape[0]} labels."
        )
