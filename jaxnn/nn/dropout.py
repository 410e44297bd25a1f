"""Dropout whose rate may be a tracer."""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike

from jaxnn.types import ConfigError

_BITS = 24  # what a float32 holds exactly, so that no rate is rounded to or from 0 and 1


class Dropout(linen.Module):
    """Sets each element to zero with probability ``rate``, else scales it by ``1 / (1 - rate)``.

    Srivastava et al., Dropout, 2014. As ``flax.linen.Dropout``, which branches on the value of the
    rate; the masks differ from Flax's. Costs one draw of 32 random bits an element and no uniform
    floats.

    Attributes:
        rate: ``[]`` the probability of zero, 0…1; may be a tracer. A plain 0 is the identity and
            needs no key.
        rng_collection: the name under which ``apply`` is given the key: ``rngs={"dropout": key}``.
    """

    rate: ArrayLike
    rng_collection: str = "dropout"

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
            ConfigError: a rate outside 0…1, or no key under ``rng_collection``.
        """
        if not train or (isinstance(self.rate, numbers.Real) and self.rate == 0):
            return x
        if not (self.has_rng(self.rng_collection) or self.has_rng("params")):
            raise ConfigError(
                f"dropout with train=True needs a random key: pass rngs={{{self.rng_collection!r}: key}} to apply."
            )
        return _drop(x, self.rate, self.make_rng(self.rng_collection))


def check_rate(rate: ArrayLike) -> None:
    """Checks a dropout rate that is a plain number; JAX arrays and tracers pass.

    Raises:
        ConfigError: it is outside 0…1, or NaN.
    """
    if isinstance(rate, numbers.Real) and not 0 <= rate <= 1:
        raise ConfigError(f"a dropout rate is a probability, 0…1, not {rate!r}.")


def _drop(x: jax.Array, rate: ArrayLike, key: jax.Array) -> jax.Array:
    rate = jnp.asarray(rate, jnp.float32)
    threshold = jnp.round(rate * 2**_BITS).astype(jnp.uint32)
    keep = jax.random.bits(key, x.shape, jnp.uint32) >> (32 - _BITS) >= threshold
    # At rate 1 nothing is kept: any finite scale will do, and gives no NaN in the gradient.
    scale = 1.0 / jnp.where(rate < 1.0, 1.0 - rate, 1.0)
    return jnp.where(keep, x * scale, 0.0).astype(x.dtype)
