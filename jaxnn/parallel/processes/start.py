"""The start and the end of a process that is one of several."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import jax

from jaxnn.parallel.processes.agreement import barrier, process_id, set_place
from jaxnn.parallel.processes.link import LOST, Ending, Link
from jaxnn.parallel.processes.place import Place
from jaxnn.types import ConfigError, JaxnnError, TrainingError

# An error may be the first sign of another process's end, whose connection closes at about the same time.
NOTICE_SECONDS = 3.0
# How long the last process may take after the first is done: it may have a record to complete.
FINISH_SECONDS = 600.0
# JAX ends a process from C++ when it misses another for so long: later than its link does, and at least after so long.
HEARTBEAT_FACTOR = 4
LEAST_HEARTBEAT_SECONDS = 100
# Who shuts down has met all others just before.
SHUTDOWN_SECONDS = 30

# JAX's distributed runtime is one for the whole process, and so is this.
_link: Link | None = None


def start_processes(place: Place) -> Link:
    """Waits for all processes of the run and joins them; ``jax.devices()`` are those of all then.

    To be called before anything is computed, in every process. From then on this process ends when another one does
    before it is done: after a few seconds for its own way to end, with a sentence and status 75 if that one died.

    Args:
        place: which process this is.

    Raises:
        ConfigError: the processes do not fit together, the port of process 0 is taken, or it is too late.
        TrainingError: some did not start in time; they are named.
    """
    global _link
    _check_not_started()
    link = Link(place)
    try:
        address = link.join()
    except BaseException:
        link.close()
        raise
    try:
        _initialize(place, address)
    except RuntimeError as error:
        failure = TrainingError(f"JAX's distributed runtime did not start: {' '.join(str(error).split())}.")
        link.fail(1, _one_line(failure))
        _leave_alone(1)
        raise failure from error
    link.close_port()
    set_place(place)
    _link = link
    return link


def stop_processes(link: Link) -> None:
    """Waits until all processes are done, and leaves them; the counterpart of ``start_processes``.

    Raises:
        TrainingError: another one ended before it was done, or is not done for very long.
    """
    global _link
    barrier("the end of the run", FINISH_SECONDS)
    link.leave()
    jax.distributed.shutdown()
    link.close()
    set_place(None)
    _link = None


@contextlib.contextmanager
def joined(place: Place, status_of: Callable[[BaseException], int] = lambda error: 1) -> Iterator[Link]:
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
    link = start_processes(place)
    try:
        yield link
        stop_processes(link)
    except BaseException as error:
        ending = _ending_behind(error, link)
        if ending is None:
            status = status_of(error)
            link.fail(status, _one_line(error))
            _leave_alone(status)
            raise
        link.say(ending)
        _leave_alone(ending.status)
        raise SystemExit(ending.status) from None


def set_resume_hint(advice: str) -> None:
    """Says what is to be done when another process is lost, such as ``resume with --resume runs/…``."""
    if _link is not None:
        _link.advice = advice


def is_primary() -> bool:
    """Whether this process prints and records: process 0, or the only one."""
    return process_id() == 0


def _check_not_started() -> None:
    """Raises ConfigError where it is too late to be one process of many."""
    if jax.distributed.is_initialized():
        raise ConfigError("this process is one of several already: start_processes is called once.")
    devices = jax.config.jax_num_cpu_devices
    try:
        # A change of this option is what JAX refuses once it has started.
        jax.config.update("jax_num_cpu_devices", devices + 2)
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        raise ConfigError("a backend of JAX runs already: start_processes comes before anything is computed.") from None


def _initialize(place: Place, address: str) -> None:
    """Starts JAX's distributed runtime, once all processes are there."""
    # JAX's preemption service takes SIGTERM in C++ for good: the process would not end by it any more.
    jax.config.update("jax_enable_preemption_service", False)
    # Proxies in the environment do not matter: what is connected to is on this machine.
    jax.config.update("jax_check_proxy_envs", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        place.num_processes,
        place.process_id,
        # A cluster assigns one of the machine's devices to each process.
        cluster_detection_method=None if place.detected else "deactivate",
        initialization_timeout=max(1, round(place.start_timeout)),
        heartbeat_timeout_seconds=max(LEAST_HEARTBEAT_SECONDS, round(HEARTBEAT_FACTOR * place.lost_after)),
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        coordinator_bind_address=address,
    )


def _ending_behind(error: BaseException, link: Link) -> Ending | None:
    """The end of another process that ``error`` comes from; None: it is this one's own."""
    own = isinstance(error, JaxnnError | KeyboardInterrupt | SystemExit)
    ending = link.ending(0.0 if own else NOTICE_SECONDS)
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
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return said.rstrip(".") or type(error).__name__
