"""The dense layer."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax

from jaxnn._batch_context import map_rows
from jaxnn.kernels import custom_vjp, dense, product, scope
from jaxnn.nn._layer_arguments import narrowed, padded_classes, with_wide_bias


def dot_general(
    inputs: jax.Array,
    kernel: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """``lax.dot_general`` of a dense layer, whose kernel gradient needs no transpose; equal to rounding.

    Takes ``inputs [..., in_features]`` and ``kernel [in_features, out_features]``, returns ``[..., out_features]``;
    differentiable in either mode and to any order. Other dimension numbers, and calls with a precision or an element
    type, are passed on to ``lax.dot_general``. ``implementation`` is ``"xla"``, ``"native"`` on a CPU with the package
    of ``make native``, or None for the faster. In a jaxpr the latter is a ``dense_product``, which `jax.checkpoint`
    policies that save products do not know: it is recomputed, unless its result has a saved name.

    >>> linen.Dense(4, dot_general=jn.nn.dot_general).init_with_output(jax.random.key(0), jnp.ones((2, 3)))[0].shape
    (2, 4)
    """
    of_a_dense_layer = (((inputs.ndim - 1,), (0,)), ((), ()))
    plain = precision is None and preferred_element_type is None and inputs.dtype == kernel.dtype
    if kernel.ndim != 2 or not plain or dimension_numbers != of_a_dense_layer:
        return lax.dot_general(inputs, kernel, dimension_numbers, precision, preferred_element_type)
    if not dense.is_chosen(inputs, kernel, implementation=implementation):
        return _by_xla(inputs, kernel)
    with scope("dense", "native"):
        return map_rows(_natively, inputs.shape[0], (0, None), 0)(inputs, kernel)  # type: ignore[no-any-return]


def _promoted(inputs: Any, kernel: Any, bias: Any, **options: Any) -> list[Any]:
    """Inputs, kernel and bias as `with_wide_bias` gives them, with columns of zeros up to `padded_classes`.

    With the bias, so that XLA pads logits' gradients where it sums them; padded for the product alone it copies them.
    """
    inputs, kernel, bias = with_wide_bias(inputs, kernel, bias, **options)
    if padding := padded_classes(kernel.shape[1]) - kernel.shape[1]:
        kernel = jnp.pad(kernel, ((0, 0), (0, padding)))
        bias = None if bias is None else jnp.pad(bias, (0, padding))
    return [inputs, kernel, bias]


class Dense(linen.Dense):
    """``flax.linen.Dense`` with `jaxnn.nn.dot_general`: the same parameters, names and results (to rounding).

    Over CPU devices that share a batch, a training step takes about half as long. On a GPU 1,024 features or more that
    are no multiple of 8, as the classes of a vocabulary, are computed with zeros up to a multiple of 128.

    >>> jn.models.num_parameters(jn.nn.Dense(10), jax.ShapeDtypeStruct((32, 784), "float32"))
    7850
    """

    dot_general: Callable[..., Any] | None = dot_general
    promote_dtype: Callable[..., Any] = _promoted

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """``[..., in_features]`` to ``[..., features]``; the bias is added, and its gradient summed, in float32."""
        outputs = narrowed(linen.Dense.__call__, self, inputs)
        return outputs[..., : self.features] if outputs.shape[-1] > self.features else outputs


def _dot(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.dot_general(inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())))


def _backward_by_xla(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    # JAX's own kernel gradient is (cotangent.T @ inputs).T. If the batch is sharded, XLA:CPU sums over devices before
    # it transposes, and the optimizer reads the result with strides: a wide network's step takes twice as long.
    inputs, kernel = saved
    summed = tuple(range(inputs.ndim - 1))
    to_inputs = lax.dot_general(cotangent, kernel, (((inputs.ndim - 1,), (1,)), ((), ())))
    return to_inputs, lax.dot_general(inputs, cotangent, ((summed, summed), ((), ())))


# The forward rule is a plain product: `jax.checkpoint` policies that save products know only JAX's own.
_by_xla = custom_vjp(_dot)
_by_xla.defvjp(lambda *arrays: (_dot(*arrays), arrays), _backward_by_xla)


def _rows(array: jax.Array) -> jax.Array:
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _native_dot(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    return product(_rows(inputs), kernel).reshape(*inputs.shape[:-1], kernel.shape[1])


def _native_backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    inputs, kernel = saved
    rows, of_rows = _rows(inputs), _rows(cotangent)
    return product(of_rows, kernel, "right").reshape(inputs.shape), product(rows, of_rows, "left")


_natively = custom_vjp(_native_dot)
_natively.defvjp(lambda *arrays: (_native_dot(*arrays), arrays), _native_backward)
