"""Recurrences over ``[time, batch, features]``: loops with one product per step, native loops, and cuDNN's LSTM.

Input products, derivatives of the gates and the recurrent kernel's gradient are computed outside the loops, for all
steps at once. The residuals are the gates and the states.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from flax.linen.recurrent import flip_sequences
from jax.custom_batching import sequential_vmap
from jax.experimental import rnn
from jax.typing import DTypeLike

from jaxnn._batch_context import map_rows
from jaxnn.nn._choice import compute_capability
from jaxnn.nn._custom_vjp import custom_vjp, native_or_xla
from jaxnn.nn._dense import dot_general
from jaxnn.nn._layer_arguments import add_broadcast, with_wide_bias
from jaxnn.nn._onednn import native_call, native_obstacle

type _Pair = tuple[jax.Array, jax.Array]
_FEW = 64  # rows of all time steps: arranging the kernel for the loop then costs as much as the products


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
    ``recurrence`` computes all steps; by default it is `_gru` if there is a recurrent bias, otherwise `_lstm`.
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
        steps = recurrence or (_gru if biases else _lstm)
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


def _delayed(first: jax.Array, sequence: jax.Array) -> jax.Array:
    """The values before each step: ``first [...]``, then ``sequence [time, ...]`` without its last."""
    return jnp.concatenate([first[None], sequence])[: sequence.shape[0]]


def _summed_products(first: jax.Array, second: jax.Array) -> jax.Array:
    """The outer products of ``[time, batch, m]`` and ``[time, batch, n]``, summed over time and batch: ``[m, n]``.

    The summed axis comes first in both: in any other order XLA:CPU transposes one of them.
    """
    rows, others = (sequence.reshape(-1, sequence.shape[-1]) for sequence in (first, second))
    return jax.lax.dot_general(rows, others, (((0,), (0,)), ((), ())))


@custom_vjp
def _lstm(projected: jax.Array, kernel: jax.Array, carry: _Pair) -> tuple[_Pair, _Pair]:
    """All steps of an LSTM (Hochreiter and Schmidhuber, 1997, with the forget gate of Gers et al., 2000).

    ``i, f, g, o = projected[t] + h @ kernel``; ``c = sigmoid(f) * c + sigmoid(i) * tanh(g)``;
    ``h = sigmoid(o) * tanh(c)``.

    Takes ``projected [time, batch, 4 * features]``, the inputs' products with their kernel plus the bias; ``kernel
    [features, 4 * features]``, whose dtype is that of the recurrent product; and ``(c, h)`` before the first step,
    ``[batch, features]`` each. Returns ``(c, h)`` after every step, and after the last.
    """
    last, states = _lstm_loop(projected, kernel, carry, lambda gates, c, h: (c, h))
    return states, last


def _lstm_loop(projected: jax.Array, kernel: jax.Array, carry: _Pair, keep: Callable[..., Any]) -> tuple[_Pair, Any]:
    # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2, so that one tanh computes all four gates.
    halves = np.repeat([0.5, 0.5, 1.0, 0.5], carry[0].shape[-1])[None]
    scale, offset = jnp.asarray(halves, projected.dtype), jnp.asarray(1 - halves, projected.dtype)
    scaled_kernel = kernel * scale.astype(kernel.dtype)

    def step(carry: _Pair, z: jax.Array) -> tuple[_Pair, Any]:
        c, h = carry
        product = jnp.matmul(h.astype(kernel.dtype), scaled_kernel, preferred_element_type=z.dtype)
        gates = jnp.tanh(z * scale + product) * scale + offset
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (c, h), keep(gates, c, h)

    return jax.lax.scan(step, carry, projected)


def _lstm_forward(projected: jax.Array, kernel: jax.Array, carry: _Pair) -> tuple[tuple[_Pair, _Pair], tuple[Any, ...]]:
    last, (gates, c) = _lstm_loop(projected, kernel, carry, lambda gates, c, h: (gates, c))
    h = jnp.split(gates, 4, axis=-1)[3] * jnp.tanh(c)
    return ((c, h), last), (gates, c, kernel, carry)


def _lstm_backward(saved: tuple[Any, ...], cotangents: tuple[_Pair, _Pair]) -> tuple[jax.Array, jax.Array, _Pair]:
    gates, c, kernel, (first_c, first_h) = saved
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    tanh_c = jnp.tanh(c)
    before_c, before_h = _delayed(first_c, c), _delayed(first_h, o * tanh_c)
    slopes = jnp.concatenate([g * i * (1 - i), before_c * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)], axis=-1)

    def step(carry: _Pair, x: tuple[jax.Array, ...]) -> tuple[_Pair, jax.Array]:
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
    return dz, _summed_products(before_h.astype(kernel.dtype), dz.astype(kernel.dtype)), to_first


_lstm.defvjp(_lstm_forward, _lstm_backward)


def native_lstm_obstacle(sequences: jax.Array, dtypes: Sequence[Any], *, requested: bool) -> str | None:
    """The reason why `native_lstm` cannot run over ``[time, batch, inputs]``, or should not by default; or None."""
    if (obstacle := native_obstacle("jaxnn_lstm")) is not None:
        return obstacle
    if any(dtype != jnp.float32 for dtype in dtypes):
        return f"it computes in float32, not in {', '.join(sorted({jnp.dtype(d).name for d in dtypes}))}"
    if not all(isinstance(size, int) for size in sequences.shape):
        return "a size is symbolic"
    if not len(sequences):
        return "there are no time steps"
    few = math.prod(sequences.shape[:2]) < _FEW and not requested
    return f"time steps times batch is less than {_FEW}, for which it is not faster" if few else None


@custom_vjp
def native_lstm(projected: jax.Array, kernel: jax.Array, carry: Any) -> Any:
    """`_lstm` of float32 arrays by the package `jaxnn-onednn`: one call for all steps, another for their gradients.

    Each thread computes some rows of the batch.
    """
    return _all_steps(projected, kernel, carry)[0]


def _native_forward(projected: jax.Array, kernel: jax.Array, carry: Any) -> Any:
    states = (*projected.shape[:2], kernel.shape[0])
    shapes = [projected.shape, states, states]
    gates, c, h = native_call("jaxnn_lstm", shapes, projected, kernel, *carry, in_place={0: 0})
    return ((c, h), (c[-1], h[-1])), (projected, kernel, carry, gates, c, h)


def _native_backward(saved: Any, cotangents: Any) -> Any:
    _, kernel, (first_c, first_h), gates, c, h = saved
    to_states, to_last = cotangents
    operands, shapes = (gates, kernel, first_c, c, *to_states, *to_last), [x.shape for x in (gates, *to_last)]
    dz, *to_first = native_call("jaxnn_lstm_backward", shapes, *operands, in_place={0: 0, 6: 1, 7: 2})
    return dz, _summed_products(_delayed(first_h, h), dz), tuple(to_first)


def _forward_by_xla(projected: jax.Array, kernel: jax.Array, carry: Any) -> Any:
    out, (gates, *_) = _lstm_forward(projected, kernel, carry)
    return out, (projected, kernel, carry, gates, *out[0])


def _backward_by_xla(saved: Any, cotangents: Any) -> Any:
    _, kernel, carry, gates, c, _ = saved
    return _lstm_backward((gates, c, kernel, carry), cotangents)


_all_steps = native_or_xla(_native_forward, _forward_by_xla)
native_lstm.defvjp(_all_steps, native_or_xla(_native_backward, _backward_by_xla), push_forward=True)


@custom_vjp
def _gru(projected: jax.Array, kernel: jax.Array, bias: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All steps of a GRU (Cho et al., 2014, arXiv:1406.1078) that resets after the product, as Flax's and cuDNN's.

    ``r, z = sigmoid(projected[t, :, :2] + h @ kernel[:, :2])`` and ``n = tanh(projected[t, :, 2] + r * (h @ kernel[:,
    2] + bias))`` by thirds of the last axis; ``h = (1 - z) * n + z * h``.

    Takes `_lstm`'s arguments, of three gates, and ``bias [features]`` of the recurrent product for ``n``. Returns
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
    before = _delayed(first, h)
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
    to_kernel = _summed_products(before.astype(kernel.dtype), product.astype(kernel.dtype))
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
