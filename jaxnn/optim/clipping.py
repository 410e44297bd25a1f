"""Gradient clipping by the global norm, as an optimizer around an optimizer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxnn.optim.checks import check_positive


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
        scale = jnp.minimum(1.0, max_norm / norm)  # 1 where the norm is 0
        return jax.tree.map(lambda update: update * scale.astype(update.dtype), updates)

    return optax.chain(optax.stateless(clip), optimizer)
