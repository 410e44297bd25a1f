"""Predictions of one state, sharded over devices, in batches of one size; metrics of all outputs of a split."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxnn._text import first_line
from jaxnn.parallel import SINGLE_DEVICE, Layout
from jaxnn.steps import make_predict_step
from jaxnn.tasks import derived_metrics, metric_of_outputs, sharded
from jaxnn.types import ConfigError, Examples, PyTree, Source, Task, TrainState, check_int


def make_predict(task: Task, source: Source, layout: Layout = SINGLE_DEVICE) -> Callable[[TrainState, PyTree], PyTree]:
    """Returns a pure function from a state and inputs ``[batch, ...]``, as ``source`` holds them, to model outputs."""
    if layout.data_size > 1 and layout.axis_name is None:
        task = sharded(task, layout.constrain, layout.map_rows)
    step = make_predict_step(task)

    def predict(state: TrainState, inputs: PyTree) -> PyTree:
        rows = jax.tree.leaves(inputs)[0].shape[0]  # symbolic in `jax.export`
        return step(state, source.as_batch(Examples(inputs, None), jnp.ones((rows,), np.float32)).inputs)

    return predict


def metrics_of_made_up_means(task: Task, sums: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that a task derives of means from 0.4 to 0.6, of the names and shapes of ``sums``.

    ConfigError if they cannot be reported.
    """
    others = {name: one for name, one in sums.items() if name != "count"}
    numbers = np.linspace(0.4, 0.6, len(others))
    means = {name: np.full(one.shape, x)[()] for (name, one), x in zip(others.items(), numbers, strict=True)}
    with np.errstate(all="ignore"):
        unknown = dict.fromkeys(task.metrics, math.nan)
        return derived_metrics(task, {**means, **unknown}, "made-up means from 0.4 to 0.6, ")


def metrics_of_outputs(task: Task, seen: Sequence[Any], count: np.ndarray, num_examples: int) -> dict[str, np.ndarray]:
    """Returns `Task.metrics` of a run or of members, of the shape of ``count``; NaN where it is 0.

    ``seen`` are targets and outputs of the pieces of a split, ``[*count.shape, batches, batch, ...]``, of which the
    first ``num_examples`` are no padding.
    """

    def rows(*leaves: np.ndarray) -> np.ndarray:
        joined = np.concatenate(leaves, count.ndim)
        flat = joined.reshape(*count.shape, -1, *joined.shape[count.ndim + 2 :])
        flat.setflags(write=False)  # or one metric could change what the next one sees
        return flat

    together = jax.tree.map(rows, *seen)
    found: dict[str, np.ndarray] = {name: np.full(count.shape, np.nan) for name in task.metrics}
    for place in np.ndindex(*count.shape):
        if count[place]:
            targets, outputs = jax.tree.map(lambda leaf, place=place: leaf[place][:num_examples], together)
            for name, metric in task.metrics.items():
                found[name][place] = metric_of_outputs(name, metric, targets, outputs)
    return found


def in_batches(
    predict: Callable[[PyTree], PyTree],
    trained_on: PyTree,
    inputs: PyTree,
    batch_size: int,
    layout: Layout = SINGLE_DEVICE,
    axis: int = 0,
) -> PyTree:
    """Returns ``predict(inputs)`` as NumPy arrays, in batches of one size that are sharded over the devices.

    The last batch is padded. ``axis`` is that of the examples in the outputs; ``trained_on`` are inputs ``[batch,
    ...]`` of the training. ConfigError for inputs or outputs that do not fit, and a ``batch_size`` below 1.
    """
    check_int("predict's batch_size", batch_size)
    if not jax.tree.leaves(trained_on):  # an experiment without data takes what its task does
        trained_on = jax.tree.map(np.asarray, inputs, is_leaf=lambda node: isinstance(node, list))
    wanted: Any = jax.tree.structure(trained_on)
    given: Any = jax.tree.structure(inputs, is_leaf=lambda node: isinstance(node, list))
    if given != wanted and wanted.num_leaves + given.num_leaves > 2:
        raise ConfigError(f"predict needs inputs as the data set holds them, {wanted}, not {given} (* is an array).")
    inputs = _inputs_like(trained_on, inputs)
    if len(lengths := {len(leaf) for leaf in jax.tree.leaves(inputs)}) > 1:
        raise ConfigError(f"predict needs equally many examples in all inputs, not {sorted(lengths)}.")
    count, size = len(jax.tree.leaves(inputs)[0]), layout.data_size
    batch_size = -(-min(batch_size, count) // size) * size

    def rows(start: int) -> PyTree:
        filled = np.minimum(np.arange(start, start + batch_size), count - 1)
        batch = jax.tree.map(lambda leaf: leaf[filled], inputs)
        return batch if layout.mesh is None else layout.place(batch, NamedSharding(layout.mesh, layout.batch_spec))

    _check_outputs(predict, trained_on, rows(0), axis)
    batches = [jax.device_get(predict(rows(start))) for start in range(0, count, batch_size)]
    kept = (*[slice(None)] * axis, slice(count))
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis)[kept], *batches)


def _inputs_like(examples: PyTree, inputs: PyTree) -> PyTree:
    """``inputs`` as arrays of the dtypes that ``examples`` have."""

    def like(example: Any, inputs: Any) -> np.ndarray:
        try:
            given = np.asarray(inputs)
            with np.errstate(invalid="ignore"):
                converted = given.astype(example.dtype)
        except (ValueError, TypeError) as error:
            of_texts = ": encode texts by vocabulary(splits).encode, read images by read_image"
            remedy = of_texts if "str_" in f"{error}" else ""
            raise ConfigError(f"the inputs to predict are not one array of numbers ({error}){remedy}.") from error
        if given.size == 0 or given.ndim == 0:
            raise ConfigError(f"predict needs inputs [examples, ...], not {list(given.shape)}.")
        # Fractions cast to pixels or tokens would all be 0.
        if np.issubdtype(example.dtype, np.integer) and not np.array_equal(converted, given):
            raise ConfigError(
                f"the inputs to predict are {given.dtype} and change their values as {example.dtype}, which the data "
                "set holds: give them as the data set does."
            )
        if given.shape == example.shape[1:]:
            raise ConfigError(
                f"predict needs inputs [examples, ...], and {list(given.shape)} is the shape of one example: add the "
                "axis, inputs[None]."
            )
        return converted

    return jax.tree.map(like, examples, inputs)


def _check_outputs(predict: Callable[[PyTree], PyTree], trained_on: PyTree, batch: PyTree, axis: int) -> None:
    """Raises ConfigError if the model refuses the shapes of ``batch``, or its outputs have another number of rows."""
    wanted, given = ([list(leaf.shape[1:]) for leaf in jax.tree.leaves(tree)] for tree in (trained_on, batch))
    count = len(jax.tree.leaves(batch)[0])
    try:
        outputs = jax.eval_shape(predict, batch)
    # Any exception: the model's own, for a shape that it does not take.
    except Exception as error:
        if given == wanted:
            raise
        expected = " and ".join(f"[{', '.join(map(str, ('examples', *shape)))}]" for shape in wanted)
        raise ConfigError(
            f"predict needs inputs {expected} or such as the model takes, not "
            f"{' and '.join(str([count, *shape]) for shape in given)} ({first_line(error)})."
        ) from error
    shapes = [list(leaf.shape) for leaf in jax.tree.leaves(outputs)]
    if not shapes or any(shape[axis : axis + 1] != [count] for shape in shapes):
        raise ConfigError(
            f"the task's predict gave {f'arrays {shapes}' if shapes else 'nothing'} for {count} examples: "
            "return arrays [examples, ...]."
        )
