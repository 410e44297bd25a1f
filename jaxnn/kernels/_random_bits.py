"""Random bits of dropout: Threefry's, 16 for each element."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxnn._batch_context import batch_sharding
from jaxnn.kernels._kernel import Kernel
from jaxnn.kernels._package import native_call

_MIN_DRAWN = 2**12  # elements: fewer are drawn by XLA as fast


@functools.partial(jax.jit, static_argnames="shape")
def _by_xla(seed: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    *leading, width = shape or (1,)
    blocks = (*leading, -(-width // 4))
    counter = jax.lax.iota(jnp.uint32, math.prod(blocks)).reshape(blocks)
    # Without the barrier XLA recomputes the block for each of its four elements.
    first, second = jax.lax.optimization_barrier(_threefry(seed, counter))
    halves = [half.astype(jnp.uint16) for word in (first, second) for half in (word, word >> 16)]
    return jnp.concatenate(halves, axis=-1)[..., :width].reshape(shape)


def _threefry(seed: jax.Array, counter: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32-20 of ``(counter, 0)`` under ``seed [2]``: two ``uint32`` words shaped as ``counter``.

    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011. The default generator of ``jax.random``, which on
    CPU loops over the rounds with the array in memory; unrolled, all rounds are one pass.
    """
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    keys = (seed[0], seed[1], seed[0] ^ seed[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter + keys[0], jnp.zeros_like(counter) + keys[1]
    for group in range(5):
        for distance in rotations[group % 2]:
            x = x + y
            y = ((y << distance) | (y >> (32 - distance))) ^ x
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _natively(seed: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return native_call("jaxnn_random_bits", [jax.ShapeDtypeStruct(shape, jnp.uint16)], seed)[0]


def _unfit(seed: Any, *, shape: tuple[int, ...]) -> str | None:
    if batch_sharding(0) is not None:
        return "devices share the batch"
    return None if all(isinstance(size, int) for size in shape) else "a size is symbolic"


def _slower(seed: Any, *, shape: tuple[int, ...]) -> str | None:
    few = all(isinstance(size, int) for size in shape) and math.prod(shape) < _MIN_DRAWN
    return "there are few elements, for which it is not faster" if few else None


# Of ``seed [2]`` uint32 and the static ``shape``: uniform uint16, quarters of whose last axis are the halves of a
# block's two words.
random_bits = Kernel("dropout", _by_xla, _natively, _unfit, _slower)
