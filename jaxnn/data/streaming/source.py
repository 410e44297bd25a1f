"""A split that does not lie in memory, whose batch at any step is a pure function of the seed and the step."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.data.rows import as_batch
from jaxnn.data.shuffle import batch_indices
from jaxnn.data.source import Augmentation
from jaxnn.data.streaming.batches import Batches
from jaxnn.data.streaming.pipeline import cores, open_batches
from jaxnn.data.streaming.reading import HostAugmentation, Reading
from jaxnn.data.streaming.steps import StepRows
from jaxnn.data.streaming.workers import end_if_unguarded
from jaxnn.types import Array, Batch, Examples

# Of a reader that does not tell how to know its examples again, so many are read for it.
_FINGERPRINT_EXAMPLES = 16


@dataclasses.dataclass(frozen=True, eq=False)
class StreamSource:
    """A `jaxnn.types.Source` over a reader.

    Compared and hashed by identity, so that its methods may be closed over or be static arguments.

    Attributes:
        reading: how its examples are read.
        like: example 0.
        targets: all targets if the reader lists them, else the first alone.
        num_workers: how many processes read `batches`; 0: threads of this process do.
        host_augment: ``(rng, input) -> input``, on the host, for each example of `batches`; or None.
        augment: ``(key, inputs [batch, ...]) -> inputs``, on the device, for training batches; or None.
    """

    reading: Reading
    like: Examples
    targets: np.ndarray
    num_workers: int
    host_augment: HostAugmentation | None = None
    augment: Augmentation | None = None

    @property
    def examples(self) -> None:
        """None: they do not lie in memory."""

    @property
    def num_examples(self) -> int:
        """How many examples the split holds."""
        return len(self.reading.reader)

    def read(self, indices: np.ndarray) -> Examples:
        """The examples at ``indices [n]``, not augmented: ``[n, ...]`` each, read now in threads of this process.

        Raises:
            DataError: one that cannot be read, or is unlike example 0; it is named.
        """
        end_if_unguarded()
        indices = np.asarray(indices)
        with ThreadPoolExecutor(cores()) as pool:
            examples = list(pool.map(self.reading.example, indices.tolist()))
        return self.reading.rows(examples, indices, self.like)

    def batches(self, seed: int, first_step: int, batch_size: int, rows: slice = slice(None)) -> Batches:
        """The training batches of ``first_step`` and the steps after it, read and augmented ahead.

        They are the same whatever the number of workers, and whichever ``rows`` are asked for together.

        Args:
            seed: decides order and augmentation.
            first_step: where to begin; that costs the same anywhere.
            batch_size: examples of the whole batch.
            rows: which of them to read: a process's own, or all.

        Returns:
            An iterator over ``Examples``, ``[rows, ...]`` each. ``close()`` it to end its workers.

        Raises:
            DataError: the batch is larger than the split, or the reader cannot be sent to worker processes. The
                iterator raises it for an example that cannot be read, which it names.
        """
        self.order(seed, np.zeros(1, np.int32), batch_size)
        places = range(batch_size)[rows]
        read = StepRows(self.reading, self.like, self.host_augment, int(seed), batch_size, places)
        num_bytes = len(places) * sum(array.nbytes for array in self.like)
        return open_batches(read, first_step, self.num_workers, name=self.reading.split, num_bytes=num_bytes)

    def order(self, seed: Array | int, steps: Array, batch_size: int) -> Array:
        """Which examples each of ``steps [k]`` trains on, as `batch_indices`: ``[k, batch]`` int32.

        Raises:
            DataError: the batch is larger than the split.
        """
        return batch_indices(seed, steps, self.num_examples, batch_size)

    def as_batch(self, examples: Examples, mask: Array | None = None) -> Batch:
        """Rows ``[batch, ...]`` as a batch, see `rows.as_batch`; pure, to be traced."""
        return as_batch(examples, mask)

    def gather(self, examples: Examples, indices: Array, mask: Array | None = None) -> Batch:
        """The rows at ``indices [batch]`` of ``examples``, ready for a model; pure, to be traced."""
        return as_batch(Examples(*(jnp.take(rows, indices, axis=0, mode="clip") for rows in examples)), mask)

    def transform(self, batch: Batch, key: jax.Array) -> Batch:
        """The batch with its inputs augmented on the device; the identity where there is no such augmentation."""
        if self.augment is None:
            return batch
        return batch._replace(inputs=self.augment(key, jnp.asarray(batch.inputs)))

    def fingerprint(self, digest: Any) -> None:
        """Feeds ``digest``, of ``hashlib``, with what the reader says of itself, else with some examples.

        Pictures of a folder tell their names, labels and sizes in bytes, not what is in them. Of any other reader
        without a ``fingerprint`` it is the number of examples, the targets it lists and sixteen examples.
        """
        digest.update(repr([(array.dtype.str, array.shape) for array in self.like]).encode())
        reader = self.reading.reader
        tell = getattr(reader, "fingerprint", None)
        if callable(tell):
            tell(digest)
            return
        digest.update(f"{self.num_examples}".encode())
        chosen = np.linspace(0, self.num_examples - 1, min(self.num_examples, _FINGERPRINT_EXAMPLES)).astype(int)
        for array in (self.targets, *self.read(chosen)):
            digest.update(np.ascontiguousarray(array).tobytes())
