"""Recurrences over ``[time, batch, features]``: loops with one product per step, and cuDNN's LSTM.

Input products, derivatives of the gates and the recurrent kernel's gradient are computed outside the loops, for all
steps at once. The residuals are the gates and the states.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.linen.recurrent import flip_sequences
from jax.custom_batching import sequential_vmap
from jax.experimental import rnn
from jax.typing import DTypeLike

from jaxnn._batch_context import map_rows
from jaxnn._compat import compute_capability
from jaxnn.kernels import custom_vjp, delayed, lstm, summed_products
from jaxnn.nn._dense import dot_general
from jaxnn.nn._layer_arguments import add_broadcast, with_wide_bias

type _Pair = tuple[jax.Array, jax.Array]


class Weights(NamedTuple):
    """The parameters of a layer, its gates concatenated."""

    kernel: jax.Array  # [inputs, gates * features]
    recurrent_kernel: jax.Array  # [features, gates * features]
    bias: jax.Array  # [gates * features]
    recurrent_bias: jax.Array | None = None  # [features], the GRU's second bias of its last gate


def run_fused_inputs(
    inputs: jax.Array,
    weights: Weights,
    carry: Any,
    lengths: jax.Array | None,
    dtype: DTypeLike | None,
    recurrence: Callable[..., tuple[Any, Any]] | None = None,
) -> tuple[Any, jax.Array]:
    """Returns the state after each sequence's last step, and the outputs ``[time, batch, features]``.

    ``carry`` is the state before the first step, ``[batch, features]`` or a tuple of such, the output last.
    ``recurrence`` computes all steps; by default it is `_gru` if there is a recurrent bias, otherwise an LSTM.
    """

    def run(inputs: jax.Array, weights: Weights, carry: Any) -> tuple[Any, Any]:
        operands = with_wide_bias(inputs, weights.kernel, weights.bias, dtype=dtype)
        # With one axis of rows, not two, XLA:CPU computes the kernel's gradient without a transposed copy.
        rows = jax.lax.collapse(operands[0], 0, 2)
        projected = dot_general(rows, operands[1], (((1,), (0,)), ((), ())))
        projected = projected.reshape(*inputs.shape[:2], projected.shape[-1])
        hidden = jax.tree.leaves(carry)[-1]
        (recurrent_kernel,) = promote_dtype(
            weights.recurrent_kernel, dtype=dtype or jnp.result_type(hidden, weights.recurrent_kernel)
        )
        # As in Flax, a float32 state stays float32 if products are computed in bfloat16.
        wide = jnp.result_type(projected, recurrent_kernel, *jax.tree.leaves(carry))
        carry = jax.tree.map(lambda leaf: leaf.astype(wide), carry)
        biases = () if weights.recurrent_bias is None else (weights.recurrent_bias.astype(wide),)
        steps = recurrence or (_gru if biases else lstm.fallback)
        return steps(add_broadcast(projected.astype(wide), operands[2][None, None]), recurrent_kernel, *biases, carry)

    # XLA would gather a sharded kernel in each step, and exchange rows where the batch is not the first axis.
    states, last = map_rows(run, inputs.shape[1], (1, None, 0), (1, 0))(inputs, weights, carry)
    if lengths is not None:
        steps, columns, any_step = lengths - 1, jnp.arange(lengths.size), lengths[:, None] > 0
        last = jax.tree.map(lambda states, first: jnp.where(any_step, states[steps, columns], first), states, carry)
    outputs: jax.Array = jax.tree.leaves(states)[-1]
    return last, outputs


@custom_vjp
def flip(sequences: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Reverses each sequence and its padding, which stays at the end."""
    flipped: jax.Array = flip_sequences(sequences, lengths, num_batch_dims=1, time_major=True)
    return flipped


# A reversal is its own transpose; JAX would scatter, which is slow on CPU and not deterministic on GPU.
flip.defvjp(lambda x, lengths: (flip(x, lengths), lengths), lambda lengths, g: (flip(g, lengths), None))


@custom_vjp
def _gru(projected: jax.Array, kernel: jax.Array, bias: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All steps of a GRU (Cho et al., 2014, arXiv:1406.1078) that resets after the product, as Flax's and cuDNN's.

    ``r, z = sigmoid(projected[t, :, :2] + h @ kernel[:, :2])`` and ``n = tanh(projected[t, :, 2] + r * (h @ kernel[:,
    2] + bias))`` by thirds of the last axis; ``h = (1 - z) * n + z * h``.

    Takes an LSTM's arguments, of three gates, and ``bias [features]`` of the recurrent product for ``n``. Returns
    ``h`` after every step, and after the last.
    """
    last, states = _gru_loop(projected, kernel, bias, carry, lambda h, *gates: h)
    return states, last


def _gru_loop(
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


def _gru_forward(projected: jax.Array, kernel: jax.Array, bias: jax.Array, carry: jax.Array) -> tuple[_Pair, Any]:
    last, (h, gates, n, inner) = _gru_loop(projected, kernel, bias, carry, lambda *values: values)
    return (h, last), (h, gates, n, inner, kernel, carry)


def _gru_backward(saved: tuple[Any, ...], cotangents: _Pair) -> tuple[jax.Array, ...]:
    h, gates, n, inner, kernel, first = saved
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


_gru.defvjp(_gru_forward, _gru_backward)


def cudnn_obstacle(dtypes: Sequence[Any]) -> str | None:
    """The reason why cuDNN cannot run an LSTM of these dtypes here, or None."""
    if not compute_capability():
        return "cuDNN runs on NVIDIA GPUs"
    if any(dtype != jnp.float32 for dtype in dtypes):
        return f"its LSTM computes in float32, not in {', '.join(sorted({jnp.dtype(d).name for d in dtypes}))}"
    return None


def run_cudnn(
    inputs: jax.Array, directions: Sequence[tuple[Weights, Any]], lengths: jax.Array | None
) -> list[tuple[Any, jax.Array]]:
    """Like `run_fused_inputs`, for one direction or two; outputs past a sequence's end are 0."""
    num_steps, batch, num_inputs = inputs.shape
    c, h = (jnp.stack(leaves) for leaves in zip(*(carry for _, carry in directions), strict=True))
    lengths = jnp.full(batch, num_steps) if lengths is None else jnp.clip(lengths, 0, num_steps)
    # Float32 if JAX's matmul precision is so; else TF32, as XLA's products. cuDNN has no third.
    exact = jax.config.jax_default_matmul_precision in ("highest", "float32")
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.HIGH
    options = (num_inputs, c.shape[-1], 1, 0.0, len(directions) == 2, precision)
    # cuDNN's layout: every direction's kernels, then every direction's two biases, which are added.
    each = [weights for weights, _ in directions]
    matrices = [matrix.T.ravel() for one in each for matrix in (one.kernel, one.recurrent_kernel)]
    weights = jnp.concatenate(matrices + [part for one in each for part in (jnp.zeros_like(one.bias), one.bias)])
    run = map_rows(partial(_cudnn, options), batch, (0, 1, 1, None, 0), (0, 1, 1))
    outputs, last_h, last_c = run(inputs.swapaxes(0, 1), h, c, weights, lengths.astype(jnp.int32))
    by_direction = jnp.split(outputs.swapaxes(0, 1), len(directions), axis=-1)
    return [((last_c[k], last_h[k]), y) for k, y in enumerate(by_direction)]


# jax.experimental.rnn.lstm, whose forward and backward pass run the members of vmap one after another.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cudnn(options: tuple[Any, ...], *arrays: jax.Array) -> Any:
    return _cudnn_forward(options, *arrays)[0]


def _cudnn_forward(options: tuple[Any, ...], *arrays: jax.Array) -> Any:
    return sequential_vmap(lambda *arrays: rnn.lstm_fwd(*arrays, *options))(*arrays)


def _cudnn_backward(options: tuple[Any, ...], saved: Any, cotangents: Any) -> tuple[Any, ...]:
    backward: Any = partial(rnn.lstm_bwd, *options)
    return *sequential_vmap(lambda saved, cotangents: backward(saved, cotangents)[:4])(saved, cotangents), None


_cudnn.defvjp(_cudnn_forward, _cudnn_backward)
