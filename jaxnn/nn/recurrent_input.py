"""What a recurrent layer is given, checked and brought to ``[time, batch, features]``, and its results brought back."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnn.types import DataError


def check_inputs(name: str, inputs: jax.Array, time_major: bool) -> None:
    """Raises DataError unless ``inputs`` are floats of at least two axes; ``name`` says for which layer."""
    if inputs.ndim < 2 or not jnp.issubdtype(inputs.dtype, jnp.floating):
        wanted = "[time, *batch, features]" if time_major else "[*batch, time, features]"
        hint = ": embed token ids first" if jnp.issubdtype(inputs.dtype, jnp.integer) else ""
        raise DataError(f"{name} needs floats {wanted}, not {inputs.dtype} {list(inputs.shape)}{hint}.")


def time_first(name: str, inputs: jax.Array, time_major: bool) -> tuple[jax.Array, tuple[int, ...]]:
    """The inputs as ``[time, batch, features]``, and the axes of the batch.

    Args:
        name: of the layer, for the error.
        inputs: ``[*batch, time, features]``, or ``[time, *batch, features]`` if ``time_major``.
        time_major: which of the two.

    Raises:
        DataError: no floats, or an axis too few.
    """
    check_inputs(name, inputs, time_major)
    batch = inputs.shape[1:-1] if time_major else inputs.shape[:-2]
    moved = inputs if time_major else jnp.moveaxis(inputs, -2, 0)
    return moved.reshape(moved.shape[0], math.prod(batch), moved.shape[-1]), batch


def flat_lengths(name: str, lengths: jax.Array | None, batch: tuple[int, ...]) -> jax.Array | None:
    """The lengths as ``[batch]``.

    Raises:
        DataError: no integers, or not one for each sequence.
    """
    if lengths is None:
        return None
    if jnp.shape(lengths) != batch or not jnp.issubdtype(jnp.result_type(lengths), jnp.integer):
        raise DataError(
            f"{name} needs seq_lengths of one integer for each sequence, {list(batch)}, "
            f"not {jnp.result_type(lengths)} {list(jnp.shape(lengths))}."
        )
    return jnp.asarray(lengths).reshape(-1)


def flat_carry(name: str, carry: Any, num_states: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """The initial state as ``[batch, features]``, or a tuple of such; zeros where ``carry`` is None.

    Args:
        name: of the layer, for the error.
        carry: ``shape``, or ``num_states`` of such where that is more than one.
        num_states: of the layer.
        shape: ``[*batch, features]``.
        dtype: of the zeros.

    Raises:
        DataError: another structure or shape.
    """
    flat = (math.prod(shape[:-1]), shape[-1])
    if carry is None:
        zeros = jnp.zeros(flat, dtype)
        return zeros if num_states == 1 else (zeros,) * num_states
    states = (carry,) if num_states == 1 else carry
    shapes = jax.tree.map(jnp.shape, states)
    if not isinstance(states, list | tuple) or list(shapes) != [shape] * num_states:
        wanted = f"{list(shape)}" if num_states == 1 else f"(c, h) of {list(shape)} each"
        raise DataError(f"{name} needs an initial_carry {wanted}, not {jax.tree.map(jnp.shape, carry)}.")
    arrays = tuple(jnp.asarray(state).reshape(flat) for state in states)
    return arrays[0] if num_states == 1 else arrays


def one_for_each(name: str, carry: Any, count: int) -> tuple[Any, ...]:
    """The states of ``count`` layers; None for each where ``carry`` is None.

    Raises:
        DataError: not one for each.
    """
    if carry is None:
        return (None,) * count
    if not isinstance(carry, list | tuple) or len(carry) != count:
        raise DataError(f"{name} needs an initial_carry of {count} states, one for each layer.")
    return tuple(carry)


def as_given(carry: Any, outputs: jax.Array, batch: tuple[int, ...], time_major: bool) -> tuple[Any, jax.Array]:
    """State and outputs with the batch axes, and the time axis, where the inputs had them."""
    outputs = outputs.reshape(outputs.shape[0], *batch, outputs.shape[-1])
    carry = jax.tree.map(lambda leaf: leaf.reshape(*batch, leaf.shape[-1]), carry)
    return carry, outputs if time_major else jnp.moveaxis(outputs, 0, -2)
