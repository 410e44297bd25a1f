"""Transfers between host and GPUs through pinned memory: 25 GB/s on an H200, where pageable memory has 5 and 1.7."""

from typing import Any

import jax
from jax.sharding import Sharding

from jaxnn.types import PyTree

PINNED = "pinned_host"
GPU = "gpu"


def send_pinned(tree: PyTree, sharding: Sharding) -> PyTree:
    """Starts to send the host's arrays of ``tree`` to GPUs by ``sharding``, and returns them there.

    A training loop sends the batches of a call while the one before runs, so that two copies are pinned in turn.
    """
    return jax.device_put(jax.device_put(tree, sharding.with_memory_kind(PINNED)), sharding)


def fetching(tree: PyTree, platform: str = GPU) -> PyTree:
    """The arrays of ``tree`` that devices of ``platform`` hold, on their way to pinned memory; others as they are.

    All are started at once. To read one, as by `numpy.asarray`, waits for it and copies nothing.
    """

    def start(leaf: Any) -> Any:
        # A process cannot read the parts of others.
        if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
            return leaf
        on_platform = next(iter(leaf.devices())).platform == platform
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(PINNED)) if on_platform else leaf

    return jax.tree.map(start, tree)
