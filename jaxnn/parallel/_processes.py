"""Runs of several processes: they start together, decide together, and end together.

Decisions go through the key-value store of JAX's coordination service, so that none waits for a device. Every process
calls these functions in the same order: a counter gives each call its own keys. In a single process each is a no-op.
"""

import atexit
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxnn._compat import coordination_client
from jaxnn._signals import RESUMABLE, leave
from jaxnn.parallel._link import Link, clean
from jaxnn.parallel._place import Place, process_count, process_id, set_place
from jaxnn.types import ConfigError, JaxnnError, TrainingError, on_one_line

NOTICE_SECONDS = 3.0  # for the connection of another process to close, of whose end an error may be the first sign
FINISH_SECONDS = 600.0  # between the ends of the first and the last process, which may have a record to complete
# JAX ends a process from C++ if another sends no heartbeat for this multiple of the link's limit, and at least so long.
HEARTBEAT_FACTOR = 4
LEAST_HEARTBEAT_SECONDS = 100
SHUTDOWN_SECONDS = 30  # all processes have synchronized just before
PRIMARY_SECONDS = 3600.0  # for a value of process 0, which may have data to load
BARRIER_SECONDS = 300.0
ERRORS = {kind.__name__: kind for kind in JaxnnError.__subclasses__()}

_link: Link | None = None  # global, as JAX's distributed runtime is
_calls = itertools.count()


@contextlib.contextmanager
def joined(place: Place, status_of: Callable[[BaseException], int] = lambda error: 1) -> Iterator[None]:
    """Joins this process to a run of several within the block, at the end of which it waits for the others.

    Enter it in every process before JAX computes anything. If an error leaves the block, all other processes end with
    its status, ``status_of(error)``. If another process ends early, this one raises SystemExit after at most ten
    seconds, with an error message, and status 75 if that process was lost.

    >>> from jaxnn.parallel import Place, joined
    >>> with joined(Place("node1:12345", num_processes=2, process_id=0)):  # doctest: +SKIP
    ...     jn.fit(experiment)

    Raises:
        ConfigError: the processes do not fit together, the port of process 0 is in use, or JAX has started.
        TrainingError: a process, which is named, did not start in time, or did not end long after the first.
    """
    global _link
    if jax.distributed.is_initialized():
        raise ConfigError("this process has joined others already: join once per process.")
    devices = jax.config.jax_num_cpu_devices
    try:
        # JAX refuses to change this option once it has started.
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
        expected = isinstance(error, JaxnnError | KeyboardInterrupt | SystemExit)
        ending = link.ending(0.0 if expected else NOTICE_SECONDS)
        if ending is None or (expected and ending.status != RESUMABLE):
            status = status_of(error)
            reason = "it was interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            link.fail(status, (isinstance(error, JaxnnError) and clean(error).rstrip(".")) or reason)
            _skip_shutdown(status)
            raise
        link.report(ending)
        _skip_shutdown(ending.status)
        raise SystemExit(ending.status) from None


def set_resume_hint(text: str) -> None:
    """Sets the fix, such as ``resume with --resume runs/…``, in the error message about a lost process."""
    if _link is not None:
        _link.resume_hint = text


def _initialize(place: Place, address: str) -> None:
    """Starts JAX's distributed runtime, once all processes have joined."""
    # JAX's preemption service would handle SIGTERM in C++, so that it would no longer end the process.
    jax.config.update("jax_enable_preemption_service", False)
    # Proxies in the environment do not matter for connections within this machine.
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
        raise TrainingError(f"JAX's distributed runtime did not start: {on_one_line(error)}.") from error


def _skip_shutdown(status: int) -> None:
    """Makes this process exit without JAX's shutdown, which waits for the others, and aborts if they are gone."""
    # The last registered function is called first.
    atexit.register(leave, status)


def broadcast_from_primary[Value](function: Callable[[], Value], seconds: float = PRIMARY_SECONDS) -> Value:
    """Calls ``function`` in process 0 and returns its value in every process.

    The value is converted to JSON and back, so that a tuple becomes a list. A JaxnnError of ``function`` is raised in
    every process; the others raise TrainingError if process 0 fails otherwise or is not done after ``seconds``.
    """
    if process_count() == 1:
        return function()
    key, sent = _key("primary"), ""
    if process_id() == 0:
        try:
            sent = json.dumps({"value": function()})
        except BaseException as error:
            kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS), None)
            failed = f"process 0 failed ({type(error).__name__}: {error}): read its output."
            sent = json.dumps({"error": kind or TrainingError.__name__, "message": str(error) if kind else failed})
            raise
        finally:
            coordination_client().key_value_set(key, sent)
    else:
        try:
            sent = coordination_client().blocking_key_value_get(key, max(1, round(1000 * seconds)))
        except RuntimeError as error:
            raise TrainingError(
                f"process {process_id()} waited {seconds:g} s for process 0, in vain: read the output of that one."
            ) from error
    found = json.loads(sent)
    if "error" in found:
        raise ERRORS[found["error"]](clean(found["message"]))
    value: Value = found["value"]
    return value


def all_agree(what: str, value: Mapping[str, Any], seconds: float = BARRIER_SECONDS) -> None:
    """Waits for all processes, and checks that ``value``, a mapping of JSON values, is the same in all.

    ConfigError lists what differs in ``what``; TrainingError, the processes that did not arrive within ``seconds``.
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
            f"{', '.join(map(str, missing))} did not come: read {'their' if several else 'its'} output."
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
            raise ConfigError(f"process {rank} was started with another {what} ({listed}): start all with the same.")


class StopVote:
    """A vote by which all processes of a run stop at the same window after a request to one of them.

    Collectives keep them within one window of each other: a process that polls at window ``w`` has the results of
    ``w - 1``, which the others have started. All know of a request at ``w`` by ``w + 2``, where they stop.
    """

    def __init__(self) -> None:
        self._key = _key("stop") if process_count() > 1 else ""
        self._asked = False

    def poll(self, window: int, requested: bool) -> bool:
        """Whether all stop at the end of ``window``; ``requested`` says whether this process was asked to.

        Call it once for each window, in order from 0, before the next one starts; it costs one query of the store.
        """
        if not self._key:
            return requested
        if requested and not self._asked:
            self._asked = True
            coordination_client().key_value_set(f"{self._key}/{process_id()}", str(window + 2))
        return any(int(stop) <= window for stop in _values(self._key).values())


def _values(key: str) -> dict[int, str]:
    """The values that the processes stored under ``key``, by rank."""
    return {int(name.rpartition("/")[2]): value for name, value in coordination_client().key_value_dir_get(key)}


def _key(name: str) -> str:
    return f"jaxnn/{next(_calls)}/{name}"
