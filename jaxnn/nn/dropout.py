"""Dropout whose rate may be a tracer, from sixteen random bits an element."""

from __future__ import annotations

import functools
import math
import numbers

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike

from jaxnn.nn.batch_axis import rows_of_whole
from jaxnn.types import ConfigError

_BITS = 16  # of an element: four to a block of Threefry, two words of 32
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class Dropout(linen.Module):
    """Sets each element to zero with probability ``rate``, else scales it by ``1 / (1 - rate)``.

    Srivastava et al., Dropout, 2014. Unlike ``flax.linen.Dropout`` it is told ``train=`` where it is called, as
    jaxnn's models are, and does not branch on the rate; the masks differ from Flax's. A mask is a function of the key,
    the shape and the rate alone, and a higher rate drops what a lower one drops and more. Costs 16 random bits an
    element where ``jax.random`` spends 64, from the same generator.

    Attributes:
        rate: ``[]`` the probability of zero, 0…1; may be a tracer. It is rounded to a multiple of
            ``2**-16``, in the scale too, so that the mean stays. A plain 0 is the identity and needs
            no key.
        rng_collection: the name under which ``apply`` is given the key: ``rngs={"dropout": key}``.
        batch_axis: which axis of the inputs is the batch, of which each device may hold its rows alone.
    """

    rate: ArrayLike
    rng_collection: str = "dropout"
    batch_axis: int = 0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Drops elements of ``x`` of any shape; shape and dtype are kept.

        Args:
            x: floats of any shape.
            train: False is the identity and needs no key.

        Raises:
            ConfigError: a rate outside 0…1, integers, or no key under ``rng_collection``.
        """
        if not train or (isinstance(self.rate, numbers.Real) and self.rate == 0):
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ConfigError(f"dropout needs floats, for what it keeps is scaled, not {x.dtype}: cast the input.")
        if not (self.has_rng(self.rng_collection) or self.has_rng("params")):
            raise ConfigError(
                f"dropout with train=True needs a random key: pass rngs={{{self.rng_collection!r}: key}} to apply."
            )
        return _drop(x, self.rate, self.make_rng(self.rng_collection), self.batch_axis)


def check_rate(rate: ArrayLike) -> None:
    """Checks a dropout rate that is a plain number; JAX arrays and tracers pass.

    Raises:
        ConfigError: it is outside 0…1, or NaN.
    """
    if isinstance(rate, numbers.Real) and not 0 <= rate <= 1:
        raise ConfigError(f"a dropout rate is a probability, 0…1, not {rate!r}.")


def _drop(x: jax.Array, rate: ArrayLike, key: jax.Array, batch_axis: int) -> jax.Array:
    threshold = jnp.round(jnp.asarray(rate, jnp.float32) * 2**_BITS)
    bits = rows_of_whole(lambda shape: _random_bits(key, shape), x.shape, batch_axis)
    keep = bits >= threshold.astype(jnp.uint32)
    kept = 1.0 - threshold.astype(jnp.promote_types(x.dtype, jnp.float32)) / 2**_BITS
    # At rate 1 nothing is kept: any finite scale will do, and gives no NaN in the gradient.
    scale = 1.0 / jnp.where(kept > 0.0, kept, 1.0)
    return jnp.where(keep, x * scale, 0.0).astype(x.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform integers of 16 bits in ``uint32``: quarters of the last axis are the halves of a block's two words."""
    *leading, width = shape or (1,)
    blocks = (*leading, -(-width // 4))
    counter = jax.lax.iota(jnp.uint32, math.prod(blocks)).reshape(blocks)
    seed = jax.random.bits(key, (2,), jnp.uint32)
    # Without the barrier XLA computes the whole block anew for each of its four elements.
    first, second = jax.lax.optimization_barrier(_threefry(seed, counter))
    halves = [half for word in (first, second) for half in (word & 0xFFFF, word >> 16)]
    return jnp.concatenate(halves, axis=-1)[..., :width].reshape(shape)


def _threefry(seed: jax.Array, counter: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32-20 of ``(counter, 0)`` under ``seed [2]``: two ``uint32`` words shaped as ``counter``.

    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011: what ``jax.random`` draws from by default, but
    on CPU as a loop over the rounds with the array in memory; unrolled, all of them are one pass.
    """
    keys = (seed[0], seed[1], seed[0] ^ seed[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter + keys[0], jnp.zeros_like(counter) + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << distance) | (y >> (32 - distance))) ^ x
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y
