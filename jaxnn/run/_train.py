"""Training a model on arrays without an experiment: ``train``."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jaxnn import data as sources
from jaxnn import tasks
from jaxnn.engine import RunOptions, check_config
from jaxnn.run._fit import fit
from jaxnn.run._run import Run
from jaxnn.types import ENDLESS, ConfigError, Experiment, Splits, Task, nearest


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What ``train`` computes, besides the model and the optimizer it is given."""

    batch_size: int
    num_steps: int
    seed: int


def train(
    model: Any,
    optimizer: optax.GradientTransformation,
    data: Splits | Any,
    *,
    num_epochs: float | None = None,
    num_steps: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    options: RunOptions | None = None,
    **changes: Any,
) -> Run:
    """Trains ``model`` without a config class.

    >>> run = jn.train(jn.models.MLP((8, 10)), optax.adam(1e-2), jn.data.digits(), num_steps=20, record=False,
    ...                progress="none", steps_per_call=5)
    >>> run.summary.step
    20

    Args:
        model: a model that `tasks.as_model` takes, or a ``Task``. A model is trained to classify if the
            targets are integers ``[examples]``, and to regress if they are floats, but not one-hot rows.
        optimizer: any Optax optimizer.
        data: ``Splits``, or what `jaxnn.data.arrays` takes as ``train``, such as a pair ``(inputs, targets)``.
        num_epochs: passes over the training data; 10 if neither this nor ``num_steps`` is given.
        num_steps: number of updates, instead of epochs.
        batch_size: examples per step.
        seed: determines initial parameters, data order and dropout.
        options: how to run, as for ``fit``.
        **changes: single run options, as for ``fit``.

    Raises:
        As ``fit``; ConfigError: both ``num_epochs`` and ``num_steps`` are given, or no positive number of epochs.
    """
    options = RunOptions() if options is None else options
    for name in changes:
        if not hasattr(options, name) and (meant := nearest(name, ("num_epochs", "batch_size", "seed"))) is not None:
            raise ConfigError(f"train has no argument {name!r}: did you mean {meant!r}?")
    splits = data if isinstance(data, Splits) else sources.arrays(train=data)
    if num_epochs is not None and num_steps is not None:
        raise ConfigError("both num_epochs and num_steps are given: give one of them.")
    check_config(TrainConfig(batch_size, 1, seed))
    if num_steps is None and splits.train.num_examples == ENDLESS:
        raise ConfigError("the training data have no end, so epochs have none either: give num_steps.")
    if num_steps is None:
        epochs = 10.0 if num_epochs is None else num_epochs
        if not isinstance(epochs, numbers.Real) or not 0 < epochs < math.inf:
            raise ConfigError(f"num_epochs is {epochs!r}, and must be a number above 0.")
        num_steps = max(1, round(epochs * sources.steps_per_epoch(splits.train.num_examples, batch_size)))
    task = model if isinstance(model, Task) else _task_for(model, splits)
    experiment = Experiment(
        TrainConfig(batch_size, num_steps, seed),
        data=lambda config: splits,
        task=lambda config: task,
        optimizer=lambda config: optimizer,
    )
    return fit(experiment, options, **changes)


def _task_for(model: Any, splits: Splits) -> Task:
    targets = splits.train.targets
    if not hasattr(targets, "dtype"):
        raise ConfigError("the targets are not one array, so the task is unknown: give one in place of the model.")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        rows = np.asarray(targets)
        if rows.ndim == 2 and rows.shape[1] > 1 and np.isin(rows, (0, 1)).all() and (rows.sum(axis=1) == 1).all():
            raise ConfigError(
                f"the targets {list(targets.shape)} are one-hot rows of floats: pass targets.argmax(axis=-1) to "
                "classify, or jn.tasks.regression(model) in place of the model to regress."
            )
        return tasks.regression(model)
    if targets.ndim != 1:
        raise ConfigError(
            f"integer targets {list(targets.shape)} are no labels [examples]: flatten them, give floats to regress, or "
            "give a task in place of the model."
        )
    return tasks.classification(model)
