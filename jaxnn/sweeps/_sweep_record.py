"""The directory of a sweep: ``sweep.json``, ``members.jsonl``, and a stacked checkpoint per group."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxnn.engine import MemberLog, Trainer, evaluations_since_best, recorded_options
from jaxnn.observe import describe_devices
from jaxnn.record import (
    SWEEP_FILE,
    Record,
    config_json,
    jax_flags,
    json_line,
    metrics_of,
    new_run_dir,
    script,
    write_bytes,
)
from jaxnn.run import file_name_of
from jaxnn.sweeps._plan import SweepPlan
from jaxnn.sweeps.results import MEMBERS_FILE, Axis, Member, RunOpener, Sweep
from jaxnn.types import Experiment

GROUPS = "groups"
MEMBER_FOLDER = "members"


@dataclasses.dataclass
class SweepRecord:
    """An open sweep directory, or None for a sweep that keeps no record, and the content of ``sweep.json``."""

    record: Record | None
    facts: dict[str, Any]

    def describe(self, **facts: Any) -> None:
        """Replaces ``sweep.json``, with these facts changed."""
        self.facts |= facts
        if self.record is not None:
            self.record.write(SWEEP_FILE, self.facts)

    def describe_group(self, number: int, trainer: Trainer) -> None:
        """Adds what a group computes and how its members are arranged, so that it resumes the same."""
        assert trainer.vmapped is not None
        plan = trainer.vmapped._asdict() | {"trials": [trial._asdict() for trial in trainer.vmapped.trials]}
        facts = {
            "vmap": plan,
            "steps_per_call": trainer.plan.steps_per_call,
            "precision": trainer.programs.product_dtypes,
            "implementations": trainer.programs.implementations,
            "fingerprint": trainer.fingerprint,
        }
        self._change_group(number, **facts)

    def close_group(self, number: int) -> None:
        """Notes that the last checkpoint of a group is complete, so that its members are over."""
        self._change_group(number, closed=True)

    def _change_group(self, number: int, **facts: Any) -> None:
        groups = list(self.facts["groups"])
        groups[number] = {**groups[number], **facts}
        self.describe(groups=groups)

    def write_members(self, plan: SweepPlan) -> None:
        """Replaces ``members.jsonl``."""
        if self.record is None:
            return
        lines = []
        for member in self.members(plan):
            facts = {name: value for name, value in vars(member).items() if name != "index"}
            folder = f"{MEMBER_FOLDER}/{member.dir.name}" if member.dir else None
            lines.append(json_line({"member": member.index, **facts, "dir": folder}))
        write_bytes(self.record.path / MEMBERS_FILE, "".join(lines).encode())

    def members(self, plan: SweepPlan) -> Iterator[Member]:
        """The members as they are now."""
        folder = self.record.path / MEMBER_FOLDER if self.record is not None else None
        exported = {path.name: path for path in folder.iterdir()} if folder is not None and folder.is_dir() else {}
        for number in sorted(plan.members):
            planned, log = plan.members[number], plan.logs[number]
            config = config_json(planned.experiment.config)
            if planned.error is not None:
                config |= {name: value for name, value in planned.point.items() if name in config}
            yield Member(
                index=number,
                point=dict(planned.point),
                config=config,
                status=log.status,
                step=log.step,
                final=log.final,
                best=_best_of(log, self.facts["monitor"], higher_is_better=self.facts["higher_is_better"]),
                error=log.error if log.status == "failed" else None,
                dir=exported.get(f"{number:04d}"),
            )

    def results(self, plan: SweepPlan, run_opener: RunOpener) -> Sweep:
        """The sweep as it is now."""
        return Sweep(
            members=tuple(self.members(plan)),
            axes=tuple(Axis(name, plan.points.values(name), scale) for name, scale in plan.points.scales.items()),
            lines=tuple({"member": number, **line} for number, log in plan.logs.items() for line in log.lines),
            monitor=self.facts["monitor"],
            higher_is_better=self.facts["higher_is_better"],
            status=self.facts["status"],
            dir=None if self.record is None else self.record.path,
            summary=self.facts["summary"] or {},
            experiment=plan.experiment,
            run_opener=run_opener,
        )

    def open_store(self, number: int, trainer: Trainer) -> None:
        """Keeps the metrics and checkpoints of a group here."""
        if self.record is not None:
            trainer.open_store(self.record, self.record.path / GROUPS / f"{number}")


def new_sweep_dir(name: str) -> Path:
    """``runs/<name>/sweep-<time>-<four hex digits>``: a path that is not used yet, not created."""
    path = new_run_dir(name)
    return path.with_name(f"sweep-{path.name}")


def origin_of(experiment: Experiment[Any]) -> dict[str, Any]:
    """The script that started a sweep: its command, git state and name, which is None in a notebook."""
    return {**script(), "name": file_name_of(experiment)}


def sweep_facts(plan: SweepPlan, first: Trainer, origin: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``sweep.json`` from the start; ``first`` trains the first group."""
    points = plan.points
    return {
        **origin,
        "name": origin["name"] or first.splits.name,
        "status": "running",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": config_json(plan.experiment.config),
        "axes": [
            {"name": name, "values": points.values(name), "scale": scale} for name, scale in points.scales.items()
        ],
        **design_facts(plan),
        "monitor": first.monitored,
        "higher_is_better": first.options.higher_is_better,
        "options": recorded_options(plan.options),
        "data": first.splits.name,
        "unread": list(plan.groups[0].unread),
        "groups": [
            {"static": dict(group.static), "traced": group.traced, "members": [m.number for m in group.members]}
            for group in plan.groups
        ],
        "devices": describe_devices(),
        "jax_flags": jax_flags(),
        "summary": None,
    }


def design_facts(plan: SweepPlan) -> dict[str, Any]:
    """What makes it this sweep and no other, besides the config."""
    halving = plan.halving
    return {
        "points": [dict(point) for point in plan.points],
        "halving": None if halving is None else {"eta": halving.eta, "min_fraction": halving.min_fraction},
    }


def _best_of(log: MemberLog, monitored: str, *, higher_is_better: bool) -> dict[str, float]:
    """The evaluation of a member that was best by the monitored metric, and its ``step``; empty before the first."""
    lines = [line for line in log.lines if monitored in line]
    since = evaluations_since_best(log.values(monitored), higher_is_better=higher_is_better)
    if since >= len(lines):
        return {}
    line = lines[len(lines) - 1 - since]
    split = monitored.partition("_")[0]
    return {"step": line["step"], **{name: v for name, v in metrics_of(line).items() if name.startswith(split)}}
