"""Measurements that advise: which kind of device an experiment should run on, and which batch size fills it."""

from __future__ import annotations

import contextlib
import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxnn.data import check_batch_size
from jaxnn.engine import (
    ENOUGH_STEPS,
    MEMORY_SHARE,
    PROBE_SECONDS,
    Trial,
    check_choice,
    check_config,
    check_count,
    check_data,
    check_parts,
    make_calls,
    make_step,
    programs_of,
    try_size,
    widen,
    with_changes,
)
from jaxnn.observe import Table, available_bytes, device_name, format_bytes, missing_gpu, text_table
from jaxnn.parallel import computing_on, find_devices, first_devices
from jaxnn.search import grid
from jaxnn.sweeps import SweepOptions, plan_sweep
from jaxnn.types import Batch, ConfigError, Experiment, Splits

# `advise` tries batch sizes in steps of a factor, from two below the config's to five above.
FACTOR, POWERS = 4, range(-2, 6)
# A size with this share of the best throughput is as good, and leaves more updates for the same examples.
NEARLY = 0.9
# `plan_batch_size` goes up to this many times the config's own size.
MOST = 64
# A short call of fewer steps would count its overhead as the steps'.
MANY_STEPS = 256


class BatchSizePlan(NamedTuple):
    """The speed of an experiment at several batch sizes on this machine.

    Attributes:
        trials: the sizes that were tried, smallest first; ``per_second`` is of examples.
        smallest: the smallest size that reaches nine tenths of the best throughput.
        note: why larger ones were not tried, if memory forbade it.
    """

    trials: tuple[Trial, ...]
    smallest: int
    note: str | None

    def table(self) -> Table:
        """Returns the trials as a table with a row per size."""
        rows = []
        for trial in self.trials:
            speed = f"{trial.per_second:,.0f}", f"{1e3 * trial.seconds:.3g}"
            mark = "← the smallest that is nearly as fast as any" if trial.size == self.smallest else ""
            rows.append((str(trial.size), *speed, format_bytes(trial.temporary_bytes), mark))
        notes = [f"batch size {self.note}"] if self.note else []
        return Table(("batch size", "examples/s", "ms/step", "temporaries", ""), rows, notes)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def plan_batch_size(
    experiment: Experiment[Any], batch_sizes: Sequence[int] | None = None, device: str | None = None
) -> BatchSizePlan:
    """Measures examples per second at several batch sizes, and the memory they take; nothing is trained or written.

    It shows how the machine is filled, not what learns best: a larger batch may need another learning rate.

    Args:
        experiment: what would be run.
        batch_sizes: the sizes to try, ascending; default: doubling from a quarter of the config's until it is no
            faster, no longer fits, or is 64 times that.
        device: the kind of device, ``cpu``, ``gpu`` or ``tpu``; None: JAX's default.

    Raises:
        ConfigError, DataError: it cannot be run.
    """
    with computing_on(device):
        config, splits = experiment.config, _checked_data(experiment)
        for size in batch_sizes or ():
            check_count("batch_size", size, 1)
        doubling = [max(1, config.batch_size // 4)]
        while 2 * doubling[-1] <= config.batch_size * MOST:
            doubling.append(2 * doubling[-1])
        sizes = [size for size in sorted(set(batch_sizes or doubling)) if size <= splits.train.num_examples]
        if not sizes:
            raise ConfigError(f"no batch size to try is within the {splits.train.num_examples} training examples.")
        free = available_bytes(find_devices(device)[0])

        def attempt(size: int) -> Trial:
            programs = programs_of(experiment.replace(batch_size=size), splits)
            make_call = make_calls(programs, "to plan the batch size")
            for num_steps in (ENOUGH_STEPS, MANY_STEPS):
                trial = try_size(size, num_steps, make_call(num_steps), programs.temporary_bytes(None, num_steps))
                if trial.seconds * num_steps > PROBE_SECONDS:
                    break
            return trial

        trials = [attempt(sizes[0])]
        # The config's own is what others are compared with.
        memory = None if free is None else MEMORY_SHARE * free
        note = widen(sizes, trials, attempt, free_bytes=memory, least=config.batch_size)
    best = max(trial.per_second for trial in trials)
    smallest = next(trial.size for trial in trials if trial.per_second >= NEARLY * best)
    return BatchSizePlan(tuple(trials), smallest, note)


def _checked_data(experiment: Experiment[Any]) -> Splits:
    """The data of an experiment that can be run."""
    check_config(experiment.config)
    splits = experiment.data(experiment.config)
    check_data(splits)
    check_parts(experiment)
    return splits


class StepParts(NamedTuple):
    """The seconds of one step that is a call of its own, on a batch that is on the device.

    Attributes:
        call: a call that computes next to nothing.
        forward: from the batch to the loss.
        backward: from the loss to the gradient of all parameters.
        update: from the gradient to the next state.
    """

    call: float
    forward: float
    backward: float
    update: float


@dataclasses.dataclass(frozen=True)
class AdviseOptions:
    """How to measure; flags of every script's ``advise`` and keyword arguments of ``jn.advise``."""

    devices: tuple[str, ...] | None = None
    """Kinds of device to compare, such as cpu gpu; default: all that there are."""
    members: int = 64
    """The most members of a sweep to try side by side; 1: none are tried."""
    progress: Literal["auto", "none"] = "auto"
    """Whether to print what is being done."""

    def __post_init__(self) -> None:
        check_count("members", self.members, 1)
        check_choice("progress", self.progress, ("auto", "none"))


class DeviceFigures(NamedTuple):
    """What was measured on one device.

    Attributes:
        name: such as ``CPU, AMD EPYC, 2 cores``.
        batch_sizes: throughput at several batch sizes, in examples/s.
        parts: the time of a step of the config's batch size, by part.
        members: throughput at several numbers of sweep members side by side, in member-steps/s; may be empty.
    """

    name: str
    batch_sizes: BatchSizePlan
    parts: StepParts
    members: tuple[Trial, ...]

    def at(self, batch_size: int) -> Trial:
        """The figures of a batch size; if it does not fit, of the largest smaller one that was tried."""
        return [trial for trial in self.batch_sizes.trials if trial.size <= batch_size][-1]


class Advice(NamedTuple):
    """Which device to train an experiment on; it prints as a table and a sentence for each device.

    Attributes:
        data: the data set's name.
        batch_size: the config's.
        devices: what was measured, by kind.
        absent: why a GPU is not among them.
    """

    data: str
    batch_size: int
    devices: Mapping[str, DeviceFigures]
    absent: str

    @property
    def compared(self) -> int:
        """The batch size that devices are compared at: the config's, or the largest below it that fits on all."""
        return min(figures.at(self.batch_size).size for figures in self.devices.values())

    @property
    def best(self) -> str:
        """The kind of device with the most examples/s at that batch size."""
        return max(self.devices, key=lambda kind: self.devices[kind].at(self.compared).per_second)

    def speedup(self, kind: str, over: str) -> float:
        """Speed of ``kind`` relative to ``over`` at that batch size."""
        mine, other = (self.devices[name].at(self.compared).per_second for name in (kind, over))
        return mine / other

    def faster(self, kind: str, over: str) -> list[int]:
        """The batch sizes, of those tried on both, at which ``kind`` is faster than ``over``."""
        mine, other = (
            {trial.size: trial.per_second for trial in self.devices[name].batch_sizes.trials} for name in (kind, over)
        )
        return [size for size in mine if size in other and mine[size] > other[size]]

    def __str__(self) -> str:
        columns = []
        for figures in self.devices.values():
            step = sum(figures.parts)
            shares = ", ".join(f"{name} {seconds / step:.0%}" for name, seconds in figures.parts._asdict().items())
            cells = {"a step by itself": f"{1e3 * step:.3g} ms: {shares}"}
            for one in figures.batch_sizes.trials:
                cells[f"batch size {one.size}"] = f"{one.per_second:,.0f} examples/s"
            for one in figures.members:
                cells[f"{one.size} member{'s' * (one.size > 1)}"] = f"{one.per_second:,.0f} member-steps/s"
            columns.append(cells)
        names = dict.fromkeys(name for cells in columns for name in cells)
        rows = [(name, *(cells.get(name, "") for cells in columns)) for name in names]
        header = f"{self.data}, batch size {self.batch_size}", *(figures.name for figures in self.devices.values())
        best, others = self.best, [kind for kind in self.devices if kind != self.best]
        why = ", ".join(f"{self.speedup(best, kind):.1f} times as fast as the {kind.upper()}" for kind in others)
        why = f"{why} at a batch size of {self.compared}" if why else "it is all that was measured"
        full = self.devices[best].batch_sizes.smallest
        lines = [f"Train on the {best.upper()}: {why}. A batch size of {full} fills it. {self.absent}".rstrip()]
        for kind in others:
            sizes = ", ".join(map(str, self.faster(kind, best)))
            lines.append(f"The {kind.upper()} is faster at {f'batch sizes {sizes}' if sizes else 'no size tried'}.")
        return "\n".join([text_table(rows, header), "", *lines])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def advise(experiment: Experiment[Any], options: AdviseOptions | None = None, **changes: Any) -> Advice:
    """Measures ``experiment`` on each kind of device, and recommends one and a batch size that fills it.

    For each: throughput at several batch sizes, the parts of a step's time, throughput of several sweep members side by
    side. Nothing is trained or written. It costs some seconds and about ten compilations a device.

    Args:
        experiment: what would be run.
        options: how to measure.
        **changes: single options, such as ``devices=("cpu", "gpu")``.

    Raises:
        ConfigError, DataError: it cannot be run, or a device is not there.
    """
    options = with_changes(options or AdviseOptions(), changes)
    devices = first_devices(options.devices)
    config, splits = experiment.config, _checked_data(experiment)
    check_batch_size(splits.train, config.batch_size)
    tried = {int(config.batch_size * FACTOR**power) for power in POWERS}
    sizes = sorted(size for size in tried if 1 <= size <= splits.train.num_examples)
    held = dataclasses.replace(experiment, data=lambda _: splits)  # read once, for all that is tried
    found = {}
    for kind, device in devices.items():
        name = device_name(device)
        if options.progress == "auto":
            print(f"advise: {name}: batch sizes {sizes[0]} to {sizes[-1]}, up to {options.members} members", flush=True)
        plan, parts = plan_batch_size(held, sizes, kind), _measure_parts(held, splits, kind)
        found[kind] = DeviceFigures(name, plan, parts, _measure_members(held, options.members, kind))
    wanted = options.devices is None and "gpu" not in devices
    absent = missing_gpu() or "JAX has no GPU here, so none was measured." if wanted else ""
    return Advice(splits.name, config.batch_size, found, absent)


def _measure_members(experiment: Experiment[Any], num_members: int, kind: str) -> tuple[Trial, ...]:
    """Measures up to ``num_members`` members under one vmap, which differ in their seed; none if it cannot be swept."""
    options = with_changes(SweepOptions(devices=1, record=False, progress="none", plan_only=True), {"device": kind})
    # Not every experiment can be swept: one whose data are streamed cannot.
    with computing_on(kind), contextlib.suppress(ConfigError):
        if num_members > 1:
            plan = plan_sweep(experiment, grid(seed=range(num_members)), options)
            chosen = plan.trainer(plan.groups[0]).vmapped
            return () if chosen is None else chosen.trials
    return ()


def _measure_parts(experiment: Experiment[Any], splits: Splits, kind: str) -> StepParts:
    """Times programs that do more and more of a step on a ``kind`` of device; a part is what it adds, at least 0."""

    def loss(params: Any, state: Any, batch: Any) -> Any:
        task = experiment.task(experiment.config)
        return task.loss(params, state.model_state, batch, state.key)

    parts: list[Callable[[Any, Any], Any]] = [
        lambda state, batch: state.step + 1,
        lambda state, batch: loss(state.params, state, batch),
        lambda state, batch: jax.value_and_grad(loss, has_aux=True)(state.params, state, batch),
        make_step(experiment),
    ]
    with computing_on(kind):
        programs = programs_of(experiment, splits, resident=False)
        state, batch = programs.init(), splits.train.as_batch(programs.first_examples)

        def seconds(part: Callable[[Any, Any], Any]) -> float:
            # The mask is closed over: like a run's step, the program is to know that the batch is full.
            program = jax.jit(lambda state, inputs, targets: part(state, Batch(inputs, targets, batch.mask)))
            return try_size(1, 1, lambda: program(state, batch.inputs, batch.targets), 0).seconds

        times = np.maximum.accumulate([seconds(part) for part in parts])
    return StepParts(*np.diff(times, prepend=0.0).tolist())
