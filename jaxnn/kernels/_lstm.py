"""All time steps of an LSTM, with the products of the inputs computed before, and of its backward pass.

Derivatives of the gates and the recurrent kernel's gradient are computed outside the loop, for all steps at once. The
residuals are the gates and the states.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.kernels._custom_vjp import custom_vjp
from jaxnn.kernels._kernel import Kernel
from jaxnn.kernels._package import native_call

type Pair = tuple[jax.Array, jax.Array]
_FEW = 64  # rows of all time steps: arranging the kernel for the loop then costs as much as the products


def delayed(first: jax.Array, sequence: jax.Array) -> jax.Array:
    """The values before each step: ``first [...]``, then ``sequence [time, ...]`` without its last."""
    return jnp.concatenate([first[None], sequence])[: sequence.shape[0]]


def summed_products(first: jax.Array, second: jax.Array) -> jax.Array:
    """The outer products of ``[time, batch, m]`` and ``[time, batch, n]``, summed over time and batch: ``[m, n]``.

    The summed axis comes first in both: in any other order XLA:CPU transposes one of them.
    """
    rows, others = (sequence.reshape(-1, sequence.shape[-1]) for sequence in (first, second))
    return jax.lax.dot_general(rows, others, (((0,), (0,)), ((), ())))


@custom_vjp
def steps_by_xla(projected: jax.Array, kernel: jax.Array, carry: Pair) -> tuple[Pair, Pair]:
    """All steps of an LSTM (Hochreiter and Schmidhuber, 1997, with the forget gate of Gers et al., 2000).

    ``i, f, g, o = projected[t] + h @ kernel``; ``c = sigmoid(f) * c + sigmoid(i) * tanh(g)``;
    ``h = sigmoid(o) * tanh(c)``.

    Takes ``projected [time, batch, 4 * features]``, the inputs' products with their kernel plus the bias; ``kernel
    [features, 4 * features]``, whose dtype is that of the recurrent product; and ``(c, h)`` before the first step,
    ``[batch, features]`` each. Returns ``(c, h)`` after every step, and after the last.
    """
    last, states = _lstm_loop(projected, kernel, carry, lambda gates, c, h: (c, h))
    return states, last


def _lstm_loop(projected: jax.Array, kernel: jax.Array, carry: Pair, keep: Callable[..., Any]) -> tuple[Pair, Any]:
    # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2, so that one tanh computes all four gates.
    halves = np.repeat([0.5, 0.5, 1.0, 0.5], carry[0].shape[-1])[None]
    scale, offset = jnp.asarray(halves, projected.dtype), jnp.asarray(1 - halves, projected.dtype)
    scaled_kernel = kernel * scale.astype(kernel.dtype)

    def step(carry: Pair, z: jax.Array) -> tuple[Pair, Any]:
        c, h = carry
        product = jnp.matmul(h.astype(kernel.dtype), scaled_kernel, preferred_element_type=z.dtype)
        gates = jnp.tanh(z * scale + product) * scale + offset
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (c, h), keep(gates, c, h)

    return jax.lax.scan(step, carry, projected)


def _lstm_forward(projected: jax.Array, kernel: jax.Array, carry: Pair) -> tuple[tuple[Pair, Pair], tuple[Any, ...]]:
    last, (gates, c) = _lstm_loop(projected, kernel, carry, lambda gates, c, h: (gates, c))
    h = jnp.split(gates, 4, axis=-1)[3] * jnp.tanh(c)
    return ((c, h), last), (gates, c, kernel, carry)


def _lstm_backward(saved: tuple[Any, ...], cotangents: tuple[Pair, Pair]) -> tuple[jax.Array, jax.Array, Pair]:
    gates, c, kernel, (first_c, first_h) = saved
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    tanh_c = jnp.tanh(c)
    before_c, before_h = delayed(first_c, c), delayed(first_h, o * tanh_c)
    slopes = jnp.concatenate([g * i * (1 - i), before_c * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)], axis=-1)

    def step(carry: Pair, x: tuple[jax.Array, ...]) -> tuple[Pair, jax.Array]:
        dc, dh = carry
        to_c, to_h, slopes, slope_c, f = x
        dh = dh + to_h
        dc = dc + to_c + dh * slope_c
        dz = jnp.concatenate([dc, dc, dc, dh], axis=-1) * slopes
        dh = jnp.matmul(dz.astype(kernel.dtype), kernel.T, preferred_element_type=dh.dtype)
        return (dc * f, dh), dz

    (to_c, to_h), to_last = cotangents
    steps = (to_c, to_h, slopes, o * (1 - tanh_c * tanh_c), f)
    to_first, dz = jax.lax.scan(step, to_last, steps, reverse=True)
    return dz, summed_products(before_h.astype(kernel.dtype), dz.astype(kernel.dtype)), to_first


steps_by_xla.defvjp(_lstm_forward, _lstm_backward)


def _native_forward(projected: jax.Array, kernel: jax.Array, carry: Any) -> Any:
    states = (*projected.shape[:2], kernel.shape[0])
    shapes = [projected.shape, states, states]
    gates, c, h = native_call("jaxnn_lstm", shapes, projected, kernel, *carry, in_place={0: 0})
    return ((c, h), (c[-1], h[-1])), (gates, c, h)


def _native_backward(operands: Any, kept: Any, cotangents: Any) -> Any:
    (_, kernel, (first_c, first_h)), (gates, c, h) = operands, kept
    to_states, to_last = cotangents
    arrays, shapes = (gates, kernel, first_c, c, *to_states, *to_last), [x.shape for x in (gates, *to_last)]
    dz, *to_first = native_call("jaxnn_lstm_backward", shapes, *arrays, in_place={0: 0, 6: 1, 7: 2})
    return dz, summed_products(delayed(first_h, h), dz), tuple(to_first)


def _unfit(*operands: Any) -> str | None:
    if dtypes := {jnp.dtype(leaf.dtype).name for leaf in jax.tree.leaves(operands)} - {"float32"}:
        return f"it computes in float32, not in {', '.join(sorted(dtypes))}"
    return None if operands[0].shape[0] else "there are no time steps"


def _slower(projected: Any, *others: Any) -> str | None:
    few = math.prod(projected.shape[:2]) < _FEW
    return f"time steps times batch is less than {_FEW}, for which it is not faster" if few else None


def _forward_by_xla(*operands: Any) -> Any:
    out, (gates, *_) = _lstm_forward(*operands)
    return out, (gates, *out[0])


def _backward_by_xla(operands: Any, kept: Any, cotangents: Any) -> Any:
    (_, kernel, carry), (gates, c, _) = operands, kept
    return _lstm_backward((gates, c, kernel, carry), cotangents)


# Operands and results are those of `steps_by_xla`, in float32; each thread computes some rows of the batch.
lstm = Kernel(
    "recurrence",
    steps_by_xla,
    None,
    _unfit,
    _slower,
    gradient=(_native_forward, _native_backward),
    fallback_gradient=(_forward_by_xla, _backward_by_xla),
)
