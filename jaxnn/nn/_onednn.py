"""Operations by oneDNN, if the package `jaxnn-onednn` is installed: on CPUs up to twice as fast as XLA's.

They are the forms of `_channels_last_conv`, the convolution and its gradients by input and kernel, and a dense layer
and its gradients, each a call of XLA's foreign function interface. The package's own update by Adam is here too.
Source: `oneDNN <https://uxlfoundation.github.io/oneDNN>`_.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxnn._batch_context import map_rows, sharding_obstacle
from jaxnn._compat import platform
from jaxnn.nn._channels_last_conv import Geometry, abstract_result, convolution, convolve, evaluate
from jaxnn.nn._choice import choose, scope
from jaxnn.nn._custom_vjp import native_or_xla, vary_together
from jaxnn.types import ConfigError

INSTALL = "make onednn (or: pip install ./native/onednn)"
SWITCH = "JAXNN_NATIVE"  # the environment variable: auto, on or off
_OFF = f"native kernels are switched off by {SWITCH}=off"
_DTYPES = "float32", "bfloat16"
type Transposed = Literal["left", "right"] | None
_ROLES = "input", "kernel", "output"  # numbered as in the package
_MIN_UPDATED = 2**14  # elements of a parameter: with fewer, XLA's three passes of Adam are as fast
_MIN_PRODUCTS = 2**19  # multiplications of a matrix product: with fewer, XLA is faster


def onednn_package() -> Any:
    """The package, whose import registers its targets; if it is not to be used or cannot be loaded, the reason.

    ``JAXNN_NATIVE`` in the environment decides: with ``off`` the package is not used, with ``on`` it must load, by
    default, ``auto``, it is used if it is there. ConfigError for another value, and with ``on`` without the package.
    """
    wanted = os.environ.get(SWITCH) or "auto"
    if wanted == "off":
        return _OFF
    if wanted not in ("auto", "on"):
        raise ConfigError(f"{SWITCH} in the environment is {wanted!r}: choose auto, on or off.")
    try:
        return importlib.import_module("jaxnn_onednn")
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError) as error:  # of another jax, for example
        reason = f"the package jaxnn-onednn cannot be loaded: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == "jaxnn_onednn":
            reason = f"the package jaxnn-onednn is not installed: {INSTALL}"
    if wanted == "on":
        raise ConfigError(f"{SWITCH} is on, but {reason}.")
    return reason


def native_obstacle(target: str) -> str | None:
    """The reason why the package's kernel ``target`` cannot be called here, or None."""
    if platform() != "cpu":
        return "the package jaxnn-onednn computes on CPUs"
    if isinstance(package := onednn_package(), str):
        return package
    known = getattr(package, "TARGETS", ())
    return None if target in known else f"the package jaxnn-onednn is older than jaxnn: {INSTALL}"


def native_call(
    target: str,
    shapes: Sequence[tuple[int, ...]],
    *operands: jax.Array,
    dtype: str = "float32",
    in_place: dict[int, int] | None = None,
    **attributes: Any,
) -> list[jax.Array]:
    """The results of ``shapes`` of the package's kernel ``target``, whose members of `jax.vmap` come first.

    ``in_place`` maps the index of an operand, to which the kernel may write, to that of its result.
    """
    like: Any = jax.typeof(operands[-1])  # varies over the mesh axes of all
    results = [like.update(shape=shape, dtype=np.dtype(dtype)) for shape in shapes]
    call: Any = jax.ffi.ffi_call(target, results, vmap_method="broadcast_all", input_output_aliases=in_place)
    return list(call(*operands, **attributes))


def onednn_missing() -> str | None:
    """Why the kernels cannot be used on this machine, where they could be: what to install; else None."""
    package = onednn_package() if sys.platform == "linux" and os.uname().machine == "x86_64" else None
    return package if isinstance(package, str) and package != _OFF and platform() == "cpu" else None


def _obstacle(target: str, *arrays: Any) -> str | None:
    """The reason why the oneDNN of ``target`` cannot compute with these shapes and dtypes here, or None."""
    if (obstacle := native_obstacle(target)) is not None:
        return obstacle
    dtypes = {str(array.dtype) for array in arrays}
    if not dtypes <= {*_DTYPES}:
        return f"oneDNN's dtypes are float32 and bfloat16, not {', '.join(sorted(dtypes.difference(_DTYPES)))}"
    if "bfloat16" in dtypes and not onednn_package().has_bfloat16():
        return "this CPU has no instructions for bfloat16"
    symbolic = any(not isinstance(size, int) for array in arrays for size in array.shape)
    return "a size is symbolic" if symbolic else None


def onednn_obstacle(
    lhs: jax.Array,
    rhs: jax.Array,
    output: jax.ShapeDtypeStruct,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    input_dilation: Sequence[int] | None,
) -> str | None:
    """The reason why oneDNN cannot compute this convolution, which has channels last and no empty array; or None."""
    if (obstacle := _obstacle("jaxnn_convolution", lhs, rhs, output)) is not None:
        return obstacle
    if not 3 <= lhs.ndim <= 5:
        return f"oneDNN has 1 to 3 spatial axes, not {lhs.ndim - 2}"
    dilation = tuple(input_dilation or (1,) * len(strides))
    if max(dilation) > 1 and max(strides) > 1:
        return "oneDNN has no convolution with both strides and input dilation"
    sizes = [(size - 1) * factor + 1 for size, factor in zip(lhs.shape[1:-1], dilation, strict=True)]
    pads = [] if isinstance(padding, str) else zip(sizes, padding, strict=True)
    return "padding crops all of the input" if any(n + min(a, 0) + min(b, 0) < 1 for n, (a, b) in pads) else None


def onednn_conv(inputs: jax.Array, kernel: jax.Array, geometry: Geometry, groups: int) -> jax.Array:
    """The convolution of ``[batch, *input_size, in_features]`` and ``[*kernel_size, in_features // groups, out]``.

    Raises nothing: `onednn_obstacle` was None. In a program that XLA partitions, each device convolves its rows.
    """
    g = geometry._replace(groups=groups, form="native")

    convolve_rows = _transposed_convolution if max(g.input_dilation) > 1 else _cropped_convolution
    run = map_rows(functools.partial(convolve_rows, geometry=g), inputs.shape[0], (0, None), 0)
    return run(inputs, kernel)  # type: ignore[no-any-return]


def _cropped_convolution(inputs: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
    """Crops the input first where padding is negative, which oneDNN does not have."""
    crops = [(min(low, 0), min(high, 0), 0) for low, high in geometry.padding]
    if any(map(any, crops)):
        inputs = lax.pad(inputs, jnp.zeros((), inputs.dtype), [(0, 0, 0), *crops, (0, 0, 0)])
        padding = tuple((max(low, 0), max(high, 0)) for low, high in geometry.padding)
        geometry = geometry._replace(input_size=inputs.shape[1:-1], padding=padding)
    return convolve(inputs, kernel, geometry)


def _transposed_convolution(inputs: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
    """The convolution of a dilated input: the input gradient of one with strides and the flipped kernel."""
    g = geometry
    borders = [(k - 1 - low, x - y + low) for x, k, y, low in g.dilated()]
    # Outputs beyond the reach of the kernel are zeros, which are added in the end.
    beyond = [(max(-low, 0), max(-high, 0), 0) for low, high in borders]
    size = tuple(n - low - high for n, (low, high, _) in zip(g.output_size, beyond, strict=True))
    inverse = g._replace(
        input_size=size,
        output_size=g.input_size,
        strides=g.input_dilation,
        input_dilation=g.strides,
        padding=tuple((max(low, 0), max(high, 0)) for low, high in borders),
        dtype=g.output_dtype,
        output_dtype=g.dtype,
    )
    flipped = jnp.flip(kernel, range(kernel.ndim - 2))
    by_group = flipped.reshape(*flipped.shape[:-1], g.groups, -1)  # [*kernel_size, in, groups, out]
    swapped = jnp.swapaxes(by_group, -3, -1).reshape(*kernel.shape[:-2], kernel.shape[-1] // g.groups, -1)
    result = convolution.bind(swapped, inputs, missing="input", geometry=inverse)
    if any(map(any, beyond)):
        result = lax.pad(result, jnp.zeros((), result.dtype), [(0, 0, 0), *beyond, (0, 0, 0)])
    return result  # type: ignore[no-any-return]


def _evaluate_native(first: jax.Array, second: jax.Array, *, missing: str, geometry: Geometry) -> jax.Array:
    if geometry.form != "native":
        return evaluate(first, second, missing=missing, geometry=geometry)
    g, aval = geometry, abstract_result(first, second, missing=missing, geometry=geometry)
    dtype = jnp.promote_types(first.dtype, second.dtype)
    # A kernel's gradient is summed over parts of the batch in float32.
    result_dtype = dtype if aval.dtype == dtype and missing != "kernel" else jnp.float32
    call = jax.ffi.ffi_call("jaxnn_convolution", jax.ShapeDtypeStruct(aval.shape, result_dtype))
    low, high = zip(*g.padding, strict=True)
    options = {"strides": g.strides, "low": low, "high": high, "dilation": g.kernel_dilation}
    arrays = {name: np.array(values, np.int64) for name, values in options.items()}
    numbers = {"missing": np.int64(_ROLES.index(missing)), "groups": np.int64(g.groups)}
    return call(first.astype(dtype), second.astype(dtype), **numbers, **arrays).astype(aval.dtype)


mlir.register_lowering(convolution, mlir.lower_fun(_evaluate_native, multiple_results=False), platform="cpu")


def product_obstacle(inputs: jax.Array, kernel: jax.Array, *, requested: bool) -> str | None:
    """The reason why the package cannot, or unless requested should not, compute this dense layer and its gradients."""
    if (obstacle := _obstacle("jaxnn_product", inputs, kernel)) is not None:
        return obstacle
    if inputs.ndim == 1:
        return "there is one row"
    if (obstacle := sharding_obstacle(inputs.shape[0])) is not None:
        return obstacle
    small = inputs.size * kernel.shape[1] <= _MIN_PRODUCTS and not requested
    return "the product is small, for which it is not faster" if small else None


def product(left: jax.Array, right: jax.Array, transposed: Transposed = None) -> jax.Array:
    """``left @ right`` of matrices, one of which may be ``transposed`` before; `product_obstacle` was None."""
    # A product of a transposed left matrix always is faster than XLA's.
    is_fast = left.dtype == jnp.float32 and onednn_package().has_fast_products(left.shape[-2])
    if transposed != "left" and not is_fast:
        return _evaluate_product(left, right, transposed=transposed)
    result: jax.Array = _product.bind(left, right, transposed=transposed)
    return result


def _evaluate_product(left: jax.Array, right: jax.Array, *, transposed: Transposed) -> jax.Array:
    return (left.mT if transposed == "left" else left) @ (right.mT if transposed == "right" else right)


def _product_shape(left: Any, right: Any, *, transposed: Transposed) -> tuple[int, ...]:
    return (
        *left.shape[:-2],
        left.shape[-1 if transposed == "left" else -2],
        right.shape[-2 if transposed == "right" else -1],
    )


def _evaluate_product_native(left: jax.Array, right: jax.Array, *, transposed: Transposed) -> jax.Array:
    result = jax.ShapeDtypeStruct(_product_shape(left, right, transposed=transposed), left.dtype)
    call = jax.ffi.ffi_call("jaxnn_product", result)
    return call(left, right, transposed=np.int64((None, "left", "right").index(transposed)))


def _batch_product(operands: Any, dims: Any, *, transposed: Transposed) -> tuple[jax.Array, int]:
    (size,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    if transposed != "left" and None in dims:  # what members share is not copied by XLA
        return jax.vmap(functools.partial(_evaluate_product, transposed=transposed), dims)(*operands), 0
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
_product.def_impl(functools.partial(xla.apply_primitive, _product))
_product.def_abstract_eval(lambda *arrays, **how: arrays[0].update(shape=_product_shape(*arrays, **how)))
ad.defbilinear(_product, _left_gradient, _right_gradient)
batching.primitive_batchers[_product] = _batch_product
mlir.register_lowering(_product, mlir.lower_fun(_evaluate_product, multiple_results=False))
mlir.register_lowering(_product, mlir.lower_fun(_evaluate_product_native, multiple_results=False), platform="cpu")


def adam_update(param: jax.Array, gradient: jax.Array, mu: jax.Array, nu: jax.Array) -> Callable[..., Any] | None:
    """The update of a parameter and its two moments, a function of Adam's ``numbers [9]``; None: it is for XLA.

    The numbers are the decay of the first moment and 1 less that, those of the second, ``rate / (1 - b1**count)``,
    ``1 / (1 - b2**count)``, ``eps``, ``eps_root`` and ``rate * weight_decay``.
    """
    if jnp.size(param) < _MIN_UPDATED:
        return None
    obstacle = native_obstacle("jaxnn_adam")
    if {str(array.dtype) for array in (param, gradient, mu, nu)} != {"float32"}:
        obstacle = "it updates float32"
    if choose("adam", None, {"native": obstacle}) != "native":
        return None

    def update(numbers: jax.Array) -> Any:
        with scope("adam", "native"):
            return _adam(*vary_together(gradient, mu, nu, numbers, param))

    return update


def _adam_by_xla(
    gradient: jax.Array, mu: jax.Array, nu: jax.Array, numbers: jax.Array, param: jax.Array
) -> tuple[jax.Array, ...]:
    decay_mu, part_mu, decay_nu, part_nu, rate, factor_nu, eps, eps_root, shrink = numbers
    mu = decay_mu * mu + part_mu * gradient
    nu = decay_nu * nu + part_nu * jnp.square(gradient)
    step = rate * mu / (jnp.sqrt(nu * factor_nu + eps_root) + eps)
    return param - (step + jnp.where(shrink == 0, 0, shrink * param)), mu, nu  # an infinite one stays so


def _native_adam(*operands: jax.Array) -> tuple[jax.Array, ...]:
    shapes = [operands[-1].shape] * 3
    return tuple(native_call("jaxnn_adam", shapes, *operands, in_place={4: 0, 1: 1, 2: 2}))


_adam = native_or_xla(_native_adam, _adam_by_xla)
