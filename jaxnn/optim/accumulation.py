"""Gradient accumulation over micro-batches, as an optimizer around an optimizer."""

from __future__ import annotations

import optax

from jaxnn.optim.checks import check_count


def accumulated(optimizer: optax.GradientTransformation, num_steps: int) -> optax.GradientTransformation:
    """``optimizer`` that updates once in ``num_steps`` calls, with the mean of their gradients.

    The calls between give zero updates: ``optax.MultiSteps`` as a plain gradient transformation. It
    equals one batch of ``num_steps`` times the examples where the micro-batches have equal counts.
    A schedule inside ``optimizer`` counts its updates, not the calls. The mean costs one more copy
    of the parameters, in float32. A gradient that is not finite stays in the mean for good: to skip
    such micro-batches put ``optax.apply_if_finite`` around this, not inside.

    Args:
        optimizer: any Optax optimizer.
        num_steps: calls to an update, at least 1; 1 returns ``optimizer`` itself.

    Raises:
        ConfigError: ``num_steps`` is not an integer of at least 1.
    """
    check_count("accumulated", "num_steps", num_steps, 1)
    if num_steps == 1:
        return optimizer
    multi_steps = optax.MultiSteps(optimizer, int(num_steps))
    return optax.GradientTransformationExtraArgs(multi_steps.init, multi_steps.update)
