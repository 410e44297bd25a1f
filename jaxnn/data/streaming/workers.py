"""What a worker process is: it opens no accelerator, heeds no signal meant for its parent, and ends with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

from jaxnn.data.streaming.environment import environment

# Read when JAX is imported, which a script that a worker imports may do before anything of ours runs.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}
# The status of a worker whose script starts its work where it is imported.
UNGUARDED = 78
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NAME = "grain-process-prefetch"
_START_SECONDS = 20.0
# How long a worker may go on with its batch once it is told to stop.
_PATIENCE_SECONDS = 10.0
# The environment is the whole process's.
_STARTING = threading.Lock()


def start(begin: Callable[[], None], number: int) -> list[BaseProcess]:
    """Calls ``begin``, which starts so many workers in threads of its own, and waits until they are started.

    Until then the environment says what workers must find in theirs, and the signals of a terminal and of a scheduler
    are held back, as they stay in a worker until it ignores them.
    """
    with _STARTING, environment(_ENVIRONMENT), _held_back():
        before = set(multiprocessing.active_children())
        deadline = time.monotonic() + _START_SECONDS
        begin()
        while True:
            new = [child for child in multiprocessing.active_children() if child not in before]
            workers = [child for child in new if child.name.startswith(_NAME)]
            if len(workers) >= number or time.monotonic() > deadline:
                return workers
            time.sleep(0.001)


def prepare(index: int, count: int) -> None:
    """Runs first in worker ``index`` of so many."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def end_late_ones(children: list[BaseProcess], closing: threading.Event, closed: threading.Event) -> None:
    """Waits for ``closing``, then kills the workers unless ``closed`` follows in time: a reader may hang."""
    closing.wait()
    if not closed.wait(_PATIENCE_SECONDS):
        for child in children:
            child.kill()


def end_if_unguarded() -> None:
    """Ends a worker that, importing the script that started it, is to start that script's work once more."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(UNGUARDED)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """This thread, and threads and processes that it starts, get no signals inside the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
