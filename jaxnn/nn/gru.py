"""The GRU's recurrence, with a gradient that leaves one matrix product to each step of either loop.

As in `jaxnn.nn.lstm`, whatever does not depend on the step before is computed outside the loops, for all steps at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnn.nn.custom_vjp import custom_vjp
from jaxnn.nn.sequences import delayed, summed_products

type Kept = tuple[jax.Array, ...]


@custom_vjp
def gru(projected: jax.Array, kernel: jax.Array, bias: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All steps of a GRU (Cho et al., 2014, arXiv:1406.1078) that resets after the product, as Flax's and cuDNN's.

    ``r, z = sigmoid(projected[t, :, :2] + h @ kernel[:, :2])`` and ``n = tanh(projected[t, :, 2] + r * (h @ kernel[:,
    2] + bias))`` by thirds of the last axis; ``h = (1 - z) * n + z * h``.

    Args:
        projected: ``[time, batch, 3 * features]``, the inputs' products with their kernel, and their biases.
        kernel: ``[features, 3 * features]``; the recurrent product is computed in its dtype, all else in that of
            ``projected``.
        bias: ``[features]`` of the recurrent product for ``n``, of the dtype of ``projected``, as ``carry``.
        carry: ``[batch, features]``, ``h`` before the first step.

    Returns:
        ``h`` after every step ``[time, batch, features]``, and after the last.
    """
    last, states = _loop(projected, kernel, bias, carry, lambda h, *gates: h)
    return states, last


def _loop(
    projected: jax.Array, kernel: jax.Array, bias: jax.Array, carry: jax.Array, keep: Callable[..., Any]
) -> tuple[jax.Array, Any]:
    features = carry.shape[-1]

    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        product = jnp.matmul(h.astype(kernel.dtype), kernel, preferred_element_type=x.dtype)
        inner = product[:, 2 * features :] + bias[None]
        # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2: without exp, which is slower and may overflow.
        gates = 0.5 * jnp.tanh(0.5 * (x + product)[:, : 2 * features]) + 0.5
        r, z = jnp.split(gates, 2, axis=-1)
        n = jnp.tanh(x[:, 2 * features :] + r * inner)
        h = n + z * (h - n)
        return h, keep(h, gates, n, inner)

    return jax.lax.scan(step, carry, projected)


def _forward(
    projected: jax.Array, kernel: jax.Array, bias: jax.Array, carry: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Kept]:
    last, (h, gates, n, inner) = _loop(projected, kernel, bias, carry, lambda *kept: kept)
    return (h, last), (h, gates, n, inner, kernel, carry)


def _backward(kept: Kept, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    h, gates, n, inner, kernel, first = kept
    r, z = jnp.split(gates, 2, axis=-1)
    before = delayed(first, h)
    slope_n = (1 - z) * (1 - n * n)
    slopes = jnp.concatenate([slope_n * inner * r * (1 - r), (before - n) * z * (1 - z), slope_n * r], axis=-1)

    def step(dh: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        to_h, slopes, z = x
        total = dh + to_h
        product = (jnp.tile(total, 3) * slopes).astype(kernel.dtype)
        dh = total * z + jnp.matmul(product, kernel.T, preferred_element_type=dh.dtype)
        return dh, total

    to_h, to_last = cotangents
    to_first, total = jax.lax.scan(step, to_last, (to_h, slopes, z), reverse=True)
    product = jnp.tile(total, 3) * slopes
    gate_parts = 2 * (product.shape[-1] // 3)
    to_kernel = summed_products(before.astype(kernel.dtype), product.astype(kernel.dtype))
    to_projected = jnp.concatenate([product[..., :gate_parts], total * slope_n], axis=-1)
    return to_projected, to_kernel, product[..., gate_parts:].sum((0, 1)), to_first


gru.defvjp(_forward, _backward)
