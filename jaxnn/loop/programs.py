"""The compiled programs of a run: make a state, train K steps, evaluate a split. All compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.loop.feed import Feed
from jaxnn.optim import evaluation_params
from jaxnn.parallel import SINGLE_DEVICE, Layout
from jaxnn.steps import TrainStep, init_train_state, make_evaluate_step, make_train_step
from jaxnn.types import Array, Examples, Experiment, Metrics, PyTree, Source, TrainState

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


def make_step(experiment: Experiment[Any], axis_name: str | None = None) -> TrainStep:
    """One training step of ``experiment``, its task and optimizer made where this is called."""
    config = experiment.config
    return make_train_step(experiment.task(config), experiment.optimizer(config), axis_name=axis_name)


def make_init(experiment: Experiment[Any], source: Source) -> Callable[[Examples], TrainState]:
    """A pure function from one batch's examples to the state before the first step."""
    config = experiment.config

    def init(examples: Examples) -> TrainState:
        task, optimizer = experiment.task(config), experiment.optimizer(config)
        return init_train_state(task, optimizer, jax.random.key(config.seed), source.as_batch(examples))

    return init


def make_names(experiment: Experiment[Any], source: Source) -> Callable[[Examples], PyTree]:
    """A pure function from one batch's examples to parameters that still say which mesh axes they are split over."""
    config = experiment.config

    def init(examples: Examples) -> PyTree:
        return experiment.task(config).init(jax.random.key(config.seed), source.as_batch(examples))[0]

    return init


def make_train(
    experiment: Experiment[Any], source: Source, feed: Feed, num_steps: int, layout: Layout = SINGLE_DEVICE
) -> TrainProgram:
    """A pure function that trains ``num_steps`` steps, more than one in a ``lax.scan``."""
    config = experiment.config

    def train(state: TrainState, totals: Totals, examples: Examples) -> tuple[TrainState, Totals]:
        step = make_step(experiment, layout.axis_name)
        augment_key = jax.random.fold_in(jax.random.key(config.seed), AUGMENT_STREAM)

        def body(carry: tuple[TrainState, Totals], row: Any) -> tuple[tuple[TrainState, Totals], None]:
            state, totals = carry
            batch = layout.constrain(feed.batch(examples, row))
            batch = source.transform(batch, jax.random.fold_in(augment_key, state.step))
            state, metrics = step(state, layout.local_shard(layout.constrain(batch)))
            return (state, _add(totals, metrics, state.step)), None

        # All batches of the call are chosen at once: far cheaper than one by one inside the scan.
        rows = feed.rows(examples, config.seed, state.step + jnp.arange(num_steps))
        if num_steps == 1:
            # Not a scan of one: on a CPU, XLA makes convolutions' gradients fast only outside loops (jax#12868).
            return body((state, totals), jax.tree.map(lambda leaf: leaf[0], rows))[0]
        return jax.lax.scan(body, (state, totals), rows)[0]

    return layout.wrap(train)


def make_evaluate(
    experiment: Experiment[Any], source: Source, layout: Layout = SINGLE_DEVICE
) -> Callable[[TrainState, Examples, Any, jax.Array], Metrics]:
    """A pure function that evaluates batches under ``mask [batches, batch]``: sums ``[batches]`` each.

    They are ``indices [batches, batch]`` into the examples, or where these are None the examples themselves,
    ``[batches, batch, ...]``.
    """

    def evaluate(state: TrainState, examples: Examples, indices: Any, mask: jax.Array) -> Metrics:
        step = make_evaluate_step(experiment.task(experiment.config), axis_name=layout.axis_name)

        def body(_: None, row: tuple[Any, jax.Array]) -> tuple[None, Metrics]:
            which, counts = row
            batch = source.as_batch(which, counts) if indices is None else source.gather(examples, which, counts)
            return None, step(state, layout.local_shard(layout.constrain(batch)))

        return jax.lax.scan(body, None, (examples if indices is None else indices, mask))[1]

    return layout.wrap(evaluate)


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
