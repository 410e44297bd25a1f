"""Options of a sweep, and a sweep before its first step: its members, their groups, their devices, what is printed."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from jaxnn import engine, parallel
from jaxnn._clock import Clock
from jaxnn._fields import option, seed_for
from jaxnn._text import format_bytes
from jaxnn.observe import cpu_count, given_up
from jaxnn.search import Points, Searcher
from jaxnn.sweeps._groups import Group, Loader, PlannedMember, plan_groups, plan_members, traces
from jaxnn.sweeps._search_events import SavedSearch, Search
from jaxnn.types import ConfigError, Experiment, warn

if TYPE_CHECKING:
    type ExecutorOption = str | Callable[..., Any]
else:  # what a command line can give
    ExecutorOption = str


DEFAULT_LANES, FEW_LANES = 64, 4  # of a search; and the least of one that learns from reports
WINDOWS = 10  # by default, of a member whose searcher asks for nothing but its end


@dataclasses.dataclass(frozen=True)
class SweepOptions(engine.RunOptions):
    """How to run a sweep; flags of every script's ``sweep`` and keyword arguments of ``jn.sweep``.

    >>> jn.SweepOptions(patience=3, order="shared").order
    'shared'
    """

    plan_only: bool = False
    """Show how the members would be grouped and how fast each vmap size is; train nothing."""
    vmap_size: int | None = option(least=1, kept=True)
    """Members under one vmap on a device; default: by the operations of a step, or by trials; on a GPU all that fit."""
    lanes: int | None = option(least=1, kept=True, decides=True)
    """Members of a search in training at once, on all workers; default: 64, for tpe and optuna at most an eighth of its
    members. For points: one that ends makes room."""
    max_groups: int = option(16, least=1, kept=True)
    """The most groups that a search may open, each with a compilation of its own; members beyond have failed."""
    states_mib: int = option(1024, least=0, kept=True)
    """MiB of states that a search keeps of pruned and paused members; one without trains again if it is promoted."""
    order: Literal["member", "shared"] = option("member", choices=("member", "shared"), kept=True, decides=True)
    """member: each sees the data in the order of its seed, as its solo run; shared: all in that of the first."""
    shard: str | None = option(kept=True)
    """Run only part I of N of the members, written I/N, counted from 1: one per job of an array."""
    executor: ExecutorOption = "local"
    """local: in this process; ray: as shards on a Ray cluster; or a function of experiment, points and options."""
    num_workers: int | None = option(least=1)
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
    points: Points  # of all members, those of other shards too; of a search, those that were proposed so far
    search: Search | None  # where members come from while others train; None: there are no more than the points
    options: SweepOptions
    members: list[PlannedMember]
    groups: list[Group]
    unread: tuple[str, ...]  # swept fields that nothing reads
    load: Loader
    clock: Clock
    saved: SavedSearch = SavedSearch()  # noqa: RUF009  # immutable: what a search is resumed from
    # By the number of a group: the vmap sizes that are chosen, and the trainers that are open.
    vmapped: dict[int, engine.VmapPlan] = dataclasses.field(default_factory=dict)
    open: dict[int, engine.Trainer] = dataclasses.field(default_factory=dict)
    _places: dict[int, int] = dataclasses.field(default_factory=dict)  # by the number of a member

    @property
    def num_lanes(self) -> int:
        """The number of members of a search that are in training at once."""
        assert self.search is not None
        if self.search.lanes is not None:
            return self.search.lanes
        first = len(self.search.events[0]["proposals"]) if self.search.events else DEFAULT_LANES
        most = self.search.searcher.num or (self.options.lanes or first)
        usual = DEFAULT_LANES
        if self.search.searcher.learns:  # what is proposed before any report is blind
            usual = min(usual, max(FEW_LANES, most // 8))
        return max(1, min(self.options.lanes or usual, most))

    @property
    def num_left(self) -> int:
        """The updates that are left to all members together, if none stops early."""
        left = (max(0, one.experiment.config.num_steps - one.step) for one in self.members if one.unfinished)
        return sum(left)

    def share_end(self, group: Group, share: float) -> int:
        """The step at which the members of a group report a share of their steps to a searcher: a window's end."""
        num_steps = group.members[0].experiment.config.num_steps
        assert self.search is not None
        return share_end(num_steps, share, search_window(num_steps, self.search.searcher.shares[0], self.options))

    def add(self) -> list[PlannedMember]:
        """Plans the members that the search proposed since, in the group that computes the same or a new one."""
        assert self.search is not None
        searcher, proposed = self.search.searcher, self.search.points
        numbers = self.search.numbers[len(self.members) :]
        points = Points(tuple(proposed[number] for number in numbers), searcher.scales)
        new = plan_members(self.experiment, points, numbers)
        self.members += new
        unlike = [member for member in new if member.unfinished and not self._joined(member)]
        for member in unlike:  # the others have the num_steps of their group
            try:
                search_window(member.experiment.config.num_steps, searcher.shares[0], self.options)
            except ConfigError as error:
                member.fail(error)
        most = self.options.max_groups
        groups, unread = plan_groups(unlike, self.load, searched=True, first=len(self.groups)) if unlike else ([], ())
        if not self.groups and len(groups) > most:
            varying = [name for name in groups[0].static if len({repr(one.static[name]) for one in groups}) > 1]
            raise ConfigError(
                f"the first {len(new)} members are of {len(groups)} groups, since a value of {', '.join(varying)} is "
                f"a compilation, and max_groups is {most}: search few values of it, make it a traced float as "
                "warnings say, or raise max_groups."
            )
        for group in groups:
            if group.number >= most:
                reason = "it would be one more group, each with a compilation of its own: raise max_groups"
                for member in group.members:
                    member.fail(ConfigError(f"{reason}, {most}, or search fewer values of {', '.join(group.static)}"))
        self.groups += [group for group in groups if group.number < most]
        self.unread = self.unread or unread
        self.points = Points(tuple(proposed), searcher.scales)
        return new

    def member(self, number: int) -> PlannedMember:
        """The member of a search with a number; other processes may train those between its own."""
        if len(self._places) < len(self.members):
            self._places = {member.number: place for place, member in enumerate(self.members)}
        return self.members[self._places[number]]

    def warn_of_windows(self) -> None:
        """Warns if members cannot be compared as early as the searcher asks."""
        assert self.search is not None
        shares, group = self.search.searcher.shares, self.groups[0]
        num_steps, first = group.members[0].experiment.config.num_steps, self.share_end(group, shares[0])
        if first > 2 * shares[0] * num_steps:
            warn(
                f"{self.search.searcher.name} asks for reports after {shares[0] * num_steps:.0f} steps, and the first "
                f"evaluation is after {first}: lower eval_every, or leave it out."
            )

    def _joined(self, member: PlannedMember) -> bool:
        """Adds a member to the group whose program it shares, if there is one."""
        for group in self.groups:
            config = member.experiment.config
            own = {name: operator.attrgetter(name)(config) for name in (*group.static, *group.traced)}
            # None, say, in place of a float is another program.
            if not all(traces(name, own[name]) for name in group.traced):
                continue
            if all(repr(own[name]) == repr(value) for name, value in group.static.items()):
                group.members.append(member)
                return True
        return False

    def is_over(self, group: Group) -> bool:
        """Whether no member of a group is to be trained any further."""
        return not any(member.unfinished for member in group.members)

    def trainer(self, group: Group) -> engine.Trainer:
        """The trainer of a group, opened if it was not yet: its data loaded, its vmap size chosen."""
        if group.number not in self.open:
            first, options = group.members[0].experiment, self.options
            with self.clock.span("load", "loading the data"):
                splits, _ = self.load(group.members[0])
            seed = seed_for(self.experiment.config, "order", self.points.points[0])
            experiments = [member.experiment for member in group.members]
            if self.search is not None:
                # Any lane may have any member; those of the first decide the values to measure with.
                experiments = list(itertools.islice(itertools.cycle(experiments), self.num_lanes))
                every = search_window(first.config.num_steps, self.search.searcher.shares[0], options)
                options = dataclasses.replace(options, eval_every=every, report_every=every)
            members = engine.Members.of(
                experiments,
                group.traced,
                shared_seed=int(seed) if options.order == "shared" else None,
                vmap_size=options.vmap_size,
                apart=self.search is not None or options.patience is not None or options.stop is not None,
                thorough=options.plan_only,
                plan=self.vmapped.get(group.number),
                in_step=self.search is None,
            )
            layout = members_layout(options, first.config.batch_size, len(experiments))
            how: Any = {"logs": group.members, "members": members}
            trainer = engine.open_trainer(first, options, splits, layout, self.clock, **how)
            trainer.logs = group.members  # type: ignore[assignment]  # which grow in a search
            assert trainer.vmapped is not None
            self.vmapped[group.number], self.open[group.number] = trainer.vmapped, trainer
        return self.open[group.number]


def plan_sweep(
    experiment: Experiment[Any],
    points: Points | Searcher | Search,
    options: SweepOptions,
    clock: Clock | None = None,
    saved: SavedSearch = SavedSearch(),  # noqa: B008  # immutable
    load: Loader | None = None,
) -> SweepPlan:
    """Builds the members of this process, chosen by the options' shard, and groups those that one program can train.

    Of a searcher they are those that it proposes first, or proposed in the events of ``saved``. ConfigError if the
    config lacks a field of ``points``, devices are not available, or no member can be run.
    """
    load, clock = load or Loader(), clock or Clock()
    found = Search(points) if isinstance(points, Searcher) else points
    search = found if isinstance(found, Search) else None
    points = checked_points(experiment, points, options)
    if search is not None:
        plan = SweepPlan(experiment, points, search, options, [], [], (), load, clock, saved)
        with clock.span("load", "loading the data and grouping the members"):
            search.restore(saved)
            if not search.numbers:
                search.ask(plan.num_lanes, ())
            if not search.numbers:
                raise ConfigError(f"the searcher {search.searcher.name} proposes no member.")
            plan.add()
        if not plan.groups:
            raise ConfigError(f"no member of the search can be run; the first, {'; '.join(map(str, plan.members[:1]))}")
        if search.searcher.copies and (static := [*plan.groups[0].static]):
            raise ConfigError(
                f"the searcher {search.searcher.name} copies states, and another value of {', '.join(static)} is "
                "another program: search floats that a program can trace, and the seed."
            )
        plan.warn_of_windows()
        return plan
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
        kept = [group._replace(members=[m for m in group.members if m.number in chosen]) for group in groups]
        groups = [group._replace(number=n) for n, group in enumerate(group for group in kept if group.members)]
        members = [m for m in members if m.number in chosen or (part == 1 and not m.unfinished)]
    return SweepPlan(experiment, points, None, options, members, groups, unread, load, clock)


def share_end(num_steps: int, share: float, window: int) -> int:
    """The step at which a ``share`` of the steps ends: at the nearest end of a window."""
    return int(min(num_steps, max(1, round(share * num_steps / window)) * window))


def search_window(num_steps: int, first: float, options: SweepOptions) -> int:
    """The steps of a window of a search, after which all are evaluated: equal, as its members are at different steps.

    They are the shorter of ``report_every`` and ``eval_every`` if given, or the largest divisor of ``num_steps`` within
    the ``first`` share that reports. ConfigError if windows do not fill the steps, or would be far shorter than needed.
    """
    given = {name: every for name in ("report_every", "eval_every") if (every := getattr(options, name))}
    if given:
        name, every = min(given.items(), key=lambda one: one[1])
        if num_steps % every:
            near = max(1, round(num_steps / every)) * every
            raise ConfigError(
                f"{name} is {every} and num_steps {num_steps}, and windows of a search fill the steps: "
                f"choose num_steps={near}, or leave {name} out."
            )
        return int(every)
    most = max(1, round(first * num_steps))
    if first == 1:  # nothing but the end is asked for
        return engine.near_divisor(num_steps, -(-num_steps // WINDOWS))
    found = next(length for length in range(most, 0, -1) if num_steps % length == 0)
    if 4 * found < most:
        near = max(1, round(num_steps / most)) * most
        raise ConfigError(
            f"num_steps is {num_steps}, which windows of about {most} steps do not fill, as a search needs: choose "
            f"num_steps={near}."
        )
    return found


def checked_points(experiment: Experiment[Any], points: Points | Searcher | Search, options: SweepOptions) -> Points:
    """The points of all members, checked against the options; of a search none. Nothing is built or read."""
    if isinstance(points, Search):  # that other processes share
        points = Points((), points.searcher.scales)
    if isinstance(points, Searcher):
        if options.shard is not None:
            raise ConfigError(
                "a searcher compares all members, and shards that are started apart share none: leave shard at its "
                "default, or choose executor='ray', whose workers share one."
            )
        points = Points((), points.scales)
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
    search = None
    if plan.search is not None:
        searcher = plan.search.searcher
        ends = dict.fromkeys(str(plan.share_end(plan.groups[0], share)) for share in searcher.shares)
        most = f"{len(plan.members)} members at first" if searcher.num is None else f"{searcher.num} members"
        search = f"{searcher.name}: {most}, {plan.num_lanes} in training at once, compared after step {', '.join(ends)}"
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
        ("search", search),
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
