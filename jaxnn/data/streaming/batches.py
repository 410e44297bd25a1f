"""An open pipeline: its batches one after the other, its end, and what is said where it broke."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from jaxnn.data.streaming import workers
from jaxnn.data.streaming.crossing import Failure
from jaxnn.types import DataError, Examples


class Batches(Iterator[Examples]):
    """The batches of one step after the other, endless until it is closed, or collected, or the program ends."""

    def __init__(self, iterator: Any, children: list[BaseProcess]) -> None:
        self._iterators = [iterator]
        self._children = children
        self._lock = threading.RLock()
        closing, closed = threading.Event(), threading.Event()
        if children:
            # Started now, for no thread can be at the end of the program.
            threading.Thread(target=workers.end_late_ones, args=(children, closing, closed), daemon=True).start()
        self._close = weakref.finalize(self, _close, self._iterators, self._lock, closing, closed)

    def __next__(self) -> Examples:
        with self._lock:
            if not self._iterators:
                raise StopIteration
            try:
                found = next(self._iterators[0])
            except Exception as error:
                failure = _as_ended(error, self._children)
                self.close()
                raise failure from None
            if isinstance(found, Failure):
                self.close()
                raise found.as_error()
            rows: Examples = found
            return rows

    def close(self) -> None:
        """Ends the workers and gives back what they hold; more than once does no harm."""
        self._close()


def _close(iterators: list[Any], lock: threading.RLock, closing: threading.Event, closed: threading.Event) -> None:
    """Ends a pipeline and waits for its end."""
    closing.set()
    with lock:
        while iterators:
            iterators.pop().close()
    closed.set()


def _as_ended(error: Exception, children: list[BaseProcess]) -> DataError:
    """A sentence about a pipeline that broke."""
    code = next((child.exitcode for child in children if child.exitcode), 0)
    worker = "a worker process that reads data"
    if code == workers.UNGUARDED:
        return DataError(
            f"{worker} imports the script that started it, which then starts its work again: put what the script does "
            'under `if __name__ == "__main__":`.'
        )
    if code > 0:
        return DataError(f"{worker} ended with status {code}, for the reason that it gives above.")
    if code < 0:
        return DataError(
            f"{worker} was ended by {signal.Signals(-code).name}: as a rule memory ran out, of the machine or in "
            "/dev/shm; give a smaller num_workers or batch_size."
        )
    return DataError(f"the pipeline that reads data failed with {type(error).__name__}: {error}")
