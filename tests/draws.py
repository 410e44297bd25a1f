"""Random arrays by NumPy: JAX compiles a draw of its own for each shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Of mean 0 and variance 1."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def uniform(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Between 0 and 1."""
    return jnp.asarray(np.random.default_rng(seed).random(shape), dtype)


def integers(seed: int, stop: int, *shape: int) -> jax.Array:
    """From 0 on, below ``stop``."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, stop, shape))
