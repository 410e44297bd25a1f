"""The compiled programs of a run: make a state, train K steps, evaluate a split. All compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.loop.feed import Feed
from jaxnn.optim import evaluation_params
from jaxnn.steps import TrainStep, init_train_state, make_evaluate_step, make_train_step
from jaxnn.types import Array, Examples, Experiment, Metrics, Source, TrainState

# Keeps the draws for augmentation apart from those for initialisation and dropout.
AUGMENT_STREAM = 1


class Totals(NamedTuple):
    """What a window adds up on the device.

    Attributes:
        sums: for each metric, the sum over the window's steps; ``[]`` float32.
        bad_step: the first step after which the loss was not finite, or -1; ``[]`` int32.
    """

    sums: Mapping[str, Array]
    bad_step: Array | np.int32


type TrainProgram = Callable[[TrainState, Totals, Examples], tuple[TrainState, Totals]]


def make_step(experiment: Experiment[Any]) -> TrainStep:
    """One training step of ``experiment``, its task and optimizer made where this is called."""
    config = experiment.config
    return make_train_step(experiment.task(config), experiment.optimizer(config))


def make_init(experiment: Experiment[Any], source: Source) -> Callable[[Examples], TrainState]:
    """A pure function from one batch's examples to the state before the first step."""
    config = experiment.config

    def init(examples: Examples) -> TrainState:
        task, optimizer = experiment.task(config), experiment.optimizer(config)
        batch = source.gather(examples, jnp.arange(config.batch_size))
        return init_train_state(task, optimizer, jax.random.key(config.seed), batch)

    return init


def make_train(experiment: Experiment[Any], source: Source, feed: Feed, num_steps: int) -> TrainProgram:
    """A pure function that trains ``num_steps`` steps, more than one in a ``lax.scan``."""
    config = experiment.config

    def train(state: TrainState, totals: Totals, examples: Examples) -> tuple[TrainState, Totals]:
        step = make_step(experiment)
        augment_key = jax.random.fold_in(jax.random.key(config.seed), AUGMENT_STREAM)

        def body(carry: tuple[TrainState, Totals], indices: Any) -> tuple[tuple[TrainState, Totals], None]:
            state, totals = carry
            batch = source.gather(examples, indices)
            batch = source.transform(batch, jax.random.fold_in(augment_key, state.step))
            state, metrics = step(state, batch)
            return (state, _add(totals, metrics, state.step)), None

        # All batches of the call are chosen at once: far cheaper than one by one inside the scan.
        indices = feed.indices(config.seed, state.step + jnp.arange(num_steps))
        if num_steps == 1:
            # Not a scan of one: on a CPU, XLA makes convolutions' gradients fast only outside loops (jax#12868).
            return body((state, totals), indices[0])[0]
        return jax.lax.scan(body, (state, totals), indices)[0]

    return train


def make_evaluate(
    experiment: Experiment[Any], source: Source
) -> Callable[[TrainState, Examples, jax.Array, jax.Array], Metrics]:
    """A pure function that evaluates ``indices [batches, batch]`` under ``mask``: sums ``[batches]`` each."""

    def evaluate(state: TrainState, examples: Examples, indices: jax.Array, mask: jax.Array) -> Metrics:
        step = make_evaluate_step(experiment.task(experiment.config))

        def body(_: None, rows: tuple[jax.Array, jax.Array]) -> tuple[None, Metrics]:
            return None, step(state, source.gather(examples, *rows))

        return jax.lax.scan(body, None, (indices, mask))[1]

    return evaluate


def make_predict(experiment: Experiment[Any], source: Source) -> Callable[[TrainState, Any], Any]:
    """A pure function from ``inputs [batch, ...]``, as the data set holds them, to the model's outputs."""

    def predict(state: TrainState, inputs: Any) -> Any:
        task = experiment.task(experiment.config)
        rows = jnp.arange(inputs.shape[0])
        batch = source.gather(Examples(inputs, rows), rows)
        params = evaluation_params(state.params, state.opt_state)
        return task.predict(params, state.model_state, batch.inputs)

    return predict


def _add(totals: Totals, metrics: Metrics, step: jax.Array) -> Totals:
    sums = {name: totals.sums[name] + value.astype(jnp.float32) for name, value in metrics.items()}
    is_bad = (totals.bad_step < 0) & ~jnp.isfinite(metrics["loss"])
    return Totals(sums, jnp.where(is_bad, step, totals.bad_step))
