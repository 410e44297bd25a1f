"""How many parameters a model has."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import linen


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
