"""``jn.advise``: measures an experiment on each kind of device that there is, and says which to use."""

from __future__ import annotations

import contextlib
import dataclasses
import html
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jaxnn.advice._probes import BatchSizePlan, StepParts, measure_parts, plan_batch_size, plan_members
from jaxnn.data import check_batch_size
from jaxnn.engine import Trial, check_choice, check_config, check_count, check_data, check_parts, with_changes
from jaxnn.observe import device_name, missing_gpu, text_table
from jaxnn.parallel import first_devices
from jaxnn.types import ConfigError, Experiment

# Batch sizes are tried in steps of a factor, from two below the config's to five above.
FACTOR, POWERS = 4, range(-2, 6)


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
    """What was measured on one device."""

    name: str  # such as ``CPU, AMD EPYC, 2 cores``
    batch_sizes: BatchSizePlan  # throughput at several batch sizes, in examples/s
    parts: StepParts  # where the time of a step of the config's batch size goes
    # Throughput at several numbers of sweep members side by side, in member-steps/s; may be empty.
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
    """Measures ``experiment`` on each kind of device, and says which to use and what would fill it.

    For each: throughput at several batch sizes, where the time of a step goes, throughput of several sweep members side
    by side. Nothing is trained or written. It costs some seconds and about ten compilations a device.

    Args:
        experiment: what would be run.
        options: how to measure.
        **changes: single options, such as ``devices=("cpu", "gpu")``.

    Raises:
        ConfigError, DataError: it cannot be run, or a device is not there.
    """
    options = with_changes(options or AdviseOptions(), changes)
    config = experiment.config
    check_config(config)
    devices = first_devices(options.devices)
    splits = experiment.data(config)
    check_data(splits)
    check_parts(experiment)
    check_batch_size(splits.train, config.batch_size)
    tried = {int(config.batch_size * FACTOR**power) for power in POWERS}
    sizes = sorted(size for size in tried if 1 <= size <= splits.train.num_examples)
    held = dataclasses.replace(experiment, data=lambda _: splits)  # read once, whatever is tried
    found = {}
    for kind, device in devices.items():
        name = device_name(device)
        if options.progress == "auto":
            print(f"advise: {name}: batch sizes {sizes[0]} to {sizes[-1]}, up to {options.members} members", flush=True)
        plan, members = plan_batch_size(held, sizes, kind), tuple[Trial, ...]()
        with contextlib.suppress(ConfigError):  # not every experiment can be swept: data that are streamed, say
            members = plan_members(held, options.members, kind) if options.members > 1 else members
        found[kind] = DeviceFigures(name, plan, measure_parts(held, splits, kind), members)
    asked = options.devices is None and "gpu" not in devices
    absent = missing_gpu() or "JAX has no GPU here, so none was measured." if asked else ""
    return Advice(splits.name, config.batch_size, found, absent)
