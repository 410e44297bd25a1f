"""Resuming a run or a sweep: its options from the record, and what forbids it."""

import dataclasses
import math
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxnn.engine import RunOptions, Trainer
from jaxnn.parallel import STRATEGIES, Strategy, choose_devices, find_devices, parse_mesh
from jaxnn.record import FOLDER, TRACKERS
from jaxnn.types import ConfigError, RecordError

FIXED = ("deterministic",)  # the options of a run that decide its results
LAYOUT = ("devices", "strategy", "mesh")
# Options that may name code of the user's: how messages call them, and the names of jaxnn's own.
_NAMED: Mapping[str, tuple[str, Collection[str]]] = {
    "strategy": ("strategy", STRATEGIES),
    "stop": ("stopping rule", ()),
    "writers": ("metric writers", TRACKERS),
    "probes": ("probes", ()),
}


def continued_names(kind: type[RunOptions]) -> set[str]:
    """Returns the names of options that a resumed run or sweep has from its record, unless they are given."""
    return {*kind.marked("kept"), *LAYOUT, *_NAMED}


def continued_options[Options: RunOptions](
    options: Options, recorded: Mapping[str, Any], where: Path, kind: str, *, trains: bool, fixed: Collection[str]
) -> Options:
    """Returns the options to continue the run or sweep, its ``kind``, in ``where``: those given, else the ``recorded``.

    Unless it ``trains``, it is loaded, on any devices, and writes nothing.

    ConfigError if the options that are ``fixed`` would change, devices are not available, or code must be given;
    RecordError if one that is recorded is not a value of its option.
    """
    if not options.record:
        raise ConfigError(f"a resumed {kind} continues its record: leave record at its default.")
    kept, given = options.marked("kept"), options.explicit()
    if lacking := {*kept, *LAYOUT} - recorded.keys():
        raise RecordError(f"the record of the {kind} in {where} lacks the option {min(lacking)!r}: it is damaged.")
    parts = [{**one, **options.deciding(one)} for one in (recorded, options.recorded())]
    for name in fixed:
        if name in given and parts[0][name] != parts[1][name]:
            raise ConfigError(
                f"the {kind} in {where} has {name}={parts[0][name]!r}, which decides its results: leave {name} at its "
                f"default, or start a new {kind}."
            )
    if not trains:
        own_strategy = recorded["strategy"] not in STRATEGIES
        loaded = {"writers": (), "probes": (), "stop": None} | ({"strategy": "auto"} if own_strategy else {})
        given = loaded | given
    setup = _recorded_setup(recorded, given, options.device, f"the {kind} in {where}", trains=trains)
    try:
        return dataclasses.replace(options, **{name: recorded[name] for name in kept} | setup | given)
    except (ConfigError, TypeError) as error:
        raise RecordError(f"the options in {where} are damaged: {error}") from error


def check_checkpoint(trainer: Trainer, before: Mapping[str, Any] | None, step: int | None) -> None:
    """Raises RecordError if a run cannot continue from its newest checkpoint, of a ``step``; None: it has none.

    ``before`` is the content of its record. It cannot if it kept none, lost them, or is past ``num_steps``.
    """
    assert before is not None and trainer.record is not None
    path = trainer.record.path
    if step is None and before["options"]["checkpoint_every"] == 0:
        raise RecordError(f"the run in {path} kept no checkpoints, so it cannot be resumed: start a new run.")
    # A killed run did not note its checkpoints.
    resumes = before.get("resumed") or ()
    noted = [*(before["groups"][0].get("checkpoints") or ()), *(resumed["step"] for resumed in resumes)]
    if step is None and (saved := max(noted, default=0)) > 0:
        raise RecordError(
            f"the run in {path} has metrics up to step {saved} but no checkpoint: bring {path / FOLDER} back from "
            "a copy, or start a new run."
        )
    if step is not None and step > trainer.plan.num_steps:
        raise RecordError(
            f"the run in {path} has done {step} steps already, more than num_steps = {trainer.plan.num_steps}: "
            "resume it with more, or start a new run."
        )


def _recorded_setup(
    recorded: Mapping[str, Any], given: Mapping[str, Any], device: str | None, where: str, *, trains: bool
) -> dict[str, Any]:
    """Returns ``devices``, ``strategy``, ``mesh``, ``stop``, ``writers`` and ``probes`` of a record, or those given.

    ``device`` is the kind to continue on, and ``where`` the record, for messages: ``the run in runs/…``. ConfigError if
    the record names code of the user's, which must be given, or it ``trains`` and its devices are not available.
    """
    parts: dict[str, Any] = {}
    found = find_devices(device)
    for option, (what, known) in _NAMED.items():
        if option in given:
            continue
        value = recorded.get(option, getattr(RunOptions, option))
        names = [value] if isinstance(value, str) else [*(value or ())]
        if own := [name for name in names if name not in known]:
            # Importing it would run the code of whoever wrote the record.
            flag = f" (--{option} {shlex.join(names)})" if all(":" in name or name in known for name in names) else ""
            raise ConfigError(
                f"{where} used the {what} {', '.join(map(repr, own))}, and a record's code is not imported: give "
                f"{option} again{flag}, or another value."
            )
        parts[option] = tuple(value) if isinstance(value, list) else value
    kept = _without_clashes(recorded, given, len(found))
    if "devices" not in given and "mesh" not in given:
        try:
            choose_devices(found, kept["devices"] if kept["mesh"] is None else _size(kept["mesh"]))
        except ConfigError as error:
            if not trains:
                return {name: value for name, value in parts.items() if name != "strategy"}
            used = f"devices={kept['devices']}" if kept["mesh"] is None else f"mesh {kept['mesh']}"
            reason = str(error).rstrip(".")
            raise ConfigError(
                f"{where} used {used}: give --devices {len(found)} to continue with what is here ({reason})."
            ) from error
    return parts | kept


def _without_clashes(recorded: Mapping[str, Any], given: Mapping[str, Any], num_devices: int) -> dict[str, Any]:
    """Returns the recorded layout without the options that contradict those given, on ``num_devices`` devices."""
    kept = {name: recorded[name] for name in ("devices", "strategy", "mesh")}
    if "mesh" in given:
        kept["devices"] = None
        if given["mesh"] and "strategy" not in given and not _fits(recorded["strategy"], given["mesh"]):
            kept["strategy"] = RunOptions.strategy
    elif recorded["mesh"] is not None:
        # The mesh implies a number of devices, and stays if that is the one asked for.
        size = _size(recorded["mesh"])
        kept["devices"] = None
        asked = num_devices if given.get("devices") == "all" else given.get("devices", size)
        if asked != size:
            kept["mesh"] = None
        elif "strategy" in given and not _fits(given["strategy"], recorded["mesh"]):
            kept |= {"mesh": None, "devices": size}
    return kept


def _size(mesh: str) -> int:
    return math.prod(parse_mesh(mesh).values())


def _fits(strategy: Any, mesh: str) -> bool:
    return Strategy.find(strategy).fits(parse_mesh(mesh))
