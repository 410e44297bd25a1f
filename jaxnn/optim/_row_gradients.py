"""The gradient of a table by the rows that were looked up, without an array of the table's size."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from jaxnn.types import ConfigError, Params, PyTree, path_name

type Path = tuple[Any, ...]
# Of each lookup, by the name of its table.
type ByTable = dict[str, list[Any]]
# Called for a lookup: (table, its rows, their numbers, one past the last for none) -> rows.
type Tap = Callable[["_Table", jax.Array, jax.Array], jax.Array]

# Equations that only wrap a program.
_WRAPPED = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


class SparseRows(NamedTuple):
    """A gradient or an update of a table by its rows."""

    ids: jax.Array  # ``[n]`` int32; values of equal ids add up, and one beyond the table's last row does not count
    values: jax.Array  # ``[n, ...]``, one for each id


def is_rows(node: Any) -> bool:
    """Whether ``node`` is ``SparseRows``; for ``jax.tree.map``'s ``is_leaf``."""
    return isinstance(node, SparseRows)


def summed(rows: SparseRows, num_rows: int) -> SparseRows:
    """Sums the values of equal ids; ids whose values sum to zero become ids beyond the table.

    Costs a sort of the ids, or if there are more ids than rows, an array of ``num_rows`` values. Returns at most
    ``num_rows`` rows with distinct ids; zeros for ids beyond the table.
    """
    if len(rows.ids) >= num_rows:
        ids = jnp.arange(num_rows, dtype=jnp.int32)
        values = jax.ops.segment_sum(rows.values, rows.ids, num_rows)
    else:
        ids, slots = jnp.unique(rows.ids, return_inverse=True, size=len(rows.ids), fill_value=num_rows)
        values = jax.ops.segment_sum(rows.values, slots, len(ids))
    axes = tuple(range(1, values.ndim))
    # True of NaN too: it must not be lost.
    counts = jnp.any(values != 0, axis=axes, keepdims=True) & (ids < num_rows).reshape(-1, *[1 for _ in axes])
    beyond = num_rows + jnp.arange(len(ids), dtype=jnp.int32)
    return SparseRows(jnp.where(counts.reshape(-1), ids, beyond), jnp.where(counts, values, 0))


def apply_updates(params: Params, updates: PyTree) -> Params:
    """``optax.apply_updates`` for updates that may be ``SparseRows`` with distinct ids: only these rows change."""

    def apply(update: Any, param: jax.Array) -> Any:
        if not is_rows(update):
            return optax.apply_updates(param, update)
        return param.at[update.ids].add(update.values.astype(param.dtype), mode="drop", unique_indices=True)

    updated: Params = jax.tree.map(apply, updates, params, is_leaf=lambda node: node is None or is_rows(node))
    return updated


def value_and_row_gradient(
    loss: Callable[..., Any], is_table: Callable[[Path], bool], has_aux: bool = False, axis_name: str | None = None
) -> Callable[..., tuple[Any, Params]]:
    """As ``jax.value_and_grad(loss, has_aux=has_aux)``, with ``SparseRows`` for the gradients of tables.

    In the program of ``loss``, each lookup of rows (``table[ids]``, ``jnp.take(table, ids, axis=0)``, any ``Embed``)
    is differentiated by its result instead of by the table. If a function with a custom derivative takes a table, its
    own rule is not used. ``is_table(path)`` is true for tables in ``params``, the first argument. The rows of all
    devices on the mapped axis ``axis_name`` are gathered, their values divided by the number of devices. `ConfigError`
    for a table that is used otherwise, or inside a loop, a branch or ``jax.checkpoint``.
    """

    def value_and_gradient(params: Params, *args: Any) -> tuple[Any, Params]:
        program, outputs = jax.make_jaxpr(loss, return_shape=True)(params, *args)
        leaves, structure = jax.tree.flatten_with_path(params)
        inputs = [_Table(path_name(path), leaf) if is_table(path) else leaf for path, leaf in leaves]
        dense = [None if isinstance(leaf, _Table) else leaf for leaf in inputs]

        def run(dense: list[Any], zeros: ByTable | None) -> tuple[jax.Array, tuple[Any, ByTable, ByTable]]:
            """The loss with ``zeros`` added to the rows of each lookup; also its results, and all ids and rows."""
            ids: ByTable = {leaf.name: [] for leaf in inputs if isinstance(leaf, _Table)}
            rows: ByTable = {name: [] for name in ids}

            def tap(table: _Table, looked_up: jax.Array, numbers: jax.Array) -> jax.Array:
                ids[table.name].append(numbers)
                rows[table.name].append(looked_up)
                return looked_up + zeros[table.name][len(rows[table.name]) - 1] if zeros else looked_up

            values = [given if leaf is None else leaf for given, leaf in zip(inputs, dense, strict=True)]
            outs = _run(program, [*values, *jax.tree.leaves(args)], tap)
            for out in outs:
                if isinstance(out, _Table):
                    raise ConfigError(
                        f"the table {out.name!r} has no gradient by rows, because the loss returns it: leave it out "
                        "of the tables of optim.sparse_rows."
                    )
            given = jax.tree.unflatten(jax.tree.structure(outputs), outs)
            return given[0] if has_aux else given, (given, ids, rows)

        _, (_, _, rows) = jax.eval_shape(run, dense, None)
        zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), rows)
        graded = jax.value_and_grad(run, (0, 1), has_aux=True)
        (_, (given, ids, _)), (gradients, by_lookup) = graded(dense, zeros)
        for place, leaf in enumerate(inputs):
            if isinstance(leaf, _Table):
                features, dtype = leaf.value.shape[1:], leaf.value.dtype
                values = [gradient.reshape(-1, *features).astype(dtype) for gradient in by_lookup[leaf.name]]
                found = SparseRows(
                    jnp.concatenate([jnp.zeros(0, jnp.int32), *ids[leaf.name]]),
                    jnp.concatenate([jnp.zeros((0, *features), dtype), *values]),
                )
                if axis_name is not None:
                    found = jax.lax.all_gather(found, axis_name, tiled=True)
                    found = found._replace(values=found.values / jax.lax.axis_size(axis_name))
                gradients[place] = found
        return given, jax.tree.unflatten(structure, gradients)

    return value_and_gradient


class _Table(NamedTuple):
    """A table as a value of a program, with the dtypes it was cast to."""

    name: str
    value: jax.Array
    dtypes: tuple[Any, ...] = ()


def _run(program: Any, args: list[Any], tap: Tap) -> list[Any]:
    """Runs a program some of whose inputs are tables, equation by equation."""
    values: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values.update(zip(program.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in program.jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        if any(isinstance(value, _Table) for value in given):
            values.update(zip(equation.outvars, _run_with_table(program, equation, given, tap), strict=True))
        else:
            values.update(_evaluate(program, equation, given))
    return [read(atom) for atom in program.jaxpr.outvars]


def _run_with_table(program: Any, equation: Any, given: list[Any], tap: Tap) -> list[Any]:
    primitive, first = equation.primitive.name, given[0]
    if primitive == "convert_element_type":
        return [first._replace(dtypes=(*first.dtypes, equation.params["new_dtype"]))]
    if primitive == "gather" and isinstance(first, _Table) and _takes_rows(equation, first):
        (rows,) = _evaluate(program, equation, [first.value, given[1]]).values()
        for dtype in first.dtypes:
            rows = rows.astype(dtype)
        num_rows, numbers = first.value.shape[0], given[1].reshape(-1)
        if equation.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            numbers = jnp.clip(numbers, 0, num_rows - 1)
        outside = (numbers < 0) | (numbers >= num_rows)
        return [tap(first, rows, jnp.where(outside, num_rows, numbers).astype(jnp.int32))]
    if primitive in _WRAPPED:
        return _run(equation.params.get("jaxpr", equation.params.get("call_jaxpr")), given, tap)
    table = next(value for value in given if isinstance(value, _Table))
    raise ConfigError(
        f"the table {table.name!r} has no gradient by rows, because the loss does more than look up rows: the table "
        f"is used by {primitive!r}, as in attend, a penalty on weights, a loop or jax.checkpoint; leave it out of the "
        "tables of optim.sparse_rows."
    )


def _takes_rows(equation: Any, table: _Table) -> bool:
    """Whether a gather takes complete rows by number: ``[..., 1]`` to ``[..., *features]``."""
    dims, features = equation.params["dimension_numbers"], table.value.shape[1:]
    lookup_rank = equation.invars[1].aval.ndim - 1
    return (
        tuple(dims.start_index_map) == tuple(dims.collapsed_slice_dims) == (0,)
        and not dims.operand_batching_dims
        and tuple(dims.offset_dims) == tuple(range(lookup_rank, lookup_rank + len(features)))
        and tuple(equation.params["slice_sizes"]) == (1, *features)
    )


def _evaluate(program: Any, equation: Any, given: list[Any]) -> dict[Any, Any]:
    """Runs one equation as JAX would, in its context and under its name; returns its outputs by variable."""
    variables = zip(equation.invars, given, strict=True)
    inputs = {atom: value for atom, value in variables if not isinstance(atom, core.Literal)}
    outvars = [var for var in equation.outvars if not isinstance(var, core.DropVar)]
    alone = program.jaxpr.replace(constvars=(), invars=list(inputs), outvars=outvars, eqns=[equation])
    outs = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*inputs.values())
    return dict(zip(outvars, outs, strict=True))
