"""Streaming of examples that do not fit in memory: a batch is still a function of the seed and the step."""

import contextlib
import dataclasses
import functools
import importlib.util
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from jaxnn.data import _examples
from jaxnn.data._arrays import Augmentation, IndexedSource
from jaxnn.data._grain import Batches, exit_if_unguarded, open_batches
from jaxnn.types import ENDLESS, ConfigError, DataError, Examples, Splits, check_int, cpu_count

_MOST_WORKERS = 8  # each takes about 220 MB of memory, half of it shared
_FEW = 32  # examples of float64 that are read at the start
_FINGERPRINT_EXAMPLES = 16  # of a reader without a `fingerprint` method

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
    """Makes a data set of examples that do not fit in memory: Grain reads and augments them while the device computes.

    Each split is a reader: any object with ``__len__`` and ``__getitem__(index) -> (input, target)``, such as a
    map-style ``Dataset`` of PyTorch, of Hugging Face, or a ``RandomAccessDataSource`` of Grain. An example that is no
    pair is an input without a target; both may be dicts of arrays. All inputs have one shape and dtype, and so have all
    targets; dtypes become those that `jaxnn.data.arrays` makes. A reader returns the same pair each time,
    is called in several threads, and is sent to worker processes, which open no accelerator: open files and connections
    in ``__getitem__``. It may have an attribute ``targets``, all targets in order, to check labels before training, and
    ``fingerprint(digest)``, which updates a ``hashlib`` object with data that identify its examples.

    A step's batch is a function of the seed and the step, for any number of workers and of processes.

    >>> reader = [(np.full((4,), index, np.uint8), index % 2) for index in range(100)]  # or your own class
    >>> jn.data.stream(reader, test=reader[:10], class_names=("even", "odd"), num_workers=0)
    Splits(stream: 100 train, 10 test, streamed, 2 classes)

    ``augment(rng, input)`` returns an input of the same shape and dtype for each training example. Its randomness must
    come from ``rng``, a `numpy.random.Generator` that depends on the seed, the step and the example's position in the
    batch. ``num_workers`` processes read training batches, by default the number of CPUs minus one, between 1 and 8;
    0: threads of this process, which are enough for readers that spend their time in C. Evaluation is read in threads.
    Without ``num_classes`` and ``class_names``, labels need only be at least 0. Other arguments as for
    `jaxnn.data.arrays`.

    Raises ConfigError if Grain is not installed, and DataError for a split that is not a reader or empty, splits that
    differ in shape or dtype, a label out of range, or an example 0 that cannot be used.
    """
    if importlib.util.find_spec("grain") is None:
        raise ConfigError('streaming needs Grain, which is not installed: pip install "jaxnn[stream]".')
    if num_workers is None:
        num_workers = min(max((cpu_count() or 1) - 1, 1), _MOST_WORKERS)
    check_int("num_workers", num_workers, 0)
    known = _examples.resolve_num_classes(class_names, num_classes)
    sources: dict[str, Any] = {}
    for split, reader in _examples.given_splits(train, test, validation).items():
        if isinstance(reader, tuple) and all(hasattr(item, "shape") for item in reader):
            raise DataError(f"{split} is a tuple of arrays in memory: use jn.data.arrays.")
        if missing := [method for method in ("__len__", "__getitem__") if not hasattr(reader, method)]:
            raise DataError(
                f"{split} must be a reader with __len__ and __getitem__(index) -> (input, target), but the "
                f"{type(reader).__name__} has no {' and no '.join(missing)}: add random access to its examples, or use "
                "jn.data.iterable."
            )
        if len(reader) == 0:
            raise DataError(f"{split} is empty: its reader's length is 0.")
        if len(reader) >= ENDLESS:
            raise DataError(
                f"{split} has {len(reader):,} examples: give each once, since training shuffles and repeats."
            )
        host_augment = augment if split == "train" else None
        sources[split] = source = StreamSource(reader, split, known, num_workers, host_augment)
        like = sources["train"].like
        _examples.check_alike(f"the {{one}} of example 0 of {split}", source.like, "that of example 0 of train", like)
        _examples.check_label_range(split, source.targets, known)
    return Splits(**sources, name=name, class_names=tuple(class_names))


@contextlib.contextmanager
def errors_named(what: str) -> Iterator[None]:
    """Converts an error inside the block into a DataError with a note, since worker processes send no cause."""
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
    """A split behind a reader; compared and hashed by identity, so that its methods may be static arguments."""

    reader: Any  # the user's, see `stream`
    split: str  # its name, for messages
    num_classes: int | None  # labels must be below it; None: integer targets need only be at least 0
    num_workers: int  # number of processes that read `batches`; 0: threads of this process
    examples: ClassVar[None] = None  # not in memory
    host_augment: HostAugmentation | None = None  # ``(rng, input) -> input`` on the host, for examples of `batches`
    augment: Augmentation | None = None  # for training batches, on the device

    @functools.cached_property
    def like(self) -> Examples:
        """Example 0; of float64 a few others are read too, to see whether float32 tells them apart."""
        first = self._given(0)
        places = jax.tree.leaves_with_path(first)
        if any(getattr(leaf, "dtype", type(leaf)) in (np.float64, float) for _, leaf in places):
            others = np.unique(np.linspace(0, len(self.reader) - 1, _FEW).astype(int))[1:].tolist()
            few = [jax.tree.leaves(example) for example in (first, *map(self._given, others))]
            for (path, _), column in zip(places, zip(*few, strict=False), strict=False):
                if len({np.shape(leaf) for leaf in column}) == 1 and np.asarray(column).dtype.kind == "f":
                    name = f"the values of {self.split}{jax.tree_util.keystr(path)}"
                    _examples.check_resolution(name, np.asarray(column))
        return _examples.as_example(self.split, 0, first, self.num_classes)

    @functools.cached_property
    def targets(self) -> Any:
        """All targets ``[examples, ...]``, checked, if the reader has ``targets``; else only the first."""
        listed = getattr(self.reader, "targets", None)
        if listed is None:
            return jax.tree.map(lambda one: one[None], self.like.targets)
        listed = _examples.as_examples(self.split, (np.arange(len(self.reader)), listed)).targets
        first = self.like._replace(targets=_examples.first_of(listed))
        _examples.check_alike(
            f"the first of the {{field}} that {self.split} lists", first, "that of example 0", self.like
        )
        return listed

    def example(self, index: int) -> Examples:
        """Returns the example at ``index`` with dtypes as of `jaxnn.data.arrays`; DataError if it cannot be used."""
        return _examples.as_example(self.split, index, self._given(index), self.num_classes)

    def _given(self, index: int) -> Any:
        with errors_named(f"reading example {index} of {self.split}"):
            return self.reader[index]

    @property
    def num_examples(self) -> int:
        """Number of examples of the split."""
        return len(self.reader)

    def read(self, indices: np.ndarray) -> Examples:
        """Reads the examples at ``indices [n]``, not augmented: ``[n, ...]`` each, in threads of this process."""
        exit_if_unguarded()
        indices = np.asarray(indices)
        with ThreadPoolExecutor(cpu_count()) as pool:
            examples = list(pool.map(self.example, indices.tolist()))
        return self.rows(examples, indices)

    def rows(self, examples: Sequence[Examples], indices: np.ndarray) -> Examples:
        """Stacks ``examples``, read at ``indices [n]``; DataError if one differs in shape or dtype from example 0."""
        for index, example in zip(indices, examples, strict=True):
            what = f"the {{one}} of example {index} of {self.split}"
            _examples.check_alike(what, example, f"that of example 0 of {self.split}", self.like)
        stacked: Examples = jax.tree.map(lambda *arrays: np.stack(arrays), *examples)
        return stacked

    def _read_step(self, seed: int, batch_size: int, positions: range, step: int) -> Examples:
        """Reads and augments the rows at ``positions`` of the batch of ``step``; called in a worker process."""
        order = np.asarray(self.order(seed, np.array([step], np.int32), batch_size))[0]
        examples = []
        for position in positions:
            example = self.example(int(order[position]))
            if self.host_augment is not None:
                where = f"example {order[position]} of {self.split}"
                rng = np.random.default_rng((seed & 0xFFFFFFFF, step, position))
                with errors_named(f"augmenting {where}"):
                    # A copy: the augmentation may modify it, and the reader may keep the original.
                    augmented = self.host_augment(rng, jax.tree.map(np.array, example.inputs))
                what = f"the augmented {{one}} of {where}"
                augmented = _examples.as_examples(where, (augmented, example.targets), what, has_examples=False)
                _examples.check_alike(f"the augmented {{one}} of {where}", augmented, "the input", example)
                example = augmented
            examples.append(example)
        return self.rows(examples, order[positions])

    def batches(self, seed: int, first_step: int, batch_size: int, rows: slice = slice(None)) -> Batches:
        """Iterates over the training batches of ``first_step`` and the steps after it, read and augmented ahead.

        ``rows`` selects a process's local rows of each batch of ``batch_size`` examples; ``seed`` decides order and
        augmentation. ``close()`` the iterator to end its workers. Raises DataError if the batch is larger than the
        split, or the reader cannot be pickled; the iterator raises it for an example that cannot be read.
        """
        self.order(seed, np.zeros(1, np.int32), batch_size)
        positions = range(batch_size)[rows]
        read = functools.partial(self._read_step, int(seed), batch_size, positions)
        num_bytes = len(positions) * sum(array.nbytes for array in jax.tree.leaves(self.like))
        return open_batches(read, first_step, self.num_workers, name=self.split, num_bytes=num_bytes)

    def fingerprint(self, digest: Any) -> None:
        """Updates ``digest`` by the reader's ``fingerprint``, else with its targets and 16 examples."""
        digest.update(repr([(array.dtype.str, array.shape) for array in jax.tree.leaves(self.like)]).encode())
        if callable(reader_fingerprint := getattr(self.reader, "fingerprint", None)):
            reader_fingerprint(digest)
            return
        digest.update(f"{self.num_examples}".encode())
        chosen = np.linspace(0, self.num_examples - 1, min(self.num_examples, _FINGERPRINT_EXAMPLES)).astype(int)
        for array in jax.tree.leaves((self.targets, self.read(chosen))):
            digest.update(np.ascontiguousarray(array).tobytes())
