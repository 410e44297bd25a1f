"""The directory of a sweep: ``sweep.json``, ``members.jsonl``, and a stacked checkpoint per group."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxnn.engine import MemberLog, Store, Trainer, evaluations_since_best, recorded_options
from jaxnn.observe import describe_devices
from jaxnn.record import SWEEP_FILE, Record, config_json, jax_flags, json_line, metrics_of, script, write_bytes
from jaxnn.run import file_name_of
from jaxnn.sweeps._plan import SweepPlan
from jaxnn.sweeps.results import MEMBERS_FILE, Axis, Member, RunOpener, Sweep

GROUPS = "groups"
MEMBER_FOLDER = "members"


@dataclasses.dataclass
class SweepRecord:
    """An open sweep directory.

    Attributes:
        record: the directory, locked; None for a sweep that keeps no record.
        facts: the content of ``sweep.json``.
    """

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
        groups = list(self.facts["groups"])
        groups[number] = {**groups[number], **facts}
        self.describe(groups=groups)

    def write_members(self, plan: SweepPlan) -> None:
        """Replaces ``members.jsonl``."""
        if self.record is not None:
            lines = (json_line(line) for line in member_lines(plan, self.facts, self.record))
            write_bytes(self.record.path / MEMBERS_FILE, "".join(lines).encode())

    def store(self, number: int, trainer: Trainer) -> Store | None:
        """Where the metrics and checkpoints of a group go."""
        if self.record is None:
            return None
        folder = self.record.path / GROUPS / f"{number}"
        return Store(self.record, folder, trainer.numbers, keep_last=trainer.options.keep_last)


def sweep_facts(plan: SweepPlan, first: Trainer) -> dict[str, Any]:
    """The content of ``sweep.json`` from the start; ``first`` trains the first group."""
    return {
        **script(),
        "name": file_name_of(plan.experiment) or first.splits.name,
        "status": "running",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": config_json(plan.experiment.config),
        "axes": axes(plan),
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


def axes(plan: SweepPlan) -> list[dict[str, Any]]:
    """The swept fields with their values, as ``sweep.json`` holds them."""
    points = plan.points
    return [{"name": name, "values": points.values(name), "scale": scale} for name, scale in points.scales.items()]


def member_lines(plan: SweepPlan, facts: Mapping[str, Any], record: Record | None) -> Iterator[dict[str, Any]]:
    """The lines of ``members.jsonl``."""
    group_of = {member.number: group.number for group in plan.groups for member in group.members}
    exported = set()
    if record is not None and (record.path / MEMBER_FOLDER).is_dir():
        exported = {path.name for path in (record.path / MEMBER_FOLDER).iterdir()}
    for number in sorted(plan.members):
        member, log = plan.members[number], plan.logs[number]
        config = config_json(member.experiment.config)
        if member.error is not None:
            config |= {name: value for name, value in member.point.items() if name in config}
        yield {
            "member": number,
            "point": dict(member.point),
            "config": config,
            "group": group_of.get(number),
            "status": log.status,
            "step": log.step,
            "final": log.final,
            "best": best_of(log, facts["monitor"], higher_is_better=facts["higher_is_better"]),
            "error": log.error if log.status == "failed" else None,
            "dir": f"{MEMBER_FOLDER}/{number:04d}" if f"{number:04d}" in exported else None,
        }


def best_of(log: MemberLog, monitored: str, *, higher_is_better: bool) -> dict[str, float]:
    """The evaluation of a member that was best by the monitored metric, and its ``step``; empty before the first."""
    lines = [line for line in log.lines if monitored in line]
    since = evaluations_since_best(log.values(monitored), higher_is_better=higher_is_better)
    if since >= len(lines):
        return {}
    line = lines[len(lines) - 1 - since]
    split = monitored.partition("_")[0]
    return {"step": line["step"], **{name: v for name, v in metrics_of(line).items() if name.startswith(split)}}


def results_of(plan: SweepPlan, sweep: SweepRecord, run_opener: RunOpener) -> Sweep:
    """The sweep as it is now."""
    facts, record = sweep.facts, sweep.record
    path = None if record is None else record.path
    members = []
    for line in member_lines(plan, facts, record):
        folder = path / line["dir"] if path is not None and line["dir"] else None
        fields = {name: value for name, value in line.items() if name not in ("member", "group", "dir")}
        members.append(Member(index=line["member"], dir=folder, **fields))
    return Sweep(
        members=tuple(members),
        axes=tuple(Axis(**axis) for axis in axes(plan)),
        lines=tuple({"member": number, **line} for number, log in plan.logs.items() for line in log.lines),
        monitor=facts["monitor"],
        higher_is_better=facts["higher_is_better"],
        status=facts["status"],
        dir=path,
        summary=facts["summary"] or {},
        experiment=plan.experiment,
        run_opener=run_opener,
    )
