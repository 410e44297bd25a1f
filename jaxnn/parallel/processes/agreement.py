"""What all processes of a run decide alike: on the host, through the key-value store of JAX's coordination service.

No device takes part, so nothing here waits for one. Every process calls these functions in the same order: a counter
gives each call its own keys. In a single process each is a no-op.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxnn._compat import coordination_client
from jaxnn.parallel.processes.place import Place
from jaxnn.parallel.processes.wire import clean
from jaxnn.types import ConfigError, DataError, JaxnnError, RecordError, TrainingError

# How long the leader may take for what all wait for: it may have data to load.
LEADER_SECONDS = 3600.0
BARRIER_SECONDS = 300.0
ERRORS: dict[str, type[JaxnnError]] = {
    kind.__name__: kind for kind in (ConfigError, DataError, RecordError, TrainingError)
}

# All processes count alike, so that each call has keys of its own, in the first run of a process and in the next.
_calls = itertools.count()
_place: Place | None = None


def set_place(place: Place | None) -> None:
    """Makes this process the one of several that ``place`` describes."""
    global _place
    _place = place


def process_id() -> int:
    """Which process this is. Unlike ``jax.process_index`` it starts no backend, unless the user joined processes."""
    if _place is None:
        return jax.process_index() if jax.distributed.is_initialized() else 0
    return _place.process_id


def process_count() -> int:
    """How many processes there are; starts no backend either."""
    if _place is None:
        return jax.process_count() if jax.distributed.is_initialized() else 1
    return _place.num_processes


def barrier(name: str, seconds: float = BARRIER_SECONDS) -> None:
    """Waits until every process is here.

    Args:
        name: what for, for the sentence where one does not come.
        seconds: for how long.

    Raises:
        TrainingError: some did not come in time, or are gone; they are named.
    """
    if process_count() > 1:
        _meet(_key(name), name, seconds)


def broadcast_from_primary[Value](function: Callable[[], Value], seconds: float = LEADER_SECONDS) -> Value:
    """The value of ``function``, called by process 0 alone.

    Args:
        function: gives a value of JSON; a tuple arrives as a list, in process 0 too.
        seconds: how long the others wait.

    Raises:
        JaxnnError: the one that ``function`` raised, in every process.
        TrainingError: process 0 failed in another way, or is not done in time.
    """
    if process_count() == 1:
        return function()
    key = _key("leader")
    if process_id() == 0:
        return _lead(function, key)
    try:
        told = json.loads(coordination_client().blocking_key_value_get(key, _milliseconds(seconds)))
    except RuntimeError as error:
        raise TrainingError(
            f"process {process_id()} waited {seconds:g} s for process 0, in vain: look at what that says."
        ) from error
    if "error" in told:
        raise ERRORS[told["error"]](clean(told["sentence"]))
    value: Value = told["value"]
    return value


def all_agree(what: str, value: Mapping[str, Any], seconds: float = BARRIER_SECONDS) -> None:
    """Checks that every process was started with the same ``value``.

    Args:
        what: what it is, such as ``config``.
        value: of JSON, by name.
        seconds: how long to wait for all.

    Raises:
        ConfigError: some differ from process 0; the first that does and the names are given.
        TrainingError: some did not come in time.
    """
    if process_count() == 1:
        return
    key = _key(what)
    _meet(key, what, seconds, json.dumps(value, sort_keys=True))
    values = {rank: json.loads(said) for rank, said in _said(key).items()}
    for rank in sorted(values):
        if differing := _differing(values[0], values[rank]):
            told = "; ".join(
                f"{name} is {values[rank].get(name)!r}, and {values[0].get(name)!r} in process 0" for name in differing
            )
            raise ConfigError(f"process {rank} was started with another {what} ({told}): start all alike.")


class StopVote:
    """At which window all processes of a run stop, when one of them is asked to.

    Collectives bind the windows of all processes together: a process that polls at window ``w`` has seen the results of
    window ``w - 1``, for which every other has begun it. So no process is more than a window ahead of another, and what
    one says at ``w``, before it begins ``w + 1``, all hear at ``w + 2`` at the latest. There they stop.
    """

    def __init__(self) -> None:
        self._key = _key("stop") if process_count() > 1 else ""
        self._asked = False

    def poll(self, window: int, wish: bool) -> bool:
        """Whether all stop at the end of ``window``.

        Costs one question to the key-value store.

        Args:
            window: how many windows came before it; asked once each, in order, before the next one begins.
            wish: whether this process was asked to stop.
        """
        if not self._key:
            return wish
        if wish and not self._asked:
            self._asked = True
            coordination_client().key_value_set(f"{self._key}/{process_id()}", str(window + 2))
        return any(int(stop) <= window for stop in _said(self._key).values())


def _lead[Value](function: Callable[[], Value], key: str) -> Value:
    """Process 0's part of ``broadcast_from_primary``: whatever happens, the others are told."""
    told = ""
    try:
        told = json.dumps({"value": function()})
        value: Value = json.loads(told)["value"]
        return value
    except BaseException as error:
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS), None)
        sentence = str(error) if kind else f"process 0 failed ({type(error).__name__}: {error}): look at what it says."
        told = json.dumps({"error": kind or TrainingError.__name__, "sentence": sentence})
        raise
    finally:
        coordination_client().key_value_set(key, told)


def _meet(key: str, name: str, seconds: float, value: str = "") -> None:
    """Says ``value`` under ``key`` and waits until all have said theirs."""
    here = coordination_client()
    here.key_value_set(f"{key}/{process_id()}", value)
    try:
        here.wait_at_barrier(key, _milliseconds(seconds))
    except RuntimeError as error:
        missing = sorted(set(range(process_count())) - set(_said(key)))
        ranks = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        raise TrainingError(
            f"process {process_id()} waited {seconds:g} s for all ({name}), and {ranks} did not come: look at what "
            f"{'they say' if len(missing) > 1 else 'it says'}."
            if missing
            else f"process {process_id()} came too late ({name}): the others waited {seconds:g} s for it."
        ) from error


def _said(key: str) -> dict[int, str]:
    """What each process said under ``key``, by its rank."""
    return {int(name.rpartition("/")[2]): value for name, value in coordination_client().key_value_dir_get(key)}


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))


def _key(name: str) -> str:
    return f"jaxnn/{next(_calls)}/{name}"


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))
