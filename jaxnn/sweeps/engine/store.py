"""The directory of a sweep: what it is, what became of each member, and the states to go on from."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxnn.loop import file_name_of, recorded_options
from jaxnn.observe import describe_devices
from jaxnn.record import (
    SWEEP_FILE,
    Checkpoints,
    LogDigest,
    Record,
    config_json,
    jax_flags,
    json_line,
    script,
    write_text,
)
from jaxnn.sweeps.design.points import Points
from jaxnn.sweeps.engine.group_run import GroupRun
from jaxnn.sweeps.engine.layout import HostStates
from jaxnn.sweeps.engine.plan import SweepPlan
from jaxnn.sweeps.results.reading import MEMBERS_FILE
from jaxnn.types import Experiment


@dataclasses.dataclass
class Store:
    """An open sweep directory.

    Attributes:
        record: the directory, locked; None for a sweep that keeps no record.
        facts: what ``sweep.json`` says.
        saved_at: when the last checkpoint was saved, on ``time.perf_counter``'s clock.
        checkpoints: those of the groups under way, by number.
        reported: the digests of what their members reported, by number.
    """

    record: Record | None
    facts: dict[str, Any]
    saved_at: float = dataclasses.field(default_factory=time.perf_counter)
    checkpoints: dict[int, Checkpoints] = dataclasses.field(default_factory=dict)
    reported: dict[int, LogDigest] = dataclasses.field(default_factory=lambda: collections.defaultdict(LogDigest))

    def report(self, plan: SweepPlan, run: GroupRun, lines: Mapping[int, Mapping[str, Any]]) -> None:
        """Appends what members reported, by row of their group, to ``metrics.jsonl``."""
        if self.record is not None:
            numbered = ({"member": run.group.members[row].number, **line} for row, line in lines.items())
            self.reported[run.group.number].add(self.record.report(*numbered))

    def describe(self, **facts: Any) -> None:
        """Replaces ``sweep.json``, with these facts changed."""
        self.facts |= facts
        if self.record is not None:
            self.record.write(SWEEP_FILE, self.facts)

    def tell_group(self, run: GroupRun) -> None:
        """Notes what a group computes and how wide, so that it resumes alike."""
        width = run.width._asdict() | {"trials": [trial._asdict() for trial in run.width.trials]}
        self._tell_group(run, width=width, fingerprint=run.fingerprint)

    def tell_reported(self, run: GroupRun) -> None:
        """Notes what the members of a group that is over reported, as its checkpoints did before."""
        digest = self.reported[run.group.number]
        self._tell_group(run, log={"lines": digest.lines, "sha256": digest.sha256})

    def _tell_group(self, run: GroupRun, **facts: Any) -> None:
        groups = list(self.facts["groups"])
        groups[run.group.number] = {**groups[run.group.number], **facts}
        self.describe(groups=groups)

    def tell_members(self, plan: SweepPlan) -> None:
        """Replaces ``members.jsonl``."""
        if self.record is not None:
            lines = (json_line(line) for line in member_lines(plan, self.facts))
            write_text(self.record.path / MEMBERS_FILE, "".join(lines))

    def save(self, run: GroupRun) -> None:
        """Starts saving a group's states; they are those of its rows on the host.

        Raises:
            RecordError: the disk refused.
        """
        if self.record is None or run.host is None:
            return
        checkpoints = self._checkpoints(run)
        # Some member has done a step since the last one, so that the sum of them is a number that grows.
        number = int(run.host.states.step.sum(dtype=np.int64))
        checkpoints.save(number, run.host, {}, self.record.log(self.reported[run.group.number]))
        self.saved_at = time.perf_counter()

    def restore(self, run: GroupRun) -> tuple[HostStates | None, Mapping[str, Any] | None, list[str]]:
        """The newest states that an earlier process saved of a group and are as they were saved, or None.

        Newer ones that are damaged are moved out of the way.

        Returns:
            The states, what of the sweep's metrics belongs to them, and what to tell the user of damaged ones.

        Raises:
            RecordError: all are damaged, or they cannot be read.
        """
        if self.record is None:
            return None, None, []
        checkpoints = Checkpoints(self._folder(run))
        restored = checkpoints.restore_newest(run.programs.abstract_host())
        if restored is None:
            return None, None, []
        damaged = [checkpoints.set_aside(damage) for damage in restored.damaged]
        # Copies, as rows are on the host, whatever the checkpoint hands out.
        states: HostStates = jax.tree.map(np.array, restored.state)
        return states, restored.log, damaged

    def tell_damage(self, damaged: Sequence[str]) -> None:
        """Notes in ``sweep.json`` what is damaged of what an earlier process left."""
        if damaged:
            self.describe(damaged=[*self.facts.get("damaged", []), *damaged])

    def close(self, run: GroupRun, *, forget: bool) -> None:
        """Waits for a group's checkpoints; drops them where its members' own take their place."""
        checkpoints = self.checkpoints.pop(run.group.number, None)
        if checkpoints is not None:
            checkpoints.close()
        if forget and self.record is not None:
            shutil.rmtree(self._folder(run), ignore_errors=True)
            # The last group leaves nothing behind.
            with contextlib.suppress(OSError):
                self._folder(run).parent.rmdir()

    def _checkpoints(self, run: GroupRun) -> Checkpoints:
        if run.group.number not in self.checkpoints:
            self.checkpoints[run.group.number] = Checkpoints(self._folder(run), keep_best=0)
        return self.checkpoints[run.group.number]

    def _folder(self, run: GroupRun) -> Path:
        assert self.record is not None
        return self.record.path / "groups" / f"{run.group.number}"


def sweep_facts(plan: SweepPlan, first: GroupRun, origin: Mapping[str, Any]) -> dict[str, Any]:
    """What ``sweep.json`` says from the start.

    Args:
        plan: what is to be run.
        first: its first group.
        origin: where it comes from, see :func:`origin_of`.
    """
    return {
        **origin,
        "name": origin["name"] or first.splits.name,
        "status": "running",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": config_json(plan.experiment.config),
        "axes": axes(plan.points),
        **sweep_plan_facts(plan),
        "numbers": plan.numbers,
        "monitor": first.monitored,
        "higher_is_better": first.options.higher_is_better,
        "options": recorded_options(plan.options),
        "data": first.splits.name,
        "unread": list(first.group.unread),
        "groups": [
            {"static": dict(group.static), "traced": group.traced, "members": [m.number for m in group.members]}
            for group in plan.groups
        ],
        "devices": describe_devices(),
        "jax_flags": jax_flags(),
        "summary": None,
    }


def origin_of(experiment: Experiment[Any]) -> dict[str, Any]:
    """The file the experiment is defined in, the command, and the git state: what this process knows, if it is main."""
    return {"name": file_name_of(experiment), **script()}


def sweep_plan_facts(plan: SweepPlan) -> dict[str, Any]:
    """What makes it this sweep and no other, besides the config."""
    halving = plan.halving
    return {
        "points": [dict(point) for point in plan.points],
        "halving": None if halving is None else {"eta": halving.eta, "min_fraction": halving.min_fraction},
    }


def axes(points: Points) -> list[dict[str, Any]]:
    """The swept fields with their values, as ``sweep.json`` holds them."""
    return [{"name": name, "values": points.values(name), "scale": scale} for name, scale in points.scales.items()]


def member_lines(plan: SweepPlan, facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of ``members.jsonl``."""
    group_of = {member.number: group.number for group in plan.groups for member in group.members}
    for index in sorted(plan.members):
        member, log = plan.members[index], plan.logs[index]
        config = config_json(member.experiment.config)
        if member.error is not None:
            config |= {name: value for name, value in member.point.items() if name in config}
        yield {
            "member": index,
            "point": dict(member.point),
            "config": config,
            "group": group_of.get(index),
            "status": log.status,
            "step": log.step,
            "final": log.final,
            "best": log.best(facts["monitor"], higher_is_better=facts["higher_is_better"]),
            "error": log.error,
            "dir": log.dir,
        }
