"""Checks of models' sizes, images and token ids; and how many parameters a model has."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jaxnn.nn import at_least_int32, positive_int
from jaxnn.types import DataError


def num_parameters(model: linen.Module, inputs: Any, **options: Any) -> int:
    """How many numbers of ``model`` are trained, as publications count them: running statistics are not among them.

    ``num_parameters(models.ResNet(10), jax.ShapeDtypeStruct((1, 32, 32, 3), "float32"))`` is 272,474. Only shapes are
    computed, no array is made.

    Args:
        model: a Flax Linen module.
        inputs: what it is called with: an array, or a ``jax.ShapeDtypeStruct``, or a tree of such.
        options: what else it must be called with, such as ``train=False``.
    """
    variables = jax.eval_shape(lambda inputs: model.init(jax.random.key(0), inputs, **options), inputs)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables.get("params", {})))


def check_sizes(model: linen.Module, *names: str) -> None:
    """Makes fields of ``model``, which is being made, ``int``; ConfigError unless they are positive integers."""
    for name in names:
        setattr(model, name, positive_int(f"{type(model).__name__}: {name}", getattr(model, name)))


def check_images(model: str, x: jax.Array) -> None:
    """Raises DataError unless ``x`` is of rank 4; ``model`` says for whom."""
    if x.ndim != 4:
        hint = ": add a channel axis, images[..., None]" if x.ndim == 3 else ""
        raise DataError(f"{model} needs images [batch, height, width, channels], not of shape {x.shape}{hint}.")


def checked_tokens(model: str, tokens: jax.Array) -> jax.Array:
    """``tokens`` as int32 or wider; DataError unless they are integers ``[batch, time]``; ``model`` says for whom."""
    if tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer):
        return at_least_int32(tokens)
    # A data set scales uint8 to floats, taking it for pictures.
    hint = ": give ids as int32, uint8 is for pictures" if jnp.issubdtype(tokens.dtype, jnp.floating) else ""
    raise DataError(
        f"{model} needs token ids [batch, time] of integers, not {tokens.dtype} {list(tokens.shape)}{hint}."
    )
