"""What a reader is, and how its examples become checked rows; each mistake of one is a sentence."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from jaxnn.types import DataError, Examples

_INT32 = np.iinfo(np.int32)

type HostAugmentation = Callable[[np.random.Generator, np.ndarray], Any]


class Reader(Protocol):
    """Random access to the examples of a split; it is called in several threads, and pickled for worker processes.

    A reader may have two attributes more: ``targets``, all of them in order, for checks of labels before any example is
    read; and ``fingerprint``, a function that feeds a digest of ``hashlib`` with what tells its examples from others.
    """

    def __len__(self) -> int:
        """How many examples there are."""

    def __getitem__(self, index: int, /) -> Any:
        """The pair ``(input [...], target [...])`` at ``index``: the same each time."""


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """How the examples of one split are read.

    Attributes:
        reader: what reads them.
        split: the split's name, for messages.
        num_classes: labels must be below it; None: integer targets need only be at least 0.
    """

    reader: Reader
    split: str
    num_classes: int | None = None

    def example(self, index: int) -> Examples:
        """The example at ``index``: arrays of the dtypes a model takes, as `jaxnn.data.arrays` makes them.

        Raises:
            DataError: it cannot be read, or is no pair of numbers that can be used; it is named.
        """
        where = self.name(index)
        pair = told(f"reading {where}", lambda: self.reader[index])
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(
                f"{where} must be a pair (input, target), not one {type(pair).__name__}: have the reader's "
                "__getitem__ return such a pair."
            )
        target = converted(f"the target of {where}", pair[1], keep_uint8=False, boolean=np.int32)
        self._check_label(where, target)
        return Examples(converted(f"the input of {where}", pair[0], keep_uint8=True, boolean=np.float32), target)

    def rows(self, examples: Iterable[Examples], indices: np.ndarray, like: Examples) -> Examples:
        """``examples``, read at ``indices [n]``, as arrays ``[n, ...]``.

        Raises:
            DataError: an example of another shape or dtype than ``like``, which is example 0; both are named.
        """
        found = list(examples)
        for example, index in zip(found, indices, strict=True):
            for what, array, model in zip(("input", "target"), example, like, strict=True):
                where = f"the {what} of {self.name(index)}"
                check_like(where, np.asarray(array), f"that of {self.name(0)}", np.asarray(model))
        return Examples(*(np.stack(arrays) for arrays in zip(*found, strict=True)))

    def name(self, index: int) -> str:
        """``example 3 of train``."""
        return f"example {index} of {self.split}"

    def _check_label(self, where: str, target: np.ndarray) -> None:
        if not np.issubdtype(target.dtype, np.integer):
            return
        # In sequences a negative one may stand for none.
        bad = (target < 0) & (target.ndim == 0)
        if self.num_classes is not None:
            bad |= target >= self.num_classes
        if bad.any():
            known = "at least 0" if self.num_classes is None else f"0 to {self.num_classes - 1}"
            raise DataError(f"the label {target[bad].flat[0]} of {where} is out of range: labels must be {known}.")


def told[Result](what: str, function: Callable[[], Result]) -> Result:
    """What ``function`` returns; what it raises becomes a DataError that says ``what`` failed, why and where.

    Its traceback becomes a note of that, which crosses from worker processes as a cause does not.
    """
    try:
        return function()
    except DataError:
        raise
    # A reader is the user's and may raise anything.
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        named = DataError(f"{what} failed with {reason} ({Path(last.filename).name}, line {last.lineno}).")
        named.add_note("".join(traceback.format_exception(error)))
        raise named from None


def check_like(what: str, array: np.ndarray, other: str, model: np.ndarray) -> None:
    """Raises DataError if the two arrays differ in shape or dtype."""
    if (array.shape, array.dtype) != (model.shape, model.dtype):
        raise DataError(
            f"{what} is {array.dtype} {array.shape} but {other} {model.dtype} {model.shape}: give all examples one "
            "shape and dtype, by resizing or padding them."
        )


def converted(what: str, value: Any, *, keep_uint8: bool, boolean: type) -> np.ndarray:
    """``value`` as a checked array of a dtype that a model takes; ``boolean`` is what booleans become.

    Raises:
        DataError: no numbers, NaN or infinity, an integer beyond int32.
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{what} is not one array but a {type(value).__name__}: give it one shape.") from error
    if array.dtype == np.bool_:
        return array.astype(boolean)
    if array.dtype == np.uint8 and keep_uint8:
        return array
    if jnp.issubdtype(array.dtype, np.integer):
        if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
            raise DataError(f"{what} holds an integer beyond int32: renumber them, or give floats.")
        return array.astype(np.int32, copy=False)
    if not jnp.issubdtype(array.dtype, np.floating):
        raise DataError(f"{what} has dtype {array.dtype}: encode it as numbers first.")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        raise DataError(f"{what} holds NaN or infinity (as float32): remove or replace these values.")
    return array
