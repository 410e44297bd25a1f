"""The LSTM of cuDNN, through `jax.experimental.rnn`: both directions in one call, its weights packed from Flax's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental import rnn

from jaxnn.nn.implementations import platform

type Carry = tuple[jax.Array, jax.Array]
type Sizes = tuple[int, int, bool]


def obstacle(dtypes: Sequence[Any]) -> str | None:
    """Why cuDNN cannot run an LSTM of these dtypes here; None: it can."""
    if platform() != "gpu" or "rocm" in jax.local_devices(backend="gpu")[0].client.platform_version.lower():
        return "cuDNN runs on NVIDIA GPUs"
    if any(dtype != jnp.float32 for dtype in dtypes):
        return f"its LSTM computes in float32, not in {', '.join(sorted({jnp.dtype(d).name for d in dtypes}))}"
    return None


def cudnn_lstm(
    inputs: jax.Array, weights: jax.Array, carries: Sequence[Carry], lengths: jax.Array | None
) -> list[tuple[jax.Array, Carry]]:
    """One LSTM layer on an NVIDIA GPU, in one direction or in both; outputs past a sequence's end are 0.

    Under ``vmap`` the members run one after another, for JAX has no batched form of the call.

    Args:
        inputs: ``[time, batch, inputs]`` float32.
        weights: `pack`'s vector.
        carries: ``(c, h)``, ``[batch, features]`` each: for one direction, or for forward and backward.
        lengths: ``[batch]`` integers; None: all are whole.

    Returns:
        For each direction its outputs ``[time, batch, features]``, in the order of the inputs, and ``(c, h)`` after
        its last step.
    """
    num_steps, batch, num_inputs = inputs.shape
    c, h = (jnp.stack(leaves) for leaves in zip(*carries, strict=True))
    lengths = jnp.full(batch, num_steps) if lengths is None else jnp.clip(lengths, 0, num_steps)
    sizes = (num_inputs, c.shape[-1], len(carries) == 2)
    outputs, last_h, last_c = _call(inputs.swapaxes(0, 1), h, c, weights, lengths.astype(jnp.int32), sizes)
    by_direction = jnp.split(outputs.swapaxes(0, 1), len(carries), axis=-1)
    return [(y, (last_c[k], last_h[k])) for k, y in enumerate(by_direction)]


def pack(kernels: Sequence[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
    """The vector of weights as cuDNN has it: every direction's kernels first, then every direction's biases.

    Args:
        kernels: for each direction ``kernel [inputs, 4 * features]``, ``recurrent_kernel [features, 4 * features]``
            and ``bias [4 * features]``, the gates in the order i, f, g, o. cuDNN has two biases, whose sum counts: the
            first is given 0.
    """
    matrices = [matrix.T.ravel() for kernel, recurrent, _ in kernels for matrix in (kernel, recurrent)]
    biases = [part for *_, bias in kernels for part in (jnp.zeros_like(bias), bias)]
    return jnp.concatenate(matrices + biases)


# jax.experimental.rnn.lstm again, with its two halves made to run under vmap.
@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _call(x: jax.Array, h: jax.Array, c: jax.Array, weights: jax.Array, lengths: jax.Array, sizes: Sizes) -> Any:
    return _call_forward(x, h, c, weights, lengths, sizes)[0]


def _call_forward(
    x: jax.Array, h: jax.Array, c: jax.Array, weights: jax.Array, lengths: jax.Array, sizes: Sizes
) -> tuple[Any, Any]:
    num_inputs, features, bidirectional = sizes

    def forward(x: jax.Array, h: jax.Array, c: jax.Array, weights: jax.Array, lengths: jax.Array) -> Any:
        return rnn.lstm_fwd(x, h, c, weights, lengths, num_inputs, features, 1, 0.0, bidirectional, _precision())

    return cast(tuple[Any, Any], sequential_vmap(forward)(x, h, c, weights, lengths))


def _call_backward(sizes: Sizes, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    num_inputs, features, bidirectional = sizes

    def backward(kept: Any, cotangents: Any) -> Any:
        return rnn.lstm_bwd(num_inputs, features, 1, 0.0, bidirectional, _precision(), kept, cotangents)[:4]

    return *sequential_vmap(backward)(kept, cotangents), None


_call.defvjp(_call_forward, _call_backward)


def _precision() -> jax.lax.Precision:
    """Float32 throughout where JAX is told so; else products in TF32, as XLA's. cuDNN knows no third."""
    exact = jax.config.jax_default_matmul_precision in ("highest", "float32")
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.HIGH
