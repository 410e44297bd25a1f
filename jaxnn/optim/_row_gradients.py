"""The gradient of a table as the rows that were looked up, never as an array of the table's size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxnn.optim._rows import Rows
from jaxnn.types import ConfigError, Params

type Path = tuple[Any, ...]
# How equations are run: (program, equation, its inputs) -> its outputs by variable.
type Evaluate = Callable[[Any, Any, list[Any]], dict[Any, Any]]
# What stands for a lookup: (run it on a table, table, first indices of the gather) -> rows.
type Lookup = Callable[[Any, Any, "_Table", Any], Any]

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


class _Found(NamedTuple):
    """A lookup: of which table, and the shape and dtype of the rows it gives."""

    table: str
    rows: Any


def path_name(path: Path) -> str:
    """``layer/embedding`` of a path in a tree of parameters."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def value_and_row_gradient(
    loss: Callable[..., Any], is_table: Callable[[Path], bool], has_aux: bool = False
) -> Callable[..., tuple[Any, Params]]:
    """As ``jax.value_and_grad(loss, has_aux=has_aux)``, with ``Rows`` for the gradients of tables.

    ``loss`` is traced to a program first, in which each lookup of rows (``table[ids]``, ``jnp.take(table, ids,
    axis=0)``, any ``Embed``) is differentiated by what it gave instead of by the table. Where a function with a custom
    derivative takes a table, its own rule is not used.

    Args:
        loss: ``(params, *args) -> value``, or ``(value, aux)`` if ``has_aux``.
        has_aux: whether the loss gives a pair.
        is_table: whether the gradient of the parameter at a path in ``params`` is to be ``Rows``.

    Returns:
        ``(params, *args) -> (what the loss gives, gradient)``. It raises ``ConfigError`` for a table that is used
        otherwise, or inside a loop, a branch or ``jax.checkpoint``.
    """

    def value_and_gradient(params: Params, *args: Any) -> tuple[Any, Params]:
        program, outputs = jax.make_jaxpr(loss, return_shape=True)(params, *args)
        leaves, structure = jax.tree.flatten_with_path(params)
        inputs = [_Table(path_name(path), leaf) if is_table(path) else leaf for path, leaf in leaves]
        dense = [None if isinstance(leaf, _Table) else leaf for leaf in inputs]

        def tapped(dense: list[Any], taps: list[jax.Array]) -> tuple[jax.Array, tuple[Any, list[jax.Array]]]:
            values = [given if leaf is None else leaf for given, leaf in zip(inputs, dense, strict=True)]
            ids: list[jax.Array] = []
            lookup = functools.partial(_tapped_lookup, iter(taps), ids)
            outs = _run(program, [*values, *jax.tree.leaves(args)], lookup, _evaluate)
            _check_outputs(outs)
            given = jax.tree.unflatten(jax.tree.structure(outputs), outs)
            return given[0] if has_aux else given, (given, ids)

        found = _find_lookups(program, inputs)
        taps = [jnp.zeros(lookup.rows.shape, lookup.rows.dtype) for lookup in found]
        graded = jax.value_and_grad(tapped, (0, 1), has_aux=True)
        (_, (given, ids)), (gradients, by_lookup) = graded(dense, taps)
        gradients = [
            _rows_of(leaf, found, ids, by_lookup) if isinstance(leaf, _Table) else gradient
            for leaf, gradient in zip(inputs, gradients, strict=True)
        ]
        return given, jax.tree.unflatten(structure, gradients)

    return value_and_gradient


def _find_lookups(program: Any, inputs: list[Any]) -> list[_Found]:
    found: list[_Found] = []

    def note(program: Any, equation: Any, table: _Table, starts: Any) -> None:
        found.append(_Found(table.name, equation.outvars[0].aval))

    def skip(program: Any, equation: Any, values: list[Any]) -> dict[Any, Any]:
        return dict.fromkeys(equation.outvars)

    others = [None] * (len(program.jaxpr.invars) - len(inputs))
    _run(program, [leaf if isinstance(leaf, _Table) else None for leaf in inputs] + others, note, skip)
    return found


def _run(program: Any, args: list[Any], lookup: Lookup, evaluate: Evaluate) -> list[Any]:
    """Runs a program some of whose inputs are tables, equation by equation."""
    values: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values.update(zip(program.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in program.jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        if any(isinstance(value, _Table) for value in given):
            outs = _run_with_table(program, equation, given, lookup, evaluate)
            values.update(zip(equation.outvars, outs, strict=True))
        else:
            values.update(evaluate(program, equation, given))
    return [read(atom) for atom in program.jaxpr.outvars]


def _run_with_table(program: Any, equation: Any, given: list[Any], lookup: Lookup, evaluate: Evaluate) -> list[Any]:
    primitive, first = equation.primitive.name, given[0]
    if primitive == "convert_element_type":
        return [first._replace(dtypes=(*first.dtypes, equation.params["new_dtype"]))]
    if primitive == "gather" and isinstance(first, _Table) and _takes_rows(equation, first):
        return [lookup(program, equation, first, given[1])]
    if primitive in _WRAPPED:
        return _run(equation.params[_WRAPPED[primitive]], given, lookup, evaluate)
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


def _tapped_lookup(
    taps: Iterator[jax.Array], ids: list[jax.Array], program: Any, equation: Any, table: _Table, starts: jax.Array
) -> jax.Array:
    """The rows plus a zero to differentiate by; notes which rows they were, one past the last for none."""
    (rows,) = _evaluate(program, equation, [table.value, starts]).values()
    for dtype in table.dtypes:
        rows = rows.astype(dtype)
    num_rows = table.value.shape[0]
    numbers = starts.reshape(-1)
    if equation.params["mode"] == jax.lax.GatherScatterMode.CLIP:
        numbers = jnp.clip(numbers, 0, num_rows - 1)
    ids.append(jnp.where((numbers < 0) | (numbers >= num_rows), num_rows, numbers).astype(jnp.int32))
    tapped: jax.Array = rows + next(taps)
    return tapped


def _evaluate(program: Any, equation: Any, given: list[Any]) -> dict[Any, Any]:
    """Runs one equation as JAX would, in its context and under its name."""
    inputs = {
        atom: value for atom, value in zip(equation.invars, given, strict=True) if not isinstance(atom, core.Literal)
    }
    outvars = [var for var in equation.outvars if not isinstance(var, core.DropVar)]
    alone = program.jaxpr.replace(constvars=(), invars=list(inputs), outvars=outvars, eqns=[equation])
    outs = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*inputs.values())
    return dict(zip(outvars, outs, strict=True))


def _check_outputs(outs: list[Any]) -> None:
    for out in outs:
        if isinstance(out, _Table):
            raise ConfigError(
                f"the table {out.name!r} has no gradient by rows, because the loss gives it back: leave it out "
                "of the tables of optim.lazy."
            )


def _rows_of(table: _Table, found: list[_Found], ids: list[jax.Array], gradients: list[jax.Array]) -> Rows:
    features = table.value.shape[1:]
    mine = [number for number, lookup in enumerate(found) if lookup.table == table.name]
    values = [gradients[number].reshape(-1, *features).astype(table.value.dtype) for number in mine]
    return Rows(
        jnp.concatenate([jnp.zeros(0, jnp.int32), *(ids[number] for number in mine)]),
        jnp.concatenate([jnp.zeros((0, *features), table.value.dtype), *values]),
    )
