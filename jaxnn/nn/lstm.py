"""The LSTM's recurrence, with a gradient that leaves one matrix product to each step of either loop.

What does not depend on the step before is computed outside the loops, for all steps at once: the products with the
inputs (the caller's), the slopes of the gates, and the gradient of the recurrent kernel, one product. What is kept for
the gradient is the gates and the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.nn.custom_vjp import custom_vjp
from jaxnn.nn.sequences import delayed, summed_products

type Carry = tuple[jax.Array, jax.Array]
type Kept = tuple[jax.Array, jax.Array, jax.Array, Carry]


@custom_vjp
def lstm(projected: jax.Array, kernel: jax.Array, carry: Carry) -> tuple[Carry, Carry]:
    """All steps of an LSTM (Hochreiter and Schmidhuber, 1997, with the forget gate of Gers et al., 2000).

    ``i, f, g, o = projected[t] + h @ kernel``; ``c = sigmoid(f) * c + sigmoid(i) * tanh(g)``;
    ``h = sigmoid(o) * tanh(c)``.

    Args:
        projected: ``[time, batch, 4 * features]``, the inputs' products with their kernel, and the bias.
        kernel: ``[features, 4 * features]``; the recurrent product is computed in its dtype, all else in that of
            ``projected``.
        carry: ``(c, h)`` before the first step, ``[batch, features]`` each, of the dtype of ``projected``.

    Returns:
        ``(c, h)`` after every step, ``[time, batch, features]`` each, and ``(c, h)`` after the last.
    """
    last, states = _loop(projected, kernel, carry, lambda gates, c, h: (c, h))
    return states, last


def _loop(projected: jax.Array, kernel: jax.Array, carry: Carry, keep: Callable[..., Any]) -> tuple[Carry, Any]:
    # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2, so that one tanh does for all four gates.
    halves = np.repeat([0.5, 0.5, 1.0, 0.5], carry[0].shape[-1])[None]
    scale, offset = jnp.asarray(halves, projected.dtype), jnp.asarray(1 - halves, projected.dtype)
    scaled_kernel = kernel * scale.astype(kernel.dtype)

    def step(carry: Carry, z: jax.Array) -> tuple[Carry, Any]:
        c, h = carry
        product = jnp.matmul(h.astype(kernel.dtype), scaled_kernel, preferred_element_type=z.dtype)
        gates = jnp.tanh(z * scale + product) * scale + offset
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (c, h), keep(gates, c, h)

    return jax.lax.scan(step, carry, projected)


def _forward(projected: jax.Array, kernel: jax.Array, carry: Carry) -> tuple[tuple[Carry, Carry], Kept]:
    last, (gates, c) = _loop(projected, kernel, carry, lambda gates, c, h: (gates, c))
    h = jnp.split(gates, 4, axis=-1)[3] * jnp.tanh(c)
    return ((c, h), last), (gates, c, kernel, carry)


def _backward(kept: Kept, cotangents: tuple[Carry, Carry]) -> tuple[jax.Array, jax.Array, Carry]:
    gates, c, kernel, (first_c, first_h) = kept
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    tanh_c = jnp.tanh(c)
    before_c, before_h = delayed(first_c, c), delayed(first_h, o * tanh_c)
    slopes = jnp.concatenate([g * i * (1 - i), before_c * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)], axis=-1)

    def step(carry: Carry, x: tuple[jax.Array, ...]) -> tuple[Carry, jax.Array]:
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


lstm.defvjp(_forward, _backward)
