"""The Grain pipeline: batches are read ahead by worker processes or threads, and its errors are clear.

A worker process opens no accelerator, ignores the signals of a terminal and of a scheduler, and ends with its parent.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from jaxnn.types import ConfigError, DataError, Examples

_LAST_STEP = 2**31 - 1
_MOST_THREADS = 16
# Batches of each worker process that may be in shared memory at a time: read, waiting, on their way, copied.
_SHARED_AT_A_TIME = 6
# The directory of shared memory on Linux; containers have little of it, and a process that takes more is killed.
_SHARED_MEMORY = "/dev/shm"
# Read when JAX is imported, which a script that a worker imports may do before any code of jaxnn runs.
_WORKER_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_START_SECONDS = 20.0
# Time that a worker has to finish its batch when the pipeline is closed.
_PATIENCE_SECONDS = 10.0
# Exit status of a worker whose script starts its work when it is imported.
_UNGUARDED = 78
# The environment belongs to the process, not to a thread.
_STARTING = threading.Lock()


@dataclasses.dataclass
class _Guarded:
    """A function of the step that returns errors as a DataError, since not every exception can be sent to a process.

    For workers it is ``pickled`` once, by cloudpickle, which pickles functions of notebooks too.
    """

    read: Callable[[int], Examples] | None
    pickled: bytes = b""

    def __call__(self, step: int) -> Examples | DataError:
        try:
            if self.read is None:
                import cloudpickle

                self.read = cloudpickle.loads(self.pickled)
            return self.read(step)
        except DataError as error:
            return error.with_traceback(None)
        # SystemExit too: Grain would wait forever for a worker that ended with status 0.
        except BaseException as error:
            failure = DataError(f"a step's batch cannot be read: {error!r}.")
            failure.add_note("".join(traceback.format_exception(error)))
            return failure


class Batches(Iterator[Examples]):
    """The batches of one step after the other, endless until it is closed or collected, or the program ends."""

    def __init__(self, iterator: Any, children: list[BaseProcess]) -> None:
        self._iterators = [iterator]
        self._children = children
        self._lock = threading.RLock()
        closing, closed = threading.Event(), threading.Event()
        if children:

            def kill_late_workers() -> None:
                """A reader may hang."""
                closing.wait()
                if not closed.wait(_PATIENCE_SECONDS):
                    for child in children:
                        child.kill()

            # Started now, since no thread can be started when the program ends.
            threading.Thread(target=kill_late_workers, daemon=True).start()
        self._close = weakref.finalize(self, _close, self._iterators, self._lock, closing, closed)

    def __next__(self) -> Examples:
        with self._lock:
            if not self._iterators:
                raise StopIteration
            try:
                found = next(self._iterators[0])
            except Exception as error:
                failure = _pipeline_error(error, self._children)
                self.close()
                raise failure from None
            if isinstance(found, DataError):
                self.close()
                raise found
            rows: Examples = found
            return rows

    def close(self) -> None:
        """Ends the workers and frees their memory; closing twice does no harm."""
        self._close()


def _close(iterators: list[Any], lock: threading.RLock, closing: threading.Event, closed: threading.Event) -> None:
    """Ends a pipeline and waits for its end."""
    closing.set()
    with lock:
        while iterators:
            iterators.pop().close()
    closed.set()


def _pipeline_error(error: Exception, children: list[BaseProcess]) -> DataError:
    """A clear message about a pipeline that broke."""
    code = next((child.exitcode for child in children if child.exitcode), 0)
    if code == _UNGUARDED:
        return DataError(
            "a worker process that reads data imports the script that started it, which then starts its work again: "
            'put what the script does under `if __name__ == "__main__":`.'
        )
    if code == 0:
        return DataError(f"the pipeline that reads data failed with {type(error).__name__}: {error}")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return DataError(
        f"a worker process that reads data {how}: look at what it printed, or, if memory ran out (of the machine or in "
        "/dev/shm), give a smaller num_workers or batch_size."
    )


def open_batches(
    read: Callable[[int], Examples], first_step: int, num_workers: int, *, name: str, num_bytes: int
) -> Batches:
    """Starts to read the batches, of ``num_bytes`` each, of ``first_step`` and the steps after it.

    ``num_workers`` processes read; 0: threads of this one do. DataError, which names the split ``name``, if cloudpickle
    cannot pickle ``read``.
    """
    exit_if_unguarded()
    import grain

    steps = grain.MapDataset.range(first_step, _LAST_STEP)
    if num_workers == 0:
        threads = min(cores(), _MOST_THREADS)
        ahead = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        return Batches(iter(steps.map(_Guarded(read)).to_iter_dataset(ahead)), [])
    import cloudpickle
    from absl import flags

    try:
        guarded = _Guarded(None, cloudpickle.dumps(read))
    # Objects may raise anything when they are pickled.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"the reader of {name}, or its augmentation, cannot be sent to worker processes ({reason}): open files and "
            "connections where they are used, or give num_workers=0 to read in threads."
        ) from error
    dataset = steps.map(guarded).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
    # Each process has one batch that waits, besides the one that it reads.
    processes = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=1)
    dataset = dataset.mp_prefetch(processes, worker_init_fn=_prepare_worker)
    # Rows are copied out of a worker's shared memory, which is then freed.
    dataset = dataset.map(lambda found: found if isinstance(found, DataError) else Examples(*map(np.array, found)))
    # Where shared memory is no folder, a folder's size does not limit it.
    needed = _SHARED_AT_A_TIME * num_workers * num_bytes
    fits = not os.path.isdir(_SHARED_MEMORY) or shutil.disk_usage(_SHARED_MEMORY).free >= needed
    options = grain.experimental.DatasetOptions(min_shm_size=0 if fits else num_bytes + 1)
    iterator = iter(grain.experimental.WithOptionsIterDataset(dataset, options))
    # Lets Grain read its flag's default: it fails in programs that do not parse absl's flags.
    flag = "grain_enable_multiprocess_worker_profiling"
    if flag in flags.FLAGS and not flags.FLAGS.is_parsed():
        flags.FLAGS[flag].present = 1
    # Grain makes its processes' iterators when it is first asked for anything, and only then can start them.
    iterator.get_state()
    children = _start_workers(iterator.start_prefetch, num_workers)
    # A thread copies: where the main thread frees shared memory, Python loses a Ctrl-C that comes at that moment.
    return Batches(grain.experimental.ThreadPrefetchDatasetIterator(iterator, 1), children)


def check_installed() -> None:
    """Raises ConfigError if Grain is not installed."""
    if importlib.util.find_spec("grain") is None:
        raise ConfigError('streamed data are read by Grain, which is not installed: pip install "jaxnn[stream]".')


def cores() -> int:
    """Number of CPUs that this process may use, as far as is known."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def exit_if_unguarded() -> None:
    """Ends a worker that, importing the script that started it, is about to start that script's work again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(_UNGUARDED)


def _start_workers(start: Callable[[], None], number: int) -> list[BaseProcess]:
    """Calls ``start``, which starts ``number`` workers from threads, and waits until they are started.

    Until then the environment is that of workers, and the signals of a terminal and of a scheduler are blocked, which
    workers inherit until they ignore them.
    """
    with _STARTING:
        others = set(multiprocessing.active_children())
        environment = {name: os.environ.get(name) for name in _WORKER_ENVIRONMENT}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        os.environ.update(_WORKER_ENVIRONMENT)
        deadline = time.monotonic() + _START_SECONDS
        try:
            start()
            while True:
                new = [child for child in multiprocessing.active_children() if child not in others]
                workers = [child for child in new if child.name.startswith("grain-process-prefetch")]
                if len(workers) >= number or time.monotonic() > deadline:
                    return workers
                time.sleep(0.001)
        finally:
            for name, value in environment.items():
                del os.environ[name]
                os.environ.update({} if value is None else {name: value})
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _prepare_worker(index: int, count: int) -> None:
    """Runs first in a worker process."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
