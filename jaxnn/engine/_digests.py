"""Digests of training states: 64 bits for each part, the same on any device and under any sharding."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn._fingerprints import STATE_PARTS
from jaxnn.types import Array, PyTree, TrainState, is_key

WORDS = 2  # of 32 bits each, in a digest
# Smaller arrays are hashed together, since each program of its own takes a while to compile; larger ones are first
# summed over all axes but the last, without a copy, wherever they are sharded.
SMALL = 2**16  # numbers
TOGETHER = 2**18  # numbers, of all members, that are copied to be hashed together
# Odd constants that spread the bits of a product (from MurmurHash3 and the golden ratio).
_PLACE, _FIRST, _SECOND = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def state_digests(state: TrainState, num_axes: int = 0, *, is_sharded: bool = False) -> jax.Array:
    """Returns the digests ``[*members, parts, 2]`` uint32 of a ``state`` whose first ``num_axes`` are of members.

    A digest is made of sums, modulo 2³², of a hash of each number's bits and its place. Integers are added in any
    order, so that it depends on the bits alone: not on devices, shardings or the order of reductions. Arrays that are
    sharded are hashed one by one: to put them together would gather them.
    """
    leading = np.shape(state.step)[:num_axes]
    digests = [_part_digest(getattr(state, part), leading, is_sharded) for part in STATE_PARTS]
    return jnp.stack(digests, axis=-2)


def _part_digest(part: PyTree, leading: tuple[int, ...], is_sharded: bool) -> jax.Array:
    total, before = jnp.zeros((*leading, WORDS), jnp.uint32), 0
    for row in _rows(part, leading, is_sharded):
        first = _mixed(row, len(leading), before)
        second = first * _SECOND
        axes = tuple(range(len(leading), row.ndim))
        total += jnp.stack([jnp.sum(one, axes, dtype=jnp.uint32) for one in (first, second ^ (second >> 13))], axis=-1)
        before += math.prod(row.shape[len(leading) :])
    return total


def _rows(part: PyTree, leading: tuple[int, ...], is_sharded: bool) -> Iterator[jax.Array]:
    """The words of all arrays in their order: large ones summed to a row, neighbours together up to a bound."""
    near = [jnp.zeros((*leading, 1), jnp.uint32)]  # also of a part without arrays
    for leaf in jax.tree.leaves(part):
        words = _words(leaf)
        if math.prod(words.shape[len(leading) :]) > SMALL:
            axes = tuple(range(len(leading), words.ndim - 1))
            words = jnp.sum(_mixed(words, len(leading), 0), axes, dtype=jnp.uint32)
        if is_sharded or sum(one.size for one in [*near, words]) > TOGETHER:
            yield _together(near, leading)
            near = []
        near.append(words)
    yield _together(near, leading)


def _together(near: list[jax.Array], leading: tuple[int, ...]) -> jax.Array:
    return near[0] if len(near) == 1 else jnp.concatenate([one.reshape(*leading, -1) for one in near], axis=-1)


def _mixed(words: jax.Array, first_axis: int, before: int) -> jax.Array:
    """Hashes of numbers and their places, counted from ``before`` along the axes from ``first_axis`` on."""
    place = jnp.full(words.shape, np.uint32(before % 2**32))
    for axis in range(first_axis, words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride)
    mixed = (words ^ (place * _PLACE)) * _FIRST
    return mixed ^ (mixed >> 15)


def _words(leaf: Array) -> jax.Array:
    """The bits of an array as integers of 32 bits; of larger numbers with another axis."""
    array = jax.random.key_data(leaf) if is_key(leaf) else jnp.asarray(leaf)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype.itemsize >= 4 and array.dtype != jnp.uint32:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = jax.lax.bitcast_convert_type(array, jnp.uint8 if array.dtype.itemsize == 1 else jnp.uint16)
    return array.astype(jnp.uint32)  # of a negative number modulo 2³²


def show_digests(digests: np.ndarray) -> str:
    """Returns the digests ``[parts, 2]`` of a state as text: 16 hexadecimal digits a part, with hyphens between."""
    return "-".join(f"{first:08x}{second:08x}" for first, second in np.asarray(digests).tolist())
