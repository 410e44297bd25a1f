"""Which axis of a device mesh each axis of a parameter is split over, as Flax's partitioning metadata say it."""

from __future__ import annotations

from typing import Any

import jax
from flax.core import meta
from flax.linen import with_partitioning
from jax.sharding import PartitionSpec

from jaxnn.types import PyTree

partitioned = with_partitioning
"""``partitioned(initializer, (None, "model"))``: the parameter's second axis is split over the mesh axis ``model``."""


def unboxed(tree: PyTree) -> PyTree:
    """``tree`` with plain arrays in place of the boxes that hold an array and the names of its axes."""
    return meta.unbox(tree)


def partition_specs(tree: PyTree) -> PyTree:
    """The names of each array's axes as a ``PartitionSpec``; an empty one where nothing was said."""
    specs = meta.get_partition_spec(tree)
    return jax.tree.map(_spec_of, specs, is_leaf=lambda leaf: leaf is None or isinstance(leaf, PartitionSpec))


def _spec_of(spec: Any) -> PartitionSpec:
    return spec if isinstance(spec, PartitionSpec) else PartitionSpec()
