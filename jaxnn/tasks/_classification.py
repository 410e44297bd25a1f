"""Classification: cross-entropy against integer labels, with accuracy; of many classes, or of two by one logit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxnn.nn import Policy, cross_entropy
from jaxnn.tasks._data_checks import check_data, last_axis
from jaxnn.tasks._supervised import supervised
from jaxnn.types import Array, ConfigError, ModelState, Params, Task


def classification(
    model: Any,
    *,
    label_smoothing: float | jax.Array = 0.0,
    auxiliary_weight: float | jax.Array | None = None,
    policy: Policy | None = None,
) -> Task:
    """Trains ``model`` to tell classes apart.

    Metrics are ``loss``, the cross-entropy in nats, and ``accuracy``, a fraction. The training loss is smoothed and
    has the auxiliary terms, the evaluated one does not, so that runs with different smoothing compare.

    A model may have auxiliary outputs, which help its early layers to learn (Szegedy et al. 2015, "Going Deeper with
    Convolutions"): in training it then returns a tuple of the logits and one or more auxiliary logits, in evaluation
    the logits alone, as torchvision's do.

    Args:
        model: outputs logits ``[batch, classes]`` for targets ``[batch]`` of integers.
        label_smoothing: the share of a target spread evenly over all classes (Szegedy et al. 2016,
            "Rethinking the Inception Architecture"), 0 to below 1; may be a tracer.
        auxiliary_weight: what the cross-entropy of each auxiliary output is multiplied by before it is added to the
            training loss, at least 0; may be a tracer; None: the model has no such outputs.
        policy: the precision to compute in.

    Raises:
        ConfigError: a smoothing outside 0…1, a negative weight, or when traced, outputs and targets that do not fit
            together. When a run starts, DataError: labels of any split that are no class of the model.
    """
    _check_label_smoothing(label_smoothing)
    if not isinstance(auxiliary_weight, jax.core.Tracer | None) and not auxiliary_weight >= 0:
        raise ConfigError(f"auxiliary_weight is {auxiliary_weight}, and must be at least 0, or None.")

    def objective(outputs: Any, labels: Array) -> jax.Array:
        if auxiliary_weight is None:
            return _cross_entropy(outputs, labels, label_smoothing)
        main, *auxiliary = _with_auxiliary(outputs)
        extra = sum(_cross_entropy(logits, labels, label_smoothing) for logits in auxiliary)
        return _cross_entropy(main, labels, label_smoothing) + auxiliary_weight * extra

    measures = {"loss": _of_main(_cross_entropy), "accuracy": _of_main(_is_largest)}
    task = supervised(model, objective, measures, policy)
    return task._replace(check=check_data(task.predict, last_axis))


def _cross_entropy(logits: Array, labels: Array, label_smoothing: float | jax.Array = 0.0) -> jax.Array:
    """`nn.cross_entropy` for one label an example: ``[batch, classes]``, ``[batch]`` → ``[batch]`` in nats."""
    _check_outputs(logits, labels)
    return cross_entropy(jnp.asarray(logits), jnp.asarray(labels), label_smoothing)


def _is_largest(logits: Array, labels: Array) -> jax.Array:
    """1.0 where the largest logit is the label's, else 0.0: ``[batch]``."""
    _check_outputs(logits, labels)
    return (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)


def _check_label_smoothing(label_smoothing: Any) -> None:
    """Raises ConfigError unless the smoothing is at least 0 and below 1, or a tracer."""
    if not isinstance(label_smoothing, jax.core.Tracer) and not 0 <= label_smoothing < 1:
        raise ConfigError(f"label_smoothing is {label_smoothing}, and must be at least 0 and below 1.")


def _check_labels(task: str, labels: Array) -> None:
    """Raises ConfigError unless ``labels`` are integers ``[batch]``; ``task`` says for what."""
    if not jnp.issubdtype(labels.dtype, jnp.integer) or labels.ndim != 1:
        raise ConfigError(
            f"{task} needs targets of integers [batch], not {labels.dtype} {list(labels.shape)}: "
            "pass one label an example, of one-hot rows their argmax(axis=-1), or use tasks.regression."
        )


def _check_outputs(logits: Array, labels: Array) -> None:
    if isinstance(logits, tuple):
        raise ConfigError(
            f"classification needs a model whose outputs are logits [batch, classes], not a tuple of {len(logits)}: "
            "give auxiliary_weight if those after the first are auxiliary logits."
        )
    _check_labels("classification", labels)
    if logits.ndim != 2 or logits.shape[0] != labels.shape[0]:
        raise ConfigError(
            f"classification needs a model whose outputs are logits [batch, classes], not {list(logits.shape)} "
            f"for {labels.shape[0]} labels."
        )
    if logits.shape[1] == 1:
        raise ConfigError(
            f"classification needs a logit for each class, and the model has one, {list(logits.shape)}: give it more, "
            "or use tasks.binary_classification; to regress, use tasks.regression."
        )


def _with_auxiliary(outputs: Any) -> tuple[Array, ...]:
    if not isinstance(outputs, tuple) or len(outputs) < 2:
        raise ConfigError(
            "classification with auxiliary_weight needs a model that in training returns a tuple, the logits and the "
            "auxiliary logits: let it return them, or leave auxiliary_weight out."
        )
    return outputs


def _of_main(measure: Callable[[Array, Array], jax.Array]) -> Callable[[Any, Array], jax.Array]:
    """``measure`` of the logits, whether or not auxiliary ones stand beside them."""
    return lambda outputs, labels: measure(outputs[0] if isinstance(outputs, tuple) else outputs, labels)


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
    _check_label_smoothing(label_smoothing)

    def objective(logits: Array, labels: Array) -> jax.Array:
        return _sigmoid_cross_entropy(logits, labels, label_smoothing)

    task = supervised(model, objective, {"loss": _sigmoid_cross_entropy, "accuracy": _is_right_side}, policy)

    def predict(params: Params, model_state: ModelState, inputs: Array) -> jax.Array:
        return _one_logit(task.predict(params, model_state, inputs))

    advice = " in binary_classification: renumber the labels, or use classification."
    return task._replace(predict=predict, check=check_data(predict, lambda outputs: (2, advice)))


def _sigmoid_cross_entropy(logits: Array, labels: Array, label_smoothing: float | jax.Array = 0.0) -> jax.Array:
    """Sigmoid cross-entropy of one logit an example: ``[batch]`` or ``[batch, 1]``, ``[batch]`` → ``[batch]`` in nats.

    Computed in float32 or wider.
    """
    logits = _checked_logits(logits, labels)
    labels = jnp.where((labels == 0) | (labels == 1), labels, jnp.nan)
    probabilities = (1 - label_smoothing) * labels + label_smoothing / 2
    loss: jax.Array = optax.sigmoid_binary_cross_entropy(logits, probabilities)
    return loss


def _is_right_side(logits: Array, labels: Array) -> jax.Array:
    """1.0 where the logit is above 0 for label 1, and is not for label 0, else 0.0: ``[batch]``."""
    return ((_checked_logits(logits, labels) > 0) == labels).astype(jnp.float32)


def _checked_logits(outputs: Any, labels: Array) -> jax.Array:
    """The logits ``[batch]``, of float32 or wider."""
    _check_labels("binary_classification", labels)
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
