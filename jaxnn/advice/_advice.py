"""The advice: which device, why, and what would fill it, as figures and as text."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxnn.advice._probes import BatchSizePlan, StepParts
from jaxnn.engine import Trial

# Devices this near to each other are alike.
ALIKE = 1.1
# A share of a step that is spent on calling and not computing, above which the call is what to save.
MUCH = 0.5


class DeviceFigures(NamedTuple):
    """What was measured on one device.

    Attributes:
        name: what tells it from others.
        batch_sizes: throughput at several batch sizes, in examples a second.
        parts: where the time of a step of the config's batch size goes.
        widths: throughput at several numbers of sweep members side by side, in member-steps a second; may be empty.
    """

    name: str
    batch_sizes: BatchSizePlan
    parts: StepParts
    widths: tuple[Trial, ...]

    def at(self, batch_size: int) -> Trial:
        """The figures of a batch size; where it does not fit, of the largest smaller one that was tried."""
        return [trial for trial in self.batch_sizes.trials if trial.size <= batch_size][-1]


class Advice(NamedTuple):
    """Which device to train an experiment on; it prints as sentences.

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
        """The kind of device with the most examples a second at that batch size."""
        return max(self.devices, key=lambda kind: self.devices[kind].at(self.compared).per_second)

    def speedup(self, kind: str, over: str) -> float:
        """How many times as fast ``kind`` is at that batch size."""
        mine, other = (self.devices[name].at(self.compared).per_second for name in (kind, over))
        return mine / other

    def crossover(self, kind: str, over: str) -> int | None:
        """The smallest batch size from which ``kind`` is faster at all larger ones tried on both; None: at none."""
        pairs = {
            size: (self.devices[kind].at(size).per_second, self.devices[over].at(size).per_second)
            for size in self.sizes(kind, over)
        }
        wins = [size for size in pairs if all(a > b for larger, (a, b) in pairs.items() if larger >= size)]
        return min(wins, default=None)

    def sizes(self, *kinds: str) -> list[int]:
        """The batch sizes that were tried on all these."""
        tried = [{trial.size for trial in self.devices[kind].batch_sizes.trials} for kind in kinds]
        return sorted(set.intersection(*tried))

    def __str__(self) -> str:
        lines = [f"{self.data}, batch size {self.batch_size}"]
        for figures in self.devices.values():
            lines += ["", figures.name, *(f"  {line}" for line in _told(figures, self.batch_size))]
        return "\n".join([*lines, "", *_verdict(self)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _told(figures: DeviceFigures, batch_size: int) -> list[str]:
    parts, own = figures.parts, figures.at(batch_size)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.shares().items())
    short = "" if own.size == batch_size else f"; of {own.size}, for {figures.batch_sizes.note}"
    told = [
        f"a step          {_ms(parts.step)} by itself: {shares}",
        f"                {_ms(own.seconds)} among many in a call, as a run makes it: {own.per_second:,.0f} examples/s"
        + short,
        f"batch size      {_curve(figures.batch_sizes.trials, 'examples/s')}",
    ]
    if len(figures.widths) > 1:
        told.append(f"sweep members   {_curve(figures.widths, 'steps/s')}")
    return told


def _curve(trials: Sequence[Trial], unit: str) -> str:
    return ", ".join(f"{trial.size}: {_rate(trial.per_second)}" for trial in trials) + f" {unit}"


def _verdict(advice: Advice) -> list[str]:
    told = [*_which(advice)]
    figures = advice.devices[advice.best]
    own, filled = figures.at(advice.batch_size), figures.at(figures.batch_sizes.smallest)
    gain = filled.per_second / own.per_second
    name = advice.best.upper()
    if filled.size > own.size and gain > ALIKE:
        told.append(
            f"The {name} is filled by a batch size of {filled.size}: {gain:.1f} times the examples a second. A larger "
            "batch may need another learning rate."
        )
    else:
        told.append(f"A batch size of {advice.batch_size} fills the {name}: larger ones are hardly faster.")
    if len(figures.widths) > 1:
        told.append(_population(figures.widths, name))
    if (share := figures.parts.shares()["call"]) > MUCH:
        told.append(f"A call costs {share:.0%} of a step made by itself: leave steps_per_call to the run.")
    return told


def _which(advice: Advice) -> list[str]:
    if len(advice.devices) == 1:
        only = next(iter(advice.devices)).upper()
        return [f"Train on the {only}: it is all that was measured. {advice.absent}".rstrip()]
    told = []
    here = "this batch size" if advice.compared == advice.batch_size else f"a batch size of {advice.compared}"
    for kind in advice.devices:
        if kind == advice.best:
            continue
        ratio = advice.speedup(advice.best, kind)
        name, other = advice.best.upper(), kind.upper()
        if ratio < ALIKE:
            told.append(f"{name} and {other} are alike at {here}: take the one that is free.")
        else:
            told.append(f"Train on the {name}: {ratio:.1f} times as fast as the {other} at {here}.")
        # It is the device that is not the host's own of which one asks from where on it pays.
        told.append(_crossing(advice, *sorted((kind, advice.best), reverse=True)))
    return told


def _crossing(advice: Advice, kind: str, over: str) -> str:
    size, tried = advice.crossover(kind, over), advice.sizes(kind, over)
    name, other = kind.upper(), over.upper()
    if size is None:
        return f"The {name} is faster at no batch size tried, {tried[0]} to {tried[-1]}: the task does not fill it."
    if size == tried[0]:
        return f"The {name} is faster at every batch size tried, {tried[0]} to {tried[-1]}."
    return f"The {name} is faster from a batch size of {size} on, the {other} below."


def _population(widths: Sequence[Trial], name: str) -> str:
    best = max(widths, key=lambda trial: trial.per_second)
    gain = best.per_second / widths[0].per_second
    if gain <= ALIKE:
        return f"Members of a sweep do not fill the {name} further: one by one is as fast."
    return f"A sweep of {best.size} members side by side does {gain:.1f} times the steps of one on the {name}."


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _rate(value: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1e6, " M"), (1e3, " k")) if value >= 10 * s), (1.0, ""))
    return f"{value / scale:,.0f}{unit}"
