"""Data sets of arrays in memory: their source, checks, splits and standardization."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.data._shuffle import batch_indices, permute, steps_per_epoch
from jaxnn.types import Array, Batch, DataError, Examples, Source, Splits, check_int

_INT32 = np.iinfo(np.int32)

type Augmentation = Callable[[jax.Array, jax.Array], jax.Array]


class IndexedSource:
    """Base of in-memory and streamed sources: the order of examples, and preparation of batches on the device."""

    augment: Augmentation | None = None

    @property
    def num_examples(self) -> int:
        """Number of examples of the split."""
        raise NotImplementedError

    def order(self, seed: Array | int, steps: Array, batch_size: int) -> Array:
        """Indices of the examples of each of ``steps [k]``, see `batch_indices`: ``[k, batch]`` int32."""
        return batch_indices(seed, steps, self.num_examples, batch_size)

    def as_batch(self, examples: Examples, mask: Array | None = None) -> Batch:
        """Returns all of ``examples [batch, ...]``, in order, as a batch for a model; pure and traceable.

        uint8 inputs become float32 in 0…1. ``mask=None`` is a NumPy array of ones, so that models see it is constant.
        """
        inputs, targets = (jnp.asarray(array) for array in examples)
        if inputs.dtype == jnp.uint8:
            inputs = inputs.astype(jnp.float32) / 255
        return Batch(inputs, targets, np.ones(inputs.shape[:1], np.float32) if mask is None else mask)

    def gather(self, examples: Examples, indices: Array, mask: Array | None = None) -> Batch:
        """Returns the rows of ``examples`` at ``indices [batch]`` as a batch; an index out of range is clipped."""
        rows = (jnp.take(array, indices, axis=0, mode="clip") for array in examples)
        return self.as_batch(Examples(*rows), mask)

    def transform(self, batch: Batch, key: jax.Array) -> Batch:
        """Returns the batch with augmented inputs, or the batch itself if there is no augmentation."""
        if self.augment is None:
            return batch
        return batch._replace(inputs=self.augment(key, jnp.asarray(batch.inputs)))


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySource(IndexedSource):
    """A split as arrays in memory; compared and hashed by identity, so that its methods may be static arguments.

    >>> source = jn.data.arrays((np.eye(4), [0, 1, 0, 1])).train
    >>> indices = source.order(seed=0, steps=np.arange(2), batch_size=2)  # an epoch: [steps, batch]
    >>> source.gather(source.examples, indices[0]).inputs.shape
    (2, 4)
    """

    examples: Examples = dataclasses.field(repr=False)  # the split's arrays, on the host
    augment: Augmentation | None = None  # ``(key, inputs [batch, ...]) -> inputs``, for training batches

    @property
    def num_examples(self) -> int:
        """Number of examples of the split."""
        return int(self.examples.targets.shape[0])

    @property
    def targets(self) -> Array:
        """All targets ``[examples, ...]``, on the host."""
        return self.examples.targets

    def read(self, indices: np.ndarray) -> Examples:
        """Returns the examples at ``indices [n]``, on the host: ``[n, ...]`` each."""
        return Examples(*(np.asarray(rows)[indices] for rows in self.examples))

    def fingerprint(self, digest: Any) -> None:
        """Updates ``digest``, a ``hashlib`` object, with every example."""
        for array in map(np.ascontiguousarray, self.examples):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(array.data.cast("B") if array.size else b"")


def padded_indices(num_examples: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns indices and mask ``[num_batches, batch]``: every example once, in order, then example 0, masked."""
    check_int("batch_size", batch_size)
    num_batches = -(-num_examples // batch_size)
    positions = np.arange(num_batches * batch_size, dtype=np.int32).reshape(-1, batch_size)
    inside = positions < num_examples
    return np.where(inside, positions, np.int32(0)), inside.astype(np.float32)


def arrays(
    train: Any,
    test: Any = None,
    validation: Any = None,
    *,
    name: str = "arrays",
    class_names: Sequence[str] = (),
    num_classes: int | None = None,
) -> Splits:
    r"""Makes a data set of the user's own arrays, and checks them.

    Each split is a pair ``(inputs [examples, ...], targets [examples, ...])`` of array-likes. Integer targets are
    labels ``0 … num_classes - 1``; targets of a regression are floats. Inputs of dtype uint8 stay uint8 and are scaled
    to 0…1 a batch at a time; other integers become int32 and keep their values (tokens); floats become float32;
    booleans float32 as inputs and int32 as targets. Arrays that need no conversion are not copied.

    A numeric CSV file is read by NumPy; `standardize` scales its columns:

    >>> _ = Path("table.csv").write_text("length,width,kind\n1.5,2.5,0\n3.0,2.0,1\n2.0,4.0,1\n")
    >>> table = np.loadtxt("table.csv", delimiter=",", skiprows=1)
    >>> jn.data.standardize(jn.data.arrays((table[:, :2], table[:, 2].astype(int)), num_classes=2))
    Splits(arrays: 3 train, inputs float32 [2])

    ``validation`` is evaluated during training. ``num_classes`` is by default the number of ``class_names``; without
    either, integer targets may have any value here, and the task checks them. Raises DataError for a split that is not
    a pair of arrays of numbers, a masked array, different lengths, an empty split, NaN or infinity, an integer beyond
    int32, a label out of range, or splits that differ in shape or dtype.
    """
    known = resolve_num_classes(class_names, num_classes)
    pairs = given_splits(train, test, validation)
    examples = {split: as_examples(split, pair) for split, pair in pairs.items()}
    for split, (inputs, targets) in examples.items():
        for field, array, model in zip(Examples._fields, (inputs, targets), examples["train"], strict=True):
            check_like(f"each of the {field} of {split}", array[0], "each of those of train", model[0])
        if known and np.issubdtype(targets.dtype, np.integer):
            check_label_range(split, np.asarray(targets), known)
        elif known:
            raise DataError(
                f"the targets of {split} are {targets.dtype} of shape {targets.shape[1:]} per example, but there are "
                f"{known} classes: give integer labels (for one-hot rows targets.argmax(axis=-1)) or omit the classes."
            )
    sources = {split: ArraySource(arrays) for split, arrays in examples.items()}
    return Splits(**sources, name=name, class_names=tuple(class_names))


def given_splits(train: Any, test: Any, validation: Any) -> dict[str, Any]:
    """Returns ``train``, and the other splits that are not None, by name; later checks refuse a ``train`` of None."""
    given = {"train": train, "validation": validation, "test": test}
    return {split: value for split, value in given.items() if value is not None or split == "train"}


def resolve_num_classes(class_names: Sequence[str], num_classes: int | None) -> int | None:
    """Returns the number of classes, or None if neither argument gives it; DataError if they differ."""
    if num_classes is None:
        return len(class_names) or None
    check_int("num_classes", num_classes)
    if class_names and len(class_names) != num_classes:
        raise DataError(f"{len(class_names)} class_names but num_classes is {num_classes}: give one name per class.")
    return num_classes


def split_off_validation(
    pair: tuple[np.ndarray, np.ndarray], num_validation: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray] | None]:
    """Returns the training pair without its last ``num_validation`` examples, and these as a pair (None if 0).

    Raises DataError for a negative number, or one that leaves no example to train on.

    >>> train, validation = jn.data.split_off_validation((np.eye(10), np.arange(10)), 3)
    >>> jn.data.arrays(train, validation=validation)
    Splits(arrays: 7 train, 3 validation, inputs float32 [10])
    """
    inputs, targets = pair
    check_int("num_validation, a number of examples,", num_validation, 0)
    num_train = len(inputs) - num_validation
    if num_train < 1:
        raise DataError(f"num_validation = {num_validation} of {len(inputs)} examples: give 0 to {len(inputs) - 1}.")
    if num_validation == 0:
        return pair, None
    return (inputs[:num_train], targets[:num_train]), (inputs[num_train:], targets[num_train:])


def check_fractions(fractions: Mapping[str, Any], seed: Any) -> None:
    """Raises DataError unless each fraction is a number in [0, 1) and the seed an integer."""
    for name, fraction in fractions.items():
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
            raise DataError(f"{name} must be a fraction of the examples, at least 0 and below 1, not {fraction!r}.")
    check_int("seed", seed, 0)


def split_by_fraction(
    texts: Sequence[str], labels: np.ndarray, fractions: Mapping[str, float], seed: int
) -> dict[str, Any]:
    """Splits texts and labels into ``train`` and a split, of at least one example, per nonzero fraction, at random."""
    check_fractions(fractions, seed)
    num_examples = len(texts)
    counts = {split: max(1, round(fraction * num_examples)) for split, fraction in fractions.items() if fraction}
    if sum(counts.values()) >= num_examples:
        raise DataError(
            f"{' and '.join(f'{count:,} for {split}' for split, count in counts.items()) or 'no other split'} leaves "
            f"none of {num_examples:,} examples to train on: choose smaller fractions."
        )
    shuffled = permute(np.arange(num_examples), num_examples, seed, 0)
    parts = map(np.sort, np.split(shuffled, np.cumsum([*counts.values()])))
    return {
        split: ([texts[index] for index in part], labels[part])
        for split, part in zip((*counts, "train"), parts, strict=True)
    }


def standardize(splits: Splits) -> Splits:
    """Scales each column of the inputs to mean 0 and variance 1 over ``train``.

    A column is one number of an example, over all examples. The other splits are shifted and scaled by the statistics
    of ``train``; a column that is constant there becomes 0 in all splits.

    Raises DataError for inputs that are not floats, or a source that is not an `ArraySource`.

    >>> splits = jn.data.standardize(jn.data.arrays((np.array([[1.0], [3.0]]), [0, 1])))
    >>> splits.train.examples.inputs.tolist()
    [[-1.0], [1.0]]
    """
    inputs = np.asarray(array_source(splits.train).examples.inputs)
    if not np.issubdtype(inputs.dtype, np.floating):
        raise DataError(f"inputs of dtype {inputs.dtype} cannot be standardized: give float inputs to arrays().")
    mean = inputs.mean(axis=0, dtype=np.float64)
    deviation = inputs.std(axis=0, dtype=np.float64)
    varies = inputs.max(axis=0) > inputs.min(axis=0)
    scale = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=varies)
    changed: dict[str, Any] = {}
    for name, source in splits.named().items():
        source = array_source(source)
        scaled = ((np.asarray(source.examples.inputs) - mean) * scale).astype(np.float32)
        changed[name] = dataclasses.replace(source, examples=Examples(scaled, source.examples.targets))
    return splits._replace(**changed)


def array_source(source: Source) -> ArraySource:
    """Returns the source if it holds arrays, else raises DataError."""
    if not isinstance(source, ArraySource):
        raise DataError(
            f"a {type(source).__name__} cannot be standardized or augmented here, only an ArraySource: prepare its "
            "examples in the reader, or augment them by jn.data.stream(augment=...)."
        )
    return source


def check_batch_size(source: Source, batch_size: int) -> None:
    """Raises DataError if a batch is larger than the split or not positive."""
    steps_per_epoch(source.num_examples, batch_size)


def check_labels(splits: Splits, num_classes: int, *, ignore: int | None = None) -> None:
    """Raises DataError for a target that is neither a label below ``num_classes`` nor ``ignore``."""
    for split, source in splits.named().items():
        targets = np.asarray(source.targets)
        if not np.issubdtype(targets.dtype, np.integer):
            raise DataError(
                f"the targets of {split} are {targets.dtype}, but classification needs integer labels: convert them, "
                "or use jn.tasks.regression."
            )
        if ignore is not None:
            targets = np.where(targets == ignore, 0, targets)
        check_label_range(split, targets, num_classes, may_ignore=False)


def as_examples(split: str, pair: Any) -> Examples:
    """Returns a pair of array-likes as checked arrays, see `model_array`; ``split`` is for messages."""
    check_pair(split, pair, "(inputs, targets)", f"write {split}=(inputs, targets)")
    inputs = model_array(f"{split} inputs", pair[0], is_input=True, has_examples=True)
    targets = model_array(f"{split} targets", pair[1], is_input=False, has_examples=True)
    if len(inputs) != len(targets):
        raise DataError(f"{split} has {len(inputs)} inputs but {len(targets)} targets: give one target for each input.")
    return Examples(inputs, targets)


def model_array(where: str, value: Any, *, is_input: bool, has_examples: bool = False) -> np.ndarray:
    """Returns ``value`` as a checked array with a dtype as of `arrays`, with ``has_examples`` along its first axis."""
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(f"{where}: a masked array, whose mask would be ignored; drop masked examples or fill them in.")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{where}: a {type(value).__name__}, not one array; give examples of one shape.") from error
    if has_examples and array.ndim == 0:
        raise DataError(f"{where}: one {type(value).__name__}, not an array [examples, ...].")
    if has_examples and array.size == 0:
        raise DataError(f"{where}: empty, of shape {array.shape}; give at least one example.")
    if array.dtype == np.bool_:
        return array.astype(np.float32 if is_input else np.int32)
    if array.dtype == np.uint8 and is_input:
        return array
    if jnp.issubdtype(array.dtype, np.integer):
        bad = (array < _INT32.min) | (array > _INT32.max)
        array = array.astype(np.int32, copy=False)
        found, fix = "an integer beyond int32", "renumber, or give floats"
    elif jnp.issubdtype(array.dtype, np.floating):
        with np.errstate(over="ignore"):
            array = array.astype(np.float32, copy=False)
        bad = ~np.isfinite(array)
        found, fix = "NaN or infinity (as float32)", "remove or replace these values"
    else:
        raise DataError(f"{where}: dtype {array.dtype}; encode it as numbers first.")
    if bad.any():
        if has_examples:
            rows = bad.reshape(len(bad), -1).any(axis=1)
            found += f" in example {rows.argmax()} (such examples: {rows.sum():,})"
        raise DataError(f"{where}: {found}; {fix}.")
    return array


def check_pair(where: str, pair: Any, form: str, fix: str) -> None:
    """Raises DataError unless ``pair`` is a tuple or list of two; ``form`` and ``fix`` are for the message."""
    is_sequence = isinstance(pair, tuple | list)
    if not is_sequence or len(pair) != 2:
        found = type(pair).__name__ + (f" of {len(pair)}" if is_sequence else "")
        raise DataError(f"{where} must be a pair {form}, not a {found}: {fix}.")


def check_like(what: str, array: Any, other: str, model: Any) -> None:
    """Raises DataError if two arrays, named ``what`` and ``other``, differ in shape or dtype."""
    if (array.shape, array.dtype) != (model.shape, model.dtype):
        raise DataError(
            f"{what} is {array.dtype} {array.shape} but {other} is {model.dtype} {model.shape}: give all examples one "
            "shape and dtype, by resizing or padding them."
        )


def check_label_range(
    split: str, targets: np.ndarray, num_classes: int | None, *, may_ignore: bool = True, first: int = 0
) -> None:
    """Raises DataError for the first label out of range; in sequences negative ones are fine if ``may_ignore``."""
    negative_is_fine = may_ignore and targets.ndim > 1
    bad = np.zeros(targets.shape, bool) if negative_is_fine else targets < 0
    if num_classes is not None:
        bad |= targets >= num_classes
    if bad.any():
        known = "at least 0" if num_classes is None else f"0 to {num_classes - 1}"
        ignored = "; a negative one is ignored" if negative_is_fine else ""
        raise DataError(
            f"the label {targets[bad][0]} of example {first + np.argwhere(bad)[0, 0]} in {split} is out of range: "
            f"labels must be {known}{ignored}."
        )
