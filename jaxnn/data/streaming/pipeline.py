"""The Grain pipeline: steps in, batches out, read ahead of who takes them by worker processes or threads."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable

import numpy as np

from jaxnn.data.streaming import workers
from jaxnn.data.streaming.batches import Batches
from jaxnn.data.streaming.crossing import Failure, Sent, guarded, pickled
from jaxnn.types import ConfigError, Examples

_LAST_STEP = 2**31 - 1
_MOST_THREADS = 16
# Batches that wait in each worker process, besides the one it reads.
_AHEAD = 1
# Batches of each worker process that may be in shared memory at a time: read, waiting, on their way, copied.
_SHARED_AT_A_TIME = 6
# Where Linux keeps shared memory; containers have little of it, and a process that takes more is ended.
_SHARED_MEMORY = "/dev/shm"


def open_batches(
    read: Callable[[int], Examples], first_step: int, num_workers: int, *, name: str, num_bytes: int
) -> Batches:
    """Starts to read the batches of ``first_step`` and the steps after it.

    Args:
        read: ``step -> Examples``; cloudpickle must be able to pickle it if there are workers.
        first_step: where to begin.
        num_workers: how many processes read; 0: threads of this one do.
        name: what is read, for messages.
        num_bytes: how large a batch is.

    Raises:
        ConfigError: Grain is not installed.
        DataError: ``read`` cannot be pickled.
    """
    check_installed()
    workers.end_if_unguarded()
    if num_workers == 0:
        return _read_by_threads(read, first_step)
    fits = _fits_shared_memory(_SHARED_AT_A_TIME * num_workers * num_bytes)
    least_shared = 0 if fits else num_bytes + 1
    return _read_by_workers(Sent(pickled(read, name)), first_step, num_workers, least_shared)


def _read_by_threads(read: Callable[[int], Examples], first_step: int) -> Batches:
    import grain

    threads = min(cores(), _MOST_THREADS)
    ahead = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    steps = grain.MapDataset.range(first_step, _LAST_STEP).map(functools.partial(guarded, read))
    return Batches(iter(steps.to_iter_dataset(ahead)), [])


def _read_by_workers(read: Sent, first_step: int, num_workers: int, least_shared: int) -> Batches:
    import grain

    steps = grain.MapDataset.range(first_step, _LAST_STEP).map(read)
    dataset = steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
    processes = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=_AHEAD)
    dataset = dataset.mp_prefetch(processes, worker_init_fn=workers.prepare).map(_copied)
    dataset = grain.experimental.WithOptionsIterDataset(
        dataset, grain.experimental.DatasetOptions(min_shm_size=least_shared)
    )
    _let_absl_be()
    iterator = iter(dataset)
    # Grain makes its processes' iterators when it is first asked for anything, and only then can start them.
    iterator.get_state()
    children = workers.start(iterator.start_prefetch, num_workers)
    # A thread that copies: where the main thread gives shared memory back, Python loses a Ctrl-C that comes then.
    return Batches(grain.experimental.ThreadPrefetchDatasetIterator(iterator, 1), children)


def check_installed() -> None:
    """Raises ConfigError where Grain is not installed."""
    if importlib.util.find_spec("grain") is None:
        raise ConfigError('streamed data are read by Grain, which is not installed: pip install "jaxnn[stream]".')


def cores() -> int:
    """How many CPUs this process may use, as far as is known."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _copied(found: Examples | Failure) -> Examples | Failure:
    """Rows out of the memory that a worker shares, which is given back; a failure as it is."""
    return found if isinstance(found, Failure) else Examples(*map(np.array, found))


def _fits_shared_memory(num_bytes: int) -> bool:
    """Whether there is room for so much; where shared memory is no folder, it is not bounded by one."""
    return not os.path.isdir(_SHARED_MEMORY) or shutil.disk_usage(_SHARED_MEMORY).free >= num_bytes


def _let_absl_be() -> None:
    """Has Grain read a flag of its own at its default, for it fails in programs that do not parse absl's flags."""
    from absl import flags

    flag = "grain_enable_multiprocess_worker_profiling"
    if flag in flags.FLAGS and not flags.FLAGS.is_parsed():
        flags.FLAGS[flag].present = 1
