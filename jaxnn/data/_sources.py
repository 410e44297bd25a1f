"""Sources beside arrays and readers: batches made on the device, iterables, mixtures, data in order; padding."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.data._arrays import ArraySource, Augmentation, IndexedSource, array_source
from jaxnn.data._examples import (
    as_example,
    as_examples,
    check_alike,
    check_label_range,
    first_of,
    num_rows,
    resolve_num_classes,
)
from jaxnn.data._shuffle import permute
from jaxnn.data._stream import StreamSource, errors_named
from jaxnn.types import ENDLESS, Array, Batch, ConfigError, DataError, Examples, PyTree, Splits, check_call, check_int

type MakeBatch = Callable[[jax.Array, jax.Array], Any]
_FINGERPRINT_EXAMPLES = 16


def generated(make_batch: MakeBatch, test: Any = None, validation: Any = None, *, name: str = "generated") -> Splits:
    """Makes a data set whose training batches are computed on the device: synthetic tasks, points of an equation.

    ``make_batch(key, step)`` is pure and traced; its key is that of the step, of the config's seed. It returns a
    `Batch`, a pair ``(inputs, targets)``, or inputs alone, of the config's batch size. Other splits are arrays as of
    `jaxnn.data.arrays`, or the number of batches to make once, by other keys.

    >>> def points(key, step):
    ...     x = jax.random.uniform(key, (32, 1))
    ...     return x, jnp.sin(x)
    >>> jn.data.generated(points, test=4)
    Splits(generated: train generated, 128 test)

    Raises ConfigError for a function of other arguments, DataError for other splits.
    """
    check_call("jn.data.generated needs a function make_batch(key, step)", make_batch, 2)
    train = GeneratedSource(make_batch)
    sources: dict[str, Any] = {"train": train}
    for index, (split, given) in enumerate((("test", test), ("validation", validation))):
        if isinstance(given, int) and not isinstance(given, bool):
            # Not a key of a step, at any seed.
            own = jax.random.fold_in(jax.random.fold_in(jax.random.key(index), ENDLESS), index)
            keys = jax.random.split(own, check_int(f"{split}, a number of batches,", given))
            made = jax.jit(lambda keys: jax.lax.map(lambda key: train.make(key, jnp.int32(0)), keys))(keys)
            rows = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:]), made)
            sources[split] = ArraySource(Examples(rows.inputs, rows.targets))
        elif given is not None:
            sources[split] = ArraySource(as_examples(split, given))
    return Splits(**sources, name=name)


@dataclasses.dataclass(frozen=True, eq=False)
class GeneratedSource(IndexedSource):
    """Training batches that are a function of a key and a step; a step's row is its seed and its number."""

    make_batch: MakeBatch = dataclasses.field(repr=False)  # see `generated`
    augment: Augmentation | None = None
    targets: ClassVar[None] = None
    num_examples: ClassVar[int] = ENDLESS

    @property
    def examples(self) -> Examples:
        """No arrays: nothing is put on the device."""
        return Examples((), None)

    def make(self, key: jax.Array, step: jax.Array) -> Batch:
        """The batch of a key and a step."""
        made = self.make_batch(key, step)
        if isinstance(made, Batch):
            return made
        inputs, targets = made if isinstance(made, tuple | list) and len(made) == 2 else (made, None)
        if not jax.tree.leaves(inputs):
            raise ConfigError("generated data need a batch with at least one array.")
        return Batch(inputs, targets, np.ones(num_rows(inputs), np.float32))

    def order(self, seed: Array | int, steps: Array, batch_size: int) -> Array:
        """Seed and number of each of ``steps [k]``: ``[k, 2]`` uint32."""
        library: Any = np if isinstance(steps, np.ndarray) and not isinstance(seed, jax.Array) else jnp
        rows = library.asarray(steps).astype(np.uint32)
        return library.stack([library.full_like(rows, seed), rows], -1)  # type: ignore[no-any-return]

    def gather(self, examples: Examples, indices: Array, mask: Array | None = None) -> Batch:
        """The batch of a row ``[2]`` of `order`."""
        seed, step = indices[0], jnp.asarray(indices[1]).astype(jnp.int32)
        return self.make(jax.random.fold_in(jax.random.key(seed), step), step)

    def as_batch(self, examples: Examples, mask: Array | None = None) -> Batch:
        """The batch of step 0, for its shapes; or given ``examples``, such as inputs to predict for."""
        if jax.tree.leaves(examples):
            return super().as_batch(examples, mask)
        return self.gather(examples, np.zeros(2, np.uint32))

    def read(self, indices: np.ndarray) -> Examples:
        """No examples."""
        return self.examples

    def fingerprint(self, digest: Any) -> None:
        """Nothing: the function is a part of the program."""


def without_data(config: Any) -> Splits:
    """The data of an experiment that has none: batches of a mask alone."""
    batch = Batch((), None, np.ones(config.batch_size, np.float32))
    return Splits(GeneratedSource(lambda key, step: batch), name="no data")


def iterable(
    train: Callable[[int, int], Iterable[Any]],
    test: Any = None,
    validation: Any = None,
    *,
    name: str = "iterable",
    class_names: Sequence[str] = (),
    num_classes: int | None = None,
) -> Splits:
    """Makes a data set of an iterable that can start at any position, such as a streamed data set of Hugging Face.

    ``train(seed, start)`` returns an iterable of examples from number ``start`` on, the same each time, so that a
    resumed run continues where it stopped; an example is a pair ``(input, target)``, or inputs alone, which may be
    dicts. It has to go on for as long as training does. Other splits are arrays as of `jaxnn.data.arrays`, or readers
    as of `jaxnn.data.stream`. Integer targets are labels as there, below ``num_classes`` or the number of
    ``class_names``, if given.

    >>> def examples(seed, start):  # Hugging Face: map(to_pair, dataset.shuffle(seed).repeat(None).skip(start))
    ...     return ((np.full(4, index), index % 2) for index in range(start, 1_000_000))
    >>> jn.data.iterable(examples, test=(np.eye(4, dtype=int), [0, 1, 0, 1]), class_names=("even", "odd"))
    Splits(iterable: train generated, 4 test, streamed, 2 classes)

    Raises ConfigError unless ``train`` is such a function, DataError for an example that cannot be used, or differs in
    shape or dtype from the first, in any split.
    """
    wanted = "jn.data.iterable needs a function train(seed, start) that returns an iterable of examples"
    check_call(wanted, train, 2)
    known = resolve_num_classes(class_names, num_classes)
    source = IterableSource(train, num_classes=known)
    (like,) = source.first(1)
    sources: dict[str, Any] = {"train": source}
    for split, given in (("validation", validation), ("test", test)):
        is_arrays = isinstance(given, tuple | list | Mapping) or hasattr(given, "__array__")
        if not is_arrays and hasattr(given, "__len__") and hasattr(given, "__getitem__"):  # a reader
            sources[split] = StreamSource(given, split, known, num_workers=0)
            one = sources[split].like
            check_alike(f"the {{one}} of example 0 of {split}", one, "that of example 0 of train", like)
        elif given is not None:
            examples = as_examples(split, given)
            check_alike(f"each of the {{field}} of {split}", first_of(examples), "the first of train", like)
            check_label_range(split, examples.targets, known)
            sources[split] = ArraySource(examples)
    return Splits(**sources, name=name, class_names=tuple(class_names))


@dataclasses.dataclass(frozen=True, eq=False)
class IterableSource(IndexedSource):
    """Training examples of an iterable with a known position; compared and hashed by identity."""

    start: Callable[[int, int], Iterable[Any]] = dataclasses.field(repr=False)  # see `iterable`
    augment: Augmentation | None = None
    num_classes: int | None = None  # labels must be below it; None: integer targets need only be at least 0
    kept: list[Examples] = dataclasses.field(default_factory=list, repr=False)  # see `first`
    examples: ClassVar[None] = None  # not in memory
    num_examples: ClassVar[int] = ENDLESS

    def order(self, seed: Array | int, steps: Array, batch_size: int) -> Array:
        """The positions of the examples of each of ``steps [k]``: ``[k, batch]`` int32."""
        return steps[:, None] * batch_size + np.arange(batch_size, dtype=np.int32)

    def iterate(self, seed: int, first: int) -> Iterator[Examples]:
        """The examples from number ``first`` on, checked."""
        like, ended = None, object()
        with errors_named("starting the iterable of train"):
            rest = iter(self.start(seed, first))
        for index in itertools.count(first):
            where = f"example {index} of train"
            with errors_named(f"reading {where}"):
                given = next(rest, ended)
            if given is ended:
                raise DataError(
                    f"the iterable of train ends before example {index}: let it repeat (Hugging Face: .repeat(None)), "
                    "or train fewer steps."
                )
            example = as_example("train", index, given, self.num_classes)
            like = example if like is None else like
            check_alike(f"the {{one}} of {where}", example, f"that of example {first}", like)
            yield example

    def first(self, count: int) -> list[Examples]:
        """The first examples of seed 0, read once, since some iterables take seconds to start or to close."""
        if len(self.kept) < count:
            self.kept[:] = itertools.islice(self.iterate(0, 0), max(count, _FINGERPRINT_EXAMPLES))
        return self.kept[:count]

    @property
    def targets(self) -> PyTree:
        """The first target."""
        return self.read(np.zeros(1, np.int32)).targets

    def read(self, indices: np.ndarray) -> Examples:
        """Examples from the start: those at ``indices``, which are small numbers."""
        first = self.first(int(np.max(indices)) + 1)
        rows: Examples = jax.tree.map(lambda *leaves: np.stack(leaves), *(first[index] for index in indices))
        return rows

    def batches(self, seed: int, first_step: int, batch_size: int, rows: slice = slice(None)) -> Iterator[Examples]:
        """Iterates over the training batches of ``first_step`` and the steps after it, of them the local ``rows``."""
        for batch in itertools.batched(self.iterate(int(seed), first_step * batch_size), batch_size):
            yield jax.tree.map(lambda *leaves: np.stack(leaves), *batch[rows])

    def fingerprint(self, digest: Any) -> None:
        """Updates ``digest`` with the first 16 examples."""
        for array in jax.tree.leaves(self.first(_FINGERPRINT_EXAMPLES)):
            digest.update(np.ascontiguousarray(array).tobytes())


def mixture(parts: Mapping[str, Splits], weights: Mapping[str, float]) -> Splits:
    """Mixes the training examples of data sets in memory: each example of a batch is one of part ``p`` with its weight.

    Examples are drawn with replacement, equally often within a part. The other splits are those of the first part; the
    parts are alike in shapes and dtypes.

    >>> even, odd = (jn.data.arrays((np.arange(first, 8, 2), np.full(4, first))) for first in (0, 1))
    >>> jn.data.mixture({"even": even, "odd": odd}, {"even": 0.75, "odd": 0.25})
    Splits(even+odd: 8 train, inputs int32 [])

    Raises DataError for parts that are not in memory, not alike, or encoded by different vocabularies, columns or bins;
    that are augmented (augment the mixture), mixed or in order already; and unless each has a weight above 0.
    """
    if weights.keys() != parts.keys() or not parts or not all(weight > 0 for weight in weights.values()):
        raise DataError(f"a mixture of {', '.join(parts)} needs a weight above 0 for each, not {dict(weights)}.")
    sources = {name: array_source(splits.train) for name, splits in parts.items()}
    first, model = next(iter(sources.items()))
    like = first_of(model.examples)
    for name, source in sources.items():
        if source.augment is not None or isinstance(source, MixedSource | OrderedSource):
            raise DataError(f"the part {name} of a mixture is augmented, mixed or in order: do that to the mixture.")
        if parts[name].class_names != parts[first].class_names:
            raise DataError(f"the part {name} of a mixture has other classes than {first}: rename them.")
        for kept in ("vocabulary", "columns", "bins"):
            if not _same(getattr(source, kept, None), getattr(model, kept, None)):
                raise DataError(
                    f"the part {name} of a mixture has another {kept} than {first}, so equal numbers mean different "
                    "things: make both from one data set, as by jn.data.subset."
                )
        check_alike(f"each of the {{field}} of {name}", first_of(source.examples), f"each of those of {first}", like)
    together: Examples = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(s.examples for s in sources.values()))
    counts = tuple(source.num_examples for source in sources.values())
    shares = tuple(weights[name] / sum(weights.values()) for name in sources)
    train = MixedSource(together, model.augment, counts, shares)
    return parts[first]._replace(train=train, name="+".join(parts))


def _same(one: Any, other: Any) -> bool:
    """Whether two encodings, such as vocabularies or None, are equal in all of their parts."""
    trees = [{} if encoding is None else vars(encoding) for encoding in (one, other)]
    left, right = map(jax.tree.leaves_with_path, trees)
    return len(left) == len(right) and all(
        a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in zip(left, right, strict=True)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class MixedSource(ArraySource):
    """Parts one after the other, from which each row of a batch is drawn; see `mixture`."""

    counts: tuple[int, ...] = ()  # examples of each part
    shares: tuple[float, ...] = ()  # how often each is drawn

    def order(self, seed: Array | int, steps: Array, batch_size: int) -> Array:
        """Indices of the examples of each of ``steps [k]``: ``[k, batch]`` int32."""
        ends, firsts = np.cumsum(self.shares)[:-1], np.cumsum([0, *self.counts[:-1]])

        def indices(step: jax.Array) -> jax.Array:
            part_key, row_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
            part = jnp.searchsorted(
                jnp.asarray(ends, jnp.float32), jax.random.uniform(part_key, (batch_size,)), "right"
            )
            rows = jax.random.randint(row_key, (batch_size,), 0, jnp.asarray(self.counts)[part])
            return jnp.asarray(firsts, jnp.int32)[part] + rows

        chosen = jax.vmap(indices)(jnp.asarray(steps))
        return np.asarray(chosen) if isinstance(steps, np.ndarray) and not isinstance(seed, jax.Array) else chosen


def subset(splits: Splits, num_train: int, seed: int = 0) -> Splits:
    """Returns the data set with ``num_train`` of its training examples, drawn at random by ``seed``; in memory.

    For learning curves: a smaller subset by the same seed is part of a larger one. Other splits stay as they are.

    >>> jn.data.subset(jn.data.digits(), 100)
    Splits(digits: 100 train, ...)

    Raises ConfigError for a number below 1, and DataError for more than there are, a mixture or a stream.
    """
    check_int("seed", seed, least=0)
    source = array_source(splits.train)
    if isinstance(source, MixedSource):
        raise DataError("a mixture has no subset: mix subsets of its parts instead.")
    if check_int("num_train", num_train) > source.num_examples:
        raise DataError(f"num_train is {num_train:,}, and there are {source.num_examples:,} training examples.")
    chosen = np.sort(permute(np.arange(num_train), source.num_examples, seed, 0))
    return splits._replace(train=dataclasses.replace(source, examples=source.read(chosen)))


def in_order(splits: Splits) -> Splits:
    """Trains on a data set in memory in its own order, for models that carry their state from batch to batch.

    Of ``n`` examples and a batch of ``b``, row ``r`` of step ``t`` is example ``r * (n // b) + t % (n // b)``: each row
    reads a stretch of the data from start to end, as truncated backpropagation through time does.

    >>> source = jn.data.in_order(jn.data.arrays(np.arange(6))).train
    >>> source.order(seed=0, steps=np.arange(3), batch_size=2).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    source = array_source(splits.train)
    if isinstance(source, MixedSource):
        raise DataError("a mixture has no order of its own: put its parts in order instead.")
    return splits._replace(train=OrderedSource(source.examples, source.augment))


class OrderedSource(ArraySource):
    """A split in its own order; see `in_order`."""

    def order(self, seed: Array | int, steps: Array, batch_size: int) -> Array:
        """Indices of the examples of each of ``steps [k]``: ``[k, batch]`` int32."""
        length = self.num_examples // batch_size
        if length == 0:
            raise DataError(f"a batch of {batch_size} is larger than the {self.num_examples} examples in the split.")
        rows = np.arange(batch_size, dtype=np.int32) * length
        return rows[None] + (steps % length)[:, None]


def pad_sequences(
    sequences: Sequence[Any], length: int | None = None, *, value: float = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns sequences ``[time, ...]`` of different lengths as one array ``[examples, length, ...]``, and the lengths.

    Sequences end with ``value`` where they are shorter, and lose their end where they are longer than ``length``, by
    default that of the longest.

    >>> tokens, lengths = jn.data.pad_sequences([[3, 1, 4], [1, 5]])
    >>> tokens.tolist(), lengths.tolist()
    ([[3, 1, 4], [1, 5, 0]], [3, 2])
    >>> splits = jn.data.arrays(({"tokens": tokens, "length": lengths}, [0, 1]))

    Raises DataError for no sequences, or sequences of different shapes or kinds.
    """
    rows = [np.asarray(sequence) for sequence in sequences]
    if not rows or any(row.ndim == 0 or row.shape[1:] != rows[0].shape[1:] for row in rows):
        raise DataError("pad_sequences needs at least one sequence [time, ...], and all alike but in length.")
    longest = max(map(len, rows)) if length is None else check_int("length", length)
    lengths = np.array([min(len(row), longest) for row in rows], np.int32)
    dtype = np.result_type(*(row.dtype for row in rows if row.size or len(rows) == 1), np.int8)
    padded = np.full((len(rows), longest, *rows[0].shape[1:]), value, dtype)
    for target, row, size in zip(padded, rows, lengths, strict=True):
        target[:size] = row[:size]
    return padded, lengths
