"""What crosses between this process and its workers: how to read a step's rows, then these, or why there are none."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import NamedTuple

from jaxnn.types import DataError, Examples


class Failure(NamedTuple):
    """What went wrong where a batch was read, in words: not every exception can be sent to another process.

    Attributes:
        message: a sentence.
        details: the traceback of what caused it; empty where the sentence is all.
    """

    message: str
    details: str

    def as_error(self) -> DataError:
        """The error that says so, its details in a note."""
        error = DataError(self.message)
        if self.details:
            error.add_note(self.details)
        return error


class Sent:
    """A function as bytes, made one again in the process that calls it, where what fails is told like the rest."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    @functools.cached_property
    def _function(self) -> Callable[[int], Examples]:
        import cloudpickle

        function: Callable[[int], Examples] = cloudpickle.loads(self._pickled)
        return function

    def __call__(self, step: int) -> Examples | Failure:
        """What the function returns, or why it did not."""
        return guarded(lambda step: self._function(step), step)


def guarded(read: Callable[[int], Examples], step: int) -> Examples | Failure:
    """What ``read`` returns, or why it did not."""
    try:
        return read(step)
    # Whatever it is, SystemExit too: Grain would wait forever for a worker that ended well.
    except BaseException as error:
        if isinstance(error, DataError):
            return Failure(str(error), "".join(getattr(error, "__notes__", ())))
        return Failure(f"a step's batch cannot be read: {error!r}.", "".join(traceback.format_exception(error)))


def pickled(read: Callable[[int], Examples], name: str) -> bytes:
    """``read`` as bytes, by cloudpickle, which takes what a notebook or a script defines too.

    Raises:
        DataError: it cannot be pickled.
    """
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(read)
    # Objects may raise anything when they are pickled.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"the reader of {name}, or its augmentation, cannot be sent to worker processes ({reason}): open files and "
            "connections where they are used, or give num_workers=0 to read in threads."
        ) from error
    return pickled
