"""A model and a loss per example become a task; every supervised task is one call of this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxnn.nn import Policy, is_full, mean_over_batch_axis, rows_masked
from jaxnn.tasks.adapter import as_model
from jaxnn.tasks.data_checks import check_ids
from jaxnn.types import Array, Batch, ConfigError, Metrics, ModelState, Params, Task

type PerExample = Callable[[Array, Array], jax.Array]


def supervised(
    model: Any,
    objective: PerExample,
    measures: Mapping[str, PerExample],
    policy: Policy | None = None,
) -> Task:
    """A task that minimises the masked mean of ``objective``.

    Args:
        model: a Flax Linen module or an ``(init, apply)`` pair.
        objective: ``(outputs [batch, ...], targets [batch, ...]) -> [batch]``, what is minimised.
        measures: what is reported, each like ``objective``; ``evaluate`` returns their masked sums, and those not
            called ``loss`` are the metrics of a training step.
        policy: the precision to compute in.

    Token ids beyond the embeddings of a Linen model are refused before training; nothing is assumed of targets.
    """
    network = as_model(model, policy)

    def init(key: jax.Array, batch: Batch) -> tuple[Params, ModelState]:
        return network.init(key, batch.inputs)

    def apply(
        params: Params, model_state: ModelState, batch: Batch, key: jax.Array | None
    ) -> tuple[Any, Batch, ModelState]:
        batch = blank_padding(batch)
        with rows_masked(batch.mask):
            outputs, updated = network.apply(params, model_state, batch.inputs, key)
        return outputs, batch, updated

    def loss(
        params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[ModelState, Metrics]]:
        outputs, batch, updated = apply(params, model_state, batch, key)
        count = batch.mask.sum()
        if not is_full(batch.mask):
            # Devices that share a batch may hold different numbers of examples: then the means of their results, each
            # divided by the mean number, are those of the batch. A batch of padding alone changes nothing.
            count = mean_over_batch_axis(jnp.asarray(count))
            updated = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), updated, model_state)
            count = jnp.where(count > 0, count, 1.0)
        sums = {
            name: masked_sum(measure(outputs, batch.targets), batch.mask)
            for name, measure in measures.items()
            if name != "loss"
        }
        total = masked_sum(objective(outputs, batch.targets), batch.mask)
        return total / count, (updated, {name: value / count for name, value in sums.items()})

    def evaluate(params: Params, model_state: ModelState, batch: Batch) -> Metrics:
        outputs, batch, _ = apply(params, model_state, batch, None)
        sums = {name: masked_sum(measure(outputs, batch.targets), batch.mask) for name, measure in measures.items()}
        return {**sums, "count": jnp.sum(batch.mask)}

    def predict(params: Params, model_state: ModelState, inputs: Array) -> Any:
        return network.apply(params, model_state, inputs, None)[0]

    return Task(init, loss, evaluate, predict, check=check_ids(predict))


def blank_padding(batch: Batch) -> Batch:
    """The batch with zeros for padding, whatever it held: a NaN there would reach the gradient as ``0 * NaN``."""
    if is_full(batch.mask):
        return batch

    def blank(rows: Array) -> jax.Array:
        counts = (batch.mask > 0).reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.where(counts, rows, 0)

    return Batch(blank(batch.inputs), blank(batch.targets), batch.mask)


def masked_sum(values: jax.Array, mask: Array) -> jax.Array:
    """The sum of ``values [batch]`` where ``mask [batch]`` is 1; what padding gives, NaN too, does not count.

    Raises:
        ConfigError: ``values`` are shaped otherwise; broadcast, they would be counted more than once.
    """
    if jnp.shape(values) != mask.shape:
        raise ConfigError(
            f"an objective or a measure must give a number an example, [{len(mask)}], not {list(jnp.shape(values))}: "
            "take its mean over every axis but the first."
        )
    return jnp.sum(jnp.where(mask > 0, values, 0.0))
