"""Gradient clipping by the global norm, as an optimizer around an optimizer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jaxnn.optim.checks import check_positive

_TINY = np.finfo(np.float32).tiny


def clipped(optimizer: optax.GradientTransformation, max_norm: ArrayLike) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` fed with gradients scaled down together to a global norm of ``max_norm``.

    Pascanu, Mikolov & Bengio, On the Difficulty of Training Recurrent Neural Networks, 2013
    (arXiv:1211.5063). Gradients within the norm stay as they are. Equal to
    ``optax.clip_by_global_norm`` before the optimizer, which refuses a traced norm for gradients
    narrower than float32; here their norm is computed in float32.

    Args:
        optimizer: any Optax optimizer.
        max_norm: ``[]`` the largest global norm, above 0; infinity clips nothing; may be a tracer.

    Raises:
        ConfigError: ``max_norm`` is a number that is not above 0.
    """
    check_positive("clipped", "max_norm", max_norm)

    def clip(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        norm = optax.tree.norm(optax.tree.cast(updates, jnp.float32))
        # All gradients may be zero: 0/0.
        scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, _TINY))
        return jax.tree.map(lambda update: update * scale.astype(update.dtype), updates)

    return optax.with_extra_args_support(optax.chain(optax.stateless(clip), optimizer))
