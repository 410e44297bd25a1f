"""Checks of what a `Task` returns, while it is traced, and tasks whose batch is split over a mapped axis."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn._batch_context import BatchSharding, use_batch_axis, use_batch_sharding
from jaxnn.types import (
    STEP_MAKER,
    Batch,
    ConfigError,
    Metrics,
    ModelState,
    Params,
    Task,
    TrainState,
    check_call,
    error_line,
    named_leaves,
)

type LossResult = tuple[jax.Array, tuple[ModelState, Metrics]]


def averaged_over(task: Task, axis_name: str | None) -> Task:
    """Returns ``task`` for devices that compute with their own rows, as under ``jax.pmap``, averaged over all.

    Loss, metrics and gradients are averaged over the axis, and sums of an evaluation are added up, so that a step of
    this task is the step of the whole batch for jaxnn's tasks, also if devices have unequal numbers of examples or
    tokens that count, and for jaxnn's layers, whose dropout and batch statistics are global. A task's own loss must be
    a mean over equally many numbers on each device: random numbers that it draws itself, for its rows or by Flax's own
    ``Dropout``, repeat on every device, and a loss that couples examples, such as a contrastive one or one with Flax's
    ``BatchNorm``, uses a part of the batch alone. `testing.check_task` finds that; this function does not.

    >>> task, optimizer = jn.tasks.classification(jn.models.MLP((8, 10))), optax.adam(1e-3)
    >>> step = jn.steps.make_train_step(jn.tasks.averaged_over(task, "devices"), optimizer)
    >>> train = jax.pmap(step, axis_name="devices", in_axes=(None, 0))  # batches [devices, rows, ...]

    All devices must hold equally many rows, padding included. If ``axis_name`` is None, returns ``task`` itself.
    """
    if axis_name is None:
        return task
    task, mean = checked(task), partial(jax.lax.pmean, axis_name=axis_name)

    def own(leaf: jax.Array) -> jax.Array:
        # `jax.shard_map` sums gradients of what all devices share, unless ``check_vma=False``.
        manual = axis_name in jax.sharding.get_abstract_mesh().manual_axes
        shared = manual and axis_name not in jax.typeof(leaf).mat.varying
        return jax.lax.pcast(leaf, axis_name, to="varying") if shared else leaf

    def loss(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> LossResult:
        with use_batch_axis(axis_name):
            params = jax.tree.map(lambda leaf: _with_gradient(own, mean, leaf), params)
            value, (model_state, metrics) = task.loss(params, model_state, batch, key)
        # With the gradient of this device's value: it is averaged on its way to the parameters.
        return _with_gradient(mean, own, value), (model_state, mean(metrics))

    def evaluate(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> Metrics:
        return jax.lax.psum(task.evaluate(params, model_state, batch, key), axis_name)  # type: ignore[no-any-return]

    return task._replace(loss=loss, evaluate=evaluate, evaluate_again=None)


def sharded(task: Task, constrain: Callable[..., Any], map_rows: Callable[..., Any]) -> Task:
    """Returns ``task`` with activations ``[batch, ...]`` kept sharded by rows; see `BatchSharding`."""
    named: dict[str, Any] = {name: getattr(task, name) for name in ("loss", "evaluate", "predict", "evaluate_again")}
    on_rows: Any = {n: by_rows(each, 2, constrain, map_rows) for n, each in named.items() if each is not None}
    return task._replace(**on_rows)


def by_rows(
    function: Callable[..., Any], rows_at: int, constrain: Callable[..., Any], map_rows: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns ``function`` with the rows of its argument number ``rows_at`` sharded; see `BatchSharding`."""

    def call(*args: Any) -> Any:
        num_rows = jax.tree.leaves(args[rows_at])[0].shape[0]
        with use_batch_sharding(BatchSharding(num_rows, constrain, map_rows)):
            return function(*args)

    return call


def _with_gradient(forward: Callable[[Any], Any], backward: Callable[[Any], Any], x: jax.Array) -> jax.Array:
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), None), lambda _, gradient: (backward(gradient),))
    return function(x)  # type: ignore[no-any-return]


def _check_batch(batch: Batch) -> None:
    """Raises ConfigError unless the parts of ``batch`` have equally many examples."""
    named = named_leaves(batch, ".")
    if len({batch.mask.shape, *(jnp.shape(part)[:1] for part in named.values())}) > 1:
        shapes = ", ".join(f"{name} {list(jnp.shape(part))}" for name, part in named.items())
        raise ConfigError(f"the parts of a batch must have one length, and a mask has one axis, not {shapes}.")


def own_step(make: Callable[..., Any], task: Task, optimizer: Any, config: Any) -> Callable[..., Any]:
    """Returns the training step that an experiment's ``step`` makes, of the config too if it has a third parameter.

    The results are checked while they are traced, and the steps counted. ConfigError if ``make`` has other parameters
    or returns no function.
    """
    parameters = inspect.signature(make).parameters
    taken = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # A third one that has a default is an argument of the user's, unless it is the config by name.
    wants_config = any(p.default is p.empty or p.name == "config" for p in taken[2:3])
    parts = (task, optimizer, config) if wants_config else (task, optimizer)
    check_call(STEP_MAKER, make, len(parts))
    if "state" in parameters:
        raise ConfigError(f"{STEP_MAKER}, and {getattr(make, '__name__', 'it')} is that function itself.")
    step = make(*parts)
    if not callable(step):
        raise ConfigError(f"{STEP_MAKER}, and it returned {_described(step)}.")

    def checked(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        made: Any = step(state, batch)
        match made:
            case (TrainState() as after, Mapping() as metrics) if "loss" in metrics:
                pass
            case _:
                raise ConfigError(
                    "the experiment's step must return (state, metrics), a TrainState and a dict of numbers with a "
                    f"'loss': it returned {_described(made)}."
                )
        for name in ("params", "model_state", "opt_state"):
            _check_state(getattr(state, name), getattr(after, name), "the experiment's step", name)
        return after._replace(step=state.step + 1, key=state.key), _numbers("the step", metrics)

    return checked


def checked(task: Task) -> Task:
    """Returns ``task`` with batches and results checked while it is traced: wrong ones fail far from their cause."""

    def init(key: jax.Array, batch: Batch) -> tuple[Params, ModelState]:
        made: Any = task.init(key, batch)
        if not isinstance(made, tuple) or len(made) != 2:
            given = f"it returned {_described(made)}; without a state, return (params, {{}})"
            raise ConfigError(f"the task's init must return (params, model_state): {given}.")
        for name, leaf in named_leaves(made[0]).items():
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                raise ConfigError(
                    f"the parameter {name!r} of the task is {jnp.result_type(leaf)}, which cannot be trained: make it "
                    "a float, or keep it in model_state."
                )
        return made

    def loss(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> LossResult:
        _check_batch(batch)
        made: Any = task.loss(params, model_state, batch, key)
        match made:
            case (value, (new_state, Mapping() as metrics)):
                value = _array("the task's loss", value)
            case _:
                raise ConfigError(
                    "the task's loss must return (loss, (model_state, metrics)) with a dict of metrics: it returned "
                    f"{_described(made)}."
                )
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ConfigError(f"the task's loss returned {_described(value)}: return one float, the batch's mean.")
        _check_state(model_state, new_state, "the task's loss", "model_state")
        numbers = _numbers("the task's loss", metrics)
        if "loss" in numbers:
            raise ConfigError("a metric of the task's loss is named 'loss', as the loss itself is reported: rename it.")
        return value, (new_state, numbers)

    def evaluate(params: Params, model_state: ModelState, batch: Batch, key: jax.Array) -> Metrics:
        _check_batch(batch)
        sums: Any = task.evaluate(params, model_state, batch, key)
        if not isinstance(sums, Mapping) or "count" not in sums:
            given = f"a dict of {', '.join(sums) or 'nothing'}" if isinstance(sums, Mapping) else _described(sums)
            raise ConfigError(
                "the task's evaluate must return a dict of sums with their count, {..., 'count': batch.mask.sum()}: "
                f"it returned {given}."
            )
        arrays = _arrays("sum", "the task's evaluate", sums)
        _check_names_apart(task, arrays)
        if arrays["count"].shape != ():
            count = _described(arrays["count"])
            raise ConfigError(f"the count of the task's evaluate is {count}: return one number.")
        return arrays

    return task._replace(init=init, loss=loss, evaluate=evaluate)


def derived_metrics(task: Task, means: dict[str, Any], what: str = "the means ") -> dict[str, float]:
    """Returns the reported metrics: those that ``task.derive_metrics`` makes of the means over a split.

    ConfigError, which describes the means by ``what``, if ``derive_metrics`` raises or returns no numbers.
    """
    own = {name: means.pop(name) for name in task.metrics if name in means}
    try:
        values: Any = task.derive_metrics(means)
    # The user's code: only the user can fix its errors.
    except Exception as error:
        given = ", ".join(f"{name} {list(np.shape(mean))}" if np.ndim(mean) else name for name, mean in means.items())
        reason = error_line(error)
        if isinstance(error, ArithmeticError | ValueError):
            reason += "; let it take any numbers, as NumPy's functions do"
        raise ConfigError(f"the task's derive_metrics failed on {what}of {given}: {reason}.") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"the task's derive_metrics returned a {type(values).__name__}: return a dict of numbers.")
    _check_names_apart(task, values)
    return {str(name): _number(name, value) for name, value in {**values, **own}.items()}


def _check_names_apart(task: Task, evaluated: Mapping[str, Any]) -> None:
    if both := sorted(task.metrics.keys() & evaluated.keys()):
        raise ConfigError(f"the task has two metrics {both[0]!r}, one of metrics and one of evaluate: rename one.")


def metric_of_outputs(name: str, metric: Callable[[Any, Any], Any], targets: Any, outputs: Any) -> float:
    """A metric of all ``targets`` and ``outputs`` of a split; NaN if an output is; ConfigError if it raises."""
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outputs)):
        return math.nan
    try:
        value = metric(targets, outputs)
        return float(np.asarray(value).item())
    # The user's code, or a library that refuses these targets.
    except Exception as error:
        shapes = f"targets {jax.tree.map(np.shape, targets)} and outputs {jax.tree.map(np.shape, outputs)}"
        raise ConfigError(f"the task's metric {name!r} failed on {shapes}: {error_line(error)}.") from error


def _number(name: str, value: Any) -> float:
    shape = np.shape(value)
    if not shape:
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    given = f"an array of shape {shape}" if shape else f"{value!r}"
    raise ConfigError(f"the metric {name!r} of the task is {given}: return numbers from derive_metrics.")


def _check_state(before: Any, after: Any, what: str, part: str) -> None:
    """Raises ConfigError unless ``part`` of the state that ``what`` returns has the structure of the one it got."""

    def made(tree: Any) -> dict[str, str]:
        return {name: f"{jax.typeof(x).dtype} {list(jnp.shape(x))}" for name, x in named_leaves(tree).items()}

    old, new = made(before), made(after)
    structures: set[Any] = {jax.tree.structure(before), jax.tree.structure(after)}
    if name := next((name for name in [*old, *new] if old.get(name) != new.get(name)), None):
        difference = f"{name} is {new.get(name, 'not there')} instead of {old.get(name, 'nothing')}"
    elif len(structures) > 1:
        difference = f"it is {_described(after)} instead of {_described(before)}"
    else:
        return
    raise ConfigError(f"{what} must return a {part} like the one it got: {difference}.")


def _numbers(of: str, metrics: Mapping[Any, Any]) -> dict[str, jax.Array]:
    numbers = _arrays("metric", of, metrics)
    for name, number in numbers.items():
        if number.shape != ():
            given = _described(number)
            raise ConfigError(f"the metric {name!r} of {of} is {given}: return one number, its mean over the batch.")
    return numbers


def _arrays(kind: str, of: str, values: Mapping[Any, Any]) -> dict[str, jax.Array]:
    for name in values:
        if not isinstance(name, str):
            raise ConfigError(f"the {kind}s of {of} have the name {name!r}: names are strings.")
    return {name: _array(f"the {kind} {name!r} of {of}", value) for name, value in values.items()}


def _array(what: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} is {_described(value)}: return a number or an array of numbers.") from error


def _described(value: Any) -> str:
    if isinstance(value, jax.Array):
        return f"{value.dtype} of shape {value.shape}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
