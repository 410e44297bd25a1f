"""Collectives of a compiled program, read from its text, and what they cost: α–β, a latency and a time per byte.

They are read, not derived from the strategy: XLA merges them, replaces one by another, and adds some of its own. The
linear model of a message is Hockney's (The communication challenge for MPP, 1994); that of collectives over rings is
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
# A collective that runs beside others is a pair, of which the second gives its result.
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
        runs: how many a step runs.
        num_bytes: of the whole arrays that go through them, in all.
    """

    kind: str
    runs: float
    num_bytes: float


def read_collectives(text: str, num_devices: int, num_steps: int = 1) -> tuple[Collective, ...]:
    """The collectives of a training step, by kind.

    The body of a loop counts as often as the loop runs, where XLA says how often, else once; of the branches of a
    conditional, all count.

    Args:
        text: the optimized program, as ``compiled.as_text()`` gives it.
        num_devices: how many take part in each.
        num_steps: how many steps the program has.
    """
    computations, entry = _computations(text)
    totals = {kind: Collective(kind, 0.0, 0.0) for kind in KINDS}
    for kind, runs, num_bytes in _walk(computations, entry):
        # What is scattered is so many times what each device is left with.
        whole = num_bytes * num_devices if kind == "reduce-scatter" else num_bytes
        _, runs_before, bytes_before = totals[kind]
        totals[kind] = Collective(kind, runs_before + runs / num_steps, bytes_before + runs * whole / num_steps)
    return tuple(total for total in totals.values() if total.runs)


def array_bytes(shape: str) -> float:
    """Bytes of a shape as XLA writes it: ``f32[128,3]{1,0}``, or a tuple of such."""
    return sum(
        _item_bytes(name) * math.prod(map(int, filter(None, sizes.split(",")))) for name, sizes in _ARRAY.findall(shape)
    )


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the name of the one that is run."""
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
    """The collectives of a computation that runs so often, and of those that it calls."""
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
    """What devices speak over.

    Attributes:
        latency_seconds: α, of a message of no bytes from a device to its neighbour.
        seconds_per_byte: β, of each further byte.
    """

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, collectives: Iterable[Collective], num_devices: int, turns: float = 1.0) -> float:
        """What ``collectives`` take over a ring of ``num_devices``, one after another.

        Args:
            collectives: those of a step.
            num_devices: how many take part.
            turns: how many devices share a core, which moves the bytes of one after those of another.
        """
        total = 0.0
        for kind, runs, num_bytes in collectives:
            messages, share = ring(kind, num_devices)
            total += runs * messages * self.latency_seconds + turns * share * num_bytes * self.seconds_per_byte
        return total

    def __str__(self) -> str:
        rate = f"{1e-9 / self.seconds_per_byte:.3g} GB/s" if self.seconds_per_byte else "no time a byte"
        return f"{1e6 * self.latency_seconds:.3g} µs a message and {rate}"


class Reduction(NamedTuple):
    """An all-reduce that was timed.

    Attributes:
        num_devices: how many took part.
        num_bytes: of the array that each of them held.
        seconds: what it took.
        turns: how many devices shared a core, 1.0 for a core each.
    """

    num_devices: int
    num_bytes: int
    seconds: float
    turns: float = 1.0

    def predicted(self, link: Link) -> float:
        """What it takes over ``link``, in seconds."""
        return link.seconds([Collective("all-reduce", 1.0, self.num_bytes)], self.num_devices, self.turns)


def ring(kind: str, num_devices: int) -> tuple[int, float]:
    """How many messages a device sends for one collective, and which share of its bytes these are in all."""
    others = num_devices - 1
    if kind == "all-reduce":  # a reduce-scatter, then an all-gather
        return 2 * others, 2 * others / num_devices
    if kind == "collective-permute":
        return min(others, 1), float(min(others, 1))
    return others, others / num_devices


def fit_link(reductions: Sequence[Reduction]) -> Link | None:
    """The α and β, neither below 0, whose relative errors on ``reductions`` have the least squares; None without any.

    Relative ones, since those of the largest messages would hide the latency.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    if not reductions:
        return None
    units = Link(1.0, 0.0), Link(0.0, 1.0)
    terms = np.array([[one.predicted(unit) / one.seconds for unit in units] for one in reductions])
    # Columns of like size: a byte takes a billionth of the time of a message.
    scale = terms.max(axis=0)
    found, _ = nnls(terms / scale, np.ones(len(reductions)))
    alpha, beta = found / scale
    return Link(float(alpha), float(beta))


def relative_errors(link: Link, reductions: Iterable[Reduction]) -> list[float]:
    """How far the predictions are off, as shares of what was measured."""
    return [one.predicted(link) / one.seconds - 1 for one in reductions]
