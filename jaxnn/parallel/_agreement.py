"""What all processes of a run decide together: on the host, through the key-value store of JAX's coordination service.

No device takes part, so nothing here waits for one. Every process calls these functions in the same order: a counter
gives each call its own keys. In a single process each is a no-op.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxnn._compat import coordination_client
from jaxnn.parallel._link import clean
from jaxnn.parallel._place import process_count, process_id
from jaxnn.types import ConfigError, JaxnnError, TrainingError

# How long process 0 may take for what all wait for: it may have data to load.
PRIMARY_SECONDS = 3600.0
BARRIER_SECONDS = 300.0
ERRORS = {kind.__name__: kind for kind in JaxnnError.__subclasses__()}

# All processes count in the same way, so that each call has keys of its own, in this run and in the next.
_calls = itertools.count()


def barrier(name: str, seconds: float = BARRIER_SECONDS) -> None:
    """Waits ``seconds`` at most until every process is here, for what ``name`` says.

    Raises:
        TrainingError: some did not come in time, or are lost; they are named.
    """
    all_agree(name, {}, seconds)


def broadcast_from_primary[Value](function: Callable[[], Value], seconds: float = PRIMARY_SECONDS) -> Value:
    """The value of ``function``, called by process 0 alone.

    It is a value of JSON; a tuple arrives as a list, in process 0 too. The others wait ``seconds`` at most.

    Raises:
        JaxnnError: the one that ``function`` raised, in every process.
        TrainingError: process 0 failed in another way, or is not done in time.
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
    """Checks that every process was started with the same ``value``, of JSON by name; ``what`` it is is for errors.

    Raises:
        ConfigError: some differ from process 0; the first that does and the names are given.
        TrainingError: some did not come in time.
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
    window ``w - 1``, for which every other has begun it. So no process is more than a window ahead of another, and what
    one says at ``w``, before it begins ``w + 1``, all hear at ``w + 2`` at the latest. There they stop.
    """

    def __init__(self) -> None:
        self._key = _key("stop") if process_count() > 1 else ""
        self._asked = False

    def poll(self, window: int, wish: bool) -> bool:
        """Whether all stop at the end of ``window``; ``wish``: whether this process was asked to.

        Asked once for each window, in order from 0, before the next one begins; costs one question to the store.
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
