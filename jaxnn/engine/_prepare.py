"""Everything before the first step: data on the device, programs compiled, sizes chosen."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn._clock import Clock
from jaxnn._compat import platform
from jaxnn._fields import SEEDS, seed_field, seed_for, with_fields
from jaxnn._fingerprints import PARTS
from jaxnn._provenance import jax_flags
from jaxnn.data import steps_per_epoch
from jaxnn.engine._checks import check_memory, notes_on
from jaxnn.engine._compiler import Programs
from jaxnn.engine._feed import make_feed
from jaxnn.engine._options import RunOptions
from jaxnn.engine._pure import GroupSpec
from jaxnn.engine._trainer import MemberLog, Trainer
from jaxnn.engine._tuning import (
    MOST_STEPS,
    SHORT_STEP,
    Call,
    VmapPlan,
    choose_steps_per_call,
    many_steps,
    plan_vmap_size,
)
from jaxnn.engine._windows import near_divisor, typical_window, with_tails
from jaxnn.observe import describe_devices
from jaxnn.parallel import SINGLE_DEVICE, Layout, all_agree, process_count
from jaxnn.record import Checkpoints
from jaxnn.tasks import check_direction, direction_of
from jaxnn.types import Array, ConfigError, DataError, Experiment, Splits, TrainState, suggest


class Members(NamedTuple):
    """How the members of a population differ, and how they are arranged."""

    num_members: int
    values: Mapping[str, Array]  # ``[members]`` of each traced field
    # From the values of one member, which may be tracers, to its experiment.
    member: Callable[[Mapping[str, Any]], Experiment[Any]]
    shared_seed: int | None = None  # the seed that orders the data for all; None: each member's own
    vmap_size: int | None = None  # the given one; None: measured
    apart: bool = False  # whether some may be stopped before others
    thorough: bool = False  # whether to measure vmap sizes until they are slower, for their throughput curve
    plan: VmapPlan | None = None  # what an earlier process chose; None: measured
    in_step: bool = True  # whether they train together; else each has a lane, and its own number of updates

    @classmethod
    def of(cls, experiments: Sequence[Experiment[Any]], traced: Iterable[str], **how: Any) -> Self:
        """Returns those of ``experiments`` whose fields ``traced`` alone differ."""
        values, member = cls.traced_values(experiments, traced), functools.partial(cls.with_values, experiments[0])
        return cls(len(experiments), values, member, **how)

    @staticmethod
    def traced_values(experiments: Sequence[Experiment[Any]], names: Iterable[str]) -> dict[str, jax.Array]:
        """Returns the values of all members for each field, ``[members]``: seeds as uint32, floats weakly typed.

        Like a Python float, a weakly typed array takes the precision of the arrays it is combined with.
        """

        def stacked(name: str) -> jax.Array:
            values = np.array([operator.attrgetter(name)(one.config) for one in experiments])
            return jnp.asarray(values.astype(np.uint32)) if name in SEEDS else _weakly_typed(values)

        return {name: stacked(name) for name in names}

    @staticmethod
    def with_values(experiment: Experiment[Any], values: Mapping[str, Any]) -> Experiment[Any]:
        """Returns the experiment of one member: its traced fields set to ``values``."""
        # Replacing nothing would still read all fields.
        return dataclasses.replace(experiment, config=with_fields(experiment.config, values)) if values else experiment


@jax.jit
def _weakly_typed(values: jax.Array) -> jax.Array:
    # Only a weakly typed array stays one: NumPy's are not.
    return jnp.full(values.shape, 0.0).at[:].set(values)


@contextlib.contextmanager
def _promotion_named() -> Iterator[None]:
    """Turns JAX's error of strict promotion, which often comes from another library, into one line."""
    try:
        yield
    except jax.dtypes.TypePromotionError as error:
        first = str(error).partition(". ")[0]
        wrong = "jax_numpy_dtype_promotion is strict, and the experiment's model, loss or optimizer mixes dtypes"
        raise ConfigError(f"{wrong}: {first}.") from error


@_promotion_named()
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

    ``experiment`` is that of the run, or of the first member; the cadences of ``options`` may be None. ``logs`` hold
    the reports of the members so far, by row. Without ``members`` it is a run, for which an earlier process may have
    chosen ``steps_per_call``. ConfigError or DataError if it cannot be run, TrainingError if memory is short.
    """
    _check_jax_flags()
    config, given = experiment.config, members or Members(1, {}, lambda values: experiment)
    evaluated = [splits.named()[name].num_examples for name in splits.evaluated]
    options = options.with_cadences(config, evaluated)
    eval_batch_size = options.eval_batch_size or 2 * config.batch_size
    steps_per_epoch(splits.train.num_examples, config.batch_size)  # raises if there is not one
    seed = seed_for(config, "order") if given.shared_seed is None else given.shared_seed
    with clock.span("load", "loading the data"):
        feed = make_feed(splits, seed, config.batch_size, resident=options.resident, layout=layout)
    if given.shared_seed is not None:
        own_rows = feed.rows
        feed = feed._replace(rows=lambda examples, _, steps: own_rows(examples, seed, steps))
    elif seed_field(config, "order") in given.values and not feed.resident:
        raise ConfigError(
            "the data are not on the device, so members cannot have different orders of them: choose "
            "order='shared', or a smaller data set."
        )
    if not (given.in_step or feed.resident):
        raise ConfigError(
            "the data are not on the device, so members cannot be at different steps: leave resident out, "
            "choose a smaller data set, or sweep a list of points without lanes."
        )
    spec = GroupSpec(experiment, given.member, splits.train, feed, layout, given.in_step)
    logs = list(logs) if logs is not None else [MemberLog()]
    programs = Programs(
        *(spec, splits, eval_batch_size, options.eval_batches, given.values, given.num_members),
        deterministic=options.deterministic,
        clock=clock,
    )
    if options.record and options.checkpoint_every != 0 and not given.thorough:  # which only plans
        programs.while_compiling = Checkpoints.preload
    check_memory(programs)
    if (rows := len(programs.batch.mask)) != config.batch_size:
        raise DataError(
            f"the data make batches of {rows} examples, and batch_size is {config.batch_size}: make as many."
        )
    programs.task.check(programs.shapes.params, programs.shapes.model_state, programs.batch, splits)
    if options.patience is not None and splits.eval_split is None:
        raise ConfigError("patience needs an eval split: give the data a validation or test split.")
    known = [*(programs.derived if splits.eval_split else programs.metrics)]
    if options.monitor not in known and options.monitor.partition("/")[0] not in options.named_probes():
        where = f"no metric of this task on the monitored split, {splits.eval_split or 'train'}"
        raise ConfigError(f"monitor is {options.monitor!r}, {where}: {suggest(options.monitor, known)}.")
    trainer = Trainer(options, splits, programs, options.plan(config.num_steps), logs, clock)
    if options.monitor_mode == "auto":
        check_direction(trainer.monitored, direction_of(trainer.monitored, programs.task.directions), "monitor_mode")
    if process_count() > 1:
        # Fails in each if some process computes something else, or on other data.
        named = {text: str(trainer.fingerprint[part])[:8] for part, text in {**PARTS, "data": "the data"}.items()}
        all_agree("code or data", named | describe_devices()["versions"] | jax_flags())
    trainer.notes = notes_on(programs, splits)
    if members is None:
        _open_run(trainer, steps_per_call)
    else:
        _open_population(trainer, members)
    return trainer


def _check_jax_flags() -> None:
    """Raises ConfigError for a setting of JAX under which nothing can be trained, whatever the experiment."""
    if jax.config.jax_disable_jit:
        how = "to debug a step, call one of jn.steps.make_train_step"
        raise ConfigError(f"jax_disable_jit is on, and training is compiled ahead: turn it off; {how}.")
    for name in ("host_to_device", "device_to_host", "device_to_device"):
        flag = f"jax_transfer_guard_{name}"
        if str(getattr(jax.config, flag) or jax.config.jax_transfer_guard).startswith("disallow"):
            moved = "batches and metrics move between host and device"
            raise ConfigError(f"{flag} disallows transfers, and {moved}: train under jax.transfer_guard('allow').")


def programs_of(
    experiment: Experiment[Any],
    splits: Splits,
    *,
    resident: bool | None = None,
    layout: Layout = SINGLE_DEVICE,
    num_seeds: int | None = None,
    members: Members | None = None,
) -> Programs:
    """The programs of a run, of ``members`` or of a sweep over seeds, to be used or measured; nothing is compiled."""
    if num_seeds is not None:
        seeds = {"seed": np.arange(num_seeds, dtype=np.uint32)}
        members = Members(num_seeds, seeds, lambda values: experiment.replace(**values))
    given = members or Members(1, {}, lambda values: experiment)
    config = experiment.config
    feed = make_feed(splits, seed_for(config, "order"), config.batch_size, resident=resident, layout=layout)
    spec = GroupSpec(experiment, given.member, splits.train, feed, layout)
    return Programs(spec, splits, 2 * config.batch_size, None, given.values, given.num_members)


def _open_run(trainer: Trainer, steps_per_call: int | None) -> None:
    programs, plan, eval_split = trainer.programs, trainer.plan, trainer.splits.eval_split
    steps, window = trainer.options.steps_per_call or steps_per_call, min(typical_window(plan), plan.num_steps)
    if steps is None and programs.layout.platform != "cpu":
        steps = many_steps(programs, window)
    elif steps is None and window > 1:
        cause = "to measure steps per call"
        programs.compile_together(None, [first_length(programs, window)], eval_split, cause)
        check_memory(programs)
        with trainer.clock.span("measure", "measuring steps per call"):
            steps, trainer.seconds_per_step = fastest_steps(programs, make_calls(programs, cause), window)
    steps = min(steps or 1, plan.num_steps)
    trainer.plan = with_tails(plan._replace(steps_per_call=steps))
    if not trainer.seconds_per_step:
        programs.compile_together(None, trainer.plan.call_lengths(), eval_split, "start")
        check_memory(programs)
    for length in trainer.plan.call_lengths():
        programs.train(None, length, "start" if length == steps else "window's end")
    trainer.state = programs.init()


def _open_population(trainer: Trainer, members: Members) -> None:
    programs, plan, eval_split = trainer.programs, trainer.plan, trainer.splits.eval_split
    vmapped = members.plan
    if vmapped is None:
        with trainer.clock.span("measure", "measuring vmap sizes"):
            steps = trainer.options.steps_per_call
            how = {"apart": members.apart, "thorough": members.thorough}
            vmapped = plan_vmap_size(programs, plan, members.vmap_size, steps, **how)
    trainer.vmapped = vmapped
    trainer.plan = with_tails(plan._replace(steps_per_call=min(vmapped.steps_per_call, plan.num_steps)))
    if members.plan is None and not (vmapped.trials or members.thorough):
        programs.compile_together(trainer.shape(trainer.block), trainer.plan.call_lengths(), eval_split, "start")


def fastest_steps(programs: Programs, make_call: Callable[[int], Call], window: int) -> tuple[int, dict[int, float]]:
    """The fastest steps per call, which should divide a ``window``, and the measured seconds per step by length."""
    compile_seconds = max((one.seconds for one in programs.ledger if one.name.startswith("train")), default=0.0)
    how: Any = {"wary": _slow_in_loops(programs), "compile_seconds": compile_seconds}
    return choose_steps_per_call(make_call, window, first_length(programs, window), **how)


def first_length(programs: Programs, window: int) -> int:
    """The number of steps of the call to measure first: many if a step is short, to compile one program less."""
    # The time to read data that are not on the device is unknown.
    known = programs.spec.feed.resident and not _slow_in_loops(programs)
    return near_divisor(window, MOST_STEPS) if known and programs.traced_step.operations < SHORT_STEP else 1


def _slow_in_loops(programs: Programs) -> bool:
    """Whether XLA may make a loop of steps slow, as it does on a CPU with the gradients of plain convolutions."""
    return platform() == "cpu" and programs.traced_step.plain_convolutions > 0


def make_calls(programs: Programs, cause: str) -> Callable[[int], Call]:
    """Returns a function from a number of steps to a call, compiled for ``cause``, that trains a run on."""
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
