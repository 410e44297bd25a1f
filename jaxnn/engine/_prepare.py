"""Everything before the first step: data on the device, programs compiled, sizes chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxnn.data import check_batch_size
from jaxnn.engine._checks import check_alike_on_devices, check_examples, check_monitor, check_patience, check_sums
from jaxnn.engine._compiler import Programs
from jaxnn.engine._feed import make_feed
from jaxnn.engine._options import RunOptions, make_plan, resolve_cadences
from jaxnn.engine._pure import GroupSpec
from jaxnn.engine._states import arrange, member_state, shape_of
from jaxnn.engine._trainer import MemberLog, Trainer
from jaxnn.engine._tuning import MEMORY_SHARE, Call, Choice, VmapPlan, VmapProbe, choose_steps_per_call, plan_vmap_size
from jaxnn.engine._windows import Plan, typical_window, with_tails
from jaxnn.nn import platform
from jaxnn.observe import Clock, available_bytes, check_placement, describe_devices
from jaxnn.parallel import SINGLE_DEVICE, Layout, all_agree, process_count
from jaxnn.record import PARTS, jax_flags
from jaxnn.types import Array, ConfigError, Experiment, Splits, TrainState


class Members(NamedTuple):
    """What tells the members of a population from each other.

    Attributes:
        numbers: theirs, in the order of the rows.
        values: ``[members]`` of each traced field.
        member: from the values of one of them, which may be tracers, to its experiment.
        shared_seed: the seed whose order of the data all see; None: each its own.
        vmap_size: that is not to be measured, or None.
        thorough: whether to measure vmap sizes until they are slower, for their throughput curve.
        plan: what an earlier process chose, or None.
    """

    numbers: tuple[int, ...]
    values: Mapping[str, Array]
    member: Callable[[Mapping[str, Any]], Experiment[Any]]
    shared_seed: int | None = None
    vmap_size: int | None = None
    thorough: bool = False
    plan: VmapPlan | None = None


def open_trainer(
    experiment: Experiment[Any],
    options: RunOptions,
    splits: Splits,
    layout: Layout,
    clock: Clock,
    *,
    logs: Sequence[MemberLog] | None = None,
    members: Members | None = None,
    steps_per_call: int | None = None,
) -> Trainer:
    """Compiles what trains a run or a population and chooses its sizes: everything before the first step.

    Args:
        experiment: that of the run, or of the first member.
        options: how to run; cadences may be open.
        splits: the data.
        layout: the devices.
        clock: gets the time.
        logs: what became of the members so far, by row; default: one that is waiting.
        members: what tells members from each other; None: a run.
        steps_per_call: what an earlier process chose.

    Raises:
        ConfigError, DataError: what is asked for cannot be run; nothing was written.
        TrainingError: there is no room for it.
    """
    config = experiment.config
    options = resolve_cadences(options, config.num_steps)
    eval_batch_size = options.eval_batch_size or 2 * config.batch_size
    check_batch_size(splits.train, config.batch_size)
    shared_seed = members.shared_seed if members is not None else None
    seed = config.seed if shared_seed is None else shared_seed
    with clock.span("load", "loading the data"):
        feed = make_feed(splits, seed, config.batch_size, resident=options.resident, layout=layout)
    if members is not None and not feed.resident and "seed" in members.values and shared_seed is None:
        raise ConfigError(
            "the data are not on the device, so members cannot each see them in an order of their own: choose "
            "order='shared', or a smaller data set."
        )
    if shared_seed is not None:
        own_rows = feed.rows
        feed = feed._replace(rows=lambda examples, _, steps: own_rows(examples, seed, steps))
    member = members.member if members is not None else lambda values: experiment
    values = members.values if members is not None else {}
    spec = GroupSpec(experiment, member, "seed" in values, splits.train, feed, layout)
    logs = list(logs) if logs is not None else [MemberLog()]
    programs = Programs(spec, splits, eval_batch_size, values, len(logs), clock=clock)
    check_examples(programs, splits)
    check_patience(options.patience, splits.held_out)
    check_monitor(options.monitor, programs.derived if splits.held_out else programs.metrics)
    plan = make_plan(options, config.num_steps)
    numbers = members.numbers if members is not None else None
    trainer = Trainer(options, splits, programs, plan, Choice(1, {}), logs, clock, numbers=numbers)
    if process_count() > 1:
        _check_processes(trainer)
    check_alike_on_devices(programs, splits)
    if members is None:
        _open_run(trainer, steps_per_call)
    else:
        _open_population(trainer, members)
    return trainer


def programs_of(experiment: Experiment[Any], splits: Splits, *, resident: bool | None = None) -> Programs:
    """The programs of a run on one device, to be measured or looked into; nothing is compiled yet.

    Args:
        experiment: what would be run; its ``data`` is not called.
        splits: its data.
        resident: the run option.
    """
    config = experiment.config
    feed = make_feed(splits, config.seed, config.batch_size, resident=resident, layout=SINGLE_DEVICE)
    spec = GroupSpec(experiment, lambda values: experiment, False, splits.train, feed, SINGLE_DEVICE)
    return Programs(spec, splits, 2 * config.batch_size)


def _check_processes(trainer: Trainer) -> None:
    """Raises ConfigError if some process computes something else, or on other data."""
    digests = trainer.fingerprint
    named = {text: str(digests[part])[:8] for part, text in {**PARTS, "data": "the data"}.items()}
    all_agree("code or data", named | describe_devices()["versions"] | jax_flags())


def _open_run(trainer: Trainer, steps_per_call: int | None) -> None:
    programs, plan, held_out = trainer.programs, trainer.plan, trainer.splits.held_out
    given = trainer.options.steps_per_call or steps_per_call
    known = with_tails(plan._replace(steps_per_call=given)).call_lengths() if given else [1]
    programs.compile_together(None, known, held_out, "start" if given else "to measure steps per call")
    with trainer.clock.span("measure", "measuring steps per call"):
        trainer.choice = choose_call(programs, plan, given)
    chosen = trainer.choice.steps_per_call
    trainer.plan = with_tails(plan._replace(steps_per_call=chosen))
    for length in trainer.plan.call_lengths():
        programs.train(None, length, "start" if length == chosen else "window's end")
    trainer.state = programs.init()
    if held_out is not None:
        check_sums(programs, trainer.splits.named()[held_out], lambda: trainer.state)
        programs.evaluator(None, held_out)
    check_placement(trainer.placement(), platform())


def choose_call(programs: Programs, plan: Plan, given: int | None) -> Choice:
    """The steps per call of a run: those given, or those that measuring finds fastest.

    Args:
        programs: what is compiled.
        plan: where windows end.
        given: the steps per call that are not to be measured, or None.
    """
    window = min(typical_window(plan), plan.num_steps)
    if given is not None or window == 1:
        return Choice(min(given or 1, plan.num_steps), {})
    return fastest_steps(programs, make_calls(programs, "to measure steps per call"), window)


def fastest_steps(programs: Programs, make_call: Callable[[int], Call], window: int) -> Choice:
    """The steps per call that measuring finds fastest; a ``window`` of steps is best made of whole calls."""
    # XLA makes the gradients of plain convolutions slow in loops on a CPU, so a loop is tried with care.
    wary = platform() == "cpu" and programs.plain_convolutions > 0
    return choose_steps_per_call(make_call, window, wary=wary)


def make_calls(programs: Programs, cause: str) -> Callable[[int], Call]:
    """From a number of steps to a call that trains a run that far, from where the call before ended.

    Args:
        programs: what is compiled.
        cause: the reason, for the ledger.
    """
    state: TrainState | None = None

    def make_call(length: int) -> Call:
        program = programs.train(None, length, cause)
        # The same every time: what reading data costs does not depend on the steps per call.
        examples = programs.spec.feed.sample(length)

        def call() -> object:
            nonlocal state
            state, totals = program(programs.init() if state is None else state, programs.zeros(None), examples)
            return totals

        return call

    return make_call


def _open_population(trainer: Trainer, members: Members) -> None:
    programs, plan, choice, held_out = trainer.programs, trainer.plan, members.plan, trainer.splits.held_out
    if choice is None:
        if held_out is not None:
            split = trainer.splits.named()[held_out]
            check_sums(programs, split, lambda: member_state(programs.initial, programs.shapes, 0))
        with trainer.clock.span("measure", "measuring how many members to train under one vmap"):
            choice = _choose_vmap(programs, plan, members, trainer.options.steps_per_call)
    trainer.choice = choice
    trainer.plan = with_tails(plan._replace(steps_per_call=min(choice.steps_per_call, plan.num_steps)))


def _choose_vmap(programs: Programs, plan: Plan, members: Members, steps_per_call: int | None) -> VmapPlan:
    num_devices, device = programs.spec.num_devices, programs.layout.device
    free = available_bytes(device)
    if free is not None and device.platform == "cpu":
        # The devices of a CPU share its memory.
        free //= num_devices

    def make_call(block: int, size: int, num_steps: int) -> Call:
        shape = shape_of(block * num_devices, size, num_devices)
        programs.compile_together(shape, [num_steps], programs.splits.held_out, "to choose the vmap size")
        program = programs.train(shape, num_steps, "to choose the vmap size")
        rows, alive = range(min(shape.lanes, programs.num_members)), np.ones(programs.num_members, np.bool_)
        population: Any = programs.lay_out(programs.initial, arrange(rows, shape), alive, 0)

        def call() -> object:
            nonlocal population
            population, totals = program(population, programs.zeros(shape), programs.spec.feed.prepare(0, num_steps))
            return totals

        return call

    def taken(block: int, size: int, num_steps: int) -> int:
        return programs.temporary_bytes(shape_of(block * num_devices, size, num_devices), num_steps)

    free_bytes = None if free is None else MEMORY_SHARE * free
    probe = VmapProbe(make_call, taken, programs.member_bytes, free_bytes, plan.num_steps, device.platform == "cpu")
    num_members, window = -(-programs.num_members // num_devices), min(typical_window(plan), plan.num_steps)
    return plan_vmap_size(probe, num_members, window, members.vmap_size, steps_per_call, thorough=members.thorough)
