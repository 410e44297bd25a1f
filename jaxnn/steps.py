"""One update and one evaluation, as pure functions that name no device, no strategy and no loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from jaxnn.optim import LossScaleState, evaluation_state, init_state, step_norms, update_params
from jaxnn.tasks import checked
from jaxnn.types import Array, Batch, ConfigError, Metrics, Params, PyTree, Task, TrainState, TrainStep, path_name

__all__ = ["init_train_state", "make_evaluate_step", "make_predict_step", "make_scaled_train_step", "make_train_step"]

type Optimizer = optax.GradientTransformation | Mapping[str, optax.GradientTransformation]


def init_train_state(
    task: Task, optimizer: Optimizer, key: jax.Array, batch: Batch, given: Mapping[str, Array] | None = None
) -> TrainState:
    """Returns the state before the first step; pure, so it may be compiled, mapped over keys, or created sharded.

    ``optimizer`` is any Optax optimizer, or a dict of them by top-level names of the parameters; ``key`` is a typed
    PRNG key ``[]``, such as ``jax.random.key(seed)``, and ``batch`` one batch, whose shapes and dtypes decide those of
    the parameters. ``given`` are arrays to take in place of drawn ones, by path, such as ``params/Dense_0/kernel``. The
    state holds plain arrays, also if the model names the axes of its parameters (`nn.partitioned`). ConfigError if the
    task's ``init`` does not return what `Task.init` must.

    >>> task, optimizer = jn.tasks.classification(jn.models.MLP((8, 10))), optax.adam(1e-3)
    >>> state = jn.steps.init_train_state(task, optimizer, jax.random.key(0), batch)
    >>> int(state.step), state.params["Dense_1"]["kernel"].shape
    (0, (8, 10))
    """
    init_key, step_key = jax.random.split(key)
    params, model_state = linen.unbox(checked(task).init(init_key, batch))

    def take(path: Any, leaf: jax.Array) -> jax.Array:
        name = path_name(path)
        return jnp.asarray(given[name], leaf.dtype) if given and name in given else leaf

    parts = jax.tree.map_with_path(take, {"params": params, "model_state": model_state})
    params, model_state = parts["params"], parts["model_state"]
    opt_state = init_state(optimizer, params, model_state)
    return TrainState(jnp.int32(0), params, model_state, opt_state, step_key)


def make_train_step(
    task: Task, optimizer: Optimizer, *, value_and_grad: Callable[..., Any] = jax.value_and_grad
) -> TrainStep:
    """Returns a pure ``step(state, batch) -> (state, metrics)`` with the shape of ``jax.lax.scan``.

    ``metrics`` holds the minimised ``loss``, the task's own metrics and the norms of ``optim.with_norms``. Optimizers
    that ask for more than gradients, such as ``optax.lbfgs`` or ``reduce_on_plateau``, get ``value``, ``grad`` and
    ``value_fn``. If each device computes with its own rows of the batch, as under ``jax.pmap``, wrap the task:
    ``tasks.averaged_over(task, axis_name)``.
    ``value_and_grad`` replaces ``jax.value_and_grad``: ``optim.value_and_grad_of(optimizer)`` computes the gradients
    of the tables of ``optim.sparse_rows`` by rows.

    Raises:
        ConfigError: when traced, a loss that does not return what `Task.loss` must.

    >>> task, optimizer = jn.tasks.classification(jn.models.MLP((8, 10))), optax.adam(1e-3)
    >>> state = jn.steps.init_train_state(task, optimizer, jax.random.key(0), batch)
    >>> step = jax.jit(jn.steps.make_train_step(task, optimizer), donate_argnums=0)
    >>> state, metrics = step(state, batch)
    >>> sorted(metrics)
    ['accuracy', 'loss']
    """
    task = checked(task)
    apply = update_params(optimizer)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if value_and_grad is jax.value_and_grad and isinstance(state.opt_state, LossScaleState):
            raise ConfigError("with_loss_scale needs the step jn.steps.make_scaled_train_step, which scales the loss.")
        key = jax.random.fold_in(state.key, state.step)

        def value_fn(params: Params) -> jax.Array:
            return task.loss(params, state.model_state, batch, key)[0]

        loss_and_gradient = value_and_grad(task.loss, has_aux=True)
        (loss, (model_state, metrics)), gradient = loss_and_gradient(state.params, state.model_state, batch, key)
        extra = {"value": loss, "grad": gradient, "value_fn": value_fn}
        params, opt_state = apply(gradient, state.opt_state, state.params, model_state, **extra)
        metrics = {"loss": loss, **metrics, **step_norms(opt_state)}
        return TrainState(state.step + 1, params, model_state, opt_state, state.key), metrics

    return step


def make_scaled_train_step(task: Task, optimizer: Optimizer) -> TrainStep:
    """Returns a training step that scales the loss, so that small gradients in float16 do not vanish.

    ``optimizer`` is one by `jaxnn.optim.with_loss_scale`, else ConfigError when traced. The metric ``loss_scale`` is
    added; the others are not scaled, and the norms of ``optim.with_norms`` are NaN in a step whose update is skipped.

    >>> policy = jn.nn.Policy(compute="float16")
    >>> experiment = jn.Experiment(
    ...     experiment.config,
    ...     data=lambda config: jn.data.digits(),
    ...     task=lambda config: jn.tasks.classification(jn.models.MLP((32, 10)), policy=policy),
    ...     optimizer=lambda config: jn.optim.with_loss_scale(optax.adam(1e-2)),
    ...     step=jn.steps.make_scaled_train_step,
    ... )
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if not isinstance(state.opt_state, LossScaleState):
            raise ConfigError("make_scaled_train_step needs as optimizer jn.optim.with_loss_scale(optimizer).")
        scale = state.opt_state.scale

        def value_and_grad(loss: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
            def scaled(*arguments: Any) -> Any:
                value, aux = loss(*arguments)
                return value * scale, (value, aux)

            gradient_of = jax.grad(scaled, has_aux=has_aux)
            return lambda *arguments: gradient_of(*arguments)[::-1]

        state, metrics = make_train_step(task, optimizer, value_and_grad=value_and_grad)(state, batch)
        # A skipped update keeps the norms of the one before, or the zeros of the start.
        skipped = state.opt_state.scale < scale
        norms = {name: jnp.where(skipped, jnp.nan, norm) for name, norm in step_norms(state.opt_state).items()}
        return state, {**metrics, **norms, "loss_scale": scale}

    return step


def make_evaluate_step(task: Task) -> Callable[..., Metrics]:
    """Returns a pure ``evaluate(state, batch, key) -> sums``; it uses averages if the optimizer keeps them.

    The key, for losses that are sampled, is by default that of the state.

    Raises:
        ConfigError: when traced, an evaluation that does not return what `Task.evaluate` must.

    >>> evaluate = jn.steps.make_evaluate_step(jn.tasks.classification(jn.models.MLP((8, 10))))
    >>> sums = evaluate(run.state, batch)
    >>> float(sums["count"])  # accuracy is sums["accuracy"] / sums["count"]
    32.0
    """
    task = checked(task)

    def evaluate(state: TrainState, batch: Batch, key: jax.Array | None = None) -> Metrics:
        used = evaluation_state(state)
        return task.evaluate(used.params, used.model_state, batch, state.key if key is None else key)

    return evaluate


def make_predict_step(task: Task) -> Callable[[TrainState, PyTree], Any]:
    """Returns a pure ``predict(state, inputs [batch, ...]) -> outputs``, with the parameters that are evaluated.

    >>> predict = jn.steps.make_predict_step(jn.tasks.classification(jn.models.MLP((8, 10))))
    >>> predict(run.state, batch.inputs).shape
    (32, 10)
    """

    def predict(state: TrainState, inputs: PyTree) -> Any:
        used = evaluation_state(state)
        return task.predict(used.params, used.model_state, inputs)

    return predict


class Totals(NamedTuple):
    """Sums over the steps of a window, kept on the device."""

    sums: dict[str, Array]  # for each metric, the sum over the steps; ``[]`` float32
    excess: dict[str, Array]  # what rounding added to it, as far as float32 shows: millions of steps would drift else
    bad_step: Array | np.int32  # ``[]`` int32, the first step after which the loss was not finite, or -1
    # ``[]`` int32, whether a call notes digests of the state at its end: 0 no, 1 if a loss was not finite, 2 yes.
    notes: Array | None = None
    digests: Array | None = None  # ``[parts, 2]`` uint32, those noted, or zeros


def scan_steps(
    step: TrainStep,
    state: TrainState,
    totals: Totals,
    rows: PyTree,
    make_batch: Callable[[Any, jax.Array], Batch],
    bounds: Array | None = None,
) -> tuple[TrainState, Totals]:
    """Trains on one batch after another, in a ``lax.scan`` if there are several, and adds metrics to ``totals``.

    ``make_batch(row, step)`` returns the batch of a step from a row of ``rows [steps, ...]``. ``bounds [2]`` are
    the first row to train on and the one to stop before, known only when it runs; default: all.
    """
    names = sorted(totals.sums)

    def body(carry: Any, row: Any) -> tuple[Any, None]:
        state, (sums, excess), bad_step = carry
        state, metrics = step(state, make_batch(row, state.step))
        # Kahan's compensated sum (1965), of all metrics in one array: as many kernels as a plain sum of two.
        part = jnp.stack([metrics[name].astype(jnp.float32) for name in names]) - excess
        after = sums + part
        excess = jnp.where(jnp.isfinite(after), (after - sums) - part, 0.0)
        is_bad = (bad_step < 0) & ~jnp.isfinite(metrics["loss"])
        return (state, jnp.stack([after, excess]), jnp.where(is_bad, state.step, bad_step)), None

    columns = jnp.stack([jnp.stack([of[name] for name in names]) for of in (totals.sums, totals.excess)])
    carry: Any = state, columns, totals.bad_step
    if jax.tree.leaves(rows)[0].shape[0] == 1:
        # Not a scan of one: on a CPU, XLA makes convolutions' gradients fast only outside loops (jax#12868).
        carry, _ = body(carry, jax.tree.map(lambda leaf: leaf[0], rows))
    elif bounds is None:
        carry, _ = jax.lax.scan(body, carry, rows)
    else:  # the same body, with the bits of the scan

        def row_of(index: jax.Array) -> Any:
            return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), rows)

        carry = jax.lax.fori_loop(bounds[0], bounds[1], lambda index, carry: body(carry, row_of(index))[0], carry)
    state, columns, bad_step = carry
    sums, excess = ({name: row[index] for index, name in enumerate(names)} for row in columns)
    return state, Totals(sums, excess, bad_step)
