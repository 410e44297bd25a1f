"""A split held in arrays, whose batch at any step is a pure function of the seed and the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.data.rows import as_batch
from jaxnn.data.shuffle import batch_indices
from jaxnn.types import Array, Batch, DataError, Examples

type Augmentation = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySource:
    """A `jaxnn.types.Source` over arrays in memory.

    Compared and hashed by identity, so that its methods may be closed over or be static arguments.

    Attributes:
        examples: the split's arrays, on the host.
        augment: ``(key, inputs [batch, ...]) -> inputs``, for training batches; or None.
    """

    examples: Examples
    augment: Augmentation | None = None

    @property
    def num_examples(self) -> int:
        """How many examples the split holds."""
        return int(self.examples.targets.shape[0])

    @property
    def targets(self) -> Array:
        """All targets ``[examples, ...]``, on the host."""
        return self.examples.targets

    def order(self, seed: Array | int, steps: Array, batch_size: int) -> Array:
        """Which examples each of ``steps [k]`` trains on, as `batch_indices`: ``[k, batch]`` int32.

        Raises:
            DataError: the batch is larger than the split.
        """
        return batch_indices(seed, steps, self.num_examples, batch_size)

    def read(self, indices: np.ndarray) -> Examples:
        """The examples at ``indices [n]``, on the host: ``[n, ...]`` each."""
        return Examples(*(np.asarray(rows)[indices] for rows in self.examples))

    def as_batch(self, examples: Examples, mask: Array | None = None) -> Batch:
        """Rows ``[batch, ...]`` as a batch, see `rows.as_batch`; pure, to be traced."""
        return as_batch(examples, mask)

    def gather(self, examples: Examples, indices: Array, mask: Array | None = None) -> Batch:
        """The examples at ``indices [batch]``, ready for a model; pure, to be traced.

        Args:
            examples: the split's arrays, where they are to be gathered: on the device, as a rule.
            indices: ``[batch]`` integers; one outside the set is clipped to it.
            mask: ``[batch]`` float32, or None: all ones.

        Returns:
            A batch whose uint8 inputs have become float32 in 0…1; other dtypes are unchanged.
        """
        rows = (jnp.take(array, indices, axis=0, mode="clip") for array in examples)
        return self.as_batch(Examples(*rows), mask)

    def transform(self, batch: Batch, key: jax.Array) -> Batch:
        """The batch with its inputs augmented; the identity where there is no augmentation."""
        if self.augment is None:
            return batch
        return batch._replace(inputs=self.augment(key, jnp.asarray(batch.inputs)))

    def fingerprint(self, digest: Any) -> None:
        """Feeds ``digest``, of ``hashlib``, with every example."""
        for array in map(np.ascontiguousarray, self.examples):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(array.data.cast("B") if array.size else b"")


def padded_indices(num_examples: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every example exactly once, in order, in batches of one size: what evaluation goes through.

    Returns:
        ``indices [num_batches, batch]`` int32 and ``mask [num_batches, batch]`` float32: the tail
        of the last batch is filled with example 0 and masked.

    Raises:
        DataError: ``batch_size`` is not positive.
    """
    if batch_size < 1:
        raise DataError(f"a batch of {batch_size} holds no example: batch_size must be at least 1.")
    num_batches = -(-num_examples // batch_size)
    positions = np.arange(num_batches * batch_size, dtype=np.int32).reshape(-1, batch_size)
    inside = positions < num_examples
    return np.where(inside, positions, np.int32(0)), inside.astype(np.float32)
