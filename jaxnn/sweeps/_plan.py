"""Options of a sweep, and a sweep before its first step: its members, their groups, their devices, what is printed."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from jaxnn import engine, parallel
from jaxnn._clock import Clock
from jaxnn._text import format_bytes
from jaxnn.observe import cpu_count, given_up
from jaxnn.search import Halving, Points
from jaxnn.sweeps._groups import Group, Loader, PlannedMember, plan_groups, plan_members, traced_values, with_values
from jaxnn.types import ConfigError, Experiment

if TYPE_CHECKING:
    type ExecutorOption = str | Callable[..., Any]
else:  # what a command line can give
    ExecutorOption = str


@dataclasses.dataclass(frozen=True)
class SweepOptions(engine.RunOptions):
    """How to run a sweep; flags of every script's ``sweep`` and keyword arguments of ``jn.sweep``.

    >>> jn.SweepOptions(patience=3, order="shared").order
    'shared'
    """

    plan_only: bool = False
    """Show how the members would be grouped and how fast each vmap size is; train nothing."""
    vmap_size: int | None = engine.option(least=1, kept=True)
    """Members under one vmap on a device; default: by the operations of a step, or by trials; on a GPU all that fit."""
    order: Literal["member", "shared"] = engine.option("member", choices=("member", "shared"), kept=True, decides=True)
    """member: each sees the data in the order of its seed, as its solo run; shared: all in that of the first."""
    shard: str | None = engine.option(kept=True)
    """Run only part I of N of the members, written I/N, counted from 1: one per job of an array."""
    executor: ExecutorOption = "local"
    """local: in this process; ray: as shards on a Ray cluster; or a function of experiment, points and options."""
    num_workers: int | None = engine.option(least=1)
    """Number of shards that Ray runs at once; default: one per device of the cluster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.executor) and self.executor not in ("local", "ray"):
            raise ConfigError(f"executor is {self.executor!r}, and must be local, ray or a function.")
        strategy = parallel.Strategy.find(self.strategy)
        if strategy.axis_name is not None:
            raise ConfigError(
                f"strategy {strategy.name} maps its program over devices, which a sweep does with "
                "members: choose auto, data or fsdp."
            )
        if self.probes:
            raise ConfigError("probes watch one run: leave them out of a sweep, and call them with sweep.run(member).")
        if self.member is not None:
            raise ConfigError("member continues one member of a sweep as a run: give it to jn.fit, or leave it out.")
        if self.shard is not None:
            parse_shard(self.shard)


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/8"`` is ``(2, 8)``: the second of eight."""
    part, _, number = text.partition("/")
    if not (part.isdecimal() and number.isdecimal() and 1 <= int(part) <= int(number)):
        raise ConfigError(f"shard is {text!r}, and must be I/N with I from 1 to N, as in 2/8: the second of eight.")
    return int(part), int(number)


@dataclasses.dataclass
class SweepPlan:
    """The members and groups of a sweep, and their progress."""

    experiment: Experiment[Any]
    points: Points  # of all members, those of other shards too
    halving: Halving | None
    options: SweepOptions
    members: list[PlannedMember]
    groups: list[Group]
    unread: tuple[str, ...]  # swept fields that nothing reads
    load: Loader
    clock: Clock
    # By the number of a group: the vmap sizes that are chosen, and the trainers that are open.
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
        config = group.members[0].experiment.config
        num_steps = config.num_steps
        times = engine.make_plan(engine.resolve_cadences(self.options, config, group.evaluated), num_steps)
        window = min(engine.typical_window(times), num_steps)
        return int(min(num_steps, max(1, round(share * num_steps / window)) * window) if share < 1.0 else num_steps)

    @property
    def num_left(self) -> int:
        """The updates that are left to all members together, if none stops early except by halving."""
        left, eta = 0.0, self.halving.eta if self.halving else 1
        for group in self.groups:
            rung_ends = [self.rung_end(group, share) for share in self.rungs]
            for member in group.members:
                ends = [end for end in rung_ends if end > member.step]
                spans = (after - before for before, after in itertools.pairwise([member.step, *ends]))
                left += sum(span / eta**rung for rung, span in enumerate(spans)) if member.unfinished else 0
        return round(left)

    def is_over(self, group: Group) -> bool:
        """Whether no member of a group is to be trained any further."""
        return not any(member.unfinished for member in group.members)

    def trainer(self, group: Group) -> engine.Trainer:
        """The trainer of a group, opened if it was not yet: its data loaded, its vmap size chosen."""
        if group.number not in self.open:
            first, options = group.members[0].experiment, self.options
            with self.clock.span("load", "loading the data"):
                splits, _ = self.load(group.members[0])
            seed = self.points.points[0].get("seed", self.experiment.config.seed)
            members = engine.Members(
                num_members=len(group.members),
                values=traced_values([member.experiment for member in group.members], group.traced),
                member=functools.partial(with_values, first),
                shared_seed=int(seed) if options.order == "shared" else None,
                vmap_size=options.vmap_size,
                apart=self.halving is not None or options.patience is not None or options.stop is not None,
                thorough=options.plan_only,
                plan=self.vmapped.get(group.number),
            )
            layout = members_layout(options, first.config.batch_size, members.num_members)
            how: Any = {"logs": group.members, "members": members}
            trainer = engine.open_trainer(first, options, splits, layout, self.clock, **how)
            assert trainer.vmapped is not None
            self.vmapped[group.number], self.open[group.number] = trainer.vmapped, trainer
        return self.open[group.number]


def plan_sweep(
    experiment: Experiment[Any], points: Points | Halving, options: SweepOptions, clock: Clock | None = None
) -> SweepPlan:
    """Builds the members of this process, chosen by the options' shard, and groups those that one program can train.

    ConfigError if the config lacks a field of ``points``, devices are not available, or no member can be run.
    """
    halving = points if isinstance(points, Halving) else None
    points = checked_points(experiment, points, options)
    load, clock = Loader(), clock or Clock()
    with clock.span("load", "loading the data and grouping the members"):
        members = plan_members(experiment, points)
        groups, unread = plan_groups(members, load)
    if not groups:
        raise ConfigError(f"no member of the sweep can be run; the first, {'; '.join(map(str, members[:1]))}")
    if options.shard is not None:
        part, num_shards = parse_shard(options.shard)
        runnable = [member.number for group in groups for member in group.members]
        if num_shards > len(runnable):
            # An error in all of them: success without any training would be misread.
            raise ConfigError(
                f"shard is {options.shard!r}, and the sweep has {len(runnable)} members that can be run: ask for at "
                "most as many shards."
            )
        # A part of as few groups as possible; the first also has the members that cannot be run.
        first, last = (len(runnable) * end // num_shards for end in (part - 1, part))
        chosen = set(runnable[first:last])
        kept = [group._replace(members=tuple(m for m in group.members if m.number in chosen)) for group in groups]
        groups = [group._replace(number=n) for n, group in enumerate(group for group in kept if group.members)]
        members = [m for m in members if m.number in chosen or (part == 1 and not m.unfinished)]
    return SweepPlan(experiment, points, halving, options, members, groups, unread, load, clock)


def checked_points(experiment: Experiment[Any], points: Points | Halving, options: SweepOptions) -> Points:
    """The points of all members, checked against the options; nothing is built or read."""
    if isinstance(points, Halving) and (options.shard is not None or options.executor == "ray"):
        raise ConfigError(
            "halving compares all members, so it needs them in one process: leave shard and executor at their defaults."
        )
    points = points.points if isinstance(points, Halving) else points
    if not isinstance(points, Points):
        raise ConfigError(
            f"a sweep needs points, not a {type(points).__name__}: use jn.grid or jn.search, or name each in a dict."
        )
    default = getattr(experiment.config, "batch_size", None)
    sizes = {size for point in points if isinstance(size := point.get("batch_size", default), int) and size > 0}
    for batch_size in sorted(sizes):
        # How members share a batch does not depend on their number.
        layout = members_layout(options, batch_size, num_members=1)
        if options.eval_batch_size is not None:
            layout.check_divides(options.eval_batch_size, "eval_batch_size")
    return points


def members_layout(options: SweepOptions, batch_size: int, num_members: int) -> parallel.Layout:
    """The devices that members are sharded over, and how each member is placed on several."""
    found, strategy = parallel.find_devices(options.device), parallel.Strategy.find(options.strategy)
    meshed = None if options.mesh is None else {engine.MEMBERS: 1, **parallel.parse_mesh(options.mesh)}
    devices = parallel.choose_devices(found, options.devices, None if meshed is None else math.prod(meshed.values()))
    # One member on each device, unless a strategy is given: that shards each member over all devices.
    axes = meshed or {engine.MEMBERS: 1, parallel.DATA: len(devices)}
    if meshed is None and strategy is parallel.STRATEGIES["auto"]:
        axes = {engine.MEMBERS: min(len(devices), num_members), parallel.DATA: 1}
    size = math.prod(axes.values())
    if size == 1:
        return parallel.SINGLE_DEVICE
    # Without a mesh, devices that have no member are left idle.
    layout = parallel.Layout(
        strategy, parallel.make_mesh(devices if options.mesh else devices[:size], axes), (parallel.DATA, engine.MEMBERS)
    )
    layout.check_divides(batch_size)
    return layout._replace(strategy=parallel.STRATEGIES["data"]) if layout.data_size == 1 else layout


def sweep_rows(plan: SweepPlan) -> list[tuple[str, str | None]]:
    """Rows of name and value for the sweep, before its first group."""
    num_groups, failed = len(plan.groups), [member for member in plan.members if member.error is not None]
    groups = "1 group, one compilation" if num_groups == 1 else f"{num_groups} groups, a compilation each"
    devices = parallel.find_devices(plan.options.device)
    largest = max(plan.groups, key=lambda group: len(group.members))
    layout = members_layout(plan.options, largest.members[0].experiment.config.batch_size, len(largest.members))
    traced = sorted({name for group in plan.groups for name in group.traced})
    static = sorted({name for group in plan.groups for name in group.static})
    varying = [name for name in static if len({repr(group.static.get(name)) for group in plan.groups}) > 1]
    halving = None
    if plan.halving is not None:
        # Rungs that would end in one window are one.
        ends = ", ".join(str(plan.rung_end(plan.groups[0], share)) for share in plan.rungs[:-1])
        halving = f"one of {plan.halving.eta} continues after step {ends}" if ends else "none: too few members or steps"
    # XLA computes small operations on one core.
    hint, cores = None, cpu_count() or 1
    if cores > 1 and len(devices) == 1 and devices[0].platform == "cpu":
        hint = f"set jax_num_cpu_devices to {cores} before JAX is used, as scripts do, so that members use all cores"
    return [
        ("sharded over", f"{layout.num_devices} of {len(devices)} devices" if len(devices) > 1 else None),
        ("members", f"{len(plan.members) - len(failed)} in {groups}"),
        ("one program for", f"all values of {', '.join(traced)}" if traced else None),
        ("a program each", f"all values of {', '.join(varying)}" if varying else None),
        ("cannot be run", "; ".join(map(str, failed)) or None),
        ("halving", halving),
        ("hint", hint),
    ]


def group_rows(plan: SweepPlan, group: Group) -> list[tuple[str, str]]:
    """Rows of name and value for one group, whose vmap size is chosen."""
    trainer = plan.trainer(group)
    spec, choice, shape = trainer.programs.spec, trainer.vmapped, trainer.shape(trainer.block)
    assert choice is not None and shape is not None
    shared = ", ".join(f"{name} {value}" for name, value in group.static.items())
    count = len(trainer.logs)
    members = f"{count} members" if count > 1 else "1 member"
    chunks = "1 chunk" if shape.chunks == 1 else f"{shape.chunks} chunks"
    devices = f" on {spec.num_devices} devices" if spec.num_devices > 1 else ""
    each = spec.layout.num_devices // spec.num_devices
    devices += f", {each} devices per member" if each > 1 else ""
    start = trainer.programs.start
    return [
        (f"group {group.number + 1}/{len(plan.groups)}", f"{members}{f', all with {shared}' if shared else ''}"),
        *([("starts from", str(start))] if start.arrays else []),
        ("a member takes", format_bytes(trainer.programs.member_bytes)),
        *(("plan", line) for line in choice.lines()),
        ("vmap size", f"{choice.size}{devices}, {chunks}, {trainer.plan.steps_per_call} steps per call"),
        *trainer.notes,
        *(("compiler", line) for line in given_up()),
    ]
