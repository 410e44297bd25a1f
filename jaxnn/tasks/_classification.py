"""Cross-entropy against integers, with accuracy: labels of many classes, of two by one logit, and next tokens."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxnn._batch_context import mean_over_batch_axis
from jaxnn.nn import Policy, at_least_int32, cross_entropy
from jaxnn.tasks._contract import LossResult
from jaxnn.tasks._data_checks import check_data, check_targets, last_axis
from jaxnn.tasks._supervised import supervised
from jaxnn.types import Array, Batch, ConfigError, Metrics, ModelState, Params, Task

_OTHER_TARGETS = "pass one label an example, of one-hot rows their argmax(axis=-1), or use tasks.regression"


def classification(
    model: Any,
    *,
    label_smoothing: float | jax.Array = 0.0,
    auxiliary_weight: float | jax.Array | None = None,
    policy: Policy | None = None,
) -> Task:
    """Trains ``model`` to classify.

    Metrics are ``loss``, the cross-entropy in nats, and ``accuracy``, a fraction. The training loss is smoothed and
    has the auxiliary terms, the evaluated one does not, so that runs with different smoothing compare.

    A model may have auxiliary outputs (Szegedy et al. 2015, "Going Deeper with Convolutions"): in training it then
    returns a tuple of the logits and one or more auxiliary logits, in evaluation the logits alone, as torchvision's do.

    >>> task = jn.tasks.classification(jn.models.MLP((8, 10)), label_smoothing=0.1)

    Args:
        model: outputs logits ``[batch, classes]`` for targets ``[batch]`` of integers, or probabilities ``[batch,
            classes]``, as of `data.mixup` or of a teacher, whose largest counts for the accuracy.
        label_smoothing: the share of a target distributed evenly over all classes (Szegedy et al. 2016,
            "Rethinking the Inception Architecture"), 0 to below 1; may be a tracer.
        auxiliary_weight: the weight of the cross-entropy of each auxiliary output in the training loss, at least 0;
            may be a tracer; None: the model has no such outputs.
        policy: the precision to compute in.

    Raises:
        ConfigError: a smoothing outside 0…1, a negative weight, or when traced, outputs and targets that do not fit
            together. When a run starts, DataError: labels that are no class of the model.
    """
    _check_label_smoothing(label_smoothing)
    if not isinstance(auxiliary_weight, jax.core.Tracer | None) and not auxiliary_weight >= 0:
        raise ConfigError(f"auxiliary_weight is {auxiliary_weight}, and must be at least 0, or None.")

    def nats(logits: Any, labels: Array, smoothing: float | jax.Array = 0.0) -> jax.Array:
        logits, labels = _checked_logits(logits, labels)
        if labels.ndim == 2:
            soft = (1 - smoothing) * labels + smoothing / labels.shape[1]
            loss: jax.Array = optax.softmax_cross_entropy(logits.astype(soft.dtype), soft)
            return loss
        return cross_entropy(logits, labels, smoothing)

    def objective(outputs: Any, labels: Array) -> jax.Array:
        if auxiliary_weight is None:
            return nats(outputs, labels, label_smoothing)
        if not isinstance(outputs, tuple) or len(outputs) < 2:
            raise ConfigError(
                "classification with auxiliary_weight needs a model that in training returns a tuple, the logits and "
                "the auxiliary logits: let it return them, or leave auxiliary_weight out."
            )
        main, *auxiliary = (nats(logits, labels, label_smoothing) for logits in outputs)
        return main + auxiliary_weight * sum(auxiliary)

    def loss(outputs: Any, labels: Array) -> jax.Array:
        return nats(_main(outputs), labels)

    def accuracy(outputs: Any, labels: Array) -> jax.Array:
        logits, labels = _checked_logits(_main(outputs), labels)
        labels = jnp.argmax(labels, axis=-1) if labels.ndim == 2 else labels
        return (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)

    task = supervised(model, objective, {"loss": loss, "accuracy": accuracy}, policy)
    return task._replace(check=check_data(task.predict, last_axis))


def _main(outputs: Any) -> Any:
    """The logits, with or without auxiliary ones beside them."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _check_label_smoothing(label_smoothing: Any) -> None:
    if not isinstance(label_smoothing, jax.core.Tracer) and not 0 <= label_smoothing < 1:
        raise ConfigError(f"label_smoothing is {label_smoothing}, and must be at least 0 and below 1.")


def _checked_logits(logits: Any, labels: Array) -> tuple[jax.Array, jax.Array]:
    """Checks that there are logits ``[batch, classes]``, and labels ``[batch]`` or probabilities; returns them."""
    wanted = "classification needs a model whose outputs are logits [batch, classes], not"
    if isinstance(logits, tuple):
        raise ConfigError(
            f"{wanted} a tuple of {len(logits)}: give auxiliary_weight if those after the first are auxiliary logits."
        )
    soft = getattr(labels, "shape", None) == logits.shape and jnp.issubdtype(labels.dtype, jnp.floating)
    if getattr(labels, "ndim", 0) == 2 and jnp.issubdtype(labels.dtype, jnp.floating) and not soft:
        raise ConfigError(
            f"classification got probabilities of {labels.shape[1]} classes, as of mixup(num_classes), for outputs "
            f"{list(logits.shape)}: give both the same number of classes, or use tasks.regression."
        )
    if not soft:
        check_targets("classification", labels, "[batch]", _OTHER_TARGETS)
    if logits.ndim != 2 or logits.shape[0] != labels.shape[0]:
        raise ConfigError(f"{wanted} {list(logits.shape)} for {labels.shape[0]} labels.")
    if logits.shape[1] == 1:
        raise ConfigError(
            f"classification needs a logit for each class, and the model has one, {list(logits.shape)}: give it more, "
            "or use tasks.binary_classification; to regress, use tasks.regression."
        )
    return jnp.asarray(logits), jnp.asarray(labels)


def binary_classification(
    model: Any, *, label_smoothing: float | jax.Array = 0.0, policy: Policy | None = None
) -> Task:
    """Trains ``model`` to classify two classes by one logit: in Keras a sigmoid and binary cross-entropy.

    The logit is that of class 1: its sigmoid is the probability of 1, and above 0 it predicts 1; ``predict`` returns
    it, ``[batch]``. Metrics are ``loss``, the cross-entropy in nats, and ``accuracy``, a fraction. The training loss is
    smoothed, the evaluated one is not, so that runs with different smoothing compare.

    >>> spam_or_not = jn.tasks.binary_classification(jn.models.MLP((8, 1)))

    Args:
        model: outputs one logit, ``[batch, 1]`` or ``[batch]``, for targets ``[batch]`` of 0 and 1; for other
            targets the loss is NaN, and a run is refused.
        label_smoothing: the share of a target distributed evenly over both classes, 0 to below 1; may be a tracer.
        policy: the precision to compute in.

    Raises:
        ConfigError: a smoothing outside 0…1, or when traced, outputs and targets that do not fit together.
    """
    _check_label_smoothing(label_smoothing)

    def checked(outputs: Any, labels: Array) -> jax.Array:
        """The logits ``[batch]``, of float32 or wider."""
        check_targets("binary_classification", labels, "[batch]", _OTHER_TARGETS)
        logits = _one_logit(outputs)
        if logits.shape != labels.shape:
            wrong = f"not {list(outputs.shape)} for {len(labels)} labels"
            raise ConfigError(f"binary_classification needs a logit for each label, {wrong}.")
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def nats(outputs: Any, labels: Array, smoothing: float | jax.Array = 0.0) -> jax.Array:
        logits = checked(outputs, labels)
        labels = jnp.where((labels == 0) | (labels == 1), labels, jnp.nan)
        loss: jax.Array = optax.sigmoid_binary_cross_entropy(logits, (1 - smoothing) * labels + smoothing / 2)
        return loss

    def accuracy(outputs: Any, labels: Array) -> jax.Array:
        return ((checked(outputs, labels) > 0) == labels).astype(jnp.float32)

    objective = partial(nats, smoothing=label_smoothing)
    task = supervised(model, objective, {"loss": nats, "accuracy": accuracy}, policy)

    def predict(params: Params, model_state: ModelState, inputs: Array) -> jax.Array:
        return _one_logit(task.predict(params, model_state, inputs))

    advice = " in binary_classification: renumber the labels, or use classification."
    return task._replace(predict=predict, check=check_data(predict, lambda outputs: (2, advice)))


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


def next_token(model: Any, *, ignore: int = -1, policy: Policy | None = None) -> Task:
    """Trains ``model`` to predict, at each position of a sequence, the token that comes next.

    Metrics are means over tokens: ``loss``, the cross-entropy in nats, ``bits_per_token``, the same in bits (of a
    model of characters: bits per character), and ``accuracy``, the share of tokens that had the largest logit. An
    evaluation adds the ``perplexity``, ``exp(loss)`` of the mean loss of the split.

    >>> task = jn.tasks.next_token(jn.models.GPT(65, num_layers=2, features=32, num_heads=2))
    >>> task.derive_metrics({"loss": np.log(2)})["perplexity"]
    np.float64(2.0)

    Args:
        model: outputs logits ``[batch, time, vocabulary]`` for targets ``[batch, time]`` of integers.
        ignore: a target that does not count, such as the padding of a sequence.
        policy: the precision to compute in.

    Raises:
        ConfigError: when traced, outputs and targets that do not fit together.
    """

    def checked(logits: Array, targets: Array) -> jax.Array:
        """The targets, as int32 or wider."""
        advice = "pass the inputs shifted by one token, or use tasks.classification"
        check_targets("next_token", targets, "[batch, time]", advice)
        if logits.ndim != 3 or logits.shape[:2] != targets.shape:
            raise ConfigError(
                "next_token needs a model whose outputs are logits [batch, time, vocabulary], not "
                f"{list(logits.shape)} for targets {list(targets.shape)}."
            )
        return at_least_int32(jnp.asarray(targets))

    def nats(logits: Array, targets: Array) -> jax.Array:
        targets = checked(logits, targets)
        counts = targets != ignore
        each = cross_entropy(jnp.asarray(logits), jnp.where(counts, targets, 0))
        return jnp.sum(jnp.where(counts, each, 0), axis=1)

    def correct(logits: Array, targets: Array) -> jax.Array:
        targets = checked(logits, targets)
        right = (jnp.argmax(logits, axis=-1) == targets) & (targets != ignore)
        return jnp.sum(right, axis=1).astype(jnp.float32)

    def count(logits: Array, targets: Array) -> jax.Array:
        return jnp.sum(checked(logits, targets) != ignore, axis=1).astype(jnp.float32)

    # Measures of an example are sums over its tokens.
    task = supervised(model, nats, {"loss": nats, "accuracy": correct, "tokens": count}, policy)

    def loss(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> LossResult:
        total, (model_state, totals) = task.loss(params, model_state, batch, key)
        # Devices that share a batch hold different numbers of tokens: divided by their mean, the mean of the devices'
        # results is that of the batch.
        tokens = mean_over_batch_axis(totals["tokens"])
        tokens = jnp.where(tokens > 0, tokens, 1)
        # What layers sow is no sum over tokens.
        sown = {name: value for name, value in totals.items() if name == "sown_loss"}
        nats_per_token = (total - sum(sown.values())) / tokens
        bits, accuracy = nats_per_token / math.log(2), totals["accuracy"] / tokens
        metrics = {"bits_per_token": bits, "accuracy": accuracy, **sown}
        return nats_per_token + sum(sown.values()), (model_state, metrics)

    def evaluate(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> Metrics:
        sums = task.evaluate(params, model_state, batch, key)
        bits = sums["loss"] / math.log(2)
        return {"loss": sums["loss"], "bits_per_token": bits, "accuracy": sums["accuracy"], "count": sums["tokens"]}

    def derive_metrics(means: dict[str, Any]) -> dict[str, Any]:
        return {**means, "perplexity": np.exp(means["loss"])}

    check = check_data(task.predict, last_axis, ignore)
    return task._replace(loss=loss, evaluate=evaluate, derive_metrics=derive_metrics, check=check)
