"""One update and one evaluation, as pure functions that name no device and know no loop."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxnn.optim import evaluation_params
from jaxnn.optim.lazy import LazyTransformation
from jaxnn.optim.row_gradients import value_and_row_gradient
from jaxnn.optim.rows import apply_updates
from jaxnn.types import Batch, Metrics, Params, Task, TrainState

type TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
type EvaluateStep = Callable[[TrainState, Batch], Metrics]


def init_train_state(task: Task, optimizer: optax.GradientTransformation, key: jax.Array, batch: Batch) -> TrainState:
    """The state before the first step; pure, so it may be compiled, mapped over keys, or born sharded.

    Args:
        task: what is trained.
        optimizer: any Optax optimizer.
        key: ``[]`` a typed PRNG key, ``jax.random.key(seed)``.
        batch: one batch; its shapes and dtypes decide the parameters'.
    """
    init_key, step_key = jax.random.split(key)
    params, model_state = task.init(init_key, batch)
    return TrainState(jnp.int32(0), params, model_state, optimizer.init(params), step_key)


def make_train_step(task: Task, optimizer: optax.GradientTransformation) -> TrainStep:
    """A pure ``step(state, batch) -> (state, metrics)``, shaped for ``jax.lax.scan``.

    ``metrics`` holds the ``loss`` that was minimised and the task's own. Optimizers that ask for more than
    gradients, such as ``optax.lbfgs`` or ``reduce_on_plateau``, get ``value``, ``grad`` and ``value_fn``. The tables of
    ``optim.lazy`` get their gradients by rows, and an update touches no other row of them.

    Raises:
        ConfigError: when traced, a table of ``optim.lazy`` of which the loss does more than look rows up.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    if isinstance(optimizer, LazyTransformation):
        loss_and_gradient = value_and_row_gradient(task.loss, optimizer.is_table)
    else:
        loss_and_gradient = jax.value_and_grad(task.loss, has_aux=True)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _check_batch(batch)
        key = jax.random.fold_in(state.key, state.step)

        def value_fn(params: Params) -> jax.Array:
            return task.loss(params, state.model_state, batch, key)[0]

        (loss, (model_state, metrics)), gradient = loss_and_gradient(state.params, state.model_state, batch, key)
        updates, opt_state = optimizer.update(
            gradient, state.opt_state, state.params, value=loss, grad=gradient, value_fn=value_fn
        )
        params = apply_updates(state.params, updates)
        state = TrainState(state.step + 1, params, model_state, opt_state, state.key)
        return state, {"loss": loss, **metrics}

    return step


def make_evaluate_step(task: Task) -> EvaluateStep:
    """A pure ``evaluate(state, batch) -> sums``; averaged parameters are used where the optimizer keeps them."""

    def evaluate(state: TrainState, batch: Batch) -> Metrics:
        _check_batch(batch)
        params = evaluation_params(state.params, state.opt_state)
        return task.evaluate(params, state.model_state, batch)

    return evaluate


def _check_batch(batch: Batch) -> None:
    import chex  # traced code only: a user who never traces need not wait for the import

    chex.assert_rank(batch.mask, 1)
    chex.assert_equal_shape_prefix([batch.inputs, batch.targets, batch.mask], prefix_len=1)
