"""The dropout layer."""

import numbers
from typing import cast

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax
from jax.typing import ArrayLike

from jaxnn._batch_context import batch_axis
from jaxnn._fields import check_rate
from jaxnn.kernels import random_bits
from jaxnn.types import ConfigError

_NUM_BITS = 16  # per element; a Threefry block, two words of 32 bits, serves four elements


class Dropout(linen.Module):
    """Sets each element to zero with probability ``rate``, else scales it by ``1 / (1 - rate)``.

    Srivastava et al., Dropout, 2014. Unlike ``flax.linen.Dropout`` it takes ``train=`` in the call, and the rate may be
    a tracer; the masks differ from Flax's. A mask depends on the key, the shape and the rate only, and a higher rate
    drops every element that a lower one drops. Uses 16 random bits per element where ``jax.random`` uses 64, from the
    same generator.

    >>> layer, x = jn.nn.Dropout(0.5), jnp.ones(6)
    >>> layer.apply({}, x, train=False)
    Array([1., 1., 1., 1., 1., 1.], dtype=float32)
    >>> layer.apply({}, x, train=True, rngs={"dropout": jax.random.key(0)})
    Array([0., 2., 0., 2., 0., 2.], dtype=float32)

    Attributes:
        rate: ``[]`` probability 0…1 of zero, rounded to a multiple of ``2**-16``, in the scale too, so that the mean is
            kept. A plain 0 is the identity and needs no key.
        rng_collection: name of the key in ``apply``: ``rngs={"dropout": key}``.
        batch_axis: the axis of the inputs that is sharded if devices share a batch.
    """

    rate: ArrayLike
    rng_collection: str = "dropout"
    batch_axis: int = 0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Drops elements of ``x``, floats of any shape; without ``train`` the identity, which needs no key."""
        if not train or (isinstance(self.rate, numbers.Real) and self.rate == 0):
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ConfigError(f"dropout scales its input, which must be floats, not {x.dtype}: cast it.")
        if not (self.has_rng(self.rng_collection) or self.has_rng("params")):
            raise ConfigError(
                f"dropout with train=True needs a key: pass rngs={{{self.rng_collection!r}: key}} to apply."
            )
        key = self.make_rng(self.rng_collection)
        threshold = jnp.round(jnp.asarray(self.rate, jnp.float32) * 2**_NUM_BITS)
        axis, batch = batch_axis(), self.batch_axis
        if axis is None or x.ndim <= batch:
            bits = _bits(key, x.shape)
        else:  # this device's rows of the draws for the full batch
            rows = x.shape[batch]
            full = (*x.shape[:batch], rows * lax.axis_size(axis), *x.shape[batch + 1 :])
            bits = lax.dynamic_slice_in_dim(_bits(key, full), lax.axis_index(axis) * rows, rows, batch)
        keep = bits.astype(jnp.uint32) >= threshold.astype(jnp.uint32)
        kept = 1.0 - threshold.astype(jnp.promote_types(x.dtype, jnp.float32)) / 2**_NUM_BITS
        # At rate 1 nothing is kept: any finite scale avoids NaN in the gradient.
        scale = 1.0 / jnp.where(kept > 0.0, kept, 1.0)
        return jnp.where(keep, x * scale, 0.0).astype(x.dtype)


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform ``uint16`` of a ``shape``."""
    return cast(jax.Array, random_bits(jax.random.bits(key, (2,), jnp.uint32), shape=shape))
