"""Collectives of a compiled program, parsed from its text, and their cost: α–β, a latency and a time per byte.

They are parsed, not derived from the strategy: XLA merges and replaces collectives and adds its own. The linear model
of a message is Hockney's (The communication challenge for MPP, 1994); that of collectives over rings is
Thakur, Rabenseifner, Gropp's (Optimization of collective communication operations in MPICH, 2005).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
# An asynchronous collective is a pair, whose second instruction returns the result.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?\S+ = (?P<shape>.+?) (?P<operation>[a-z][a-z\-]*?)(?:-done)?\(")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(?:\{(?P<all>[^}]*)\}|%?(?P<one>[\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """All collectives of one kind in a training step.

    Attributes:
        kind: one of ``KINDS``.
        runs: number per step.
        num_bytes: of the unsharded arrays, in total.
    """

    kind: str
    runs: float
    num_bytes: float


def read_collectives(text: str, num_devices: int, num_steps: int = 1) -> tuple[Collective, ...]:
    """Returns the collectives of a training step, by kind.

    The body of a loop counts once per iteration if XLA knows their number, else once. All branches of a conditional
    count.

    Args:
        text: the optimized program, from ``compiled.as_text()``.
        num_devices: number of devices in each collective.
        num_steps: number of steps in the program.
    """
    computations, entry = _computations(text)
    totals = {kind: Collective(kind, 0.0, 0.0) for kind in KINDS}
    for kind, runs, num_bytes in _walk(computations, entry):
        # The instruction has the shape of one shard of what is scattered.
        total_bytes = num_bytes * num_devices if kind == "reduce-scatter" else num_bytes
        _, runs_before, bytes_before = totals[kind]
        totals[kind] = Collective(kind, runs_before + runs / num_steps, bytes_before + runs * total_bytes / num_steps)
    return tuple(total for total in totals.values() if total.runs)


def array_bytes(shape: str) -> float:
    """Returns the bytes of a shape in XLA's notation, ``f32[128,3]{1,0}``, or a tuple of shapes."""
    return sum(
        _item_bytes(name) * math.prod(map(int, filter(None, sizes.split(",")))) for name, sizes in _ARRAY.findall(shape)
    )


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation by name, and the name of the entry computation."""
    computations: dict[str, list[str]] = {}
    entry = ""
    for line in text.splitlines():
        if (found := _COMPUTATION.match(line)) is not None:
            lines = computations[found["name"]] = []
            entry = found["name"] if found["entry"] else entry
        elif computations:
            lines.append(line)
    return computations, entry


def _walk(computations: Mapping[str, list[str]], name: str, runs: float = 1.0) -> Iterator[Collective]:
    """Yields the collectives of a computation that runs ``runs`` times, and of those that it calls."""
    for line in computations.get(name, ()):
        if (found := _INSTRUCTION.match(line)) is None:
            continue
        if found["operation"] in KINDS:
            yield Collective(found["operation"], runs, array_bytes(found["shape"]))
        trips = _TRIPS.search(line)
        for called in _called(line):
            yield from _walk(computations, called, runs * int(trips[1]) if trips else runs)


def _called(line: str) -> Iterator[str]:
    for found in _CALLED.finditer(line):
        yield from (name.strip().lstrip("%") for name in (found["one"] or found["all"]).split(","))


def _item_bytes(name: str) -> float:
    if name == "pred":
        return 1.0
    bits = re.search(r"\d+", name)
    return int(bits[0]) / 8 if bits else 0.0  # a token has no bytes


class Link(NamedTuple):
    """The link between devices.

    Attributes:
        latency_seconds: α, of an empty message from a device to its neighbour.
        seconds_per_byte: β, of each byte.
    """

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, collectives: Iterable[Collective], num_devices: int, turns: float = 1.0) -> float:
        """Returns the seconds of ``collectives``, one after another, over a ring of ``num_devices``.

        Args:
            collectives: of a step.
            num_devices: number of devices.
            turns: number of devices per core, which moves their bytes one after another.
        """
        total = 0.0
        for kind, runs, num_bytes in collectives:
            messages, share = ring(kind, num_devices)
            total += runs * messages * self.latency_seconds + turns * share * num_bytes * self.seconds_per_byte
        return total

    def __str__(self) -> str:
        rate = f"{1e-9 / self.seconds_per_byte:.3g} GB/s" if self.seconds_per_byte else "infinite bandwidth"
        return f"{1e6 * self.latency_seconds:.3g} µs per message and {rate}"


class Reduction(NamedTuple):
    """A timed all-reduce.

    Attributes:
        num_devices: number of devices.
        num_bytes: of the array on each device.
        seconds: of one all-reduce.
        turns: number of devices per core, at least 1.0.
    """

    num_devices: int
    num_bytes: int
    seconds: float
    turns: float = 1.0

    def predicted(self, link: Link) -> float:
        """Returns the seconds it takes over ``link``."""
        return link.seconds([Collective("all-reduce", 1.0, self.num_bytes)], self.num_devices, self.turns)


def ring(kind: str, num_devices: int) -> tuple[int, float]:
    """Returns the messages a device sends for one collective, and their bytes as a share of the array."""
    others = num_devices - 1
    if kind == "all-reduce":  # a reduce-scatter, then an all-gather
        return 2 * others, 2 * others / num_devices
    if kind == "collective-permute":
        return min(others, 1), float(min(others, 1))
    return others, others / num_devices


def fit_link(reductions: Sequence[Reduction]) -> Link | None:
    """Fits non-negative α and β to ``reductions`` by least squares of relative errors; None if there are none.

    Absolute errors of the largest messages would hide the latency.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    if not reductions:
        return None
    units = Link(1.0, 0.0), Link(0.0, 1.0)
    terms = np.array([[one.predicted(unit) / one.seconds for unit in units] for one in reductions])
    # Scales the columns: a byte takes a billionth of the time of a message.
    scale = terms.max(axis=0)
    found, _ = nnls(terms / scale, np.ones(len(reductions)))
    alpha, beta = found / scale
    return Link(float(alpha), float(beta))


def relative_errors(link: Link, reductions: Iterable[Reduction]) -> list[float]:
    """Returns the relative errors of the predictions."""
    return [one.predicted(link) / one.seconds - 1 for one in reductions]
