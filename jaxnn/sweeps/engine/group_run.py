"""One group on its way: its programs, its plan, its members' states and what each of them reported."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxnn.loop import (
    Call,
    Feed,
    Plan,
    Programs,
    RunOptions,
    check_examples,
    check_monitor,
    check_patience,
    check_sums,
    make_feed,
    make_plan,
    settle_allocation,
    typical_window,
    with_tails,
)
from jaxnn.observe import Clock, Ledger, available_bytes
from jaxnn.parallel import (
    DATA,
    SINGLE_DEVICE,
    Layout,
    check_divides,
    choose_devices,
    find_devices,
    make_mesh,
    parse_mesh,
)
from jaxnn.sweeps.engine.compiling import GroupPrograms
from jaxnn.sweeps.engine.layout import HostStates, arrange
from jaxnn.sweeps.engine.logs import Log
from jaxnn.sweeps.engine.population import MEMBERS, Formula, Shape
from jaxnn.sweeps.engine.probing import MEMORY_SHARE
from jaxnn.sweeps.engine.width import Bench, WidthPlan, plan_width
from jaxnn.sweeps.options import SweepOptions
from jaxnn.sweeps.search import Group, traced_values
from jaxnn.types import ConfigError, Splits


@dataclasses.dataclass
class GroupRun:
    """A group under way.

    Attributes:
        group: who is in it.
        options: those of each member, cadences resolved.
        splits: the data.
        programs: what is compiled.
        plan: where windows and calls end.
        width: how members lie.
        logs: what became of each member, by row.
        host: the members' states between blocks; None before they are made.
    """

    group: Group
    options: RunOptions
    splits: Splits
    programs: GroupPrograms
    plan: Plan
    width: WidthPlan
    logs: list[Log]
    host: HostStates | None = None

    @property
    def num_members(self) -> int:
        """How many members there are."""
        return len(self.group.members)

    @functools.cached_property
    def fingerprint(self) -> dict[str, str | None]:
        """Digests of the data and of what its first member computes with them alone, by part."""
        return self.programs.solo.fingerprint(self.splits)

    @property
    def monitored(self) -> str:
        """The metric that ranks members, as reports name it; of the training data where nothing is held out."""
        return f"{self.splits.held_out or 'train'}_{self.options.monitor}"

    def running(self) -> list[int]:
        """The rows of the members that are still to be trained."""
        return [row for row, log in enumerate(self.logs) if log.goes_on]

    @property
    def block(self) -> int:
        """How many members are on the devices at a time, at most."""
        return min(self.num_members, self.width.block * self.programs.formula.num_devices)

    def shape(self, num_members: int) -> Shape:
        """How so many members of a block are laid out: in the fastest width that was tried for their number.

        There are always chunks for a whole block, so that one program serves whatever number is left of it.
        """
        num_devices = self.programs.formula.num_devices
        width = self.width.width_for(-(-num_members // num_devices))
        return shape_of(self.block, width, num_devices)

    def start(self) -> HostStates:
        """The members' states, made if they were not yet."""
        if self.host is None:
            self.host = self.programs.initial
        return self.host


def open_group(
    group: Group,
    splits: Splits,
    options: SweepOptions,
    logs: list[Log],
    width: WidthPlan | None,
    clock: Clock,
    shared_seed: int | None = None,
) -> GroupRun:
    """A group with its width planned, unless that was done before; then nothing is compiled yet.

    Args:
        group: who is in it.
        splits: its data.
        options: how to run it.
        logs: what became of its members so far, by row.
        width: what an earlier process decided for it, or None.
        clock: gets the time of compiling and measuring.
        shared_seed: whose order of the data all members see; None: each its own.

    Raises:
        ConfigError, DataError, TrainingError: what is asked for cannot be run.
    """
    first = group.members[0].experiment
    run_options = options.run_options(first.config.num_steps)
    formula = _formula(group, splits, options, shared_seed)
    solo = Programs(first, splits.train, formula.feed, Ledger(), clock, formula.layout)
    check_examples(solo, splits)
    check_patience(run_options.patience, splits.held_out)
    check_monitor(run_options.monitor, solo.evaluation_metrics() if splits.held_out else solo.zeros.sums)
    values = traced_values([member.experiment for member in group.members], group.traced)
    programs = GroupPrograms(formula, solo, len(group.members), values)
    plan = make_plan(run_options, first.config.num_steps)
    if width is None:
        if splits.held_out is not None:
            check_sums(solo, splits.named()[splits.held_out], programs.first_state, options.eval_batch_size)
        with clock.span("measure", "measuring how many members to train side by side"):
            width = _plan(programs, plan, len(group.members), options)
    plan = with_tails(plan._replace(steps_per_call=min(width.steps_per_call, plan.num_steps)))
    return GroupRun(group, run_options, splits, programs, plan, width, logs)


def time_plan(options: SweepOptions, num_steps: int) -> Plan:
    """Where the windows of members of ``num_steps`` end; their steps per call are open."""
    return make_plan(options.run_options(num_steps), num_steps)


def make_ready(run: GroupRun, stack: contextlib.ExitStack) -> None:
    """Compiles what trains a whole block, and has freed memory kept where its temporaries ask for that.

    Args:
        run: the group.
        stack: gets what is to be undone when the group is over.
    """
    shape = run.shape(run.block)
    run.programs.train(shape, run.plan.steps_per_call, "start")
    on_cpu = run.programs.formula.layout.device.platform == "cpu"
    taken = run.programs.temporary_bytes(shape, run.plan.steps_per_call) if on_cpu else 0
    # Not tried out: a call has many steps, which share its page faults.
    settle_allocation(run.options.allocator, taken, None, stack)


def _formula(group: Group, splits: Splits, options: SweepOptions, shared_seed: int | None) -> Formula:
    config = group.members[0].experiment.config
    layout = members_layout(options, config.batch_size, len(group.members))
    seed = config.seed if shared_seed is None else shared_seed
    feed = make_feed(splits, seed, config.batch_size, resident=options.resident, layout=layout)
    if not feed.resident and "seed" in group.traced and shared_seed is None:
        raise ConfigError(
            "the data do not lie on the device, so members cannot each see them in an order of their own: choose "
            "order='shared', or a smaller data set."
        )
    if shared_seed is not None:
        feed = _in_order_of(feed, shared_seed)
    return Formula(group.members[0].experiment, group.traced, splits.train, feed, layout)


def _in_order_of(feed: Feed, seed: int) -> Feed:
    """The feed with its data in one order, whatever a member's own seed."""
    return feed._replace(rows=lambda examples, _, steps: feed.rows(examples, seed, steps))


def members_layout(options: SweepOptions, batch_size: int, num_members: int) -> Layout:
    """The devices that so many members are spread over, and how each lies on several where that is asked for.

    Raises:
        ConfigError: more devices are wanted than there are, or batches of ``batch_size`` cannot be split over them.
    """
    there = find_devices(options.device)
    meshed = None if options.mesh is None else {MEMBERS: 1, **parse_mesh(options.mesh)}
    devices = choose_devices(there, options.devices, None if meshed is None else math.prod(meshed.values()))
    axes = meshed or _axes(options.strategy, len(devices), num_members)
    size = math.prod(axes.values())
    if size == 1:
        return SINGLE_DEVICE
    # Without a mesh, devices that have no member are left idle.
    mesh = make_mesh(devices if options.mesh else devices[:size], axes)
    layout = Layout(options.strategy, mesh, (DATA, MEMBERS))
    check_divides(batch_size, layout.data_size)
    return layout._replace(strategy="data") if layout.data_size == 1 else layout


def _axes(strategy: str, num_devices: int, num_members: int) -> dict[str, int]:
    """What stands along the axes ``members`` and ``data``: members, unless a strategy says otherwise."""
    if strategy != "auto":
        return {MEMBERS: 1, DATA: num_devices}
    return {MEMBERS: min(num_devices, num_members), DATA: 1}


def _plan(programs: GroupPrograms, plan: Plan, num_members: int, options: SweepOptions) -> WidthPlan:
    num_devices = programs.formula.num_devices
    free = available_bytes(device := programs.formula.layout.device)
    if free is not None and device.platform == "cpu":
        # The devices of a CPU share its memory.
        free //= num_devices
    bench = Bench(
        call=_make_calls(programs),
        temporary_bytes=lambda block, width, steps: programs.temporary_bytes(
            shape_of(block * num_devices, width, num_devices), steps
        ),
        member_bytes=programs.member_bytes,
        free_bytes=None if free is None else MEMORY_SHARE * free,
        num_steps=plan.num_steps,
    )
    window = min(typical_window(plan), plan.num_steps)
    return plan_width(bench, -(-num_members // num_devices), window, options.width, options.steps_per_call)


def _make_calls(programs: GroupPrograms) -> Callable[[int, int, int], Call]:
    """From block, width and number of steps to a call that trains one chunk, whose results are thrown away."""
    formula = programs.formula

    def make_call(block: int, width: int, num_steps: int) -> Call:
        shape = shape_of(block * formula.num_devices, width, formula.num_devices)
        program = programs.train(shape, num_steps, "to plan the width")
        rows, alive = range(min(shape.lanes, programs.num_members)), np.ones(programs.num_members, np.bool_)
        population: Any = programs.lay_out(programs.initial, arrange(rows, shape), alive, 0)

        def call() -> object:
            nonlocal population
            examples = formula.feed.prepare(0, num_steps)
            population, totals = program(population, programs.zeros(shape), examples)
            return totals

        return call

    return make_call


def shape_of(num_members: int, width: int, num_devices: int) -> Shape:
    """``num_members`` in chunks of ``width`` on each device."""
    return Shape(-(-num_members // (width * num_devices)), width * num_devices)
