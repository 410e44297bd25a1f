"""The record of a population in training: its facts at the start and of each group, and what changed at a resume."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from jaxnn import record as records
from jaxnn._fingerprints import changed_implementations, changed_parts, check_same_data
from jaxnn._json import config_json
from jaxnn._provenance import jax_flags
from jaxnn.engine._options import RunOptions
from jaxnn.engine._trainer import RUNNING, Trainer
from jaxnn.observe import Compilation, describe_devices
from jaxnn.parallel import format_mesh
from jaxnn.types import Experiment

TIME = "%Y-%m-%dT%H:%M:%S%z"


@dataclasses.dataclass
class PopulationRecord:
    """The open directory of a run or a sweep, or None for one without record, and the content of ``record.json``."""

    directory: records.Record | None
    facts: dict[str, Any]
    before: Mapping[str, Any] | None = None  # the content at a resume

    @classmethod
    def start(
        cls,
        experiment: Experiment[Any],
        options: RunOptions,
        trainer: Trainer,
        groups: Sequence[Mapping[str, Any]],
        name: str,
        script: Mapping[str, Any],
        *,
        points: Sequence[Mapping[str, Any]] = (),
        **design: Any,
    ) -> Self:
        """Returns the record, still without directory, of a run or a sweep; ``trainer`` trains its first group.

        ``groups`` have their ``members``, the fields that these share and those that differ; a run has no ``points``.
        """
        facts = {
            "format": records.FORMAT,
            "name": name,
            "started": time.strftime(TIME),
            **_process_facts(experiment, options, script),
            **_trainer_facts(trainer),
            "axes": (),
            "search": None,
            **design,
            "points": [dict(point) for point in points],
            "groups": [dict(group) for group in groups],
            "summary": None,
        }
        return cls(None, facts)

    @classmethod
    def resume(
        cls,
        before: Mapping[str, Any],
        experiment: Experiment[Any],
        options: RunOptions,
        script: Mapping[str, Any],
        trainer: Trainer | None = None,
    ) -> Self:
        """Returns the record, still without directory, of a run or a sweep that is resumed; ``before`` is its content.

        ``trainer`` trains a run; the groups of a sweep are opened later, and decide nothing here.
        """
        process = {name: before[name] for name in ("command", "git", "devices", "jax_flags") if name in before}
        resumed = {"time": time.strftime(TIME), "step": 0, "changed": [], "damaged": [], "before": process}
        now = _process_facts(experiment, options, script) | ({} if trainer is None else _trainer_facts(trainer))
        name = options.name or before["name"]  # trackers know it by this
        since = {"name": name, "resumed": [*(before.get("resumed") or ()), resumed], "summary": None}
        return cls(None, {**before, **now, **since}, before)

    def write(self, **facts: Any) -> None:
        """Replaces ``record.json``, with these facts changed."""
        self.facts |= facts
        if self.directory is not None:
            self.directory.write(records.RECORD_FILE, self.facts)

    def set_group(self, number: int, **facts: Any) -> None:
        """Changes facts of a group; `write` stores them."""
        groups = list(self.facts["groups"])
        groups[number] = {**groups[number], **facts}
        self.facts["groups"] = groups

    def open_group(
        self,
        number: int,
        trainer: Trainer,
        how: Mapping[str, Any],
        name: str,
        check: Callable[[int | None], None] = lambda step: None,
        *,
        stores: bool = True,
    ) -> tuple[list[str], list[str]]:
        """Opens a group's store; continues it from its newest undamaged checkpoint if it was started before.

        ``how`` it is computed, as `Trainer.facts` returns, is added to its facts; `write` stores them. ``name`` is the
        group's in messages, and ``check`` gets the checkpoint's step, or None, before anything is changed. Without
        ``stores`` its states are the caller's business. Returns
        what changed since and what was damaged, which is also added to the last of the ``resumed``. RecordError if the
        data are others, or no checkpoint can be read; then the facts stay as they are.
        """
        assert self.directory is not None
        path, now = self.directory.path, dict(how)
        changed, damaged = list[str](), list[str]()
        if stores:
            trainer.open_store(self.directory, records.Record.states(path, self.facts, number))
        known = () if self.before is None else self.before["groups"]
        before = known[number] if number < len(known) else {}
        if self.before is not None and before.get("fingerprint") is not None:  # it was started
            kind = "sweep" if self.facts["points"] else "run"
            check_same_data(path, before["fingerprint"], now["fingerprint"]["data"], kind)
            step, damaged = trainer.restore(name, check) if stores else (None, [])
            now["seconds_per_step_measured"] |= before.get("seconds_per_step_measured") or {}
            changed = _changes(self.before, self.facts, before, now)
            resumed = self.facts["resumed"][-1]
            resumed["step"] += step or 0
            resumed["changed"] += [change for change in changed if change not in resumed["changed"]]
            resumed["damaged"] += damaged
        self.set_group(number, **now)
        return changed, damaged

    def write_compilations(self, compilations: Sequence[tuple[int, Any]]) -> None:
        """Replaces ``compiles.json``; each compilation is given with the number of its group."""
        if self.directory is not None:
            each = [{"group": number, **dataclasses.asdict(one)} for number, one in compilations]
            totals = Compilation.totals([one for _, one in compilations])
            self.directory.write("compiles.json", {"compilations": each, "totals": totals})


def _trainer_facts(trainer: Trainer) -> dict[str, Any]:
    """What ranks the members of a population, and the name of its data."""
    return {
        "monitored": trainer.monitored,
        "higher_is_better": trainer.higher_is_better,
        "directions": dict(trainer.programs.task.directions),
        "data": trainer.splits.name,
    }


def _process_facts(experiment: Experiment[Any], options: RunOptions, script: Mapping[str, Any]) -> dict[str, Any]:
    """What a process that starts or resumes a population decides."""
    return {
        "status": RUNNING,
        "config": config_json(experiment.config),
        "options": options.recorded(),
        "devices": describe_devices(),
        "jax_flags": jax_flags(),
        **script,
    }


def _changes(
    before: Mapping[str, Any], facts: Mapping[str, Any], group_before: Mapping[str, Any], group: Mapping[str, Any]
) -> list[str]:
    """Descriptions of what differs: layout, device, programs, versions, flags, stopping rule, length."""
    changes = []
    layouts = [_describe(one.get("layout") or group["layout"]) for one in (group_before, group)]
    if layouts[0] != layouts[1]:
        changes.append(f"the layout {layouts[0]} → {layouts[1]}")
    if _device(facts) != _device(before):
        changes.append(f"the device {_device(before)} → {_device(facts)}")
    changes += changed_parts(group_before["fingerprint"], group["fingerprint"])
    changes += changed_implementations(group_before.get("implementations") or {}, group["implementations"])
    pairs = (before["devices"]["versions"], facts["devices"]["versions"]), (before["jax_flags"], facts["jax_flags"])
    for old, new in pairs:
        changes += [f"{name} {old.get(name)} → {new[name]}" for name in new if new[name] != old.get(name)]
    rules = [str(one["options"].get("stop")).rpartition(":")[2] for one in (before, facts)]
    if rules[0] != rules[1]:
        changes.append(f"stop {rules[0]} → {rules[1]}")
    if (now := facts["config"].get("num_steps")) != (then := before["config"].get("num_steps")):
        changes.append(f"num_steps {then} → {now}")
    return changes


def _describe(layout: Mapping[str, Any]) -> str:
    return f"{layout['strategy']} {format_mesh(layout['mesh'])}" if layout["mesh"] else str(layout["strategy"])


def _device(facts: Mapping[str, Any]) -> str:
    """The kind of device that a process computed on; the platform if the record does not list its devices."""
    platform = facts["options"].get("device") or facts["devices"]["backend"]
    kinds = {device["kind"] for device in facts["devices"]["devices"] if device["platform"] == platform}
    return ", ".join(sorted(kinds)) or platform
