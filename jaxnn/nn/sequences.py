"""Sequences in one array, time first, perhaps of several lengths: shifted, multiplied, reversed, read at their end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.recurrent import flip_sequences

from jaxnn.nn.custom_vjp import custom_vjp


def delayed(first: jax.Array, sequence: jax.Array) -> jax.Array:
    """What stood before each step: ``first [...]``, then all of ``sequence [time, ...]`` but its last."""
    return jnp.concatenate([first[None], sequence])[: sequence.shape[0]]


def summed_products(first: jax.Array, second: jax.Array) -> jax.Array:
    """The outer products of ``[time, batch, m]`` and ``[time, batch, n]``, summed over time and batch: ``[m, n]``.

    One product of matrices with the summed axis first in both: in any other order XLA:CPU transposes one of them.
    """
    rows, others = (sequence.reshape(-1, sequence.shape[-1]) for sequence in (first, second))
    return jax.lax.dot_general(rows, others, (((0,), (0,)), ((), ())))


def flip(sequences: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Each sequence in reverse, its padding behind it as before (and itself reversed): Flax's ``flip_sequences``.

    Args:
        sequences: ``[time, batch, features]``.
        lengths: ``[batch]`` integers; None: all are whole.
    """
    return jnp.flip(sequences, 0) if lengths is None else _flip_ragged(sequences, lengths)


@custom_vjp
def _flip_ragged(sequences: jax.Array, lengths: jax.Array) -> jax.Array:
    flipped: jax.Array = flip_sequences(sequences, lengths, num_batch_dims=1, time_major=True)
    return flipped


def _flip_forward(sequences: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _flip_ragged(sequences, lengths), lengths


def _flip_backward(lengths: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    # A reversal is its own transpose; JAX would scatter, which is slow on CPU and in no fixed order on GPU.
    return _flip_ragged(cotangent, lengths), None


def _flip_pushforward(lengths: jax.Array, tangents: tuple[jax.Array, None]) -> jax.Array:
    return _flip_ragged(tangents[0], lengths)


_flip_ragged.defvjp(_flip_forward, _flip_backward, _flip_pushforward)


def at_last_step(states: Any, initial: Any, lengths: jax.Array) -> Any:
    """The state after each sequence's last step.

    Args:
        states: a tree of ``[time, batch, features]``, the state after every step.
        initial: the same of ``[batch, features]``: the state before the first, which a sequence of length 0 keeps.
        lengths: ``[batch]`` integers.
    """
    columns = jnp.arange(lengths.size)

    def read(states: jax.Array, initial: jax.Array) -> jax.Array:
        return jnp.where(lengths[:, None] > 0, states[lengths - 1, columns], initial)

    return jax.tree.map(read, states, initial)
