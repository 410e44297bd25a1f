"""The Grain pipeline: batches are read ahead in threads, or in processes that open no accelerator."""

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxnn.types import DataError, Examples, cpu_count

_LAST_STEP = 2**31 - 1
_MOST_THREADS = 16
_SHARED_AT_A_TIME = 6  # batches of a worker process in shared memory: being read, queued, sent and copied
_SHARED_MEMORY = "/dev/shm"  # on Linux; containers have little of it, and a process that exceeds it is killed
# Set before workers start, since the script that a worker imports may import JAX, which reads them then.
_WORKER_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_START_SECONDS = 20.0
_CLOSE_TIMEOUT_SECONDS = 10.0  # after which a worker that has not ended is killed
_UNGUARDED = 78  # exit status of a worker whose script lacks the `__main__` guard
_STARTING = threading.Lock()  # the environment is shared by all threads of a process


@dataclasses.dataclass
class _Guarded:
    """A function of the step that returns errors as a DataError, since not every exception can be pickled."""

    read: Callable[[int], Examples] | None
    path: str = ""  # a worker's file with the function, by cloudpickle, which also pickles functions of notebooks

    def __call__(self, step: int) -> Examples | DataError:
        try:
            if self.read is None:
                import cloudpickle

                with open(self.path, "rb") as file:
                    self.read = cloudpickle.load(file)
            return self.read(step)
        except DataError as error:
            return error.with_traceback(None)
        # Includes SystemExit: Grain would wait forever for a worker that ended with status 0.
        except BaseException as error:
            failure = DataError(f"the batch of a step cannot be read: {error!r}.")
            failure.add_note("".join(traceback.format_exception(error)))
            return failure


class Batches(Iterator[Examples]):
    """An endless iterator of the batches of consecutive steps, until it is closed or garbage-collected."""

    def __init__(self, iterator: Any, children: list[BaseProcess], *resources: Any) -> None:
        self._iterators = [iterator, *resources]
        self._children = children
        self._lock = threading.RLock()
        closing, closed = threading.Event(), threading.Event()
        if children:

            def kill_late_workers() -> None:
                """Kills workers whose reader hangs."""
                closing.wait()
                if not closed.wait(_CLOSE_TIMEOUT_SECONDS):
                    for child in children:
                        child.kill()

            # Started now, since no thread can start during interpreter shutdown.
            threading.Thread(target=kill_late_workers, daemon=True).start()
        self._close = weakref.finalize(self, _close, self._iterators, self._lock, closing, closed)

    def __next__(self) -> Examples:
        with self._lock:
            if not self._iterators:
                raise StopIteration
            try:
                batch: Examples | DataError = next(self._iterators[0])
            except Exception as error:
                failure = _pipeline_error(error, self._children)
                self.close()
                raise failure from None
            if isinstance(batch, DataError):
                self.close()
                raise batch
            return batch

    def close(self) -> None:
        """Ends the workers and frees their memory; closing twice is allowed."""
        self._close()


def _close(iterators: list[Any], lock: threading.RLock, closing: threading.Event, closed: threading.Event) -> None:
    """Closes a pipeline and waits until it has ended."""
    closing.set()
    with lock:
        while iterators:
            iterators.pop().close()
    closed.set()


def _pipeline_error(error: Exception, children: list[BaseProcess]) -> DataError:
    """Returns the error for a pipeline that failed: why, and how to fix it."""
    code = next((child.exitcode for child in children if child.exitcode), 0)
    if code == _UNGUARDED:
        return DataError(
            "a worker process that reads data imports the script that started it, and the script started training "
            'again: put its code under `if __name__ == "__main__":`.'
        )
    if code == 0:
        return DataError(f"the pipeline that reads data failed with {type(error).__name__}: {error}")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return DataError(
        f"a worker process that reads data {how}: see its output above, or, if memory ran out (RAM or /dev/shm), lower "
        "num_workers or batch_size."
    )


def open_batches(
    read: Callable[[int], Examples], first_step: int, num_workers: int, *, name: str, num_bytes: int
) -> Batches:
    """Starts reading the batches, of ``num_bytes`` each, from ``first_step``, in worker processes or (0) threads."""
    exit_if_unguarded()
    import grain

    steps = grain.MapDataset.range(first_step, _LAST_STEP)
    if num_workers == 0:
        threads = min(cpu_count() or 1, _MOST_THREADS)
        ahead = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        return Batches(iter(steps.map(_Guarded(read)).to_iter_dataset(ahead)), [])
    import cloudpickle
    from absl import flags

    try:
        pickled = cloudpickle.dumps(read)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"the reader of {name}, or its augmentation, cannot be sent to worker processes ({reason}): open files and "
            "connections in __getitem__, or set num_workers=0 to read in threads."
        ) from error
    # Not sent through a pipe: Python hangs if a worker ends before it has read more than 64 KB from its pipe.
    folder = contextlib.ExitStack()
    path = Path(folder.enter_context(tempfile.TemporaryDirectory()), "reader")
    path.write_bytes(pickled)
    dataset = steps.map(_Guarded(None, str(path))).to_iter_dataset(
        grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    )
    # Each process buffers one batch in addition to the one that it reads.
    processes = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=1)
    dataset = dataset.mp_prefetch(processes, worker_init_fn=_prepare_worker)
    # Batches are copied out of a worker's shared memory, which is then freed.
    dataset = dataset.map(lambda batch: batch if isinstance(batch, DataError) else jax.tree.map(np.array, batch))
    # Without the folder (macOS), shared memory has no such limit.
    needed = _SHARED_AT_A_TIME * num_workers * num_bytes
    fits = not os.path.isdir(_SHARED_MEMORY) or shutil.disk_usage(_SHARED_MEMORY).free >= needed
    options = grain.experimental.DatasetOptions(min_shm_size=0 if fits else num_bytes + 1)
    iterator = iter(grain.experimental.WithOptionsIterDataset(dataset, options))
    # Grain reads this flag, which fails in programs that do not parse absl flags.
    flag = "grain_enable_multiprocess_worker_profiling"
    if flag in flags.FLAGS and not flags.FLAGS.is_parsed():
        flags.FLAGS[flag].present = 1
    # Grain creates the iterators of its processes lazily, and can start them only afterwards.
    iterator.get_state()
    children = _start_workers(iterator.start_prefetch, num_workers)
    # A thread copies: Python loses a Ctrl-C that arrives while the main thread frees shared memory.
    return Batches(grain.experimental.ThreadPrefetchDatasetIterator(iterator, 1), children, folder)


def exit_if_unguarded() -> None:
    """Ends a worker that is importing the script that started it, before the script trains again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(_UNGUARDED)


def _start_workers(start: Callable[[], None], number: int) -> list[BaseProcess]:
    """Calls ``start`` and waits for the workers, which inherit an environment and blocked `_SIGNALS`."""
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
