"""Checks of models' sizes, images and token ids; the number of parameters."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jaxnn.nn import at_least_int32, check_rate
from jaxnn.types import DataError, check_int


def num_parameters(model: linen.Module, inputs: Any, **options: Any) -> int:
    """Returns the number of trained parameters; running statistics do not count. Computes shapes only.

    >>> jn.models.num_parameters(jn.models.ResNet(10), jax.ShapeDtypeStruct((1, 32, 32, 3), "float32"))
    272474

    Args:
        model: a Flax Linen module.
        inputs: arrays or ``jax.ShapeDtypeStruct``, as for a call.
        options: further arguments of the call, such as ``train=False``.
    """
    variables = jax.eval_shape(lambda inputs: model.init(jax.random.key(0), inputs, **options), inputs)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables.get("params", {})))


def check_fields(model: linen.Module, *names: str) -> None:
    """Converts fields to ``int``; raises ConfigError unless they are positive and a ``dropout`` is a probability."""
    for name in names:
        setattr(model, name, check_int(f"{type(model).__name__}: {name}", getattr(model, name)))
    check_rate(getattr(model, "dropout", 0.0))


def check_images(model: str, x: jax.Array) -> None:
    """Raises DataError unless ``x`` is of rank 4."""
    if x.ndim != 4:
        hint = ": add a channel axis, images[..., None]" if x.ndim == 3 else ""
        raise DataError(f"{model} needs images [batch, height, width, channels], not of shape {x.shape}{hint}.")


def checked_tokens(model: str, tokens: jax.Array) -> jax.Array:
    """Returns ``tokens`` as int32 or wider; raises DataError unless they are integers ``[batch, time]``."""
    if tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer):
        return at_least_int32(tokens)
    # Data sets scale uint8 to floats, as images.
    hint = ": pass ids as int32, uint8 is for images" if jnp.issubdtype(tokens.dtype, jnp.floating) else ""
    raise DataError(
        f"{model} needs token ids [batch, time] of integers, not {tokens.dtype} {list(tokens.shape)}{hint}."
    )
