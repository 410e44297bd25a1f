"""Dynamic loss scaling, for gradients in float16."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxnn.types import check_int


class LossScaleState(NamedTuple):
    """State of ``with_loss_scale``."""

    inner: optax.OptState  # of the optimizer within
    scale: jax.Array  # ``[]`` float32, by which the loss of the next step is multiplied
    good_steps: jax.Array  # ``[]`` int32, steps since a gradient was not finite or the scale was doubled


def with_loss_scale(
    optimizer: optax.GradientTransformation, *, init_scale: float = 2.0**16, growth_interval: int = 2_000
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optimizer`` for gradients of a scaled loss, as `jaxnn.steps.make_scaled_train_step` computes them.

    Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740), with the defaults of NVIDIA Apex. Gradients
    are divided by the scale. If one is not finite, the update is skipped, which keeps the state of ``optimizer``, and
    the scale halved; after ``growth_interval`` finite ones in a row, an integer of at least 1, it is doubled, up to
    2²⁴. A power of two as ``init_scale`` rounds nothing. To be put outermost.

    >>> optimizer = jn.optim.with_loss_scale(optax.adam(1e-3))
    """
    check_int("with_loss_scale: growth_interval", growth_interval)
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> LossScaleState:
        return LossScaleState(optimizer.init(params), jnp.float32(init_scale), jnp.int32(0))

    def update(scaled: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, LossScaleState]:
        gradient = jax.tree.map(lambda leaf: (leaf / state.scale).astype(leaf.dtype), scaled)
        extra_args |= {"grad": gradient} if "grad" in extra_args else {}
        made = optimizer.update(gradient, state.inner, params, **extra_args)
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)]).all()
        skipped = jax.tree.map(jnp.zeros_like, made[0]), state.inner
        updates, inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), made, skipped)
        good_steps = jnp.where(finite, state.good_steps + 1, 0)
        grows = good_steps >= growth_interval
        scale = jnp.minimum(state.scale * jnp.where(grows, 2.0, jnp.where(finite, 1.0, 0.5)), 2.0**24)
        return updates, LossScaleState(inner, scale, jnp.where(grows, 0, good_steps))

    return optax.GradientTransformationExtraArgs(init, update)
