"""The record of a population in training: its facts at the start and of each group, and what changed at a resume."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from jaxnn import record as records
from jaxnn._fingerprints import Difference, check_same_data
from jaxnn._json import config_json
from jaxnn._provenance import jax_flags
from jaxnn.engine._differences import Described, changes_at_resume, find_differences
from jaxnn.engine._options import RunOptions
from jaxnn.engine._trainer import RUNNING, Trainer
from jaxnn.observe import Compilation, describe_devices
from jaxnn.types import Experiment

TIME = "%Y-%m-%dT%H:%M:%S%z"


@dataclasses.dataclass
class PopulationRecord:
    """The open directory of a run or a sweep, or None for one without record, and the content of ``record.json``."""

    directory: records.Record | None
    facts: dict[str, Any]
    before: Mapping[str, Any] | None = None  # the content at a resume
    texts: dict[str, str] = dataclasses.field(default_factory=dict)  # files beside it that are not written yet

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
        return cls(None, facts, None, {records.Record.CODE: script["patch"]} if script["patch"] else {})

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
        process = {name: before[name] for name in ("command", "git", "code", "devices", "jax_flags") if name in before}
        resumed = {"time": time.strftime(TIME), "step": 0, "changed": [], "damaged": [], "before": process}
        now = _process_facts(experiment, options, script) | ({} if trainer is None else _trainer_facts(trainer))
        name = options.name or before["name"]  # trackers know it by this
        since = {"name": name, "resumed": [*(before.get("resumed") or ()), resumed], "summary": None}
        return cls(None, {**before, **now, **since}, before, {records.Record.CODE: script["patch"]})

    @staticmethod
    def differences(a: records.Recorded, b: records.Recorded) -> list[Difference]:
        """Returns what differs between two recorded trainings, the likeliest cause of other numbers first."""
        sides = [Described(one.about["config"], one.facts, one.group) for one in (a, b)]
        return find_differences(*sides)

    @staticmethod
    def changes(before: records.Recorded, trainer: Trainer) -> list[str]:
        """Returns what a process that computes a recorded training again, by ``trainer``, does otherwise.

        The program of a member is that of its group's first one, and is not compared.
        """
        programs, config = trainer.programs, before.about["config"]
        now = {"implementations": programs.traced_step.implementations, "layout": programs.layout.as_json()}
        now |= {"fingerprint": trainer.fingerprint} if before.row is None else {}
        facts = before.facts | {"devices": describe_devices(), "jax_flags": jax_flags()}
        sides = Described(config, before.facts, before.group), Described(config, facts, before.group | now)
        return changes_at_resume(*sides)

    def write(self, **facts: Any) -> None:
        """Replaces ``record.json``, with these facts changed, and writes new texts beside it."""
        self.facts |= facts
        if self.directory is not None:
            self.directory.write(records.RECORD_FILE, self.facts)
            while self.texts:
                self.directory.write_text(*self.texts.popitem())

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
            then = Described(self.before["config"], self.before, {"layout": now["layout"], **before})
            changed = changes_at_resume(then, Described(self.facts["config"], self.facts, now))
            resumed = self.facts["resumed"][-1]
            resumed["step"] += step or 0
            resumed["changed"] += [change for change in changed if change not in resumed["changed"]]
            resumed["damaged"] += damaged
        self.set_group(number, **now)
        self.texts[records.Record.listing(path, self.facts, number).name] = trainer.programs.listing()
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
        **{name: value for name, value in script.items() if name != "patch"},
    }
