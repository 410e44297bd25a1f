"""A convolution and its two gradients as one primitive, differentiable in either mode and to any order.

Input, kernel and output of a convolution are on an equal footing in ``sum(output * conv(input, kernel))``, which is
linear in each. Of any two of them, its derivative by the third is what the third *misses*: the output is the
convolution, input and kernel are its gradients. The derivative of each of these is again one of the three.

Likewise any two of the three share one axis that the third has not: the batch, the input or the output features.
Members of `jax.vmap` may be laid side by side along it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxnn.nn import conv_forms
from jaxnn.nn.conv_forms import Geometry
from jaxnn.nn.varying import varying_alike

_FORMS = {
    "input": conv_forms.input_gradient,
    "kernel": conv_forms.kernel_gradient,
    "output": conv_forms.output,
}
_AXES = {
    "input": {"batch": 0, "in_features": -1},
    "kernel": {"in_features": -2, "out_features": -1},
    "output": {"batch": 0, "out_features": -1},
}


def convolve(inputs: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
    """The convolution with channels last, which stays so in its gradients and under `jax.vmap`.

    Members are never a grouped convolution: they share one along the batch, or along the features of thin inputs
    that are theirs in common; otherwise one follows the other.

    Args:
        inputs: ``[batch, *input_size, in_features]``.
        kernel: ``[*kernel_size, in_features, out_features]``, of the same dtype.
        geometry: the sizes named here, and all else.

    Returns:
        ``[batch, *output_size, out_features]``.
    """
    inputs, kernel = varying_alike(inputs, kernel)
    return _bind({"input": inputs, "kernel": kernel}, "output", geometry)


def _given(missing: str) -> list[str]:
    return [role for role in _AXES if role != missing]


def _bind(arrays: dict[str, Any], missing: str, geometry: Geometry) -> jax.Array:
    operands = [arrays[role] for role in _given(missing)]
    result: jax.Array = _convolution.bind(*operands, missing=missing, geometry=geometry)
    return result


def _evaluate(first: jax.Array, second: jax.Array, *, missing: str, geometry: Geometry) -> jax.Array:
    dtype = jnp.promote_types(first.dtype, second.dtype)
    result = _FORMS[missing](first.astype(dtype), second.astype(dtype), geometry)
    return result.astype(geometry.output_dtype if missing == "output" else geometry.dtype)


def _abstract(*operands: Any, missing: str, geometry: Geometry) -> Any:
    given = zip(_given(missing), operands, strict=True)
    sizes = {name: x.shape[axis] for role, x in given for name, axis in _AXES[role].items()}
    first, last = (sizes[name] for name in _AXES[missing])
    shape = {
        "input": (first, *geometry.input_size, last),
        "kernel": (*geometry.kernel_size, first, last),
        "output": (first, *geometry.output_size, last),
    }[missing]
    dtype = geometry.output_dtype if missing == "output" else geometry.dtype
    return operands[0].update(shape=shape, dtype=dtype, weak_type=False)


def _transpose(wanted: int, cotangent: jax.Array, *operands: Any, missing: str, geometry: Geometry) -> jax.Array:
    roles = _given(missing)
    other = 1 - wanted
    return _bind({roles[other]: operands[other], missing: cotangent}, roles[wanted], geometry)


def _batch(operands: Any, dims: Any, *, missing: str, geometry: Geometry) -> tuple[jax.Array, int]:
    apply = functools.partial(_convolution.bind, missing=missing, geometry=geometry)
    if None not in dims:
        return _one_by_one(apply, operands, dims)
    roles = _given(missing)
    own = 0 if dims[1] is None else 1
    (shared,) = _AXES[roles[own]].keys() & _AXES[missing].keys()
    thin = roles[1 - own] == "input" and operands[1 - own].shape[-1] <= conv_forms.THIN
    if shared != "batch" and not thin:
        return _one_by_one(apply, operands, dims)
    axis = _AXES[roles[own]][shared] % (operands[own].ndim - 1)
    side_by_side = list(operands)
    side_by_side[own] = lax.collapse(jnp.moveaxis(operands[own], dims[own], axis), axis, axis + 2)
    result = apply(*side_by_side)
    axis = _AXES[missing][shared] % result.ndim
    return result.reshape(*result.shape[:axis], operands[own].shape[dims[own]], -1, *result.shape[axis + 1 :]), axis


def _one_by_one(apply: Callable[..., jax.Array], operands: Any, dims: Any) -> tuple[jax.Array, int]:
    members = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True) if dim is not None]

    def one(member: list[jax.Array]) -> jax.Array:
        own = iter(member)
        return apply(*(x if dim is None else next(own) for x, dim in zip(operands, dims, strict=True)))

    return lax.map(one, members), 0


_convolution = Primitive("channels_last_convolution")
_convolution.def_impl(jax.jit(_evaluate, static_argnames=("missing", "geometry")))
_convolution.def_abstract_eval(_abstract)
ad.defbilinear(_convolution, functools.partial(_transpose, 0), functools.partial(_transpose, 1))
batching.primitive_batchers[_convolution] = _batch
mlir.register_lowering(_convolution, mlir.lower_fun(_evaluate, multiple_results=False))
