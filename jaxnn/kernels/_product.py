"""The product of a dense layer and its gradients: of matrices, one of which may be transposed."""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jaxnn._batch_context import sharding_obstacle
from jaxnn.kernels._kernel import Kernel
from jaxnn.kernels._package import native_call, native_package

type Transposed = Literal["left", "right"] | None
_MIN_PRODUCTS = 2**19  # multiplications of a matrix product: with fewer, XLA is faster


def dtype_obstacle(*arrays: Any) -> str | None:
    """The reason why products natively cannot have these dtypes, or None; the package is installed."""
    dtypes = {str(array.dtype) for array in arrays}
    if others := dtypes - {"float32", "bfloat16"}:
        return f"its dtypes are float32 and bfloat16, not {', '.join(sorted(others))}"
    if "bfloat16" in dtypes and not native_package().has_bfloat16():
        return "this CPU has no instructions for bfloat16"
    return None


def _unfit(inputs: Any, kernel: Any, *, transposed: Transposed = None) -> str | None:
    if (obstacle := dtype_obstacle(inputs, kernel)) is not None:
        return obstacle
    return "there is one row" if inputs.ndim == 1 else sharding_obstacle(inputs.shape[0])


def _slower(inputs: Any, kernel: Any, *, transposed: Transposed = None) -> str | None:
    is_small = inputs.size * kernel.shape[1] <= _MIN_PRODUCTS
    return "the product is small, for which it is not faster" if is_small else None


def _by_xla(left: jax.Array, right: jax.Array, *, transposed: Transposed = None) -> jax.Array:
    return (left.mT if transposed == "left" else left) @ (right.mT if transposed == "right" else right)


def _shape(left: Any, right: Any, *, transposed: Transposed = None) -> tuple[int, ...]:
    rows, columns = left.shape[-1 if transposed == "left" else -2], right.shape[-2 if transposed == "right" else -1]
    return (*left.shape[:-2], rows, columns)


def _natively(left: jax.Array, right: jax.Array, *, transposed: Transposed = None) -> jax.Array:
    like = jax.ShapeDtypeStruct(_shape(left, right, transposed=transposed), left.dtype)
    number = (None, "left", "right").index(transposed)
    return native_call("jaxnn_product", [like], left, right, transposed=number)[0]


def _products(left: Any, right: Any, *, transposed: Transposed) -> float:
    shape = _shape(left, right, transposed=transposed)
    return float(math.prod(shape) * left.shape[-2 if transposed == "left" else -1])


# Of matrices ``[rows, summed]`` and ``[summed, columns]``; ``transposed`` is the one that is not so.
dense = Kernel("dense", _by_xla, _natively, _unfit, _slower, products=_products)


def product(left: jax.Array, right: jax.Array, transposed: Transposed = None) -> jax.Array:
    """``left @ right`` of matrices, one of which may be ``transposed`` before; `dense` had no obstacle."""
    # A product of a transposed left matrix always is faster than XLA's.
    is_fast = left.dtype == jnp.float32 and native_package().has_fast_products(left.shape[-2])
    if transposed != "left" and not is_fast:
        return _by_xla(left, right, transposed=transposed)
    result: jax.Array = _product.bind(left, right, transposed=transposed)
    return result


def _batch(operands: Any, dims: Any, *, transposed: Transposed) -> tuple[jax.Array, int]:
    (size,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    if transposed != "left" and None in dims:  # what members share is not copied by XLA
        return jax.vmap(functools.partial(_by_xla, transposed=transposed), dims)(*operands), 0
    members = (
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    )
    return _product.bind(*members, transposed=transposed), 0


def _left_gradient(g: jax.Array, left: Any, right: jax.Array, *, transposed: Transposed) -> jax.Array:
    if transposed == "left":
        return right @ g.mT
    return g @ (right if transposed == "right" else right.mT)


def _right_gradient(g: jax.Array, left: jax.Array, right: Any, *, transposed: Transposed) -> jax.Array:
    if transposed == "right":
        return g.mT @ left
    return (left if transposed == "left" else left.mT) @ g


_product = Primitive("dense_product")  # of ``[*members, rows, summed]`` and ``[*members, summed, columns]``
_product.def_abstract_eval(lambda *arrays, **how: arrays[0].update(shape=_shape(*arrays, **how)))
ad.defbilinear(_product, _left_gradient, _right_gradient)
batching.primitive_batchers[_product] = _batch
dense.lower(_product)
