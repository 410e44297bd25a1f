"""The collectives of a compiled program: which, how often and how many bytes, read from its text.

They are read, not derived from the strategy: XLA merges them, replaces one by another, and adds some of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

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
