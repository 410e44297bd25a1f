"""Language modelling: cross-entropy of each next token, counted by the token."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.nn import Policy, cross_entropy, mean_over_batch_axis, widened
from jaxnn.tasks._contract import LossResult
from jaxnn.tasks._data_checks import check_data, check_targets, last_axis
from jaxnn.tasks._supervised import supervised
from jaxnn.types import Array, Batch, ConfigError, Metrics, ModelState, Params, Task


def next_token(model: Any, *, ignore: int = -1, policy: Policy | None = None) -> Task:
    """Trains ``model`` to predict, at each position of a sequence, the token that comes next.

    Metrics are means over tokens: ``loss``, the cross-entropy in nats, ``bits_per_token``, the same in bits (of a
    model of characters: bits per character), and ``accuracy``, the share of tokens that had the largest logit. Of an
    evaluated split there is the ``perplexity`` too, ``exp(loss)`` of its mean loss; it is no mean of batches.

    Args:
        model: outputs logits ``[batch, time, vocabulary]`` for targets ``[batch, time]`` of integers.
        ignore: a target that does not count, such as what pads a sequence.
        policy: the precision to compute in.

    Raises:
        ConfigError: when traced, outputs and targets that do not fit together.
    """

    def nats(logits: Array, targets: Array) -> jax.Array:
        targets = _checked(logits, targets)
        counts = targets != ignore
        each = cross_entropy(jnp.asarray(logits), jnp.where(counts, targets, 0))
        return jnp.sum(jnp.where(counts, each, 0), axis=1)

    def correct(logits: Array, targets: Array) -> jax.Array:
        targets = _checked(logits, targets)
        right = (jnp.argmax(logits, axis=-1) == targets) & (targets != ignore)
        return jnp.sum(right, axis=1).astype(jnp.float32)

    def count(logits: Array, targets: Array) -> jax.Array:
        return jnp.sum(_checked(logits, targets) != ignore, axis=1).astype(jnp.float32)

    measures = {"loss": nats, "accuracy": correct, "tokens": count}
    task = _per_token(supervised(model, nats, measures, policy))
    return task._replace(check=check_data(task.predict, last_axis, ignore))


def _per_token(task: Task) -> Task:
    """``task``, whose measures are sums over an example's tokens and their number ``tokens``, by the token."""

    def loss(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> LossResult:
        total, (model_state, totals) = task.loss(params, model_state, batch, key)
        # Devices that share a batch hold different numbers of tokens: divided by their mean, the mean of the devices'
        # results is that of the batch.
        tokens = mean_over_batch_axis(totals["tokens"])
        tokens = jnp.where(tokens > 0, tokens, 1)
        loss = total / tokens
        return loss, (model_state, {"bits_per_token": loss / math.log(2), "accuracy": totals["accuracy"] / tokens})

    def evaluate(params: Params, model_state: ModelState, batch: Batch) -> Metrics:
        sums = task.evaluate(params, model_state, batch)
        bits = sums["loss"] / math.log(2)
        return {"loss": sums["loss"], "bits_per_token": bits, "accuracy": sums["accuracy"], "count": sums["tokens"]}

    def finish(means: dict[str, Any]) -> dict[str, Any]:
        return {**means, "perplexity": np.exp(means["loss"])}

    return task._replace(loss=loss, evaluate=evaluate, finish=finish)


def _checked(logits: Array, targets: Array) -> jax.Array:
    """The targets, as int32 or wider."""
    advice = "pass the inputs shifted by one token, or use tasks.classification"
    check_targets("next_token", targets, "[batch, time]", advice)
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        raise ConfigError(
            f"next_token needs a model whose outputs are logits [batch, time, vocabulary], not {list(logits.shape)} "
            f"for targets {list(targets.shape)}."
        )
    return widened(jnp.asarray(targets))
