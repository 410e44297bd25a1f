"""A sweep before its first step: who its members are, which programs they need, what an earlier process left."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

from jaxnn.loop import typical_window
from jaxnn.observe import Clock
from jaxnn.sweeps.engine.group_run import GroupRun, time_plan
from jaxnn.sweeps.engine.logs import Log
from jaxnn.sweeps.engine.width import WidthPlan
from jaxnn.sweeps.options import SweepOptions, parse_shard
from jaxnn.sweeps.search import Group, Halving, Loader, Planned, Points, plan_groups, plan_members, rung_step, rungs
from jaxnn.types import ConfigError, Experiment


@dataclasses.dataclass
class SweepPlan:
    """What is to be run, and what has become of it so far.

    Attributes:
        experiment: what is swept.
        points: all its points, those of other shards too.
        halving: how members are taken out early, or None.
        options: how it is run.
        members: those of this process, by number.
        groups: those of this process.
        logs: what became of each, by number.
        load: loads the data of a member.
        clock: where the time went.
        numbers: the members that were chosen by number, or None.
        widths: what an earlier process decided for a group, by number.
        open: the groups that were opened and not closed, by number.
    """

    experiment: Experiment[Any]
    points: Points
    halving: Halving | None
    options: SweepOptions
    members: dict[int, Planned]
    groups: list[Group]
    logs: dict[int, Log]
    load: Loader
    clock: Clock
    numbers: tuple[int, ...] | None = None
    widths: dict[int, WidthPlan] = dataclasses.field(default_factory=dict)
    open: dict[int, GroupRun] = dataclasses.field(default_factory=dict)

    @property
    def shared_seed(self) -> int | None:
        """The seed whose order of the data all members see: the first point's; None where each sees its own."""
        if self.options.order == "member":
            return None
        return int(self.points.points[0].get("seed", self.experiment.config.seed))

    @functools.cached_property
    def rungs(self) -> list[float]:
        """Where members are taken out, as shares of a run, the last 1: those that end apart from each other."""
        kept: list[float] = []
        for share in reversed(rungs(self.halving)):
            if not kept or all(self.rung_end(group, share) < self.rung_end(group, kept[0]) for group in self.groups):
                kept.insert(0, share)
        return kept

    def rung_end(self, group: Group, share: float) -> int:
        """The step at which a rung ends for the members of a group: at the end of a window."""
        return self._ends[group.number, share]

    @functools.cached_property
    def _ends(self) -> dict[tuple[int, float], int]:
        ends: dict[tuple[int, float], int] = {}
        for group in self.groups:
            times = time_plan(self.options, group.members[0].experiment.config.num_steps)
            window = min(typical_window(times), times.num_steps)
            ends |= {(group.number, share): rung_step(share, times.num_steps, window) for share in rungs(self.halving)}
        return ends

    @property
    def num_done(self) -> int:
        """The updates that all members together have done."""
        return sum(log.step for log in self.logs.values())

    @property
    def num_left(self) -> int:
        """The updates that are left to all members together, if none stops early but by halving."""
        left, eta = 0.0, self.halving.eta if self.halving else 1
        for group in self.groups:
            for log in (self.logs[member.number] for member in group.members):
                ends = [end for share in self.rungs if (end := self.rung_end(group, share)) > log.step]
                spans = (after - before for before, after in itertools.pairwise([log.step, *ends]))
                left += sum(span / eta**rung for rung, span in enumerate(spans)) if log.goes_on else 0
        return round(left)


def plan_sweep(
    experiment: Experiment[Any],
    points: Points | Halving,
    options: SweepOptions,
    numbers: Collection[int] | None = None,
    clock: Clock | None = None,
) -> SweepPlan:
    """Builds the members of this process and groups those that one program can train.

    Args:
        experiment: what is swept.
        points: those of all members.
        options: how it is run; its shard chooses among all members by their groups.
        numbers: the members to choose; default: all.
        clock: where the time goes; default: one of its own.

    Raises:
        ConfigError: no points, a field the config does not have, no member that can be run, or more shards than these.
    """
    check_alone(points, options)
    halving = points if isinstance(points, Halving) else None
    points = plain_points(points)
    load, clock = Loader(), clock or Clock()
    chosen = [member for member in plan_members(experiment, points) if numbers is None or member.number in numbers]
    with clock.span("load", "loading the data and grouping the members"):
        groups, failed = plan_groups(chosen, load)
    if not groups:
        raise ConfigError(f"no member of the sweep can be run; the first, {_told(failed[0])}")
    groups, failed = _shard(groups, failed, options.shard)
    members = {member.number: member for group in groups for member in group.members}
    members |= {member.number: member for member in failed}
    logs = {index: Log() for index in sorted(members)}
    for member in failed:
        logs[member.number] = Log(status="failed", error=member.error)
    told = None if numbers is None else tuple(sorted(numbers))
    return SweepPlan(experiment, points, halving, options, members, groups, logs, load, clock, told)


def plain_points(points: Points | Halving) -> Points:
    """The points of all members, however some are taken out early.

    Raises:
        ConfigError: they are none.
    """
    points = points.points if isinstance(points, Halving) else points
    if not isinstance(points, Points):
        raise ConfigError(
            f"a sweep needs points, not a {type(points).__name__}: make them with jn.grid, jn.zipped or jn.random."
        )
    return points


def check_alone(points: Points | Halving, options: SweepOptions) -> None:
    """Raises ConfigError where halving, which compares all members, would not have them in one process."""
    if isinstance(points, Halving) and (options.shard is not None or options.engine != "local"):
        raise ConfigError(
            "halving compares all members, so it needs them in one process: leave shard and engine at their defaults."
        )


def _shard(groups: list[Group], failed: list[Planned], shard: str | None) -> tuple[list[Group], list[Planned]]:
    """The part of one job: as many members as any other job's, of as few groups as can be.

    The first tells of the members that cannot be run, so that they are told of once.
    """
    if shard is None:
        return groups, failed
    part, whole = parse_shard(shard)
    everyone = [member.number for group in groups for member in group.members]
    if whole > len(everyone):
        # Told to all of them: one that did nothing and succeeded would look like work done.
        raise ConfigError(
            f"shard is {shard!r}, and the sweep has {len(everyone)} members that can be run: ask for at most as many "
            "shards."
        )
    first, last = (len(everyone) * end // whole for end in (part - 1, part))
    mine = set(everyone[first:last])
    kept = [group._replace(members=tuple(m for m in group.members if m.number in mine)) for group in groups]
    mine_only = [group for group in kept if group.members]
    renumbered = [group._replace(number=number) for number, group in enumerate(mine_only)]
    return renumbered, failed if part == 1 else []


def describe_members(members: Sequence[Planned]) -> str:
    """``member 3 (learning_rate 0.1)``: of a few members, by number and point."""
    return "; ".join(_told(member) for member in members)


def _told(member: Planned) -> str:
    point = ", ".join(f"{name} {value}" for name, value in member.point.items())
    return f"member {member.number} ({point}): {member.error}"
