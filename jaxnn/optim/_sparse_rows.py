"""Sparse updates by any optimizer: only the rows of an embedding that have a gradient are updated."""

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxnn.optim._combinators import AveragedState
from jaxnn.optim._row_gradients import Path, SparseRows, is_rows, summed, value_and_row_gradient
from jaxnn.types import ConfigError, Params, PyTree, named_leaves, path_name, suggest


class SparseRowsTransformation(optax.GradientTransformationExtraArgs):
    """The optimizer that ``sparse_rows`` returns, which knows by their paths which parameters are tables."""

    is_table: Callable[[Path], bool]


def sparse_rows(
    optimizer: optax.GradientTransformation, tables: str | Sequence[str] = "embedding"
) -> SparseRowsTransformation:
    """Returns ``optimizer`` that updates only the rows of tables, and of their moments, that have a gradient.

    As TensorFlow Addons' LazyAdam and PyTorch's SparseAdam, for any optimizer that works element by element. In each
    update, a row of a table counts if any element of its
    gradient, summed over the batch, is not zero. Rows that count are updated as always, with the optimizer's own count
    of updates for schedules and bias corrections. All others keep their parameters and their state bit for bit: their
    moments do not decay, and neither weight decay nor momentum changes them. A table whose every
    row counts in every update is updated as without ``sparse_rows``, and so are all other parameters.

    `make_train_step` then takes the gradient by rows, and no operation of an update but the lookups and the writes
    uses a full table: time and memory depend on the ids in a batch, not on the size of the vocabulary. It can do so for
    tables in which the loss only looks up rows, and if ``sparse_rows`` is outermost. Gradient clipping goes inside,
    and its norm is that of all gradients. ``with_ema`` and ``with_accumulation`` use full tables and go outside: the
    updates are the same then, but come from dense gradients and save nothing.

    It pays if a table has many more rows than a batch has ids. With 12,800 ids a step of Adam on two CPU cores is 6
    to 15 times as fast for 1,200,000 rows of 50 (the more ids repeat, the faster), and half as fast for 20,000. On a
    GPU the sums of repeated ids are in no fixed order.

    >>> optimizer = jn.optim.sparse_rows(optax.adam(1e-3), tables="words/embedding")

    Args:
        optimizer: any Optax optimizer that works element by element, or scales by norms and losses of all. Not lbfgs,
            Adafactor, LAMB, or one with a line search.
        tables: the parameters ``[rows, ...]`` to update by rows: their names (``"embedding"``, as Flax calls every
            ``Embed``'s) or ends of their paths (``"words/embedding"``).

    Raises:
        ConfigError: when initialised, a name that no parameter has, or an optimizer whose state shows that it does
            not work by rows. LAMB, LARS, Muon and clipping by the norm of a unit or a block keep no such state: they
            are not detected, and compute other numbers.
    """
    inner = optax.with_extra_args_support(optimizer)
    names = (tables,) if isinstance(tables, str) else tuple(tables)

    def is_table(path: Path) -> bool:
        return any(_is_called(path_name(path), name) for name in names)

    def init(params: optax.Params) -> optax.OptState:
        known = named_leaves(params)
        for name in names:
            if not any(_is_called(path, name) for path in known):
                raise ConfigError(f"sparse_rows: no parameter is called {name!r}: {suggest(name, known)}.")
        state = inner.init(params)
        _check_state(params, state, is_table)
        return state

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        if params is None:
            raise ConfigError("sparse_rows: update needs the parameters: pass them as params.")
        leaves, gradients = jax.tree.leaves_with_path(params), jax.tree.leaves(updates, is_leaf=is_rows)
        paths = {path for path, _ in leaves}
        selected = {
            path: _select(gradient, len(table))
            for (path, table), gradient in zip(leaves, gradients, strict=True)
            if is_table(path)
        }

        def on_tables(apply: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
            """``apply`` to leaves of tables and their selections; elsewhere the last tree's leaf."""

            def on_leaf(path: Path, *leaves: Any) -> Any:
                rows = selected.get(_owner(path, paths))
                return leaves[-1] if rows is None else apply(rows, *leaves)

            return jax.tree.map_with_path(on_leaf, tree, *rest, is_leaf=is_rows)

        gradient = on_tables(lambda rows, _: rows.gradient, updates)
        if "grad" in extra_args:
            extra_args |= {"grad": gradient, "value_fn": _refuse_line_search}
        some_params, some_state = (on_tables(lambda rows, leaf: rows.take(leaf), tree) for tree in (params, state))
        steps, some_state = inner.update(gradient, some_state, some_params, **extra_args)
        state = on_tables(lambda rows, leaf, new: rows.put(leaf, new), state, some_state)
        return on_tables(lambda rows, step: rows.update(step), steps), state

    transformation = SparseRowsTransformation(init, update)
    transformation.is_table = is_table
    return transformation


def value_and_grad_of(
    optimizer: optax.GradientTransformation, axis_name: str | None = None
) -> Callable[..., Callable[..., Any]]:
    """Returns the function that differentiates a loss for ``optimizer``, called as ``jax.value_and_grad``.

    It is that function itself, or for an optimizer by `sparse_rows` one that returns ``SparseRows`` as the gradients
    of tables. Optimizers around one by `sparse_rows` take dense gradients.
    ``axis_name`` is the mapped axis that batches are split over (`tasks.averaged_over`); every device gets all rows.

    >>> optimizer = jn.optim.sparse_rows(optax.adam(1e-3))
    >>> task = jn.tasks.classification(jn.models.MLP((8, 10)))
    >>> step = jn.steps.make_train_step(task, optimizer, value_and_grad=jn.optim.value_and_grad_of(optimizer))
    """
    if not isinstance(optimizer, SparseRowsTransformation):
        return jax.value_and_grad
    return functools.partial(value_and_row_gradient, is_table=optimizer.is_table, axis_name=axis_name)


class _Selection(NamedTuple):
    """The rows of one table that count."""

    gradient: jax.Array  # theirs
    take: Callable[[jax.Array], jax.Array]  # these rows of an array shaped as the table
    put: Callable[[jax.Array, jax.Array], jax.Array]  # such an array with other values for them
    update: Callable[[jax.Array], SparseRows | jax.Array]  # the table's update, from theirs


def _select(gradient: SparseRows | jax.Array, num_rows: int) -> _Selection:
    if isinstance(gradient, SparseRows):
        ids, values = summed(gradient, num_rows)
        return _Selection(
            values,
            lambda leaf: leaf.at[ids].get(mode="fill", fill_value=0, unique_indices=True),
            lambda leaf, new: leaf.at[ids].set(new.astype(leaf.dtype), mode="drop", unique_indices=True),
            lambda step: SparseRows(ids, step),
        )
    counts = jnp.any(gradient != 0, axis=tuple(range(1, gradient.ndim)), keepdims=True)
    return _Selection(
        gradient,
        lambda leaf: leaf,
        lambda leaf, new: jnp.where(counts, new, leaf),
        lambda step: jnp.where(counts, step, 0),
    )


def _is_called(path: str, name: str) -> bool:
    return f"/{path}".endswith(f"/{name}")


def _owner(path: Path, paths: Container[Path]) -> Path:
    """The parameter to which a leaf of an optimizer's state belongs: the longest end of its path that is one's."""
    ends = (path[start:] for start in range(len(path)))
    return next((end for end in ends if end in paths), ())


def _check_state(params: Params, state: optax.OptState, is_table: Callable[[Path], bool]) -> None:
    whole = (AveragedState, optax.MultiStepsState)
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, whole)):
        if isinstance(node, whole):
            raise ConfigError(
                f"sparse_rows: {type(node).__name__} concerns every row in every update: put with_ema "
                "or with_accumulation around sparse_rows, not inside."
            )
    tables = dict(jax.tree.leaves_with_path(params))
    for path, leaf in jax.tree.leaves_with_path(state):
        owner = _owner(path, tables)
        if owner and is_table(owner) and leaf.shape != tables[owner].shape:
            raise ConfigError(
                f"sparse_rows: the optimizer keeps {list(leaf.shape)} for the table {path_name(owner)!r} "
                f"{list(tables[owner].shape)}, so it does not work element by element: use another, such as optax.adam."
            )


def _refuse_line_search(params: Params) -> jax.Array:
    raise ConfigError("sparse_rows: the optimizer searches for a step size, for which it needs every row: use another.")
