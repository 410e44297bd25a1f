"""Runs of several processes: how they start together, what they decide together, and how they end together.

Decisions go through the key-value store of JAX's coordination service, so that none waits for a device. Every process
calls these functions in the same order: a counter gives each call its own keys. In a single process each is a no-op.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxnn._compat import coordination_client
from jaxnn.parallel._link import LOST, Link, clean
from jaxnn.parallel._place import Place, process_count, process_id, set_place
from jaxnn.types import ConfigError, JaxnnError, TrainingError

# An error may be the first sign of another process's end, whose connection closes at about the same time.
NOTICE_SECONDS = 3.0
# How long the last process may take after the first is done: it may have a record to complete.
FINISH_SECONDS = 600.0
# JAX ends a process from C++ after missing another for this multiple of the link's limit, and at least this long.
HEARTBEAT_FACTOR = 4
LEAST_HEARTBEAT_SECONDS = 100
# A process that shuts down has met all others just before.
SHUTDOWN_SECONDS = 30

# How long process 0 may take for what all wait for: it may have data to load.
PRIMARY_SECONDS = 3600.0
BARRIER_SECONDS = 300.0
ERRORS = {kind.__name__: kind for kind in JaxnnError.__subclasses__()}

# JAX's distributed runtime is one for the whole process, and so are these.
_link: Link | None = None
_calls = itertools.count()


@contextlib.contextmanager
def joined(place: Place, status_of: Callable[[BaseException], int] = lambda error: 1) -> Iterator[None]:
    """Makes this the process ``place`` of several for the length of the block, which ends with all others.

    To be entered before anything is computed, in every process; waits for all of them. An error that leaves the block
    is reported to the others, which end with its status, ``status_of`` it. If another process ends before it is done,
    this one raises SystemExit: after a few seconds for its own way to end, with an error message, and status 75 if that
    process died. Raises ConfigError if the processes do not fit together, the port of process 0 is taken, or JAX has
    started; TrainingError, which names them, if some do not start in time or are not done long after the first.
    """
    global _link
    if jax.distributed.is_initialized():
        raise ConfigError("this process is one of several already: it joins others once.")
    devices = jax.config.jax_num_cpu_devices
    try:
        # A change of this option is what JAX refuses once it has started.
        jax.config.update("jax_num_cpu_devices", devices + 2)
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        raise ConfigError("a backend of JAX runs already: join processes before anything is computed.") from None
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
        all_agree("the end of the run", {}, FINISH_SECONDS)
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
            reason = "it was interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            link.fail(status, (isinstance(error, JaxnnError) and clean(error).rstrip(".")) or reason)
            _leave_alone(status)
            raise
        link.say(ending)
        _leave_alone(ending.status)
        raise SystemExit(ending.status) from None


def set_resume_hint(text: str) -> None:
    """Sets what to do when another process is lost, such as ``resume with --resume runs/…``, for the error message."""
    if _link is not None:
        _link.resume_hint = text


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


def broadcast_from_primary[Value](function: Callable[[], Value], seconds: float = PRIMARY_SECONDS) -> Value:
    """The value of ``function``, called by process 0 alone.

    It is a value of JSON; a tuple arrives as a list, in process 0 too. The others wait ``seconds`` at most. A
    JaxnnError of ``function`` is raised in every process; if process 0 fails in another way or is not done in time, the
    others raise TrainingError.
    """
    if process_count() == 1:
        return function()
    key, sent = _key("primary"), ""
    if process_id() == 0:
        try:
            sent = json.dumps({"value": function()})
        except BaseException as error:
            kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS), None)
            failed = f"process 0 failed ({type(error).__name__}: {error}): look at what it says."
            sent = json.dumps({"error": kind or TrainingError.__name__, "message": str(error) if kind else failed})
            raise
        finally:
            coordination_client().key_value_set(key, sent)
    else:
        try:
            sent = coordination_client().blocking_key_value_get(key, max(1, round(1000 * seconds)))
        except RuntimeError as error:
            raise TrainingError(
                f"process {process_id()} waited {seconds:g} s for process 0, in vain: look at what that says."
            ) from error
    found = json.loads(sent)
    if "error" in found:
        raise ERRORS[found["error"]](clean(found["message"]))
    value: Value = found["value"]
    return value


def all_agree(what: str, value: Mapping[str, Any], seconds: float = BARRIER_SECONDS) -> None:
    """Waits for every process, ``seconds`` at most, and checks that ``value``, of JSON by name, is the same in all.

    ``what`` it is is for errors: ConfigError names the first process that differs from process 0, and the names that
    do; TrainingError those that did not come in time, or are lost.
    """
    if process_count() == 1:
        return
    key, rank, client = _key(what), process_id(), coordination_client()
    client.key_value_set(f"{key}/{rank}", json.dumps(value, sort_keys=True))
    try:
        client.wait_at_barrier(key, max(1, round(1000 * seconds)))
    except RuntimeError as error:
        missing = sorted(set(range(process_count())) - set(_values(key)))
        several = len(missing) > 1
        raise TrainingError(
            f"process {rank} waited {seconds:g} s for all ({what}), and process{'es' * several} "
            f"{', '.join(map(str, missing))} did not come: look at what {'they say' if several else 'it says'}."
            if missing
            else f"process {rank} came too late ({what}): the others waited {seconds:g} s for it."
        ) from error
    values = {rank: json.loads(text) for rank, text in _values(key).items()}
    for rank, theirs in sorted(values.items()):
        names = sorted(name for name in {*values[0], *theirs} if values[0].get(name) != theirs.get(name))
        if names:
            listed = "; ".join(
                f"{name} is {theirs.get(name)!r}, and {values[0].get(name)!r} in process 0" for name in names
            )
            raise ConfigError(f"process {rank} was started with another {what} ({listed}): start all alike.")


class StopVote:
    """At which window all processes of a run stop, when one of them is asked to.

    Collectives bind the windows of all processes together: a process that polls at window ``w`` has seen the results of
    window ``w - 1``, so every other has started that. No process is more than a window ahead of another, and a wish at
    ``w``, before ``w + 1`` starts, is known to all at ``w + 2`` at the latest. There they stop.
    """

    def __init__(self) -> None:
        self._key = _key("stop") if process_count() > 1 else ""
        self._asked = False

    def poll(self, window: int, wish: bool) -> bool:
        """Whether all stop at the end of ``window``; ``wish``: whether this process was asked to.

        Asked once for each window, in order from 0, before the next one starts; costs one question to the store.
        """
        if not self._key:
            return wish
        if wish and not self._asked:
            self._asked = True
            coordination_client().key_value_set(f"{self._key}/{process_id()}", str(window + 2))
        return any(int(stop) <= window for stop in _values(self._key).values())


def _values(key: str) -> dict[int, str]:
    """What each process stored under ``key``, by its rank."""
    return {int(name.rpartition("/")[2]): value for name, value in coordination_client().key_value_dir_get(key)}


def _key(name: str) -> str:
    return f"jaxnn/{next(_calls)}/{name}"
