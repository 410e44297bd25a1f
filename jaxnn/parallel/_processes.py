"""Runs of several processes: how they start together and end together.

`joined` calls the roll over one TCP connection per process to process 0, then starts JAX's own distributed runtime,
which goes over the same port. Afterwards ``jax.devices()`` are those of all processes. The connections stay: a process
that dies is noticed at once, and every other one ends with an error message and a status that say: resume later.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import jax

from jaxnn.parallel._agreement import barrier
from jaxnn.parallel._link import LOST, Link, clean
from jaxnn.parallel._place import Place, set_place
from jaxnn.types import ConfigError, JaxnnError, TrainingError

# An error may be the first sign of another process's end, whose connection closes at about the same time.
NOTICE_SECONDS = 3.0
# How long the last process may take after the first is done: it may have a record to complete.
FINISH_SECONDS = 600.0
# JAX ends a process from C++ when it misses another for so long: later than its link does, and at least after so long.
HEARTBEAT_FACTOR = 4
LEAST_HEARTBEAT_SECONDS = 100
# A process that shuts down has met all others just before.
SHUTDOWN_SECONDS = 30

# JAX's distributed runtime is one for the whole process, and so is this.
_link: Link | None = None


@contextlib.contextmanager
def joined(place: Place, status_of: Callable[[BaseException], int] = lambda error: 1) -> Iterator[None]:
    """One process of several for the length of the block, which ends with all others or not at all.

    To be entered before anything is computed, in every process; waits for all of them. An error that leaves the block
    is reported to the others, which end with it. If another process ends before it is done, this one ends too: after a
    few seconds for its own way to end, with an error message, and status 75 if that process died.

    Args:
        place: which process this is.
        status_of: the exit status that an error means.

    Raises:
        SystemExit: another process ended before it was done.
        ConfigError: the processes do not fit together, the port of process 0 is taken, or it is too late.
        TrainingError: some did not start in time, or one is not done for very long; they are named.
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
        link.close_port()
        set_place(place)
        _link = link
        yield
        barrier("the end of the run", FINISH_SECONDS)
        link.leave()
        jax.distributed.shutdown()
        link.close()
        set_place(None)
        _link = None
    except BaseException as error:
        own = isinstance(error, JaxnnError | KeyboardInterrupt | SystemExit)
        ending = link.ending(0.0 if own else NOTICE_SECONDS)
        if ending is None or (own and ending.status != LOST):
            status = status_of(error)
            told = "it was interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            link.fail(status, (isinstance(error, JaxnnError) and clean(error).rstrip(".")) or told)
            _leave_alone(status)
            raise
        link.say(ending)
        _leave_alone(ending.status)
        raise SystemExit(ending.status) from None


def set_resume_hint(text: str) -> None:
    """Sets what to do when another process is lost, such as ``resume with --resume runs/…``, for the error message."""
    if _link is not None:
        _link.resume_hint = text


def _check_not_started() -> None:
    """Raises ConfigError if it is too late to be one process of many."""
    if jax.distributed.is_initialized():
        raise ConfigError("this process is one of several already: it joins others once.")
    devices = jax.config.jax_num_cpu_devices
    try:
        # A change of this option is what JAX refuses once it has started.
        jax.config.update("jax_num_cpu_devices", devices + 2)
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        raise ConfigError("a backend of JAX runs already: join processes before anything is computed.") from None


def _initialize(place: Place, address: str) -> None:
    """Starts JAX's distributed runtime, once all processes are there."""
    # JAX's preemption service takes SIGTERM in C++ for good: the process would not end by it any more.
    jax.config.update("jax_enable_preemption_service", False)
    # Proxies in the environment do not matter: what is connected to is on this machine.
    jax.config.update("jax_check_proxy_envs", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
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
    except RuntimeError as error:
        raise TrainingError(f"JAX's distributed runtime did not start: {' '.join(str(error).split())}.") from error


def _leave_alone(status: int) -> None:
    """Has this process end without the others: JAX's own way at exit waits for them, and aborts when they are gone."""

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    # What is registered last is called first.
    atexit.register(leave)
