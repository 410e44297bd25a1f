"""One recurrent layer over sequences, in one direction or two, by the implementation that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike

from jaxnn.nn.cudnn_lstm import cudnn_lstm, pack
from jaxnn.nn.gru import gru
from jaxnn.nn.lstm import lstm
from jaxnn.nn.sequences import at_last_step, flip
from jaxnn.nn.varying import varying_alike


class Weights(NamedTuple):
    """What a layer multiplies by, the gates side by side.

    Attributes:
        kernel: ``[inputs, gates * features]``.
        recurrent_kernel: ``[features, gates * features]``.
        bias: ``[gates * features]``.
        recurrent_bias: ``[features]``, the GRU's second bias of its last gate; None for the LSTM.
    """

    kernel: jax.Array
    recurrent_kernel: jax.Array
    bias: jax.Array
    recurrent_bias: jax.Array | None = None


class Direction(NamedTuple):
    """One pass over the sequences.

    Attributes:
        weights: of this direction.
        carry: the state before the first step, ``[batch, features]`` or a tuple of such, the output last.
        reverse: whether it starts at the end.
    """

    weights: Weights
    carry: Any
    reverse: bool


def run(
    chosen: str,
    inputs: jax.Array,
    directions: Sequence[Direction],
    lengths: jax.Array | None,
    dtype: DTypeLike | None,
    keep_order: bool,
) -> list[tuple[Any, jax.Array]]:
    """The layer in every direction.

    Args:
        chosen: ``"hoisted"`` a loop for each direction, ``"paired"`` one loop over batched products for both of them,
            ``"cudnn"`` (float32 LSTMs alone).
        inputs: ``[time, batch, inputs]`` floats.
        directions: one, or the forward and the backward one.
        lengths: ``[batch]`` integers; None: all are whole.
        dtype: of the products; None: what the operands promote to.
        keep_order: whether outputs of a reversed direction are put in the order of the inputs.

    Returns:
        For each direction the state after each sequence's last step, and the outputs ``[time, batch, features]``.
    """
    if chosen == "cudnn" and len(directions) == 2:
        return _run_cudnn(inputs, directions, lengths)
    turned = [flip(inputs, lengths) if direction.reverse else inputs for direction in directions]
    if chosen == "cudnn":
        results = _run_cudnn(turned[0], directions, lengths)
    else:
        each = partial(_run_hoisted, lengths=lengths, dtype=dtype)
        results = _run_paired(each, turned, directions) if chosen == "paired" else list(map(each, turned, directions))
    return [
        (carry, flip(outputs, lengths) if direction.reverse and keep_order else outputs)
        for direction, (carry, outputs) in zip(directions, results, strict=True)
    ]


def _run_hoisted(
    inputs: jax.Array, direction: Direction, *, lengths: jax.Array | None, dtype: DTypeLike | None
) -> tuple[Any, jax.Array]:
    weights = direction.weights
    operands = promote_dtype(inputs, weights.kernel, weights.bias, dtype=dtype)
    projected = operands[0] @ operands[1] + operands[2][None, None]
    hidden = jax.tree.leaves(direction.carry)[-1]
    (recurrent_kernel,) = promote_dtype(
        weights.recurrent_kernel, dtype=dtype or jnp.result_type(hidden, weights.recurrent_kernel)
    )
    # As in Flax, a state of float32 stays so where the products are computed in bfloat16.
    wide = jnp.result_type(projected, recurrent_kernel, *jax.tree.leaves(direction.carry))
    carry = jax.tree.map(lambda leaf: leaf.astype(wide), direction.carry)
    biases = () if weights.recurrent_bias is None else (weights.recurrent_bias.astype(wide),)
    recurrence: Callable[..., tuple[Any, Any]] = gru if biases else lstm
    arguments = varying_alike(projected.astype(wide), recurrent_kernel, *biases, carry)
    states, last = recurrence(*arguments)
    last = last if lengths is None else at_last_step(states, carry, lengths)
    outputs: jax.Array = jax.tree.leaves(states)[-1]
    return last, outputs


def _run_paired(
    each: Callable[..., tuple[Any, jax.Array]], inputs: Sequence[jax.Array], directions: Sequence[Direction]
) -> list[tuple[Any, jax.Array]]:
    stacked_weights, stacked_carries = (
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
        for trees in zip(*((direction.weights, direction.carry) for direction in directions), strict=True)
    )

    def one(inputs: jax.Array, weights: Weights, carry: Any) -> tuple[Any, jax.Array]:
        return each(inputs, Direction(weights, carry, reverse=False))

    both = jax.vmap(one)(jnp.stack(inputs), stacked_weights, stacked_carries)
    return [jax.tree.map(lambda leaf, k=k: leaf[k], both) for k in range(2)]


def _run_cudnn(
    inputs: jax.Array, directions: Sequence[Direction], lengths: jax.Array | None
) -> list[tuple[Any, jax.Array]]:
    packed = pack([(d.weights.kernel, d.weights.recurrent_kernel, d.weights.bias) for d in directions])
    results = cudnn_lstm(inputs, packed, [direction.carry for direction in directions], lengths)
    return [(carry, outputs) for outputs, carry in results]
