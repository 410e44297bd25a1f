"""What enters as data is looked at once, here: each defect is named with its split and example."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxnn.types import DataError, Examples

_INT32 = np.iinfo(np.int32)


def as_examples(split: str, pair: Any) -> Examples:
    """A pair of array-likes as checked arrays of the dtypes a model takes.

    Floats become float32, integers int32 (uint8 inputs stay uint8), booleans float32 as inputs and
    int32 as targets. Arrays that have these dtypes already are not copied.

    Args:
        split: the split's name, for messages.
        pair: ``(inputs [examples, ...], targets [examples, ...])``.

    Raises:
        DataError: not a pair; not arrays of numbers; nothing in them; lengths that differ; NaN or
            infinity; an integer beyond int32.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(
            f"{split} must be a pair (inputs, targets), not {_described(pair)}: write {split}=(inputs, targets)."
        )
    inputs = _converted(f"{split} inputs", pair[0], keep_uint8=True, boolean=np.float32)
    targets = _converted(f"{split} targets", pair[1], keep_uint8=False, boolean=np.int32)
    if len(inputs) != len(targets):
        raise DataError(f"{split} has {len(inputs)} inputs but {len(targets)} targets: give one target for each input.")
    return Examples(inputs, targets)


def check_integer(name: str, value: Any, least: int) -> None:
    """Raises DataError unless ``value`` is an integer of at least ``least``, of Python or NumPy."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise DataError(f"{name} must be an integer of at least {least}, not {value!r}.")


def check_alike(splits: dict[str, Examples]) -> None:
    """Raises DataError if the examples of two splits differ in shape or dtype."""
    (first, model), *others = splits.items()
    for name, examples in others:
        for field in Examples._fields:
            expected, found = getattr(model, field), getattr(examples, field)
            if (expected.shape[1:], expected.dtype) != (found.shape[1:], found.dtype):
                raise DataError(
                    f"the {field} of {first} are {expected.dtype} {expected.shape[1:]} an example, "
                    f"but those of {name} are {found.dtype} {found.shape[1:]}: make them alike."
                )


def check_class_names(class_names: tuple[str, ...], num_classes: int | None) -> None:
    """Raises DataError where ``num_classes`` is no number, or there are names, and not as many as it says."""
    if num_classes is not None:
        check_integer("num_classes", num_classes, 1)
    if num_classes is not None and class_names and len(class_names) != num_classes:
        raise DataError(
            f"there are {len(class_names)} class_names but num_classes is {num_classes}: give one name a class."
        )


def check_label_range(split: str, targets: np.ndarray, num_classes: int, *, may_be_none: bool = True) -> None:
    """Raises DataError for the first label that is negative or not below ``num_classes``.

    In sequences of them, ``[examples, time]``, a negative one may stand for none, unless ``may_be_none`` is False.
    """
    bad = ((targets < 0) & (targets.ndim == 1 or not may_be_none)) | (targets >= num_classes)
    if not bad.any():
        return
    example = _first_example(bad)
    value = targets[bad][0]
    ignored = "; a negative one is ignored." if targets.ndim > 1 and may_be_none else "."
    raise DataError(
        f"the label {value} of example {example} in {split} is out of range: labels must be 0 to "
        f"{num_classes - 1}{ignored}"
    )


def _converted(where: str, value: Any, *, keep_uint8: bool, boolean: type) -> np.ndarray:
    """``value`` as a checked array; ``boolean`` is what booleans become."""
    array = _as_array(where, value)
    if jnp.issubdtype(array.dtype, np.floating):
        return _as_float32(where, array)
    if array.dtype == np.bool_:
        return array.astype(boolean)
    if array.dtype == np.uint8 and keep_uint8:
        return array
    if jnp.issubdtype(array.dtype, np.integer):
        return _as_int32(where, array)
    raise DataError(f"the {where} have dtype {array.dtype}: encode them as numbers first.")


def _as_array(where: str, value: Any) -> np.ndarray:
    """``value`` as an array with examples on its first axis."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise DataError(f"the {where} are not one array: give all examples one shape and one dtype.") from error
    if array.ndim == 0:
        raise DataError(f"the {where} are {_described(value)}, not an array [examples, ...].")
    if array.size == 0:
        raise DataError(f"the {where} are empty, of shape {array.shape}: give at least one example.")
    return array


def _as_float32(where: str, array: np.ndarray) -> np.ndarray:
    """Floats as float32; what is not finite there is named."""
    with np.errstate(over="ignore"):
        array = array.astype(np.float32, copy=False)
    finite = np.isfinite(array)
    if finite.all():
        return array
    example = _first_example(~finite)
    num_bad = int((~finite).reshape(len(array), -1).any(axis=1).sum())
    raise DataError(
        f"the {where} hold NaN or infinity (as float32), first in example {example}, in {num_bad} "
        "of all examples: remove or replace these values."
    )


def _as_int32(where: str, array: np.ndarray) -> np.ndarray:
    """Integers as int32; what does not fit is named."""
    bad = (array < _INT32.min) | (array > _INT32.max)
    if bad.any():
        example = _first_example(bad)
        raise DataError(
            f"the {where} hold an integer beyond int32 in example {example}: renumber them, or give floats."
        )
    return array.astype(np.int32, copy=False)


def _first_example(bad: np.ndarray) -> int:
    """The first example with something bad in it."""
    return int(bad.reshape(len(bad), -1).any(axis=1).argmax())


def _described(value: Any) -> str:
    """A value in a few words, for messages."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    return f"one {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape else "")
