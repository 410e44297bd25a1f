"""Binary classification: one logit an example, sigmoid cross-entropy against labels 0 and 1, with accuracy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxnn.nn import Policy
from jaxnn.tasks.classification import check_label_smoothing, check_labels
from jaxnn.tasks.data_checks import check_binary
from jaxnn.tasks.supervised import supervised
from jaxnn.types import Array, ConfigError, ModelState, Params, Task


def binary_classification(
    model: Any, *, label_smoothing: float | jax.Array = 0.0, policy: Policy | None = None
) -> Task:
    """Trains ``model`` to tell two classes apart by one logit: what Keras calls one sigmoid and binary cross-entropy.

    The logit is that of class 1: its sigmoid is the probability of 1, and above 0 it predicts 1; ``predict`` gives it,
    ``[batch]``. Metrics are ``loss``, the cross-entropy in nats, and ``accuracy``, a fraction. The training loss is
    smoothed, the evaluated one is not, so that runs with different smoothing compare.

    Args:
        model: outputs one logit, ``[batch, 1]`` or ``[batch]``, for targets ``[batch]`` of 0 and 1; of another target
            the loss is NaN, and a run is refused.
        label_smoothing: the share of a target spread evenly over both classes, 0 to below 1; may be a tracer.
        policy: the precision to compute in.

    Raises:
        ConfigError: a smoothing outside 0…1, or when traced, outputs and targets that do not fit together.
    """
    check_label_smoothing(label_smoothing)

    def objective(logits: Array, labels: Array) -> jax.Array:
        return cross_entropy(logits, labels, label_smoothing)

    task = supervised(model, objective, {"loss": cross_entropy, "accuracy": correct}, policy)

    def predict(params: Params, model_state: ModelState, inputs: Array) -> jax.Array:
        return _one_logit(task.predict(params, model_state, inputs))

    return task._replace(predict=predict, check=check_binary(predict))


def cross_entropy(logits: Array, labels: Array, label_smoothing: float | jax.Array = 0.0) -> jax.Array:
    """Sigmoid cross-entropy of one logit an example: ``[batch]`` or ``[batch, 1]``, ``[batch]`` → ``[batch]`` in nats.

    Computed in float32 or wider.
    """
    logits = _checked(logits, labels)
    labels = jnp.where((labels == 0) | (labels == 1), labels, jnp.nan)
    probabilities = (1 - label_smoothing) * labels + label_smoothing / 2
    loss: jax.Array = optax.sigmoid_binary_cross_entropy(logits, probabilities)
    return loss


def correct(logits: Array, labels: Array) -> jax.Array:
    """1.0 where the logit is above 0 for label 1, and is not for label 0, else 0.0: ``[batch]``."""
    return ((_checked(logits, labels) > 0) == labels).astype(jnp.float32)


def _checked(outputs: Any, labels: Array) -> jax.Array:
    """The logits ``[batch]``, of float32 or wider."""
    check_labels("binary_classification", labels)
    logits = _one_logit(outputs)
    if logits.shape != labels.shape:
        raise ConfigError(
            f"binary_classification needs a logit for each label, not {list(outputs.shape)} for {len(labels)} labels."
        )
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _one_logit(outputs: Any) -> jax.Array:
    """Outputs ``[batch, 1]`` or ``[batch]`` as ``[batch]``: in the one shape they would broadcast against labels."""
    shape = getattr(outputs, "shape", None)
    if shape is None or len(shape) not in (1, 2) or shape[1:] not in ((), (1,)):
        given = f"a {type(outputs).__name__}" if shape is None else list(shape)
        raise ConfigError(
            f"binary_classification needs a model of one logit, [batch, 1] or [batch], not {given}: change its last "
            "layer, or use tasks.classification."
        )
    return jnp.reshape(outputs, shape[:1])
