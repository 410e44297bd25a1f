"""Recommends a device and a batch size for an experiment, from measurements."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxnn import engine
from jaxnn._fields import bounded, check_fields, with_changes
from jaxnn._text import Table
from jaxnn.data import steps_per_epoch
from jaxnn.observe import available_bytes, device_name, missing_gpu
from jaxnn.parallel import computing_on, find_devices, first_devices
from jaxnn.search import grid
from jaxnn.sweeps import SweepOptions, plan_sweep
from jaxnn.types import Batch, ConfigError, Experiment, Splits

FACTORS = tuple(4.0**power for power in range(-2, 6))  # `advise` tries the config's batch size times these
# The smallest size with this share of the best throughput is recommended: it gives more updates per example.
SATURATED = 0.9
MANY_STEPS = 256  # fast steps are timed in calls of this many, so that the overhead of a call does not count


class BatchSizePlan(NamedTuple):
    """The throughput at several batch sizes. It is not convergence: a larger batch may need another learning rate."""

    trials: tuple[engine.Trial, ...]  # the measured sizes, smallest first; ``per_second`` is examples/s
    smallest: int  # the smallest size with at least 90 % of the best throughput
    note: str | None  # why larger sizes were not tried, if they exceed the memory


@dataclasses.dataclass(frozen=True)
class AdviseOptions:
    """Options of `advise`; flags of every script's ``advise`` command."""

    devices: tuple[str, ...] | None = None
    """Kinds of device to compare, such as cpu gpu; default: all available."""
    members: int = bounded(64, least=1)
    """Largest number of sweep members to vmap; 1 measures no sweep."""
    progress: Literal["auto", "none"] = bounded("auto", choices=("auto", "none"))
    """Whether to print progress."""

    def __post_init__(self) -> None:
        check_fields(self)


class DeviceFigures(NamedTuple):
    """Measurements on one device."""

    name: str  # such as ``CPU, AMD EPYC, 2 cores``
    batch_sizes: BatchSizePlan
    # Seconds of one step at the config's batch size, dispatched alone on a batch that is on the device: the overhead of
    # the ``call``, ``forward`` to the loss, ``backward`` to the gradient, ``update`` to the state.
    parts: Mapping[str, float]
    members: tuple[engine.Trial, ...]  # at several numbers of vmapped sweep members, in member-steps/s; may be empty

    def at(self, batch_size: int) -> engine.Trial:
        """Returns the trial of ``batch_size``, or of the largest smaller size if that does not fit."""
        return [trial for trial in self.batch_sizes.trials if trial.size <= batch_size][-1]


class Advice(NamedTuple):
    """Recommends the device to train on; prints as a table and a conclusion."""

    data: str  # the data set's name
    batch_size: int  # the config's
    devices: Mapping[str, DeviceFigures]  # measurements by kind of device
    absent: str  # why no GPU was measured

    @property
    def compared(self) -> int:
        """The batch size at which devices are compared: the config's, or the largest below it that fits on all."""
        return min(figures.at(self.batch_size).size for figures in self.devices.values())

    @property
    def best(self) -> str:
        """The kind of device with the highest throughput at that batch size."""
        return max(self.devices, key=lambda kind: self.devices[kind].at(self.compared).per_second)

    def __repr__(self) -> str:
        columns = []
        for figures in self.devices.values():
            step = sum(figures.parts.values())
            shares = ", ".join(f"{name} {seconds / step:.0%}" for name, seconds in figures.parts.items())
            cells = {"one step": f"{1e3 * step:.3g} ms: {shares}"}
            for one in figures.batch_sizes.trials:
                cells[f"batch size {one.size}"] = f"{one.per_second:,.0f} examples/s"
            for one in figures.members:
                cells[f"{one.size} member{'s' * (one.size > 1)}"] = f"{one.per_second:,.0f} member-steps/s"
            columns.append(cells)
        names = dict.fromkeys(name for cells in columns for name in cells)
        rows = [(name, *(cells.get(name, "") for cells in columns)) for name in names]
        header = f"{self.data}, batch size {self.batch_size}", *(figures.name for figures in self.devices.values())
        best, others = self.best, [kind for kind in self.devices if kind != self.best]
        rates = {kind: figures.at(self.compared).per_second for kind, figures in self.devices.items()}
        why = ", ".join(f"{rates[best] / rates[kind]:.1f} times as fast as the {kind.upper()}" for kind in others)
        why = f"{why} at a batch size of {self.compared}" if why else "the only device measured"
        full = self.devices[best].batch_sizes.smallest
        notes = ["", f"Train on the {best.upper()}: {why}. A batch size of {full} fills it. {self.absent}".rstrip()]
        limits = ((kind, figures.batch_sizes.note) for kind, figures in self.devices.items())
        notes += [f"On the {kind.upper()}, batch size {note}." for kind, note in limits if note]
        tried = {kind: {one.size: one.per_second for one in self.devices[kind].batch_sizes.trials} for kind in rates}
        for kind in others:
            sizes = ", ".join(str(size) for size, rate in tried[kind].items() if rate > tried[best].get(size, rate))
            notes.append(f"The {kind.upper()} is faster at {f'batch sizes {sizes}' if sizes else 'no size measured'}.")
        return str(Table(header, rows, notes))


def advise(experiment: Experiment[Any], options: AdviseOptions | None = None, **changes: Any) -> Advice:
    """Measures ``experiment`` on each kind of device and recommends a device and a batch size that fills it.

    On each device it measures throughput at several batch sizes, the parts of a step, and the throughput of vmapped
    sweep members: some seconds and about ten compilations. Nothing is trained or written.

    Args:
        experiment: what to measure.
        options: how to measure, see `AdviseOptions`.
        **changes: single options, such as ``devices=("cpu", "gpu")``.

    Raises ConfigError or DataError if the experiment cannot be run or a device is not available.

    >>> print(jn.advise(experiment.replace(batch_size=1024), devices=("cpu",), members=1, progress="none"))
    digits, batch size 1024 ...
    Train on the CPU: the only device measured. A batch size of ... fills it.
    """
    options = with_changes(options or AdviseOptions(), changes)
    devices = first_devices(options.devices)
    config, splits = experiment.config, engine.load_data(experiment)
    steps_per_epoch(splits.train.num_examples, config.batch_size)  # raises if there is not one
    tried = {int(config.batch_size * factor) for factor in FACTORS}
    sizes = sorted(size for size in tried if 1 <= size <= splits.train.num_examples)
    loaded = dataclasses.replace(experiment, data=lambda _: splits)  # reads the data once
    found = {}
    for kind, device in devices.items():
        name = device_name(device)
        if options.progress == "auto":
            print(f"advise: {name}: batch sizes {sizes[0]} to {sizes[-1]}, up to {options.members} members", flush=True)
        plan, parts = _measure_sizes(loaded, splits, sizes, kind), _measure_parts(loaded, splits, kind)
        found[kind] = DeviceFigures(name, plan, parts, _measure_members(loaded, options.members, kind))
    expected = options.devices is None and "gpu" not in devices
    absent = missing_gpu() or "No GPU was measured: JAX finds none." if expected else ""
    return Advice(splits.name, config.batch_size, found, absent)


def _measure_sizes(experiment: Experiment[Any], splits: Splits, sizes: Sequence[int], kind: str) -> BatchSizePlan:
    """Measures batch sizes, ascending, until they are slower or do not fit; sizes up to the config's own anyway."""
    with computing_on(kind):
        free = available_bytes(find_devices(kind)[0])

        def attempt(size: int) -> engine.Trial:
            programs = engine.programs_of(experiment.replace(batch_size=size), splits)
            make_call = engine.make_calls(programs, "to plan the batch size")
            for num_steps in (engine.ENOUGH_STEPS, MANY_STEPS):
                call = make_call(num_steps)  # compiles, so that the memory is known
                trial = engine.Trial.measure(size, num_steps, call, programs.temporary_bytes(None, num_steps))
                if trial.is_long(num_steps):
                    break
            return trial

        trials = [attempt(sizes[0])]
        memory = None if free is None else engine.MEMORY_SHARE * free
        note = engine.widen(sizes, trials, attempt, free_bytes=memory, least=experiment.config.batch_size)
    best = max(trial.per_second for trial in trials)
    smallest = next(trial.size for trial in trials if trial.per_second >= SATURATED * best)
    return BatchSizePlan(tuple(trials), smallest, note)


def _measure_members(experiment: Experiment[Any], num_members: int, kind: str) -> tuple[engine.Trial, ...]:
    """Measures up to ``num_members`` seeds under one vmap; none if the experiment cannot be swept."""
    options = SweepOptions(devices=1, record=False, progress="none", plan_only=True)
    options = with_changes(options, {"device": kind})
    # Streamed data, among others, cannot be swept.
    with computing_on(kind), contextlib.suppress(ConfigError):
        if num_members > 1:
            plan = plan_sweep(experiment, grid(seed=range(num_members)), options)
            chosen = plan.trainer(plan.groups[0]).vmapped
            return () if chosen is None else chosen.trials
    return ()


def _measure_parts(experiment: Experiment[Any], splits: Splits, kind: str) -> dict[str, float]:
    """Times growing prefixes of a step on a ``kind`` of device; a part is the difference of two, at least 0."""

    def loss(params: Any, state: Any, batch: Any) -> Any:
        task = experiment.task(experiment.config)
        return task.loss(params, state.model_state, batch, state.key)

    parts: dict[str, Callable[[Any, Any], Any]] = {
        "call": lambda state, batch: state.step + 1,
        "forward": lambda state, batch: loss(state.params, state, batch),
        "backward": lambda state, batch: jax.value_and_grad(loss, has_aux=True)(state.params, state, batch),
        "update": engine.make_step(experiment),
    }
    with computing_on(kind):
        programs = engine.programs_of(experiment, splits, resident=False)
        state, batch = programs.init(), splits.train.as_batch(programs.first_examples)

        def seconds(part: Callable[[Any, Any], Any]) -> float:
            # The mask is a constant, as in a run's step: the program can use that the batch is full.
            program = jax.jit(lambda state, inputs, targets: part(state, Batch(inputs, targets, batch.mask)))
            return engine.Trial.measure(1, 1, lambda: program(state, batch.inputs, batch.targets), 0).seconds

        times = np.maximum.accumulate([seconds(part) for part in parts.values()])
    return dict(zip(parts, np.diff(times, prepend=0.0).tolist(), strict=True))
