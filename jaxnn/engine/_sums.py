"""Whether an evaluation returns sums over examples, read from its traced program: nothing is compiled or computed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from jaxnn.types import Batch, ConfigError

_KEEP = ("neg", "abs", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "real")
_JOIN = ("add", "sub", "add_any", "max", "min", "concatenate")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")


class _Value(NamedTuple):
    """How an array of a program depends on the batch."""

    degree: int | None  # power of the number of examples that it is proportional to; None: unknown
    is_masked: bool = False  # whether it depends on the mask
    is_batched: bool = False  # whether it depends on the batch, or on its size


_CONSTANT = _Value(0)


def check_sums(evaluate: Callable[..., Any], state: Any, batch: Batch, size: int) -> list[str]:
    """Raises ConfigError if a result of ``evaluate(state, batch)`` is no sum over examples, or counts padding too.

    Compares the programs of batches of ``size``, 2 or more, and twice as many examples, of the shapes in ``batch``: a
    sum over examples is proportional to their number and depends on the mask. Returns the names of results of which
    that is not known.
    """

    def trace(size: int) -> Any:
        shapes = jax.tree.map(lambda rows: jax.ShapeDtypeStruct((size, *rows.shape[1:]), rows.dtype), batch)
        return jax.make_jaxpr(evaluate, return_shape=True)(state, shapes)

    size = max(size, 2)
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
        if value.degree is None or value.degree > 1:  # such as pairs of examples
            unknown[name] = None
        elif value.degree < 1:
            raise ConfigError(f"{name!r} of the task's evaluate is a mean over the examples, not a sum: {remedy}.")
        elif not value.is_masked:
            raise ConfigError(f"{name!r} of the task's evaluate counts padding too, whose mask is 0: {remedy}.")
    return list(unknown)


def _outputs(first: Any, second: Any, inputs: Sequence[_Value]) -> list[_Value]:
    """The results of a closed program for two sizes of a batch."""
    constants = [_constant(*pair) for pair in zip(first.consts, second.consts, strict=False)]
    return _walk(first.jaxpr, second.jaxpr, [*constants, *inputs])


def _constant(first: Any, second: Any) -> _Value:
    """A constant in the programs for two sizes of a batch."""
    unknown = _Value(None, is_batched=True)
    if np.shape(first) != np.shape(second):
        return unknown
    try:
        first, second = np.float64(first), np.float64(second)
    except TypeError:  # such as a key
        return _CONSTANT
    if np.array_equal(first, second, equal_nan=True):
        return _CONSTANT
    powers = (power for power in (-1, 1, 2) if np.array_equal(second, first * 2.0**power))
    return _Value(next(powers, None), is_batched=True)


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
            results = [_joined(operands)._replace(degree=None, is_batched=True)] * len(one.outvars)
        known.update(zip(one.outvars, results, strict=True))
    return [read(*pair) for pair in zip(first.outvars, second.outvars, strict=False)]


def _joined(operands: Sequence[_Value]) -> _Value:
    """Operands that are added or compared, to which constants such as a small epsilon do not matter."""
    degrees = {value.degree for value in operands if value.is_batched} or {0}
    degree = degrees.pop() if len(degrees) == 1 else None
    return _Value(degree, *(any(getattr(value, name) for value in operands) for name in ("is_masked", "is_batched")))


def _growth(one: Any, other: Any) -> dict[int, int | None]:
    """The axes along which an array grows with the batch, each with the power; None: it is no power of two."""
    shapes = zip(getattr(one.aval, "shape", ()), getattr(other.aval, "shape", ()), strict=False)
    grown = {axis: other_size / size for axis, (size, other_size) in enumerate(shapes) if size != other_size}
    return {axis: {2.0: 1, 4.0: 2}.get(ratio) for axis, ratio in grown.items()}


def _summed(degree: int, growth: dict[int, int | None], axes: Sequence[int]) -> int | None:
    """The degree of a sum over ``axes``."""
    powers = [growth[axis] for axis in axes if axis in growth]
    return None if None in powers else degree + sum(power for power in powers if power is not None)


def _results(one: Any, other: Any, operands: Sequence[_Value]) -> list[_Value]:
    """The results of an equation, from its form for either size."""
    name, joined = one.primitive.name, _joined(operands)
    growths = [_growth(*pair) for pair in zip(one.invars, other.invars, strict=False)]
    outputs = [_growth(*pair) for pair in zip(one.outvars, other.outvars, strict=False)]
    found: list[_Value] | None = None
    if name in _CALLS:
        found = _called(one, other, operands)
    elif name == "cond":
        branches = zip(one.params["branches"], other.params["branches"], strict=False)
        ways = [_outputs(*pair, operands[1:]) for pair in branches]
        found = [_joined([*values, operands[0]]) for values in zip(*ways, strict=False)]
    elif name == "scan" and one.params["length"] == other.params["length"]:
        found = _scanned(one, other, operands)
    if found is not None and len(found) == len(one.outvars):
        return found
    degrees = [value.degree for value in operands if value.degree is not None]
    degree = _degree(one, operands, degrees, growths, outputs) if len(degrees) == len(operands) else None
    is_batched = joined.is_batched or any(outputs) or one.params.get("length") != other.params.get("length")
    return [_Value(degree, joined.is_masked, is_batched)] * len(one.outvars)


def _called(one: Any, other: Any, operands: Sequence[_Value]) -> list[_Value]:
    key = next(key for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in one.params)
    first, second = one.params[key], other.params[key]
    return (_outputs if hasattr(first, "consts") else _walk)(first, second, operands)


def _scanned(one: Any, other: Any, operands: Sequence[_Value]) -> list[_Value]:
    """The results of a scan of as many steps for either size; its carry must keep how it depends on the batch."""
    body = one.params["jaxpr"].jaxpr
    # What is not carried has the axis of the steps outside the body.
    num_carried = sum(
        inner.aval.ndim == outer.aval.ndim for inner, outer in zip(body.outvars, one.outvars, strict=True)
    )
    num_stepped = sum(inner.aval.ndim != outer.aval.ndim for inner, outer in zip(body.invars, one.invars, strict=True))
    given = len(operands) - num_carried - num_stepped
    values = list(operands)
    for _ in range(2):
        found = _outputs(one.params["jaxpr"], other.params["jaxpr"], values)
        carried = values[given : given + num_carried]
        after = [_joined(pair) for pair in zip(carried, found[:num_carried], strict=False)]
        if after == carried:
            return [*after, *found[num_carried:]]
        values[given : given + num_carried] = after
    return [value._replace(degree=None, is_batched=True) for value in found]


def _degree(
    one: Any, operands: Sequence[_Value], degrees: list[int], growths: list[dict[int, Any]], outputs: list[Any]
) -> int | None:
    """The degree of the results of an equation whose operands have ``degrees`` and ``growths``."""
    name, params = one.primitive.name, one.params
    if name == "mul":
        return sum(degrees)
    if name == "dot_general":
        return _summed(sum(degrees), growths[0], params["dimension_numbers"][0][0])
    if name == "div":
        return degrees[0] - degrees[1]
    if name == "reduce_sum":
        return _summed(degrees[0], growths[0], params["axes"])
    if name == "scatter-add" and not outputs[0] and not operands[0].is_batched:
        return _summed(degrees[2], growths[2], list(growths[2]))
    if name == "integer_pow":
        return int(degrees[0] * params["y"])
    if name in _KEEP:
        return degrees[0]
    if name in _JOIN:
        return _joined(operands).degree
    if name == "select_n":  # by a mask, for example: an example counts, or it does not
        return _joined(operands[1:]).degree if degrees[0] == 0 else None
    if any(degrees) or _is_coupled(one, growths, outputs):
        return None
    return 0


def _is_coupled(one: Any, growths: list[dict[int, Any]], outputs: list[Any]) -> bool:
    """Whether a result for an example may depend on others, or how it depends on the batch is not seen."""
    name, params = one.primitive.name, one.params
    if name.startswith(("reduce_max", "reduce_min", "arg")):  # the same if each example is there twice
        return False
    if name.startswith(("scatter", "iota")):
        return any(outputs)
    if name.startswith(("sort", "cum")):
        return params.get("dimension", params.get("axis")) in growths[0]
    if name.startswith("reduce_window"):
        return any(params["window_dimensions"][axis] > 1 for axis in growths[0])
    inner = (value for param in params.values() for value in (param if isinstance(param, tuple) else (param,)))
    is_opaque = any(hasattr(value, "eqns") or hasattr(value, "jaxpr") for value in inner)
    if is_opaque or "callback" in name or (name == "ffi_call" and not params["target_name"].startswith("jaxnn_")):
        return True
    return any(growths) and not all(outputs)
