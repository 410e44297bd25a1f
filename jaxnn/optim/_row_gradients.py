"""The gradient of a table as the rows that were looked up, never as an array of the table's size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxnn.optim._rows import SparseRows
from jaxnn.types import ConfigError, Params

type Path = tuple[Any, ...]
# What is done with a lookup: (table, rows it gave, their numbers, one past the last for none) -> rows.
type Tap = Callable[["_Table", jax.Array, jax.Array], jax.Array]

# Equations that only wrap a program, and under which name they hold it.
_WRAPPED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


class _Table(NamedTuple):
    """A table on its way through a program, with the dtypes it was cast to."""

    name: str
    value: jax.Array
    dtypes: tuple[Any, ...] = ()


def path_name(path: Path) -> str:
    """``layer/embedding`` of a path in a tree of parameters."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def value_and_row_gradient(
    loss: Callable[..., Any], is_table: Callable[[Path], bool], has_aux: bool = False
) -> Callable[..., tuple[Any, Params]]:
    """As ``jax.value_and_grad(loss, has_aux=has_aux)``, with ``SparseRows`` for the gradients of tables.

    ``loss`` is traced to a program first, in which each lookup of rows (``table[ids]``, ``jnp.take(table, ids,
    axis=0)``, any ``Embed``) is differentiated by what it gave instead of by the table. Where a function with a custom
    derivative takes a table, its own rule is not used. ``is_table`` says of a path in ``params``, the first argument,
    whether there is one. Raises `ConfigError` for a table that is used otherwise, or inside a loop, a branch or
    ``jax.checkpoint``.
    """

    def value_and_gradient(params: Params, *args: Any) -> tuple[Any, Params]:
        program, outputs = jax.make_jaxpr(loss, return_shape=True)(params, *args)
        leaves, structure = jax.tree.flatten_with_path(params)
        inputs = [_Table(path_name(path), leaf) if is_table(path) else leaf for path, leaf in leaves]
        dense = [None if isinstance(leaf, _Table) else leaf for leaf in inputs]

        def run(dense: list[Any], tap: Tap) -> Any:
            values = [given if leaf is None else leaf for given, leaf in zip(inputs, dense, strict=True)]
            outs = _run(program, [*values, *jax.tree.leaves(args)], tap)
            for out in outs:
                if isinstance(out, _Table):
                    raise ConfigError(
                        f"the table {out.name!r} has no gradient by rows, because the loss gives it back: leave it out "
                        "of the tables of optim.lazy."
                    )
            return jax.tree.unflatten(jax.tree.structure(outputs), outs)

        names, shapes = [], []

        def note(table: _Table, rows: jax.Array, numbers: jax.Array) -> jax.Array:
            names.append(table.name)
            shapes.append(jax.ShapeDtypeStruct(rows.shape, rows.dtype))
            return rows

        def tapped(dense: list[Any], taps: list[jax.Array]) -> tuple[jax.Array, tuple[Any, list[jax.Array]]]:
            ids, zeros = [], iter(taps)

            def tap(table: _Table, rows: jax.Array, numbers: jax.Array) -> jax.Array:
                ids.append(numbers)
                return rows + next(zeros)

            given = run(dense, tap)
            return given[0] if has_aux else given, (given, ids)

        jax.eval_shape(lambda dense: run(dense, note), dense)
        graded = jax.value_and_grad(tapped, (0, 1), has_aux=True)
        taps = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
        (_, (given, ids)), (gradients, by_lookup) = graded(dense, taps)
        lookups = list(zip(names, ids, by_lookup, strict=True))
        gradients = [
            _rows_of(leaf, lookups) if isinstance(leaf, _Table) else gradient
            for leaf, gradient in zip(inputs, gradients, strict=True)
        ]
        return given, jax.tree.unflatten(structure, gradients)

    return value_and_gradient


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
        return _run(equation.params[_WRAPPED[primitive]], given, tap)
    table = next(value for value in given if isinstance(value, _Table))
    raise ConfigError(
        f"the table {table.name!r} has no gradient by rows, because the loss does more than look up rows: the table "
        f"meets {primitive!r}, as in attend, a penalty on weights, a loop or jax.checkpoint; leave it out of the "
        "tables of optim.lazy."
    )


def _takes_rows(equation: Any, table: _Table) -> bool:
    """Whether a gather takes whole rows by their number: ``[..., 1]`` to ``[..., *features]``."""
    dims, features = equation.params["dimension_numbers"], table.value.shape[1:]
    lookup_rank = equation.invars[1].aval.ndim - 1
    return (
        tuple(dims.start_index_map) == tuple(dims.collapsed_slice_dims) == (0,)
        and not dims.operand_batching_dims
        and tuple(dims.offset_dims) == tuple(range(lookup_rank, lookup_rank + len(features)))
        and tuple(equation.params["slice_sizes"]) == (1, *features)
    )


def _evaluate(program: Any, equation: Any, given: list[Any]) -> dict[Any, Any]:
    """Runs one equation as JAX would, in its context and under its name; gives its outputs by variable."""
    variables = zip(equation.invars, given, strict=True)
    inputs = {atom: value for atom, value in variables if not isinstance(atom, core.Literal)}
    outvars = [var for var in equation.outvars if not isinstance(var, core.DropVar)]
    alone = program.jaxpr.replace(constvars=(), invars=list(inputs), outvars=outvars, eqns=[equation])
    outs = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*inputs.values())
    return dict(zip(outvars, outs, strict=True))


def _rows_of(table: _Table, lookups: list[tuple[str, jax.Array, jax.Array]]) -> SparseRows:
    features, dtype = table.value.shape[1:], table.value.dtype
    mine = [(ids, gradient) for name, ids, gradient in lookups if name == table.name]
    values = [gradient.reshape(-1, *features).astype(dtype) for _, gradient in mine]
    return SparseRows(
        jnp.concatenate([jnp.zeros(0, jnp.int32), *(ids for ids, _ in mine)]),
        jnp.concatenate([jnp.zeros((0, *features), dtype), *values]),
    )
