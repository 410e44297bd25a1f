"""Losses and metrics of a task as numbers, of a model whose outputs are its inputs times a parameter of 1."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.types import Batch, Task

KEY = jax.random.key(0)
# What a test feeds in is what the loss sees.
SCALE = (lambda key, inputs: {"scale": jnp.ones(())}, lambda params, inputs: inputs * params["scale"])


def batch_of(inputs: Any, targets: Any, mask: Any = None) -> Batch:
    inputs = np.asarray(inputs, np.float32)
    return Batch(inputs, np.asarray(targets), np.asarray([1.0] * len(inputs) if mask is None else mask, np.float32))


def loss_of(task: Task, batch: Batch) -> dict[str, float]:
    """The training loss and the metrics beside it."""
    loss, (_, metrics) = task.loss(*task.init(KEY, batch), batch, KEY)
    return {name: float(value) for name, value in {"loss": loss, **metrics}.items()}


def sums_of(task: Task, batch: Batch) -> dict[str, float]:
    return {name: float(value) for name, value in task.evaluate(*task.init(KEY, batch), batch).items()}


def gradient_of(task: Task, batch: Batch) -> Any:
    params, model_state = task.init(KEY, batch)
    return jax.grad(lambda params: task.loss(params, model_state, batch, KEY)[0])(params)
