"""Checks and conversions of the user's examples: dtypes, shapes, lengths and labels."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.types import DataError, Examples, PyTree, check_int

_INT32 = np.iinfo(np.int32)


def num_rows(examples: PyTree) -> int:
    """The number of examples in arrays ``[examples, ...]``."""
    return int(jax.tree.leaves(examples)[0].shape[0])


def first_of(examples: PyTree) -> Any:
    """The first example of arrays ``[examples, ...]``, without that axis."""
    return jax.tree.map(lambda array: array[0], examples)


def resolve_num_classes(class_names: Sequence[str], num_classes: int | None) -> int | None:
    """Returns the number of classes, or None if neither argument gives it; DataError if they differ."""
    if num_classes is None:
        return len(class_names) or None
    check_int("num_classes", num_classes)
    if class_names and len(class_names) != num_classes:
        raise DataError(f"{len(class_names)} class_names but num_classes is {num_classes}: give one name per class.")
    return num_classes


def given_splits(train: Any, test: Any, validation: Any) -> dict[str, Any]:
    """Returns ``train``, and the other splits that are not None, by name; later checks refuse a ``train`` of None."""
    given = {"train": train, "validation": validation, "test": test}
    return {split: value for split, value in given.items() if value is not None or split == "train"}


def check_split_names(names: Iterable[str]) -> None:
    """Raises DataError for names of further splits that are taken, or could not be those of metrics."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", str(name)) or name in ("train", "validation", "test", "probe"):
            raise DataError(
                f"others has the split {name!r}: give it a name of letters and digits that is not train, validation, "
                "test or probe."
            )


def distinct(entries: Iterable[str]) -> tuple[str, ...]:
    """Returns the different entries, in numerical order if all are integers, else alphabetically."""
    found = sorted(set(entries))
    try:
        return tuple(sorted(found, key=int))  # equal numbers such as 1 and 01 stay in alphabetical order
    except ValueError:
        return tuple(found)


def ids_of(entries: Iterable[Any], known: Sequence[Any], unknown: int = -1) -> np.ndarray:
    """The place in ``known`` of each entry, int32; ``unknown`` for others."""
    places = {entry: place for place, entry in enumerate(known)}
    return np.array([places.get(entry, unknown) for entry in entries], np.int32)


def encode_labels(pairs: dict[str, Any], class_names: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns splits whose targets are integers where they were texts, and the names of their classes.

    Without ``class_names`` they are the different texts of ``train``. DataError for a text that is none of them.
    """

    def texts(pair: Any) -> np.ndarray | None:
        given = pair[1] if isinstance(pair, tuple | list) and len(pair) == 2 else None
        # Lists, and arrays or columns of a data frame.
        kind = "O" if isinstance(given, list | tuple) else getattr(getattr(given, "dtype", None), "kind", "")
        if kind not in ("O", "U"):
            return None
        labels = np.array(given, object)
        return labels if labels.size and all(isinstance(label, str) for label in labels.flat) else None

    found = {split: labels for split, pair in pairs.items() if (labels := texts(pair)) is not None}
    if not found:
        return pairs, tuple(class_names)
    class_names = tuple(class_names) or distinct(map(str, found.get("train", np.array([])).flat))
    encoded = dict(pairs)
    for split, labels in found.items():
        ids = ids_of(labels.flat, class_names).reshape(labels.shape)
        if (ids < 0).any():
            wrong = labels[ids < 0][0]
            raise DataError(
                f"{split} has the label {wrong!r}, which is no class of train ({', '.join(class_names[:5])}"
                f"{', …' if len(class_names) > 5 else ''}): correct or remove such examples."
            )
        encoded[split] = pairs[split][0], ids
    return encoded, class_names


def is_integers(targets: PyTree) -> bool:
    """Whether ``targets`` are one array of integers."""
    return np.issubdtype(getattr(targets, "dtype", float), np.integer)


def as_examples(split: str, given: Any, what: str = "{split} {field}", *, has_examples: bool = True) -> Examples:
    """Returns a pair of array-likes, or inputs alone, as checked arrays, see `model_array`; ``split`` is for messages.

    Dicts, and tuples within a pair, are pytrees of arrays; so are other registered nodes, but not lists.
    """
    if given is None or (isinstance(given, tuple | list) and len(given) != 2):
        found = type(given).__name__ + (f" of {len(given)}" if given is not None else "")
        wanted = "a pair (inputs, targets), or inputs alone, as an array or a dict of arrays"
        raise DataError(f"{split} must be {wanted}, not a {found}: write {split}=(inputs, targets).")
    parts = given if isinstance(given, tuple | list) else (given, None)
    lengths: dict[str, int] = {}

    def converted(field: str, tree: Any) -> Any:
        def convert(path: Any, leaf: Any) -> np.ndarray:
            name = what.format(split=split, field=field, one=field[:-1]) + jax.tree_util.keystr(path)
            array = model_array(name, leaf, is_input=field == "inputs", has_examples=has_examples)
            lengths[field + jax.tree_util.keystr(path)] = len(array) if has_examples else 1
            return array

        return jax.tree.map_with_path(convert, tree, is_leaf=lambda node: isinstance(node, list))

    examples = Examples(*map(converted, Examples._fields, parts))
    if not jax.tree.leaves(examples.inputs):
        raise DataError(f"{split} has no inputs: give at least one array.")
    if len({*lengths.values()}) > 1:
        counts = " but ".join(f"{count} {name}" for name, count in lengths.items())
        raise DataError(f"{split} has {counts}: give one target for each input, and equally many of everything.")
    return examples


def as_example(split: str, index: int, given: Any, num_classes: int | None) -> Examples:
    """Returns one example as checked arrays, as of `as_examples`; a label must be below ``num_classes``, if given."""
    where = f"example {index} of {split}"
    example = as_examples(where, given, "the {one} of {split}", has_examples=False)
    check_label_range(split, jax.tree.map(lambda array: array[None], example.targets), num_classes, first=index)
    return example


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
        if has_examples:
            check_resolution(f"the values of {where}", array)
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


def check_resolution(what: str, values: np.ndarray) -> None:
    """Raises DataError if float32 rounds ``values [rows, ...]`` by more than a thousandth of a column's deviation.

    It compares distinct values of at most 10,000 rows, also without the lowest or the highest twentieth of them:
    outliers, such as a 0 for a missing time, do not hide the others. Rounding errors of float64 do not count.
    """
    if np.can_cast(values.dtype, np.float32):
        return
    columns = values.reshape(len(values), -1)
    columns = columns[:: -(-len(columns) // 10_000)]
    with np.errstate(all="ignore"):
        number = max(4, min(64, 1_000_000 // columns.shape[1]))
        few = np.sort(columns[:: -(-len(columns) // number)], axis=0)
        gaps = np.diff(few, axis=0)
        # Of a column that float32 cannot hold, most distinct values lie close together, or are tiny.
        near = (gaps > 0) & (gaps < 1e-4 * np.abs(few[1:]) + 1e-37)
        for column in columns.T[near.any(axis=0) & (3 * near.sum(axis=0) >= (gaps > 0).sum(axis=0) - 2)]:
            distinct = np.unique(column[np.isfinite(column)])
            end = -(-len(distinct) // 20)
            for part in (distinct, distinct[end:], distinct[:-end], distinct[end:-end]):
                if len(part) < 2:
                    continue
                lost = np.std(part - part.astype(np.float32))
                if lost > 1e-3 * np.std(part) > 1e-17 * np.abs(part).max():
                    raise DataError(f"float32 cannot tell {what} apart: subtract their median, or scale them.")


def check_alike(what: str, example: Examples, other: str, model: Examples) -> None:
    """Raises DataError if two examples differ in shapes or dtypes.

    ``what`` and ``other`` name them, with ``{field}`` or ``{one}`` in the first for ``inputs`` or ``input``.
    """
    for field, part, like in zip(Examples._fields, example, model, strict=True):
        arrays, wanted = (
            {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(x)} for x in (part, like)
        )
        part_name = what.format(field=field, one=field[:-1])
        if arrays.keys() != wanted.keys():
            given, known = (", ".join(names) or "nothing" for names in (arrays, wanted))
            raise DataError(f"{part_name} has {given} but {other} has {known}: give all the same arrays.")
        for name, array in arrays.items():
            one = wanted[name]
            if (array.shape, array.dtype) != (one.shape, one.dtype):
                raise DataError(
                    f"{part_name}{name} is {array.dtype} {array.shape} but {other} is {one.dtype} {one.shape}: give "
                    "all examples one shape and dtype, by resizing or padding them."
                )


def check_label_range(
    split: str, targets: PyTree, num_classes: int | None, *, may_ignore: bool = True, first: int = 0
) -> None:
    """Raises DataError for the first label out of range; in sequences negative ones are fine if ``may_ignore``.

    Targets other than one array of integers are no labels.
    """
    if not is_integers(targets):
        return
    targets = np.asarray(targets)
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
