"""Checks of a data set against the model of a task: token ids within embeddings, labels within outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from jaxnn.data import check_labels
from jaxnn.types import Array, Batch, ConfigError, DataError, ModelState, Params, Splits

type Predict = Callable[[Params, ModelState, Array], Any]
type Check = Callable[[Params, ModelState, Batch, Splits], None]

# Operations that move ids and drop none.
_MOVES = ("transpose", "reshape", "squeeze", "convert_element_type", "broadcast_in_dim", "copy")


def check_data(
    predict: Predict, classes: Callable[[Any], tuple[int, str]] | None = None, ignore: int | None = None
) -> Check:
    """Returns a `Task.check` that ids are within their embeddings and labels within the model's classes.

    ``classes`` returns from the shapes of the outputs the number of classes and the end of the error for other labels;
    None: targets are no labels. The label ``ignore`` is allowed, and so are probabilities of the classes.
    """

    def check(params: Params, model_state: ModelState, batch: Batch, splits: Splits) -> None:
        outputs = _trace_model(predict, params, model_state, batch, splits)
        if classes is None:
            return
        num_classes, advice = classes(outputs)
        targets = batch.targets
        if getattr(targets, "shape", ())[1:] == (num_classes,) and jnp.issubdtype(targets.dtype, jnp.floating):
            return
        try:
            check_labels(splits, num_classes, ignore=ignore)
        except DataError as error:
            raise DataError(f"{str(error).rstrip('.')}{advice}") from error

    return check


def check_targets(task: str, targets: Array, axes: str, advice: str) -> None:
    """Raises ConfigError unless ``targets`` are integers with axes such as ``[batch]``; ``task`` needs them."""
    fits = hasattr(targets, "dtype") and jnp.issubdtype(targets.dtype, jnp.integer)
    if not fits or targets.ndim != len(axes.split(",")):
        given = f"{targets.dtype} {list(targets.shape)}" if hasattr(targets, "dtype") else f"{targets!r:.60}"
        raise ConfigError(f"{task} needs targets of integers {axes}, not {given}: {advice}.")


def last_axis(logits: Any) -> tuple[int, str]:
    """The classes of logits ``[batch, ..., classes]``, or of a tuple with them first; for `check_data`."""
    count = (logits[0] if isinstance(logits, tuple) else logits).shape[-1]
    return count, f", since the model has {count} outputs: increase their number, or fix the labels."


def _trace_model(predict: Predict, params: Params, model_state: ModelState, batch: Batch, splits: Splits) -> Any:
    """The shapes of a model's outputs; raises DataError for an id that an embedding has no row for.

    Such an id gives NaN, which looks like a diverged loss.
    """
    leaves = jax.tree.leaves(batch.inputs)
    if not any(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves):
        return jax.eval_shape(predict, params, model_state, batch.inputs)
    tables: list[tuple[str, int]] = []

    def call(params: Params, model_state: ModelState, inputs: Array) -> tuple[Any, list[Array]]:
        looked_up: list[Any] = []
        sizes = {leaf.size for leaf in jax.tree.leaves(inputs)}

        def watch(method: Any, arguments: Any, keywords: Any, context: Any) -> Any:
            module, size = context.module, 0
            # Some of jaxnn's models encode tokens as one-hot vectors, without a table.
            if isinstance(module, linen.Embed) or type(module).__module__.startswith("jaxnn.models."):
                size = getattr(module, "num_embeddings", getattr(module, "vocabulary_size", 0))
            # A table of one row gives that row for any id.
            ids = arguments[0] if arguments else None
            if size > 1 and context.method_name == "__call__" and getattr(ids, "size", None) in sizes:
                tables.append(("/".join(module.path) or type(module).__name__, size))
                looked_up.append(ids)
            return method(*arguments, **keywords)

        with linen.intercept_methods(watch):
            return predict(params, model_state, inputs), looked_up

    try:
        closed, (outputs, _) = jax.make_jaxpr(call, return_shape=True)(params, model_state, batch.inputs)
    except jax.errors.UnexpectedTracerError:
        # An embedding within a scan or a remat: its ids cannot be traced.
        return jax.eval_shape(predict, params, model_state, batch.inputs)
    ids = closed.jaxpr.outvars[len(closed.jaxpr.outvars) - len(tables) :]
    makers = {made: equation for equation in closed.jaxpr.eqns for made in equation.outvars}
    for (name, size), variable in zip(tables, ids, strict=True):
        while variable in makers and makers[variable].primitive.name in _MOVES:
            variable = makers[variable].invars[0]
        given = closed.jaxpr.invars[len(closed.jaxpr.invars) - len(leaves) :]
        for place, leaf in enumerate(given):
            if variable is leaf:
                _check_range(splits, place, name, size)
    return outputs


def _check_range(splits: Splits, place: int, name: str, size: int) -> None:
    for split, source in splits.named().items():
        if source.examples is None or not jax.tree.leaves(source.examples.inputs):
            continue
        ids = np.asarray(jax.tree.leaves(source.examples.inputs)[place])
        # JAX would take negative ones from the end of the table.
        if ids.min() >= 0 and ids.max() < size:
            continue
        bad = (ids < 0) | (ids >= size)
        example = int(bad.reshape(len(bad), -1).any(axis=1).argmax())
        raise DataError(
            f"the token id {ids[bad][0]} of example {example} in {split} is out of range: the model's {name} has "
            f"{size} rows, ids must be 0 to {size - 1}; enlarge its vocabulary to {max(size, ids.max() + 1)} or more, "
            "such as len(splits.class_names), or fix the inputs."
        )
