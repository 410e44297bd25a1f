"""Sums of many terms in half precision, which lose most of them: where a traced program has them."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxnn._equations import constants_and_carries, equations
from jaxnn.types import is_half

MOST_TERMS = 64  # so many equal terms are exact in bfloat16, and others err by about the rounding of the result
# In named scopes, which also have the transformations around a module: names of jitted functions, and of operations.
_NO_MODULE = re.compile(r"\b(jit|pjit)\([^)]*\)|\bjaxnn\.[\w.]+|\w+\(|\)")


class HalfSum(NamedTuple):
    """A sum in half precision."""

    where: str  # the path of the module, as ``Net/Dense_0``; empty if the model has no modules
    operation: str  # JAX's name: reduce_sum, scatter-add, cumsum, reduce_window_sum, or scan for a sum over its steps
    terms: int  # that are added to one number, at most
    dtype: str

    def __str__(self) -> str:
        return f"sums {self.terms:,} terms in {self.dtype} in {self.where or 'the model'} ({self.operation})"


def half_sums(function: Callable[..., Any], *args: Any) -> list[HalfSum]:
    """The sums of more than 64 terms in float16 or bfloat16 that ``function`` computes, the longest first.

    From 256 on bfloat16 drops a 1, float16 from 2,048 on: a sum of many terms, such as the gradient of a bias over rows
    or of a frequent token, is far too small. Matrix products and convolutions are not listed: they sum in float32, but
    on CPUs, which add parts of batched products in bfloat16. ``args`` are its arguments, or ``jax.ShapeDtypeStruct`` in
    their place; costs one trace.

    >>> def loss(bias, rows):
    ...     return jnp.sum(jnp.float32(rows + bias[None]))
    >>> shapes = jax.ShapeDtypeStruct((8,), "bfloat16"), jax.ShapeDtypeStruct((1000, 8), "bfloat16")
    >>> [str(found) for found in jn.observe.half_sums(jax.grad(loss), *shapes)]
    ['sums 1,000 terms in bfloat16 in the model (reduce_sum)']
    """
    found = dict[HalfSum, None]()
    for equation, scopes in equations(jax.make_jaxpr(function)(*args)):
        for terms, value in _sums(equation):
            if terms > MOST_TERMS and is_half(value.aval.dtype):
                names = [name.partition(".")[0] for name in _NO_MODULE.sub("", scopes).split("/")]
                path = "/".join(name for name, _ in itertools.groupby(filter(None, names)))
                found[HalfSum(path, equation.primitive.name, terms, str(value.aval.dtype))] = None
    return sorted(found, key=lambda one: -one.terms)


def _sums(equation: Any) -> list[tuple[int, Any]]:
    """The numbers of terms of the sums of ``equation``, and the sums."""
    name, parameters = equation.primitive.name, equation.params
    shapes = [getattr(value.aval, "shape", ()) for value in equation.invars]
    match name:
        case "reduce_sum":
            return [(math.prod(shapes[0][axis] for axis in parameters["axes"]), equation.outvars[0])]
        case "reduce_window_sum":
            return [(math.prod(parameters["window_dimensions"]), equation.outvars[0])]
        case "cumsum":
            return [(shapes[0][parameters["axis"]], equation.outvars[0])]
        case "scatter-add" if not parameters["unique_indices"]:
            batch = parameters["dimension_numbers"].scatter_indices_batching_dims
            sizes = (size for axis, size in enumerate(shapes[1][:-1]) if axis not in batch)
            return [(math.prod(sizes), equation.outvars[0])]
        case "scan":
            (body,) = core.jaxprs_in_params(parameters)
            first, num_carries = constants_and_carries(equation, body)
            carries = zip(body.invars[first:], body.outvars[:num_carries], strict=False)
            return [(parameters["length"], after) for before, after in carries if _adds_to(body, before, after)]
    return []


def _adds_to(body: Any, before: Any, after: Any) -> bool:
    """Whether ``after`` is the sum of ``before`` and what does not depend on it, as the blocks of a network do."""
    dependent = {id(before)}
    for equation in body.eqns:
        inputs = [id(value) in dependent for value in equation.invars]
        if equation.outvars[0] is after and equation.primitive.name in ("add", "add_any"):
            return sum(inputs) == 1 and any(value is before for value in equation.invars)
        if any(inputs):
            dependent.update(map(id, equation.outvars))
    return False
