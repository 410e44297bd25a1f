"""How training data reach the compiled step: resident on the device, or sent a call's worth at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.observe import available_bytes, nbytes
from jaxnn.types import Array, Examples, Source

# The share of a device's free memory that resident data may take: the rest is the step's own.
RESIDENT_SHARE = 0.5


type Placement = jax.Device | jax.sharding.Sharding | None


class Feed(NamedTuple):
    """Where the examples of a call come from; both kinds give the same batches.

    Attributes:
        resident: whether the whole split is on the device.
        prepare: ``(step, num_steps) -> Examples`` on the device, called outside the compiled program.
        indices: ``(seed, steps [k]) -> [k, batch]`` into those examples, traced inside it; the seed may be a tracer.
    """

    resident: bool
    prepare: Callable[[int, int], Examples]
    indices: Callable[[Array | int, jax.Array], Array]


def fits_on_device(*sources: Source, num_devices: int = 1) -> bool:
    """Whether all ``sources`` may lie together on each of so many devices; those of a CPU share its memory."""
    device = jax.devices()[0]
    free = available_bytes(device)
    needed = sum(nbytes(source.examples) for source in sources)
    copies = num_devices if device.platform == "cpu" else 1
    return free is None or copies * needed <= RESIDENT_SHARE * free


def resident_feed(source: Source, seed: int, batch_size: int, where: Placement = None) -> Feed:
    """All examples go to the device once, or to where ``where`` says; a batch is gathered there."""
    examples = jax.device_put(source.examples, where)
    return Feed(
        resident=True,
        prepare=lambda step, num_steps: examples,
        indices=lambda seed, steps: source.order(seed, steps, batch_size),
    )


def streamed_feed(source: Source, seed: int, batch_size: int, where: Placement = None) -> Feed:
    """The host gathers the examples of a call in the order of ``seed`` and sends them while the call before runs."""

    def prepare(step: int, num_steps: int) -> Examples:
        order = source.order(seed, np.arange(step, step + num_steps, dtype=np.int32), batch_size)
        rows = np.asarray(order).reshape(-1)
        inputs, targets = jax.device_put(tuple(array[rows] for array in source.examples), where)
        return Examples(inputs, targets)

    def indices(seed: Array | int, steps: jax.Array) -> jax.Array:
        num_steps = steps.shape[0]
        return jnp.arange(num_steps * batch_size, dtype=jnp.int32).reshape(num_steps, batch_size)

    return Feed(resident=False, prepare=prepare, indices=indices)
