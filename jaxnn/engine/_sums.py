"""Whether an evaluation returns sums over examples, read from its traced program: nothing is compiled or computed."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from jaxnn.types import Batch, ConfigError

_KEEP = ("neg", "abs", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "real")
_JOIN = ("add", "sub", "add_any", "max", "min", "concatenate")
# Operations whose results for an example may depend on other examples.
_COUPLED = ("cum", "reduce_window", "scatter", "iota", "sort", "while")


class _Value(NamedTuple):
    """How an array of a program depends on the batch."""

    degree: int | None  # power of the number of examples that it is proportional to; None: unknown
    is_masked: bool = False  # whether it depends on the mask
    is_batched: bool = False  # whether it depends on the batch, or on its size


_CONSTANT = _Value(0)


def check_sums(evaluate: Callable[..., Any], state: Any, batch: Batch, size: int) -> list[str]:
    """Raises ConfigError if a result of ``evaluate(state, batch)`` is no sum over examples, or counts padding too.

    Compares the programs of batches of ``size`` and twice as many examples, of the shapes in ``batch``: a sum over
    examples is proportional to their number and depends on the mask. Returns the names of results of which that is not
    known.
    """

    def trace(size: int) -> Any:
        shapes = jax.tree.map(lambda rows: jax.ShapeDtypeStruct((size, *rows.shape[1:]), rows.dtype), batch)
        return jax.make_jaxpr(evaluate, return_shape=True)(state, shapes)

    first, shapes = trace(size)
    names = [str(path[0].key) for path, _ in jax.tree.leaves_with_path(shapes)]
    try:
        second, _ = trace(2 * size)
    except Exception:  # it takes no other number of examples
        return names
    is_mask = jax.tree.leaves(jax.tree.map(lambda _: False, batch)._replace(mask=True))
    values = [_CONSTANT] * len(jax.tree.leaves(state)) + [_Value(0, masked, True) for masked in is_mask]
    unknown = dict[str, None]()
    for name, value in zip(names, _outputs(first, second, values), strict=True):
        remedy = f"return the sum of {'batch.mask' if name == 'count' else 'values * batch.mask'}"
        if not value.is_batched:  # a constant
            continue
        if value.degree is None:
            unknown[name] = None
        elif value.degree != 1:
            power = f"grows as the number of examples to the power {value.degree}, which no sum does"
            wrong = power if value.degree else "is a mean over the examples, not a sum"
            raise ConfigError(f"{name!r} of the task's evaluate {wrong}: {remedy}.")
        elif not value.is_masked:
            raise ConfigError(f"{name!r} of the task's evaluate counts padding too, whose mask is 0: {remedy}.")
    return list(unknown)


def _outputs(first: Any, second: Any, inputs: Sequence[_Value]) -> list[_Value]:
    """The results of a closed program for two sizes of a batch."""
    constants = [_constant(*pair) for pair in zip(first.consts, second.consts, strict=False)]
    return _walk(first.jaxpr, second.jaxpr, [*constants, *inputs])


def _constant(first: Any, second: Any) -> _Value:
    """A number in the programs for two sizes of a batch."""
    if np.shape(first) != np.shape(second):
        return _Value(None, is_batched=True)
    if np.size(first) != 1:
        return _CONSTANT
    try:
        first, second = float(np.ravel(first)[0]), float(np.ravel(second)[0])
    except TypeError:  # such as a key
        return _CONSTANT
    if first == second or math.isnan(first):
        return _CONSTANT
    powers = {first / 2: -1, 2 * first: 1, 4 * first: 2}
    return _Value(powers.get(second), is_batched=True)


def _walk(first: Any, second: Any, inputs: Sequence[_Value]) -> list[_Value]:
    known: dict[Any, _Value] = dict(zip([*first.constvars, *first.invars], inputs, strict=False))

    def read(one: Any, other: Any) -> _Value:
        if isinstance(one, core.Literal):
            return _constant(one.val, getattr(other, "val", None))
        return known.get(one, _Value(None, True, True))

    same = len(first.eqns) == len(second.eqns)
    for one, other in zip(first.eqns, second.eqns, strict=False):
        operands = [read(*pair) for pair in zip(one.invars, other.invars, strict=False)]
        if same and one.primitive is other.primitive:
            results = _results(one, other, operands)
        else:
            results = [_joined(operands)._replace(degree=None)] * len(one.outvars)
        known.update(zip(one.outvars, results, strict=True))
    return [read(*pair) for pair in zip(first.outvars, second.outvars, strict=False)]


def _joined(operands: Sequence[_Value]) -> _Value:
    """Operands that are added or compared, to which constants such as a small epsilon do not matter."""
    degrees = {value.degree for value in operands if value.is_batched} or {0}
    degree = degrees.pop() if len(degrees) == 1 else None
    return _Value(degree, *(any(getattr(value, name) for value in operands) for name in ("is_masked", "is_batched")))


def _batch_axes(one: Any, other: Any) -> set[int]:
    """The axes along which an array grows with the batch."""
    shapes = zip(getattr(one.aval, "shape", ()), getattr(other.aval, "shape", ()), strict=False)
    return {axis for axis, (first, second) in enumerate(shapes) if first != second}


def _results(one: Any, other: Any, operands: Sequence[_Value]) -> list[_Value]:
    """The results of an equation, from its form for either size."""
    inner = next((key for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in one.params), None)
    if inner is not None and one.primitive.name not in ("scan", "while", "shard_map"):
        first, second = one.params[inner], other.params[inner]
        return (_outputs if hasattr(first, "consts") else _walk)(first, second, operands)
    joined = _joined(operands)
    axes = [_batch_axes(*pair) for pair in zip(one.invars, other.invars, strict=False)]
    outputs = [_batch_axes(*pair) for pair in zip(one.outvars, other.outvars, strict=False)]
    degrees = [value.degree for value in operands if value.degree is not None]
    degree = _degree(one, operands, degrees, axes, outputs) if len(degrees) == len(operands) else None
    return [_Value(degree, joined.is_masked, joined.is_batched or any(outputs))] * len(one.outvars)


def _degree(
    one: Any, operands: Sequence[_Value], degrees: list[int], axes: list[set[int]], outputs: list[set[int]]
) -> int | None:
    """The degree of the results of an equation whose operands have ``degrees``, and arrays these batch ``axes``."""
    name, params = one.primitive.name, one.params
    if name == "mul":
        return sum(degrees)
    if name == "dot_general":
        return sum(degrees) + len(axes[0] & {*params["dimension_numbers"][0][0]})
    if name == "div":
        return degrees[0] - degrees[1]
    if name == "reduce_sum":
        return degrees[0] + len(axes[0] & {*params["axes"]})
    if name == "scatter-add" and not operands[0].is_batched:
        return degrees[2] + bool(axes[2] and not outputs[0])
    if name == "integer_pow":
        return int(degrees[0] * params["y"])
    if name in _KEEP:
        return degrees[0]
    if name in _JOIN:
        return _joined(operands).degree
    if name == "select_n":  # by a mask, for example: an example counts, or it does not
        return _joined(operands[1:]).degree if degrees[0] == 0 else None
    if any(degrees):
        return None
    of_all = name.startswith(("reduce_max", "reduce_min", "arg"))  # the same if each example is there twice
    by_row = not any(axes) or all(outputs)
    return 0 if of_all or (by_row and not (any(outputs) and name.startswith(_COUPLED))) else None
