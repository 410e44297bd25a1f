"""What collectives cost: α–β, a latency for each message and a time for each of its bytes.

The linear model of a message is Hockney's (The communication challenge for MPP, 1994). That of collectives over rings,
in which every device speaks to its neighbour alone and no link is idle, is told in Thakur, Rabenseifner, Gropp
(Optimization of collective communication operations in MPICH, 2005).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxnn.scaling.collectives import Collective


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
