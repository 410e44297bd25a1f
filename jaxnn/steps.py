"""One update and one evaluation, as pure functions that name no device and know no loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxnn.nn import batch_split_over, unboxed
from jaxnn.optim import LazyTransformation, apply_updates, evaluation_params, is_rows, value_and_row_gradient
from jaxnn.types import Batch, ConfigError, Metrics, ModelState, Params, PyTree, Task, TrainState

type TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
type EvaluateStep = Callable[[TrainState, Batch], Metrics]


def init_train_state(task: Task, optimizer: optax.GradientTransformation, key: jax.Array, batch: Batch) -> TrainState:
    """The state before the first step; pure, so it may be compiled, mapped over keys, or born sharded.

    Args:
        task: what is trained.
        optimizer: any Optax optimizer.
        key: ``[]`` a typed PRNG key, ``jax.random.key(seed)``.
        batch: one batch; its shapes and dtypes decide the parameters'.

    Returns:
        Plain arrays, also where the model names the axes of its parameters (`nn.partitioned`).
    """
    init_key, step_key = jax.random.split(key)
    params, model_state = unboxed(task.init(init_key, batch))
    return TrainState(jnp.int32(0), params, model_state, optimizer.init(params), step_key)


def make_train_step(task: Task, optimizer: optax.GradientTransformation, *, axis_name: str | None = None) -> TrainStep:
    """A pure ``step(state, batch) -> (state, metrics)``, shaped for ``jax.lax.scan``.

    ``metrics`` holds the ``loss`` that was minimised and the task's own. Optimizers that ask for more than
    gradients, such as ``optax.lbfgs`` or ``reduce_on_plateau``, get ``value``, ``grad`` and ``value_fn``. The tables of
    ``optim.lazy`` get their gradients by rows, and an update touches no other row of them.

    Args:
        task: what is trained.
        optimizer: any Optax optimizer.
        axis_name: where each device computes with its own rows, as under ``jax.pmap``, the axis that the batch is
            split over; all devices must hold as many rows, padding among them. Loss, gradients and metrics are averaged
            over it. That is the step of the whole batch for jaxnn's tasks, also where devices have unequal numbers of
            examples or tokens that count, and for jaxnn's layers, whose dropout and batch statistics are global. A
            task's own loss must be a mean over as many numbers on each device: random numbers that it draws itself,
            for its rows or by Flax's own ``Dropout``, repeat on every device, and what couples examples, as a
            contrastive loss, Flax's own ``BatchNorm`` or a mean over those that count, sees a part of the batch alone.
            Nothing checks that here; `fit` does, for strategy ``pmap``.

    Raises:
        ConfigError: when traced, a loss that does not give what `Task.loss` must, or a table of ``optim.lazy`` of which
            it does more than look rows up.
    """
    task = _checked(task)
    optimizer = optax.with_extra_args_support(optimizer)
    if isinstance(optimizer, LazyTransformation):
        loss_and_gradient = value_and_row_gradient(task.loss, optimizer.is_table, has_aux=True)
    else:
        loss_and_gradient = jax.value_and_grad(task.loss, has_aux=True)
    mean, own_copy = _make_mean(axis_name), _make_own_copy(axis_name)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _check_batch(batch)
        key = jax.random.fold_in(state.key, state.step)

        def own_value(params: Params) -> jax.Array:
            with batch_split_over(axis_name):
                return task.loss(params, state.model_state, batch, key)[0]

        value_fn = own_value if axis_name is None else _shared(own_value, mean, own_copy)
        params = own_copy(state.params)
        with batch_split_over(axis_name):
            (loss, (model_state, metrics)), gradient = loss_and_gradient(params, state.model_state, batch, key)
        loss, metrics, gradient = mean((loss, metrics, gradient))
        updates, opt_state = optimizer.update(
            gradient, state.opt_state, state.params, value=loss, grad=gradient, value_fn=value_fn
        )
        params = apply_updates(state.params, updates)
        state = TrainState(state.step + 1, params, model_state, opt_state, state.key)
        return state, {"loss": loss, **metrics}

    return step


def make_evaluate_step(task: Task, *, axis_name: str | None = None) -> EvaluateStep:
    """A pure ``evaluate(state, batch) -> sums``; averaged parameters are used where the optimizer keeps them.

    Args:
        task: what is evaluated.
        axis_name: as for `make_train_step`: the sums are those over all devices.

    Raises:
        ConfigError: when traced, an evaluation that does not give what `Task.evaluate` must.
    """
    task = _checked(task)

    def evaluate(state: TrainState, batch: Batch) -> Metrics:
        _check_batch(batch)
        params = evaluation_params(state.params, state.opt_state)
        sums = task.evaluate(params, state.model_state, batch)
        return sums if axis_name is None else jax.lax.psum(sums, axis_name)

    return evaluate


def _make_mean(axis_name: str | None) -> Callable[[PyTree], PyTree]:
    """A function to the mean of a tree over the devices of an axis; where there is none, to the tree itself."""

    def mean(leaf: PyTree) -> PyTree:
        if not is_rows(leaf):
            return jax.lax.pmean(leaf, axis_name)
        gathered = jax.lax.all_gather(leaf, axis_name, tiled=True)
        return gathered._replace(values=gathered.values / jax.lax.axis_size(axis_name))

    return lambda tree: tree if axis_name is None else jax.tree.map(mean, tree, is_leaf=is_rows)


def _make_own_copy(axis_name: str | None) -> Callable[[PyTree], PyTree]:
    """A function to a tree as each device's own, so that gradients are those of its rows alone.

    Of what all devices share `jax.shard_map` sums the gradients itself, unless it is told not to look
    (``check_vma=False``), as `jax.pmap` is.
    """

    def own(leaf: PyTree) -> PyTree:
        manual = axis_name in jax.sharding.get_abstract_mesh().manual_axes
        if not manual or axis_name in jax.typeof(leaf).mat.varying:
            return leaf
        return jax.lax.pcast(leaf, axis_name, to="varying")

    return lambda tree: tree if axis_name is None else jax.tree.map(own, tree)


def _shared(
    value_fn: Callable[[Params], jax.Array], mean: Callable[[PyTree], PyTree], own_copy: Callable[[PyTree], PyTree]
) -> Callable[[Params], jax.Array]:
    """``value_fn`` of each device's rows as that of the whole batch, its gradient too: line searches ask for both."""

    @jax.custom_vjp
    def value(params: Params) -> jax.Array:
        return forward(params)[0]

    def forward(params: Params) -> tuple[jax.Array, Params]:
        both: tuple[jax.Array, Params] = mean(jax.value_and_grad(value_fn)(own_copy(params)))
        return both

    def backward(gradient: Params, cotangent: jax.Array) -> tuple[Params]:
        return (jax.tree.map(lambda leaf: cotangent * leaf, gradient),)

    value.defvjp(forward, backward)
    return value


def _check_batch(batch: Batch) -> None:
    import chex  # traced code only: a user who never traces need not wait for the import

    chex.assert_rank(batch.mask, 1)
    chex.assert_equal_shape_prefix([batch.inputs, batch.targets, batch.mask], prefix_len=1)


def _checked(task: Task) -> Task:
    """``task``, whose results are checked while it is traced: a wrong one would fail far from its cause."""

    def loss(
        params: Params, model_state: ModelState, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[ModelState, Metrics]]:
        made: Any = task.loss(params, model_state, batch, key)
        match made:
            case (value, (new_state, Mapping() as metrics)):
                value = _array("the task's loss", value)
            case _:
                raise ConfigError(
                    "the task's loss must return (loss, (model_state, metrics)), where metrics is a dict: it gave "
                    f"{_described(made)}."
                )
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ConfigError(f"the task's loss gave {_described(value)}: return one float, the mean over the batch.")
        _check_state(model_state, new_state)
        _check_names("the metrics of the task's loss", metrics)
        if "loss" in metrics:
            raise ConfigError("a metric of the task's loss is named 'loss', as the loss itself is reported: rename it.")
        numbers = {name: _array(f"the metric {name!r} of the task's loss", one) for name, one in metrics.items()}
        for name, number in numbers.items():
            if number.shape != ():
                raise ConfigError(
                    f"the metric {name!r} of the task's loss is {_described(number)}: return its mean over the batch."
                )
        return value, (new_state, numbers)

    def evaluate(params: Params, model_state: ModelState, batch: Batch) -> Metrics:
        sums: Any = task.evaluate(params, model_state, batch)
        if not isinstance(sums, Mapping) or "count" not in sums:
            given = f"a dict of {', '.join(sums) or 'nothing'}" if isinstance(sums, Mapping) else _described(sums)
            raise ConfigError(
                "the task's evaluate must return a dict of sums with their count, {..., 'count': batch.mask.sum()}: "
                f"it gave {given}."
            )
        _check_names("the sums of the task's evaluate", sums)
        arrays = {name: _array(f"the sum {name!r} of the task's evaluate", value) for name, value in sums.items()}
        if arrays["count"].shape != ():
            raise ConfigError(f"the count of the task's evaluate is {_described(arrays['count'])}: return one number.")
        return arrays

    return task._replace(loss=loss, evaluate=evaluate)


def _check_state(before: ModelState, after: Any) -> None:
    """Raises ConfigError unless the model state that a loss returns is made like the one it got."""

    def made(tree: Any) -> dict[str, str]:
        leaves = (
            (jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in jax.tree.leaves_with_path(tree)
        )
        return {name: f"{getattr(x, 'dtype', None) or jnp.result_type(x)} {list(jnp.shape(x))}" for name, x in leaves}

    old, new = made(before), made(after)
    structure: Any = jax.tree.structure(before)
    if old == new and structure == jax.tree.structure(after):
        return
    name = next((name for name in [*old, *new] if old.get(name) != new.get(name)), None)
    if name is None:
        difference = f"it is {_described(after)} instead of {_described(before)}"
    else:
        difference = f"{name or 'it'} is {new.get(name, 'not there')} instead of {old.get(name, 'nothing')}"
    raise ConfigError(
        "the task's loss must return (loss, (model_state, metrics)) with a model_state made like the one it got: "
        f"{difference}."
    )


def _check_names(what: str, values: Mapping[Any, Any]) -> None:
    for name in values:
        if not isinstance(name, str):
            raise ConfigError(f"{what} have the name {name!r}: names are strings.")


def _array(what: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} is {_described(value)}: return a number or an array of numbers.") from error


def _described(value: Any) -> str:
    if isinstance(value, jax.Array):
        return f"{value.dtype} of shape {value.shape}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
