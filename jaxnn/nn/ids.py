"""Integers that name a class or a row of a table."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def widened(ids: jax.Array) -> jax.Array:
    """``ids`` of any integer dtype as at least int32.

    In a narrower dtype their comparison with a count of classes wraps around: among ``uint8`` 256 is 0.
    """
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids
