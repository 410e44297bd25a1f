"""The rows of any step, as a pure function of the seed and the step: what a worker process computes."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxnn.data.shuffle import batch_indices
from jaxnn.data.streaming.reading import HostAugmentation, Reading, check_like, converted, told
from jaxnn.types import Examples


@dataclasses.dataclass(frozen=True, eq=False)
class StepRows:
    """``step -> Examples``: some rows of that step's batch, read and augmented.

    Attributes:
        reading: how examples are read.
        like: example 0, which all must resemble.
        augment: ``(rng, input) -> input``, or None. The generator of an example is a function of the seed, the step and
            the example's place in the whole batch, so that it is the same whoever reads it.
        seed: decides order and augmentation; its low 32 bits count.
        batch_size: examples of the whole batch.
        places: which of them to read.
    """

    reading: Reading
    like: Examples
    augment: HostAugmentation | None
    seed: int
    batch_size: int
    places: range

    def __call__(self, step: int) -> Examples:
        """The rows ``[places, ...]`` of ``step``."""
        steps = np.array([step], np.int32)
        order = np.asarray(batch_indices(self.seed, steps, len(self.reading.reader), self.batch_size))[0]
        examples = (self._example(step, place, int(order[place])) for place in self.places)
        return self.reading.rows(examples, order[self.places], self.like)

    def _example(self, step: int, place: int, index: int) -> Examples:
        example = self.reading.example(index)
        if self.augment is None:
            return example
        augment, where = self.augment, self.reading.name(index)
        rng = np.random.default_rng((self.seed & 0xFFFFFFFF, step, place))
        # A copy, which it may change: what the reader gave may be the reader's own.
        augmented = told(f"augmenting {where}", lambda: augment(rng, np.array(example.inputs)))
        what = f"the augmented input of {where}"
        inputs = converted(what, augmented, keep_uint8=True, boolean=np.float32)
        check_like(what, inputs, "it was", np.asarray(example.inputs))
        return example._replace(inputs=inputs)
