"""Examples that do not fit in memory: readers become sources whose batches are functions of the seed and the step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxnn.data._arrays import (
    IndexedSource,
    as_examples,
    check_integer,
    check_label_range,
    check_like,
    check_pair,
    converted,
    given_splits,
    known_classes,
)
from jaxnn.data._grain import Batches, check_installed, cores, exit_if_unguarded, open_batches
from jaxnn.types import ConfigError, DataError, Examples, Splits

# Each takes some 220 MB of memory, half of it its own.
_MOST_WORKERS = 8
# Read for the fingerprint of a reader without a `fingerprint`.
_FINGERPRINT_EXAMPLES = 16

type HostAugmentation = Callable[[np.random.Generator, np.ndarray], Any]


def stream(
    train: Any,
    test: Any = None,
    validation: Any = None,
    *,
    name: str = "stream",
    class_names: Sequence[str] = (),
    num_classes: int | None = None,
    augment: HostAugmentation | None = None,
    num_workers: int | None = None,
) -> Splits:
    """Examples that do not fit in memory as a data set: read and augmented by Grain while the device computes.

    Each split is a reader: any object with ``__len__`` and ``__getitem__(index) -> (input, target)``, such as a
    map-style ``Dataset`` of PyTorch or a ``RandomAccessDataSource`` of Grain. All inputs have one shape and dtype, and
    so have all targets; dtypes become those that `jaxnn.data.arrays` makes. A reader gives the same pair each time, is
    called in several threads, and is sent to worker processes, which open no accelerator: it opens files and
    connections where it uses them. It may also have ``targets``, all of them in order, to check labels before training,
    and ``fingerprint(digest)``, which feeds a digest of ``hashlib`` with what distinguishes its examples.

    A step's batch is a function of the seed and the step, for any number of workers and of processes.

    Args:
        train: the training split.
        test: the test split, or None.
        validation: the split that is evaluated during training, or None.
        name: the data set's name, for reports.
        class_names: one name per class.
        num_classes: the number of labels; by default as many as ``class_names``, and if there are none, labels need
            only be at least 0.
        augment: ``(rng, input) -> input`` for each training example: an input of the same shape and dtype, random by
            ``rng`` alone, a `numpy.random.Generator` that is a function of the seed, the step and the example's place
            in the batch.
        num_workers: how many processes read training batches; 0: threads of this process do, which is enough for
            readers that spend their time in C. By default one for each CPU but one, at least 1 and at most 8.
            Evaluation is read in threads.

    Raises:
        ConfigError: Grain is not installed, or a bad ``num_workers``.
        DataError: no reader, an empty one, splits that differ in shape or dtype, ``class_names`` that are not
            ``num_classes``, a label out of range, an example 0 that cannot be read or used.
    """
    check_installed()
    if num_workers is None:
        num_workers = min(max(cores() - 1, 1), _MOST_WORKERS)
    check_integer("num_workers", num_workers, 0, ConfigError)
    known = known_classes(class_names, num_classes)
    sources: dict[str, Any] = {}
    for split, reader in given_splits(train, test, validation).items():
        if isinstance(reader, tuple) and all(hasattr(item, "shape") for item in reader):
            raise DataError(f"{split} is a tuple of arrays, which are in memory: use jn.data.arrays.")
        if missing := [method for method in ("__len__", "__getitem__") if not hasattr(reader, method)]:
            raise DataError(
                f"{split} must be a reader with __len__ and __getitem__(index) -> (input, target), but the "
                f"{type(reader).__name__} has no {' and no '.join(missing)}: give random access to its examples."
            )
        if len(reader) == 0:
            raise DataError(f"{split} is empty: its reader's length is 0.")
        host_augment = augment if split == "train" else None
        sources[split] = source = StreamSource(reader, split, known, num_workers, host_augment)
        source.check_alike(0, source.like, sources["train"].like, "train")
        if np.issubdtype(source.targets.dtype, np.integer):
            check_label_range(split, source.targets, known)
    return Splits(**sources, name=name, class_names=tuple(class_names))


@contextlib.contextmanager
def _errors_named(what: str) -> Iterator[None]:
    """Turns an error inside the block into a DataError with the reason and the place why ``what`` failed.

    The traceback becomes a note: worker processes send notes but no cause.
    """
    try:
        yield
    except DataError:
        raise
    # The user's reader may raise anything.
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        named = DataError(f"{what} failed with {reason} ({Path(last.filename).name}, line {last.lineno}).")
        named.add_note("".join(traceback.format_exception(error)))
        raise named from None


@dataclasses.dataclass(frozen=True, eq=False)
class StreamSource(IndexedSource):
    """A `jaxnn.types.Source` over a reader.

    Compared and hashed by identity, so that its methods may be closed over or be static arguments.
    """

    reader: Any  # the user's, see `stream`
    split: str  # its name, for messages
    num_classes: int | None  # labels must be below it; None: integer targets need only be at least 0
    num_workers: int  # number of processes that read `batches`; 0: threads of this process do
    host_augment: HostAugmentation | None = None  # ``(rng, input) -> input`` on the host, for examples of `batches`

    @functools.cached_property
    def like(self) -> Examples:
        """Example 0."""
        return self.example(0)

    @functools.cached_property
    def targets(self) -> np.ndarray:
        """All targets ``[examples, ...]`` if the reader lists them, checked; else the first alone."""
        listed = getattr(self.reader, "targets", None)
        if listed is None:
            return np.asarray(self.like.targets)[None]
        targets = np.asarray(as_examples(self.split, (np.arange(len(self.reader)), listed)).targets)
        what = f"the first of the targets that {self.split} lists"
        check_like(what, targets[0], "that of example 0", self.like.targets)
        return targets

    def example(self, index: int) -> Examples:
        """The example at ``index`` with the dtypes of `jaxnn.data.arrays`; DataError, which names it, if it is bad."""
        where = f"example {index} of {self.split}"
        with _errors_named(f"reading {where}"):
            pair = self.reader[index]
        check_pair(where, pair, "(input, target)", "have the reader's __getitem__ return such a pair")
        target = converted(f"the target of {where}", pair[1], is_input=False)
        if np.issubdtype(target.dtype, np.integer):
            check_label_range(self.split, target[None], self.num_classes, first=index)
        return Examples(converted(f"the input of {where}", pair[0], is_input=True), target)

    def check_alike(self, index: int, example: Examples, like: Examples, split: str) -> None:
        """DataError if the example at ``index`` differs in shape or dtype from ``like``, example 0 of ``split``."""
        for what, array, model in zip(("input", "target"), example, like, strict=True):
            check_like(f"the {what} of example {index} of {self.split}", array, f"that of example 0 of {split}", model)

    @property
    def examples(self) -> None:
        """None: they are not in memory."""

    @property
    def num_examples(self) -> int:
        """Number of examples of the split."""
        return len(self.reader)

    def read(self, indices: np.ndarray) -> Examples:
        """The examples at ``indices [n]``, not augmented: ``[n, ...]`` each, read now in threads of this process."""
        exit_if_unguarded()
        indices = np.asarray(indices)
        with ThreadPoolExecutor(cores()) as pool:
            examples = list(pool.map(self.example, indices.tolist()))
        return self.rows(examples, indices)

    def rows(self, examples: Sequence[Examples], indices: np.ndarray) -> Examples:
        """``examples``, read at ``indices [n]``, as arrays ``[n, ...]``; DataError if one differs from the first."""
        for index, example in zip(indices, examples, strict=True):
            self.check_alike(index, example, self.like, self.split)
        return Examples(*(np.stack(arrays) for arrays in zip(*examples, strict=True)))

    def _read_step(self, seed: int, batch_size: int, places: range, step: int) -> Examples:
        """The rows at ``places`` of the batch of ``step``, read and augmented: what a worker process computes.

        An example's generator is a function of the seed (its low 32 bits), the step and the place in the batch.
        """
        order = np.asarray(self.order(seed, np.array([step], np.int32), batch_size))[0]
        examples = []
        for place in places:
            example = self.example(int(order[place]))
            if self.host_augment is not None:
                where = f"example {order[place]} of {self.split}"
                rng = np.random.default_rng((seed & 0xFFFFFFFF, step, place))
                with _errors_named(f"augmenting {where}"):
                    # A copy, since the reader may keep the original.
                    augmented = self.host_augment(rng, np.array(example.inputs))
                inputs = converted(f"the augmented input of {where}", augmented, is_input=True)
                check_like(f"the augmented input of {where}", inputs, "the input", example.inputs)
                example = example._replace(inputs=inputs)
            examples.append(example)
        return self.rows(examples, order[places])

    def batches(self, seed: int, first_step: int, batch_size: int, rows: slice = slice(None)) -> Batches:
        """The training batches of ``first_step`` and the steps after it, read and augmented ahead.

        They are the same for any number of workers, and for any ``rows`` that are read together: a process's local
        rows of each batch of ``batch_size`` examples, or all. To start at any step costs the same. ``seed`` decides
        order and augmentation. ``close()`` the iterator to end its workers. DataError: the batch is larger than the
        split, or the reader cannot be sent to worker processes; the iterator's names an example that cannot be read.
        """
        self.order(seed, np.zeros(1, np.int32), batch_size)
        places = range(batch_size)[rows]
        read = functools.partial(self._read_step, int(seed), batch_size, places)
        num_bytes = len(places) * sum(array.nbytes for array in self.like)
        return open_batches(read, first_step, self.num_workers, name=self.split, num_bytes=num_bytes)

    def fingerprint(self, digest: Any) -> None:
        """Feeds ``digest``, of ``hashlib``, by the reader's ``fingerprint``, else with its targets and 16 examples."""
        digest.update(repr([(array.dtype.str, array.shape) for array in self.like]).encode())
        own = getattr(self.reader, "fingerprint", None)
        if callable(own):
            own(digest)
            return
        digest.update(f"{self.num_examples}".encode())
        chosen = np.linspace(0, self.num_examples - 1, min(self.num_examples, _FINGERPRINT_EXAMPLES)).astype(int)
        for array in (self.targets, *self.read(chosen)):
            digest.update(np.ascontiguousarray(array).tobytes())
