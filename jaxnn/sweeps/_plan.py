"""A sweep before its first step: its members, their groups, and the devices they are placed on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from jaxnn import engine, parallel
from jaxnn.observe import Clock
from jaxnn.sweeps import search
from jaxnn.sweeps._sweep_options import SweepOptions, parse_shard
from jaxnn.sweeps.results import show_point
from jaxnn.sweeps.search import Group, Halving, Planned, Points
from jaxnn.types import ConfigError, Experiment


@dataclasses.dataclass
class SweepPlan:
    """What is to be trained, and what has become of it so far."""

    experiment: Experiment[Any]
    points: Points  # of all members, those of other shards too
    halving: Halving | None
    options: SweepOptions
    members: dict[int, Planned]
    groups: list[Group]
    logs: dict[int, engine.MemberLog]
    load: search.Loader
    clock: Clock
    # By the number of a group: what an earlier process chose, and the trainers that are open.
    vmapped: dict[int, engine.VmapPlan] = dataclasses.field(default_factory=dict)
    open: dict[int, engine.Trainer] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def rungs(self) -> list[float]:
        """Where members are taken out, as shares of a run, the last 1: those that end at different steps."""
        kept: list[float] = []
        for share in reversed(self.halving.rungs if self.halving else [1.0]):
            if not kept or all(self.rung_end(group, share) < self.rung_end(group, kept[0]) for group in self.groups):
                kept.insert(0, share)
        return kept

    def rung_end(self, group: Group, share: float) -> int:
        """The step at which a rung ends for the members of a group: at the end of a window."""
        num_steps = group.members[0].experiment.config.num_steps
        times = engine.make_plan(engine.resolve_cadences(self.options, num_steps), num_steps)
        window = min(engine.typical_window(times), num_steps)
        return int(min(num_steps, max(1, round(share * num_steps / window)) * window) if share < 1.0 else num_steps)

    @property
    def num_done(self) -> int:
        """The updates that all members together have done."""
        return sum(log.step for log in self.logs.values())

    @property
    def num_left(self) -> int:
        """The updates that are left to all members together, if none stops early except by halving."""
        left, eta = 0.0, self.halving.eta if self.halving else 1
        for group in self.groups:
            rung_ends = [self.rung_end(group, share) for share in self.rungs]
            for log in (self.logs[member.number] for member in group.members):
                ends = [end for end in rung_ends if end > log.step]
                spans = (after - before for before, after in itertools.pairwise([log.step, *ends]))
                left += sum(span / eta**rung for rung, span in enumerate(spans)) if log.unfinished else 0
        return round(left)

    def is_over(self, group: Group) -> bool:
        """Whether no member of a group is to be trained any further."""
        return not any(self.logs[member.number].unfinished for member in group.members)

    def trainer(self, group: Group) -> engine.Trainer:
        """The trainer of a group, opened if it was not yet: its data loaded, its vmap size chosen."""
        if group.number not in self.open:
            first, options = group.members[0].experiment, self.options
            with self.clock.span("load", "loading the data"):
                splits, _ = self.load(group.members[0])
            shared_seed = None
            if options.order == "shared":
                shared_seed = int(self.points.points[0].get("seed", self.experiment.config.seed))
            members = engine.Members(
                numbers=tuple(member.number for member in group.members),
                values=search.traced_values([member.experiment for member in group.members], group.traced),
                member=functools.partial(search.with_values, first),
                shared_seed=shared_seed,
                vmap_size=options.vmap_size,
                thorough=options.plan_only,
                plan=self.vmapped.get(group.number),
            )
            logs = [self.logs[member.number] for member in group.members]
            layout = members_layout(options, first.config.batch_size, len(logs))
            trainer = engine.open_trainer(first, options, splits, layout, self.clock, logs=logs, members=members)
            assert trainer.vmapped is not None
            self.vmapped[group.number], self.open[group.number] = trainer.vmapped, trainer
        return self.open[group.number]


def plan_sweep(
    experiment: Experiment[Any], points: Points | Halving, options: SweepOptions, clock: Clock | None = None
) -> SweepPlan:
    """Builds the members of this process and groups those that one program can train.

    Args:
        experiment: what is swept.
        points: those of all members.
        options: how it is run; its shard chooses among all members by their groups.
        clock: gets the time; default: a new one.

    Raises:
        ConfigError: no points, a field that the config does not have, devices that are not there, no member that can be
            run, or more shards than these.
    """
    halving = points if isinstance(points, Halving) else None
    points = checked_points(experiment, points, options)
    load, clock = search.Loader(), clock or Clock()
    with clock.span("load", "loading the data and grouping the members"):
        groups, failed = search.plan_groups(search.plan_members(experiment, points), load)
    if not groups:
        raise ConfigError(f"no member of the sweep can be run; the first, {describe_members(failed[:1])}")
    groups, failed = _shard(groups, failed, options.shard)
    members = {member.number: member for group in groups for member in group.members}
    members |= {member.number: member for member in failed}
    logs = {number: engine.MemberLog() for number in sorted(members)}
    for member in failed:
        logs[member.number] = engine.MemberLog(status="failed", error=member.error)
    return SweepPlan(experiment, points, halving, options, members, groups, logs, load, clock)


def checked_points(experiment: Experiment[Any], points: Points | Halving, options: SweepOptions) -> Points:
    """The points of all members, once it is known that the options can train them; nothing is built or read."""
    if isinstance(points, Halving) and (options.shard is not None or options.executor == "ray"):
        raise ConfigError(
            "halving compares all members, so it needs them in one process: leave shard and executor at their defaults."
        )
    points = points.points if isinstance(points, Halving) else points
    if not isinstance(points, Points):
        raise ConfigError(f"a sweep needs points, not a {type(points).__name__}: make them with jn.grid or jn.search.")
    own = getattr(experiment.config, "batch_size", None)
    sizes = {size for point in points if isinstance(size := point.get("batch_size", own), int) and size > 0}
    for batch_size in sorted(sizes):
        # How members share a batch does not depend on their number.
        layout = members_layout(options, batch_size, num_members=1)
        if options.eval_batch_size is not None:
            parallel.check_divides(options.eval_batch_size, layout.data_size, "eval_batch_size")
    return points


def members_layout(options: SweepOptions, batch_size: int, num_members: int) -> parallel.Layout:
    """The devices that members are sharded over, and how each is placed on several if that is asked for."""
    found, strategy = parallel.find_devices(options.device), parallel.find_strategy(options.strategy)
    meshed = None if options.mesh is None else {engine.MEMBERS: 1, **parallel.parse_mesh(options.mesh)}
    devices = parallel.choose_devices(found, options.devices, None if meshed is None else math.prod(meshed.values()))
    # One member on each device, unless a strategy is given: that shares each member between all.
    apart = strategy is parallel.STRATEGIES["auto"]
    axes = meshed or {
        engine.MEMBERS: min(len(devices), num_members) if apart else 1,
        parallel.DATA: 1 if apart else len(devices),
    }
    size = math.prod(axes.values())
    if size == 1:
        return parallel.SINGLE_DEVICE
    # Without a mesh, devices that have no member are left idle.
    layout = parallel.Layout(
        strategy, parallel.make_mesh(devices if options.mesh else devices[:size], axes), (parallel.DATA, engine.MEMBERS)
    )
    parallel.check_divides(batch_size, layout.data_size)
    return layout._replace(strategy=parallel.STRATEGIES["data"]) if layout.data_size == 1 else layout


def _shard(groups: list[Group], failed: list[Planned], shard: str | None) -> tuple[list[Group], list[Planned]]:
    """The part of one job: as many members as any other job's, of as few groups as can be.

    The first has the members that cannot be run, so that they are reported once.
    """
    if shard is None:
        return groups, failed
    part, whole = parse_shard(shard)
    everyone = [member.number for group in groups for member in group.members]
    if whole > len(everyone):
        # An error in all of them: one that did nothing and succeeded would look like work done.
        raise ConfigError(
            f"shard is {shard!r}, and the sweep has {len(everyone)} members that can be run: ask for at most as many "
            "shards."
        )
    first, last = (len(everyone) * end // whole for end in (part - 1, part))
    mine = set(everyone[first:last])
    kept = [group._replace(members=tuple(m for m in group.members if m.number in mine)) for group in groups]
    renumbered = [group._replace(number=n) for n, group in enumerate(group for group in kept if group.members)]
    return renumbered, failed if part == 1 else []


def describe_members(members: Sequence[Planned]) -> str:
    """``member 3 (learning_rate 0.1): why``, and so on."""
    return "; ".join(f"member {member.number} ({show_point(member.point)}): {member.error}" for member in members)
