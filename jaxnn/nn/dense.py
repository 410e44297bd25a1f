"""The dense layer: Flax's, whose kernel's gradient comes out as the kernel lies.

JAX writes the gradient of ``inputs @ kernel`` by the kernel as ``(cotangent.T @ inputs).T``. Where the batch is split
over devices, XLA:CPU sums that product over them before it transposes it, and all that follows (an optimizer) reads
it across the grain: twice the step of a wide network. ``inputs.T @ cotangent`` needs no transpose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxnn.nn.varying import varying_alike


def dot_general(
    inputs: jax.Array,
    kernel: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """``lax.dot_general``, to rounding: that of a dense layer with a gradient that is not transposed.

    Args:
        inputs: ``[..., in_features]``.
        kernel: ``[in_features, out_features]``.
        dimension_numbers: as ``lax.dot_general``'s. Others than a dense layer's are left to it, and so is all that
            has a precision or an element type of its own.
        precision: as ``lax.dot_general``'s.
        preferred_element_type: as ``lax.dot_general``'s.

    Returns:
        ``[..., out_features]``, differentiable in either mode and to any order.
    """
    of_a_dense_layer = (((inputs.ndim - 1,), (0,)), ((), ()))
    plain = precision is None and preferred_element_type is None and inputs.dtype == kernel.dtype
    if kernel.ndim != 2 or not plain or dimension_numbers != of_a_dense_layer:
        return lax.dot_general(inputs, kernel, dimension_numbers, precision, preferred_element_type)
    result: jax.Array = _dense(*varying_alike(inputs, kernel))
    return result


class Dense(linen.Dense):
    """``flax.linen.Dense`` by `jaxnn.nn.dot_general`: the same parameters, names and results (to rounding).

    Over devices of a CPU that share a batch its step takes about half as long.
    """

    dot_general: Callable[..., Any] | None = dot_general


@jax.custom_jvp
def _dense(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    # Not the primitive below: policies of `jax.checkpoint` that save products know JAX's own alone.
    return _evaluate(inputs, kernel, missing="output")


def _with_tangent(primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    operands = [(tangents[0], primals[1]), (primals[0], tangents[1])]
    terms = [
        _product.bind(*pair, missing="output")
        for pair, tangent in zip(operands, tangents, strict=True)
        if not isinstance(tangent, SymbolicZero)
    ]
    return _evaluate(*primals, missing="output"), functools.reduce(jnp.add, terms)


_dense.defjvp(_with_tangent, symbolic_zeros=True)

# In ``sum(output * (inputs @ kernel))`` inputs, kernel and output are on an equal footing: the derivative of a product
# of two of them by either is again a product of two, and misses the third.
_ROLES = ("inputs", "kernel", "output")


def _evaluate(first: jax.Array, second: jax.Array, *, missing: str) -> jax.Array:
    if missing == "kernel":
        summed = tuple(range(first.ndim - 1))
        return lax.dot_general(first, second, ((summed, summed), ((), ())))
    if missing == "inputs":
        return lax.dot_general(second, first, (((second.ndim - 1,), (1,)), ((), ())))
    return lax.dot_general(first, second, (((first.ndim - 1,), (0,)), ((), ())))


def _abstract(first: Any, second: Any, *, missing: str) -> Any:
    shape = {
        "inputs": (*second.shape[:-1], first.shape[0]),
        "kernel": (first.shape[-1], second.shape[-1]),
        "output": (*first.shape[:-1], second.shape[-1]),
    }[missing]
    return first.update(shape=shape, weak_type=False)


def _transpose(wanted: int, cotangent: jax.Array, *operands: Any, missing: str) -> jax.Array:
    given = [role for role in _ROLES if role != missing]
    arrays = {given[1 - wanted]: operands[1 - wanted], missing: cotangent}
    first, second = (arrays[role] for role in _ROLES if role in arrays)
    result: jax.Array = _product.bind(first, second, missing=given[wanted])
    return result


def _batch(operands: Any, dims: Any, *, missing: str) -> tuple[jax.Array, int]:
    return jax.vmap(lambda *members: _evaluate(*members, missing=missing), dims)(*operands), 0


_product = Primitive("dense_product")
_product.def_impl(jax.jit(_evaluate, static_argnames="missing"))
_product.def_abstract_eval(_abstract)
ad.defbilinear(_product, *(lambda g, *xs, _wanted=wanted, **kw: _transpose(_wanted, g, *xs, **kw) for wanted in (0, 1)))
batching.primitive_batchers[_product] = _batch
mlir.register_lowering(_product, mlir.lower_fun(_evaluate, multiple_results=False))
