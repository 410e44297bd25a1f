"""Checks of an experiment's functions: their types, masked sums, equal results on several devices."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxnn.data import check_split_names, without_data
from jaxnn.engine._compiler import Programs, for_one_call
from jaxnn.engine._options import check_config
from jaxnn.nn import use_batch_axis
from jaxnn.observe import equations
from jaxnn.parallel import DATA, STRATEGIES, Layout, shardings_of
from jaxnn.steps import make_evaluate_step
from jaxnn.tasks import own_step
from jaxnn.types import Batch, ConfigError, Examples, Experiment, Metrics, ModelState, Source, Splits, Task, TrainState

# What rounding may make of a forward pass in float32, in units of the result: sums in another order, layer after layer.
LEAST_DIFFERENCE = 1e-4
# In a single batch the devices may happen to hold equally many examples that count.
COMPARED_BATCHES = 4
INSTEAD = "use strategy data, as fast and with the numbers of one device, or jaxnn's layers"


def load_data(experiment: Experiment[Any]) -> Splits:
    """Returns the data of ``experiment``, after checking that it can be run."""
    check_config(experiment.config)
    splits = (experiment.data or without_data)(experiment.config)
    check_data(splits)
    check_parts(experiment)
    return splits


def check_data(splits: Any) -> None:
    """Raises ConfigError unless ``splits`` are what an experiment's ``data`` must return."""
    if not isinstance(splits, Splits):
        raise _wrong("data", splits, "Splits, as jn.data.arrays(train=(inputs, targets)) does")
    check_split_names(splits.others)


def check_parts(experiment: Experiment[Any]) -> None:
    """Raises ConfigError unless ``experiment`` makes a task of functions and an Optax optimizer."""
    task = experiment.task(experiment.config)
    if not isinstance(task, Task):
        raise _wrong("task", task, "a Task, as jn.tasks.classification(model) does")
    if not isinstance(task.metrics, Mapping):
        raise ConfigError(f"the task's metrics are {task.metrics!r:.60}: give a dict of functions by name.")
    functions = task._asdict() | {f"metric {name}": metric for name, metric in task.metrics.items()}
    for name, part in functions.items():
        if name != "metrics" and not callable(part):
            raise ConfigError(f"the task's {name} is {part!r}, and must be a function: see jn.Task.")
    optimizer = experiment.optimizer(experiment.config)
    for name, one in optimizer.items() if isinstance(optimizer, Mapping) else [(None, optimizer)]:
        if not all(callable(getattr(one, function, None)) for function in ("init", "update")):
            which = "optimizer" if name is None else f"optimizer, for {name!r},"
            raise _wrong(which, one, "an Optax optimizer, as optax.adam(config.learning_rate) does")
    if experiment.step is not None:
        own_step(experiment, task, optimizer)


def check_sums(programs: Programs, source: Source, make_state: Callable[[], TrainState]) -> None:
    """Confirms that an evaluation returns masked sums: for examples that are in a batch twice, not the same again.

    jaxnn's own tasks do, and cost nothing here. Any other evaluation is compiled once more and run with the state from
    ``make_state`` on examples of ``source``: in a short batch, beside padding, and twice in one batch. ConfigError if a
    sum or the count stays the same, as means over the batch or over the mask do.
    """
    task, layout = programs.task, programs.layout
    if getattr(task.evaluate, "__module__", "").startswith("jaxnn."):
        return
    step, half = make_evaluate_step(task), -(-programs.eval_batch_size // 2)

    def evaluate(state: TrainState, examples: Examples, masks: jax.Array) -> tuple[Metrics, Metrics]:
        both = jax.lax.map(lambda mask: step(state, source.as_batch(examples, mask)), masks)
        try:
            short = jax.tree.map(lambda rows: rows[:half], examples)
            return step(state, source.as_batch(short, masks[1, :half])), both
        except Exception:  # it needs more examples, such as the five nearest of a batch
            return {}, both

    rows = np.arange(half, dtype=np.int32) % source.num_examples
    examples = layout.place(source.read(np.concatenate([rows, rows])))
    masks = layout.place(np.repeat(np.array([[1, 0], [1, 1]], np.float32), half, axis=1))
    state, jit = make_state(), for_one_call()
    if programs.shardings is not None:
        same = layout.replicated
        jit |= {"in_shardings": (programs.shardings, same, same), "out_shardings": same}
    program = programs.compile(evaluate, "evaluate twice", "to check sums", state, examples, masks, **jit)
    short, both = jax.device_get(program(state, examples, masks))
    padded, twice = ({name: sums[row] for name, sums in both.items()} for row in (0, 1))
    if not np.any(twice["count"]):  # such as labels that are all ignored
        return
    for once in filter(None, (padded, short)):
        for name in sorted(once, key=lambda name: name != "count"):
            known = np.isfinite(once[name]) & np.isfinite(twice[name])
            first, second = once[name][known], twice[name][known]
            if np.any(first) and np.allclose(first, second, rtol=1e-3, atol=0.0):
                fix = "the mask, batch.mask.sum()" if name == "count" else "values * batch.mask, and return no mean"
                raise ConfigError(
                    f"{name!r} of the task's evaluate is {np.max(once[name]):.3g} for {half} examples, and the same if "
                    f"each is twice in the batch: sum {fix}."
                )


class _Outcome(NamedTuple):
    """The results of a task for a batch: of its loss, and the sums of its evaluation."""

    model_state: ModelState
    loss: jax.Array
    metrics: Metrics
    evaluation: Metrics


def check_equal_on_devices(programs: Programs, splits: Splits) -> None:
    """Confirms that a task computes the same under `pmap`, where each device has its rows alone, as from all rows.

    Compares loss and evaluation of the first batches, and searches the traced program for random numbers that would
    repeat: means over many of them hardly show it. Costs a compilation of the forward pass. ConfigError if the task
    draws random numbers itself, as Flax's Dropout does, or couples examples, as Flax's BatchNorm does.
    """
    layout, source, feed = programs.layout, programs.source, programs.spec.feed
    if layout.axis_name is None or layout.data_size == 1:
        return
    seed = programs.spec.experiment.config.seed
    whole, parts = _make_whole_and_parts(programs.task, layout, evaluated=splits.eval_split is not None)
    examples = feed.sample(COMPARED_BATCHES)

    def compare(state: TrainState, examples: Examples) -> Any:
        def moved(leaf: jax.Array) -> jax.Array:
            floats = jnp.issubdtype(leaf.dtype, jnp.floating)
            return leaf + jax.random.uniform(state.key, leaf.shape, leaf.dtype, -0.05, 0.05) if floats else leaf

        # A layer of zeros would hide what comes before it.
        state = state._replace(params=jax.tree.map(moved, state.params))

        def differences(row: Any) -> Any:
            batch = source.transform(feed.batch(examples, row), state.key)
            # XLA computes the batch in parts with the same result, as under strategy data.
            split = layout._replace(strategy=STRATEGIES["data"]).constrain(batch)
            return jax.tree.map(_difference, whole(state, split), parts(state, batch))

        found = jax.lax.map(differences, feed.rows(examples, seed, jnp.arange(COMPARED_BATCHES)))
        return jax.tree.map(jnp.max, found)

    with jax.default_matmul_precision("highest"):
        batch = jax.eval_shape(source.as_batch, programs.first_examples)
        shapes = programs.shapes, jax.eval_shape(source.transform, batch, programs.shapes.key)
        traced = [*equations(jax.make_jaxpr(whole)(*shapes))]
        if own := [*(_draws(equations(jax.make_jaxpr(parts)(*shapes))) - _draws(traced))]:
            raise ConfigError(
                f"the task draws random numbers of its own, {own[0]} on each device, and all would draw the same "
                f"under pmap: {INSTEAD}."
            )
        jit = {"in_shardings": (programs.shardings, shardings_of(examples)), "out_shardings": layout.replicated}
        program = programs.compile(compare, "compare devices", "pmap", programs.shapes, examples, **jit)
    allowed = max(LEAST_DIFFERENCE, *(4 * rounding for rounding in _roundings(traced)))
    for path, difference in jax.tree.leaves_with_path(jax.device_get(program(programs.init(), examples))):
        if not difference <= allowed:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ConfigError(
                f"{name} would be off by {difference:.2g} of it under pmap, where each device sees its rows alone, "
                f"because the task couples the examples of a batch: {INSTEAD}."
            )


def _make_whole_and_parts(task: Task, layout: Layout, *, evaluated: bool) -> tuple[Callable[..., _Outcome], ...]:
    """The functions that compute a task from all rows, and on each device from its rows alone, ``[devices, ...]``."""

    def outcome(axis_name: str | None, state: TrainState, batch: Batch) -> _Outcome:
        # As in a run, it is known while tracing that nothing is padding.
        batch = batch._replace(mask=np.ones(batch.mask.shape, np.float32))
        with use_batch_axis(axis_name):
            loss, (model_state, metrics) = task.loss(state.params, state.model_state, batch, state.key)
        sums = task.evaluate(state.params, state.model_state, batch, state.key) if evaluated else {}
        return _Outcome(model_state, loss, metrics, sums)

    def part(state: TrainState, batch: Batch) -> Any:
        own = outcome(DATA, state, batch)
        loss, metrics = jax.lax.pmean((own.loss, own.metrics), DATA)
        shared = own._replace(loss=loss, metrics=metrics, evaluation=jax.lax.psum(own.evaluation, DATA))
        return jax.tree.map(lambda leaf: leaf[None], shared)

    specs = PartitionSpec(), PartitionSpec(DATA)
    parts = jax.shard_map(part, mesh=layout.mesh, in_specs=specs, out_specs=PartitionSpec(DATA), check_vma=False)
    return jax.jit(functools.partial(outcome, None)), jax.jit(parts)


def _difference(whole: jax.Array, parts: jax.Array) -> jax.Array:
    """How far ``parts [devices, ...]`` are from ``whole [...]``, in units of the largest number among them."""
    whole, parts = (jnp.asarray(leaf, jnp.float32) for leaf in jnp.broadcast_arrays(whole[None], parts))
    equal = (whole == parts) | (jnp.isnan(whole) & jnp.isnan(parts))
    return jnp.max(jnp.where(equal, 0.0, jnp.abs(whole - parts))) / jnp.maximum(jnp.max(jnp.abs(whole)), 1e-2)


def _draws(found: Iterable[tuple[Any, str]]) -> Counter[str]:
    """The shapes of the random numbers and keys that a program draws, with the number of each."""
    drawn = (one for one, _ in found if one.primitive.name.startswith(("random_", "rng_")))
    return Counter(f"{list(one.outvars[0].aval.shape)}" for one in drawn)


def _roundings(found: Iterable[tuple[Any, str]]) -> set[float]:
    """The relative spacing of numbers in each floating-point type that a program computes in."""
    dtypes = {getattr(variable.aval, "dtype", jnp.dtype(bool)) for one, _ in found for variable in one.outvars}
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return {float(jnp.finfo(dtype).eps) for dtype in floats}  # type: ignore[no-untyped-call]


def _wrong(name: str, made: Any, wanted: str) -> ConfigError:
    return ConfigError(f"the experiment's {name} gave a {type(made).__name__}: it must return {wanted}.")
