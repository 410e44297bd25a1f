"""Checks of what enters as data: each error names the split and the example."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxnn.types import DataError, Examples

_INT32 = np.iinfo(np.int32)


def as_examples(split: str, pair: Any) -> Examples:
    """A pair of array-likes as checked arrays, see `converted`; ``split`` is the split's name, for messages."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(
            f"{split} must be a pair (inputs, targets), not {_described(pair)}: write {split}=(inputs, targets)."
        )
    inputs = converted(f"{split} inputs", pair[0], is_input=True, has_examples=True)
    targets = converted(f"{split} targets", pair[1], is_input=False, has_examples=True)
    if len(inputs) != len(targets):
        raise DataError(f"{split} has {len(inputs)} inputs but {len(targets)} targets: give one target for each input.")
    return Examples(inputs, targets)


def converted(where: str, value: Any, *, is_input: bool, has_examples: bool = False) -> np.ndarray:
    """``value`` as a checked array of a dtype that models take, see `jaxnn.data.arrays`; ``where`` is for messages.

    With ``has_examples`` the first axis counts examples; there must be one, and messages name the first bad one.
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(
            f"{where}: not one array but a {type(value).__name__}; give all examples one shape and dtype."
        ) from error
    if has_examples and array.ndim == 0:
        raise DataError(f"{where}: {_described(value)}, not an array [examples, ...].")
    if has_examples and array.size == 0:
        raise DataError(f"{where}: empty, of shape {array.shape}; give at least one example.")
    if array.dtype == np.bool_:
        return array.astype(np.float32 if is_input else np.int32)
    if array.dtype == np.uint8 and is_input:
        return array
    if jnp.issubdtype(array.dtype, np.integer):
        bad = (array < _INT32.min) | (array > _INT32.max)
        if bad.any():
            place = f" in example {_first_example(bad)}" if has_examples else ""
            raise DataError(f"{where}: an integer beyond int32{place}; renumber, or give floats.")
        return array.astype(np.int32, copy=False)
    if not jnp.issubdtype(array.dtype, np.floating):
        raise DataError(f"{where}: dtype {array.dtype}; encode it as numbers first.")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32, copy=False)
    finite = np.isfinite(array)
    if not finite.all():
        number = int((~finite).reshape(len(array), -1).any(axis=1).sum()) if has_examples else 0
        place = f", first in example {_first_example(~finite)}, in {number} of all examples" if has_examples else ""
        raise DataError(f"{where}: NaN or infinity (as float32){place}; remove or replace these values.")
    return array


def check_integer(name: str, value: Any, least: int) -> None:
    """Raises DataError unless ``value`` is an integer of at least ``least``, of Python or NumPy."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise DataError(f"{name} must be an integer of at least {least}, not {value!r}.")


def check_like(what: str, array: Any, other: str, model: Any) -> None:
    """Raises DataError if two arrays differ in shape or dtype; ``what`` and ``other`` are their names."""
    if (array.shape, array.dtype) != (model.shape, model.dtype):
        raise DataError(
            f"{what} is {array.dtype} {array.shape} but {other} is {model.dtype} {model.shape}: give all examples one "
            "shape and dtype, by resizing or padding them."
        )


def check_class_names(class_names: tuple[str, ...], num_classes: int | None) -> None:
    """Raises DataError if ``num_classes`` is not a number, or differs from the number of names."""
    if num_classes is None:
        return
    check_integer("num_classes", num_classes, 1)
    if class_names and len(class_names) != num_classes:
        raise DataError(
            f"there are {len(class_names)} class_names but num_classes is {num_classes}: give one name per class."
        )


def check_label_range(
    split: str, targets: np.ndarray, num_classes: int | None, *, may_ignore: bool = True, first: int = 0
) -> None:
    """Raises DataError for the first label that is negative or not below ``num_classes``, if that is known.

    In sequences, ``[examples, time]``, a negative label means "ignored" if ``may_ignore``; ``first`` is the index of
    the first example, for the message.
    """
    negative_is_fine = may_ignore and targets.ndim > 1
    bad = np.zeros(targets.shape, bool) if negative_is_fine else targets < 0
    if num_classes is not None:
        bad |= targets >= num_classes
    if bad.any():
        known = "at least 0" if num_classes is None else f"0 to {num_classes - 1}"
        ignored = "; a negative one is ignored" if negative_is_fine else ""
        raise DataError(
            f"the label {targets[bad][0]} of example {first + _first_example(bad)} in {split} is out of range: labels "
            f"must be {known}{ignored}."
        )


def _first_example(bad: np.ndarray) -> int:
    """The index of the first example with a bad value."""
    return int(bad.reshape(len(bad), -1).any(axis=1).argmax())


def _described(value: Any) -> str:
    """A value in a few words, for messages."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    return f"one {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape else "")
