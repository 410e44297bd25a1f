"""The gradient function that an optimizer asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxnn.optim.lazy import LazyTransformation
from jaxnn.optim.row_gradients import value_and_row_gradient
from jaxnn.optim.rows import is_rows
from jaxnn.types import PyTree


def value_and_grad_of(optimizer: optax.GradientTransformation, axis_name: str | None = None) -> Callable[..., Any]:
    """Returns what `make_train_step` takes as ``value_and_grad``: by rows for the tables of `lazy`, else JAX's own.

    Args:
        optimizer: any Optax optimizer.
        axis_name: the mapped axis that batches are split over (`tasks.averaged_over`), whose rows are put together.
    """
    if not isinstance(optimizer, LazyTransformation):
        return jax.value_and_grad

    def gathered(leaf: PyTree) -> PyTree:
        if axis_name is None or not is_rows(leaf):
            return leaf
        rows = jax.lax.all_gather(leaf, axis_name, tiled=True)
        return rows._replace(values=rows.values / jax.lax.axis_size(axis_name))

    def value_and_grad(function: Callable[..., Any], has_aux: bool = True) -> Callable[..., Any]:
        graded = value_and_row_gradient(function, optimizer.is_table)

        def compute(*args: Any) -> Any:
            value, gradient = graded(*args)
            return value, jax.tree.map(gathered, gradient, is_leaf=is_rows)

        return compute

    return value_and_grad
