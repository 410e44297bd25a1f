"""Data sets of arrays in memory: their source, checks, splits and standardization."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.data import _examples
from jaxnn.data._shuffle import batch_indices, permute
from jaxnn.types import ENDLESS, Array, Batch, ConfigError, DataError, Examples, Source, Splits, check_int, shapes_of

type Augmentation = Callable[[jax.Array, Batch], Batch]


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
        inputs, targets = jax.tree.map(jnp.asarray, (examples.inputs, examples.targets))
        inputs = jax.tree.map(lambda x: x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x, inputs)
        return Batch(inputs, targets, np.ones(_examples.num_rows(inputs), np.float32) if mask is None else mask)

    def gather(self, examples: Examples, indices: Array, mask: Array | None = None) -> Batch:
        """Returns the rows of ``examples`` at ``indices [batch]`` as a batch; an index out of range is clipped."""
        return self.as_batch(jax.tree.map(lambda array: jnp.take(array, indices, axis=0, mode="clip"), examples), mask)

    def transform(self, batch: Batch, key: jax.Array) -> Batch:
        """Returns the augmented batch, or the batch itself if there is no augmentation."""
        changed = batch if self.augment is None else self.augment(key, batch)
        if not isinstance(changed, Batch):
            raise ConfigError(
                f"an augmentation returned a {type(changed).__name__}: it must be a function (key, batch) -> batch, "
                "such as lambda key, batch: batch._replace(inputs=2 * batch.inputs)."
            )
        return changed


def is_augmented(source: Source) -> bool:
    """Returns whether `Source.transform` may change a batch."""
    own = getattr(type(source), "transform", None) is not IndexedSource.transform
    return own or getattr(source, "augment", None) is not None


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySource(IndexedSource):
    """A split as arrays in memory; compared and hashed by identity, so that its methods may be static arguments.

    >>> source = jn.data.arrays((np.eye(4), [0, 1, 0, 1])).train
    >>> indices = source.order(seed=0, steps=np.arange(2), batch_size=2)  # an epoch: [steps, batch]
    >>> source.gather(source.examples, indices[0]).inputs.shape
    (2, 4)
    """

    examples: Examples = dataclasses.field(repr=False)  # the split's arrays, on the host
    augment: Augmentation | None = None  # for training batches

    @property
    def num_examples(self) -> int:
        """Number of examples of the split."""
        return _examples.num_rows(self.examples)

    @property
    def targets(self) -> Any:
        """All targets ``[examples, ...]``, on the host, or None."""
        return self.examples.targets

    def read(self, indices: np.ndarray) -> Examples:
        """Returns the examples at ``indices [n]``, on the host: ``[n, ...]`` each."""
        rows: Examples = jax.tree.map(lambda array: np.asarray(array)[indices], self.examples)
        return rows

    def fingerprint(self, digest: Any) -> None:
        """Updates ``digest``, a ``hashlib`` object, with every example."""
        for array in map(np.ascontiguousarray, jax.tree.leaves(self.examples)):
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
    others: Mapping[str, Any] | None = None,
) -> Splits:
    r"""Makes a data set of the user's own arrays, and checks them.

    Each split is a pair ``(inputs [examples, ...], targets [examples, ...])`` of array-likes. Integer targets are
    labels ``0 … num_classes - 1``; texts are labels too, whose names become ``class_names``, in alphabetical order if
    none are given; targets of a regression are floats. Inputs of dtype uint8 stay uint8 and are scaled
    to 0…1 a batch at a time; other integers become int32 and keep their values (tokens); floats become float32;
    booleans float32 as inputs and int32 as targets. Arrays that need no conversion are not copied.

    Inputs and targets may also be dicts, or nested dicts and tuples, of such arrays: images beside texts, or weights,
    lengths and masks of examples. A split that is an array or a dict, and no pair, has inputs alone; ``batch.targets``
    is then None.

    >>> jn.data.arrays((np.eye(3), ["good", "bad", "good"])).class_names
    ('bad', 'good')
    >>> images, texts = np.zeros((8, 4, 4, 1), np.uint8), np.ones((8, 5), int)
    >>> jn.data.arrays(train={"image": images, "text": texts})
    Splits(arrays: 8 train, inputs {image: uint8 [4, 4, 1], text: int32 [5]})

    A numeric CSV file is read by NumPy; `standardize` scales its columns:

    >>> _ = Path("table.csv").write_text("length,width,kind\n1.5,2.5,0\n3.0,2.0,1\n2.0,4.0,1\n")
    >>> table = np.loadtxt("table.csv", delimiter=",", skiprows=1)
    >>> jn.data.standardize(jn.data.arrays((table[:, :2], table[:, 2].astype(int)), num_classes=2))
    Splits(arrays: 3 train, inputs float32 [2])

    ``validation`` is evaluated during training, and so are the splits ``others``, by name. ``num_classes`` is by
    default the number of ``class_names``; without either, integer targets may have any value here, and the task checks
    them. Raises DataError for a split that is not of arrays of numbers, a masked array, different lengths, an empty
    split, NaN or infinity, an integer beyond int32, a label out of range, or splits that differ in shape or dtype.
    """
    if not isinstance(others, Mapping | None):
        raise DataError(f"others must be a dict of splits by name, not a {type(others).__name__}.")
    _examples.check_split_names(others or ())
    if getattr(train, "ndim", 0) > getattr(test, "ndim", 0) == 1:
        raise DataError("train and test are arrays of other shapes: give targets in a pair, arrays((inputs, targets)).")
    pairs = _examples.given_splits(train, test, validation) | dict(others or {})
    pairs, class_names = _examples.encode_labels(pairs, class_names)
    known = _examples.resolve_num_classes(class_names, num_classes)
    examples = {split: _examples.as_examples(split, pair) for split, pair in pairs.items()}
    for split, one in examples.items():
        first, of_train = map(_examples.first_of, (one, examples["train"]))
        _examples.check_alike(f"each of the {{field}} of {split}", first, "each of those of train", of_train)
        if known:
            _examples.check_label_range(split, one.targets, known)
        if known and not _examples.is_integers(one.targets):
            raise DataError(
                f"the targets of {split} are {shapes_of(one.targets)} per example, but there are {known} classes: give "
                "integer labels (for one-hot rows targets.argmax(axis=-1)) or omit the classes."
            )
    sources: dict[str, Any] = {split: ArraySource(arrays) for split, arrays in examples.items()}
    rest = {split: sources.pop(split) for split in others or {}}
    return Splits(**sources, name=name, class_names=class_names, others=rest)


def split_off_validation(
    pair: tuple[np.ndarray, np.ndarray], num_validation: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray] | None]:
    """Returns the training pair without its last ``num_validation`` examples, and these as a pair (None if 0)."""
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
    of ``train``; a column that is constant there becomes 0 in all splits. In a `jaxnn.data.table`, where NaN is a
    missing number, it becomes 0, and each column with missing ones in ``train`` adds a column that is 1 for those.

    Raises DataError for inputs that are not floats, or a source that is not an `ArraySource`.

    >>> splits = jn.data.standardize(jn.data.arrays((np.array([[1.0], [3.0]]), [0, 1])))
    >>> splits.train.examples.inputs.tolist()
    [[-1.0], [1.0]]
    """
    columns: Any = getattr(splits.train, "columns", None)
    if columns is not None and columns.scaling:  # standardized already
        return splits
    inputs = array_source(splits.train).examples.inputs
    numbers = inputs.get("numbers") if isinstance(inputs, Mapping) else inputs
    if not np.issubdtype(getattr(numbers, "dtype", int), np.floating):
        raise DataError(f"inputs {shapes_of(inputs)} cannot be standardized: give one array of floats to arrays().")
    scaling = learn_scaling(np.asarray(numbers))
    learnt = {} if columns is None else {"columns": dataclasses.replace(columns, scaling=scaling)}
    changed: dict[str, Any] = {}
    for name, source in splits.named().items():
        source = array_source(source)
        given, targets = source.examples
        scaled: Any = apply_scaling(np.asarray(given["numbers"] if isinstance(given, Mapping) else given), *scaling)
        scaled = {**given, "numbers": scaled} if isinstance(given, Mapping) else scaled
        changed[name] = dataclasses.replace(source, examples=Examples(scaled, targets), **learnt)
    return splits.with_sources(changed)


def learn_scaling(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean, 1 / deviation (0: constant) and whether some are missing of each column ``[rows, ...]``."""
    known = ~np.isnan(numbers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a column without any number, which becomes 0
        mean = np.nan_to_num(numbers.mean(axis=0, dtype=np.float64, where=known))
        deviation = numbers.std(axis=0, dtype=np.float64, where=known)
        varies = np.nanmax(numbers, axis=0) > np.nanmin(numbers, axis=0)
    scale = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=varies)
    return mean, scale, ~known.all(axis=0)


def apply_scaling(values: np.ndarray, mean: np.ndarray, scale: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Returns standardized float32 columns ``[rows, ...]``; those of ``missing`` add one that is 1 for NaN."""
    scaled: np.ndarray = ((values - mean) * scale).astype(np.float32)
    scaled[np.isnan(values)] = 0
    return np.hstack([scaled, np.isnan(values[:, missing]).astype(np.float32)]) if missing.any() else scaled


def array_source(source: Source) -> ArraySource:
    """Returns the source if it holds arrays, else raises DataError."""
    if not isinstance(source, ArraySource):
        raise DataError(
            f"a {type(source).__name__} cannot be standardized or augmented here, only an ArraySource: prepare its "
            "examples in the reader, or augment them by jn.data.stream(augment=...)."
        )
    return source


def check_labels(splits: Splits, num_classes: int, *, ignore: int | None = None) -> None:
    """Raises DataError for a target that is neither a label below ``num_classes`` nor ``ignore``."""
    for split, source in splits.named().items():
        if source.num_examples == ENDLESS and source.examples is not None:  # generated
            continue
        if not _examples.is_integers(source.targets):
            raise DataError(
                f"the targets of {split} are {shapes_of(source.targets)}, but classification needs integer labels: "
                "convert them, or use jn.tasks.regression."
            )
        targets = np.asarray(source.targets)
        if ignore is not None:
            targets = np.where(targets == ignore, 0, targets)
        _examples.check_label_range(split, targets, num_classes, may_ignore=False)
