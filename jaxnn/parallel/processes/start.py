"""The start and the end of a process that is one of several."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from jaxnn.parallel.processes import runtime
from jaxnn.parallel.processes.ending import LOST, Ending
from jaxnn.parallel.processes.peers import FINISH_SECONDS, Peers
from jaxnn.parallel.processes.place import Place
from jaxnn.types import JaxnnError, TrainingError

# An error may be the first sign of another process's end, whose connection closes at about the same time.
NOTICE_SECONDS = 3.0

# JAX's distributed runtime is one for the whole process, and so is this.
_peers: Peers | None = None


def start_processes(place: Place) -> Peers:
    """Waits for all processes of the run and joins them; ``jax.devices()`` are those of all then.

    To be called before anything is computed, in every process. From then on this process ends when another one does
    before it is done: after a few seconds for its own way to end, with a sentence and status 75 if that one died.

    Args:
        place: which process this is.

    Raises:
        ConfigError: the processes do not fit together, the port of process 0 is taken, or it is too late.
        TrainingError: some did not start in time; they are named.
    """
    global _peers
    runtime.check_not_started()
    peers = Peers(place)
    try:
        address = peers.join()
    except BaseException:
        peers.stop()
        raise
    try:
        runtime.initialize(
            address=address,
            num_processes=place.num_processes,
            process_id=place.process_id,
            local_devices=place.detected,
            start_timeout=place.start_timeout,
            lost_after=place.lost_after,
        )
    except RuntimeError as error:
        said = TrainingError(f"JAX's distributed runtime did not start: {' '.join(str(error).split())}.")
        peers.fail(1, _one_line(said))
        _leave_alone(1)
        raise said from error
    _peers = peers
    return peers


def stop_processes(peers: Peers) -> None:
    """Waits until all processes are done, and leaves them; the counterpart of ``start_processes``.

    Raises:
        TrainingError: another one ended before it was done, or is not done for very long.
    """
    global _peers
    if not peers.finish():
        ending = peers.ending()
        late = f"other processes are not done {FINISH_SECONDS:g} s after process {runtime.process_id()}: look at them."
        raise TrainingError(late if ending is None else f"{ending.sentence}.")
    runtime.shutdown()
    peers.close()
    _peers = None


@contextlib.contextmanager
def joined(place: Place, status_of: Callable[[BaseException], int] = lambda error: 1) -> Iterator[Peers]:
    """One process of several for the length of the block, which ends with all others or not at all.

    An error that leaves the block is told to the others, who end with it. Where it comes from the end of another
    process, it is replaced by a sentence on standard error that says so.

    Args:
        place: which process this is.
        status_of: the exit status that an error means.

    Raises:
        SystemExit: another process ended before it was done; 75 if it died.
        ConfigError, TrainingError: as ``start_processes``.
    """
    peers = start_processes(place)
    try:
        yield peers
        stop_processes(peers)
    except BaseException as error:
        ending = _ending_behind(error, peers)
        if ending is None:
            status = status_of(error)
            peers.fail(status, _one_line(error))
            _leave_alone(status)
            raise
        peers.say(ending)
        _leave_alone(ending.status)
        raise SystemExit(ending.status) from None


def when_lost(advice: str) -> None:
    """Says what is to be done when another process is lost, such as ``resume with --resume runs/…``."""
    if _peers is not None:
        _peers.advice = advice


def is_leader() -> bool:
    """Whether this process prints and records: process 0, or the only one."""
    return runtime.process_id() == 0


def _ending_behind(error: BaseException, peers: Peers) -> Ending | None:
    """The end of another process that ``error`` comes from; None: it is this one's own."""
    own = isinstance(error, JaxnnError | KeyboardInterrupt | SystemExit)
    ending = peers.ending(0.0 if own else NOTICE_SECONDS)
    return None if ending is None or (own and ending.status != LOST) else ending


def _leave_alone(status: int) -> None:
    """Has this process end without the others: JAX's own way at exit waits for them, and aborts when they are gone."""

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    # What is registered last is called first.
    atexit.register(leave)


def _one_line(error: BaseException) -> str:
    said = " ".join(str(error).split()) if isinstance(error, JaxnnError) else ""
    return said.rstrip(".") or type(error).__name__
