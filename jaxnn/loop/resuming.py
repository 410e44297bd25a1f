"""A run that goes on: the options it goes on with, the state it goes on from, and what is different now."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxnn.loop.options import RunOptions
from jaxnn.loop.recorded_layout import recorded_layout
from jaxnn.loop.saving import recorded_checkpoints, restore_newest
from jaxnn.loop.session import Session
from jaxnn.loop.stopping import status_after
from jaxnn.parallel import format_mesh, from_leader
from jaxnn.record import FOLDER, Restored, changed_parts, config_from_json, config_json, rewind_metrics
from jaxnn.types import ConfigError, Experiment, RecordError, TrainState

# Options that shape what a run leaves behind: a resumed run takes them from the record unless told otherwise.
KEPT_OPTIONS = (
    "report_every",
    "eval_every",
    "eval_batch_size",
    "checkpoint_every",
    "keep_last",
    "keep_best",
    "monitor",
    "monitor_mode",
    "patience",
)


def continued_options(experiment: Experiment[Any], options: RunOptions, before: dict[str, Any]) -> RunOptions:
    """The options to go on with: the record's, where the caller leaves them at their defaults.

    An option at its default is not told from one that was not given: ``strategy="auto"`` keeps the record's.

    Raises:
        ConfigError: the experiment is not the one of the record, or the devices that the record asks for are not there.
    """
    if not options.record:
        raise ConfigError("a resumed run goes on with its record: leave record at its default.")
    config = config_json(experiment.config)
    recorded = config_json(config_from_json(before["config"], experiment.config))
    for name, value in recorded.items():
        # More steps are a wish that can be met; anything else would be another experiment.
        if config[name] != value and name != "num_steps":
            raise ConfigError(
                f"the run in {options.resume} has {name} = {value!r}, this experiment {config[name]!r}: resume it "
                f"with experiment.replace({name}={value!r}), or start a new run."
            )
    given = options.explicit()
    for name in (*KEPT_OPTIONS, "devices", "strategy", "mesh"):
        if name not in before["options"]:
            raise RecordError(f"run.json in {options.resume} lacks the option {name!r}: the record is damaged.")
    kept = {name: before["options"][name] for name in KEPT_OPTIONS}
    kept |= recorded_layout(before["options"], given, options.device, f"the run in {options.resume}")
    return dataclasses.replace(options, **kept | given)


def restored_facts(session: Session, before: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Puts the session where the newest whole checkpoint left it; returns the new content of ``run.json``.

    Raises:
        RecordError: the data are not those of the record, there is no checkpoint to go on from, none is whole, it
            cannot be read, or it is past ``num_steps``; nothing was written.
    """
    assert session.record is not None
    path = session.record.path
    if facts["fingerprint"]["data"] != before["fingerprint"]["data"]:
        raise RecordError(
            f"the data are not those that the run in {path} was trained on: restore the data, or start a new run."
        )
    restored = restore_newest(session)
    step = restored.step if restored is not None else 0
    if restored is None and before["options"]["checkpoint_every"] == 0:
        raise RecordError(f"the run in {path} kept no checkpoints, so there is nothing to go on from: start a new run.")
    if restored is None and (saved := _last_saved(before)) > 0:
        raise RecordError(
            f"the run in {path} has metrics up to step {saved} but no checkpoint: bring {path / FOLDER} back from a "
            "copy, or start a new run."
        )
    if step > session.plan.num_steps:
        raise RecordError(
            f"the run in {path} has done {step} steps already, more than num_steps = {session.plan.num_steps}: resume "
            "it with more, or start a new run."
        )
    # Out of the way before the run comes to their steps again.
    damaged = [recorded_checkpoints(session).set_aside(damage) for damage in restored.damaged] if restored else []
    session.lines, lost = from_leader(lambda: _rewind(session, restored))
    damaged += [lost] if lost is not None else []
    session.status = status_after(session, step)
    changed = _changes(before, facts)
    session.resumed = {"step": step, "time": facts["started"], "changed": changed, "damaged": damaged}
    told = {name: before[name] for name in ("command", "git", "devices", "jax_flags")}
    kept = {name: before[name] for name in ("started", "seconds_per_step_measured")}
    return {**facts, **kept, "resumed": [*before.get("resumed", []), session.resumed | {"before": told}]}


def _last_saved(before: dict[str, Any]) -> int:
    """The newest step that the record says there was a checkpoint of; 0 if it says nothing, as of a killed run."""
    return max([*before.get("checkpoints", ()), *(resumed["step"] for resumed in before.get("resumed", ()))], default=0)


def _rewind(session: Session, restored: Restored[TrainState] | None) -> tuple[list[dict[str, Any]], str | None]:
    """Cuts the metrics to those of the checkpoint; returns them, and what to tell the user of damage to them."""
    assert session.record is not None
    step, noted = (restored.step, restored.log) if restored is not None else (0, None)
    where = f"step {step}" if restored is not None else "the run"
    lines, session.reported, told = rewind_metrics(session.record.path, lambda line: step, noted, where)
    return lines, told


def _changes(before: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """What differs from the record and may change numbers: layout, kind of device, program, versions, JAX's flags."""
    changes = []
    if facts["layout"] != before["layout"]:
        changes.append(f"the layout {_told(before['layout'])} → {_told(facts['layout'])}")
    if _device(facts) != _device(before):
        changes.append(f"the device {_device(before)} → {_device(facts)}")
    changes += changed_parts(before["fingerprint"], facts["fingerprint"])
    pairs = (before["devices"]["versions"], facts["devices"]["versions"]), (before["jax_flags"], facts["jax_flags"])
    for old, new in pairs:
        changes += [f"{name} {old.get(name)} → {new[name]}" for name in new if new[name] != old.get(name)]
    return changes


def _told(layout: dict[str, Any]) -> str:
    """A layout in a few words."""
    return f"{layout['strategy']} {format_mesh(layout['mesh'])}" if layout["mesh"] else str(layout["strategy"])


def _device(facts: dict[str, Any]) -> str:
    """What kind of device a run computed on; where the record does not list that platform's devices, the platform."""
    platform = facts["options"]["device"] or facts["devices"]["backend"]
    kinds = {device["kind"] for device in facts["devices"]["devices"] if device["platform"] == platform}
    return ", ".join(sorted(kinds)) or platform
