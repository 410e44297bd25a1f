"""Rows of a split become a batch that a model takes, the same whether they lay in memory or came out of files."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxnn.types import Array, Batch, Examples


def as_batch(examples: Examples, mask: Array | None = None) -> Batch:
    """All of ``examples``, in order, ready for a model; pure, to be traced.

    Args:
        examples: ``[batch, ...]`` inputs and targets.
        mask: ``[batch]`` float32, or None: all ones, of NumPy, so that a model traced with them may know.

    Returns:
        A batch whose uint8 inputs have become float32 in 0…1; other dtypes are unchanged.
    """
    inputs, targets = (jnp.asarray(array) for array in examples)
    if inputs.dtype == jnp.uint8:
        inputs = inputs.astype(jnp.float32) / 255
    return Batch(inputs, targets, np.ones(inputs.shape[:1], np.float32) if mask is None else mask)
