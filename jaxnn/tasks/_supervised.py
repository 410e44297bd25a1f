"""A model and a loss per example become a task; every supervised task is one call of `supervised`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn._batch_context import is_full, mean_over_batch_axis, use_batch_mask
from jaxnn.nn import Policy
from jaxnn.tasks._contract import LossResult
from jaxnn.tasks._data_checks import check_data
from jaxnn.tasks._model_calls import ModelResult
from jaxnn.tasks._models import as_model
from jaxnn.types import Array, Batch, ConfigError, Direction, Metrics, ModelState, Params, PyTree, Task

type PerExample = Callable[[Any, Any], jax.Array]


def supervised(
    model: Any,
    objective: PerExample,
    measures: Mapping[str, PerExample],
    policy: Policy | None = None,
    directions: Mapping[str, Direction] | None = None,
) -> Task:
    """Returns a task that minimises the masked mean of ``objective``.

    Token ids beyond the embeddings of a Linen model are refused before training; targets may be anything.

    >>> huber = lambda outputs, targets: optax.huber_loss(outputs[:, 0], targets)
    >>> task = jn.tasks.supervised(jn.models.MLP((8, 1)), objective=huber, measures={"loss": huber})

    Args:
        model: of Flax Linen or NNX, Equinox, Haiku, a pytree or an ``(init, apply)`` pair: see `as_model`.
        objective: ``(outputs [batch, ...], targets [batch, ...]) -> [batch]``, to be minimised. Inputs and targets may
            be trees of arrays, and targets None. What a Linen module sows into ``losses`` is added to the mean, and is
            the metric ``sown_loss`` of a training step.
        measures: the metrics, each like ``objective``; ``evaluate`` returns their masked sums, and those not
            called ``loss`` are the metrics of a training step.
        policy: the precision to compute in.
        directions: ``"min"`` or ``"max"`` by the names of ``measures``, where less or more is better; see `Task`.
    """
    init, apply = as_model(model, policy)

    def sums_of(
        functions: Mapping[str, PerExample], params: Params, state: ModelState, batch: Batch, key: jax.Array | None
    ) -> tuple[dict[str, jax.Array], ModelResult]:
        if not is_full(batch.mask):
            # Padding is replaced by zeros: a NaN there would reach the gradient as ``0 * NaN``.
            inputs, targets = jax.tree.map(lambda rows: _where(batch.mask, rows), tuple(batch[:2]))
            batch = Batch(inputs, targets, batch.mask)
        with use_batch_mask(batch.mask):
            result = apply(params, state, batch.inputs, key)
        values = {name: function(result.outputs, batch.targets) for name, function in functions.items()}
        for shape in map(jnp.shape, values.values()):
            # Broadcast, they would be counted more than once.
            if shape != batch.mask.shape:
                raise ConfigError(
                    f"an objective or a measure must return a number an example, [{len(batch.mask)}], not "
                    f"{list(shape)}: take its mean over every axis but the first."
                )
        return {name: jnp.sum(_where(batch.mask, value)) for name, value in values.items()}, result

    def loss(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> LossResult:
        functions = {**measures, "loss": objective}
        sums, (_, updated, sown_loss) = sums_of(functions, params, model_state, batch, key)
        count = batch.mask.sum()
        if not is_full(batch.mask):
            # Devices that share a batch may hold different numbers of examples: then the means of their results, each
            # divided by the mean number, are those of the batch. A batch of padding alone changes nothing.
            count = mean_over_batch_axis(jnp.asarray(count))
            updated = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), updated, model_state)
            sown_loss = None if sown_loss is None else jnp.where(count > 0, sown_loss, 0.0)
            count = jnp.where(count > 0, count, 1.0)
        means = {name: total / count for name, total in sums.items()}
        value = means.pop("loss")
        if sown_loss is None:
            return value, (updated, means)
        return value + sown_loss, (updated, {**means, "sown_loss": sown_loss})

    def evaluate(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> Metrics:
        sums, _ = sums_of(measures, params, model_state, batch, None)
        return {**sums, "count": jnp.sum(batch.mask)}

    def predict(params: Params, model_state: ModelState, inputs: PyTree) -> Any:
        return apply(params, model_state, inputs, None).outputs

    def start(key: jax.Array, batch: Batch) -> tuple[Params, ModelState]:
        try:
            return init(key, batch.inputs)
        except Exception as error:
            if isinstance(batch.inputs, dict) and "'dict' object" in str(error):
                raise ConfigError(
                    f"the model takes no dict, and the inputs are one of {', '.join(batch.inputs)} ({error}): use a "
                    "model of dicts, such as jn.models.TableMLP for a table."
                ) from error
            if jax.tree.leaves(batch.inputs):
                raise
            raise ConfigError(
                "the model failed without inputs, and batches have none: give the experiment data."
            ) from error

    return Task(start, loss, evaluate, predict, check=check_data(predict), directions=directions or {})


def _where(mask: Array, rows: Array) -> jax.Array:
    """``rows [batch, ...]``, zeros where ``mask [batch]`` is 0."""
    return jnp.where((mask > 0).reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)


def regression(model: Any, *, policy: Policy | None = None) -> Task:
    """Trains ``model`` to predict numbers.

    Metrics are ``loss``, the squared error, and ``mean_absolute_error``, both means over a target's components
    and in the targets' units (squared for the loss). Evaluations add ``root_mean_squared_error``, the root of the loss.

    >>> task = jn.tasks.regression(jn.models.MLP((16, 1)))

    ``model`` outputs ``[batch, ...]`` shaped like the targets; ``[batch, 1]`` also fits targets ``[batch]``.
    ConfigError when traced, if the shapes differ. ``policy`` is the precision to compute in.
    """

    def mean(penalty: Callable[[jax.Array], jax.Array]) -> PerExample:
        def per_example(outputs: Array, targets: Array) -> jax.Array:
            # [batch, 1] - [batch] would broadcast to [batch, batch] and train on nonsense.
            outputs = outputs[..., 0] if outputs.shape == (*targets.shape, 1) else outputs
            if outputs.shape != targets.shape:
                raise ConfigError(
                    f"regression needs outputs shaped like the targets, not outputs {list(outputs.shape)} for targets "
                    f"{list(targets.shape)}: change the model's last layer."
                )
            errors = penalty(jnp.asarray(outputs - targets))
            return jnp.mean(errors.reshape(errors.shape[0], -1), axis=-1)

        return per_example

    squared = mean(jnp.square)
    task = supervised(model, squared, {"loss": squared, "mean_absolute_error": mean(jnp.abs)}, policy)
    return task._replace(derive_metrics=lambda means: {**means, "root_mean_squared_error": np.sqrt(means["loss"])})
