"""What is measured: a step on so many devices with so many examples on each, and what of it is compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

type Kind = Literal["strong", "weak"]
KINDS: tuple[Kind, ...] = ("strong", "weak")


class Case(NamedTuple):
    """A training step that is timed.

    Attributes:
        num_devices: how many share a batch.
        rows: examples each of them gets of it.
        alone: whether each trains by itself, as the step would be were there no collectives.
    """

    num_devices: int
    rows: int
    alone: bool = False

    @property
    def batch_size(self) -> int:
        """Examples of all devices together."""
        return self.num_devices * self.rows


class Message(NamedTuple):
    """An all-reduce that is timed.

    Attributes:
        num_devices: how many take part.
        num_bytes: of the array that each of them holds.
    """

    num_devices: int
    num_bytes: int


class Sizes(NamedTuple):
    """What a study compares.

    Attributes:
        devices: numbers of devices that are there, ascending.
        batch_size: examples of a batch in strong scaling, whatever the number of devices.
        batch_per_device: examples of each device in weak scaling.
    """

    devices: tuple[int, ...]
    batch_size: int
    batch_per_device: int

    def rows(self, kind: Kind, num_devices: int) -> int:
        """Examples that each of ``num_devices`` gets."""
        return self.batch_size // num_devices if kind == "strong" else self.batch_per_device

    def case(self, kind: Kind, num_devices: int, *, alone: bool = False) -> Case:
        """A step of either kind of scaling."""
        return Case(num_devices, self.rows(kind, num_devices), alone)

    def cases(self, predict: Sequence[int]) -> list[Case]:
        """All steps to time, each once: those on one device come first.

        Args:
            predict: larger numbers of devices. Their share of a batch is timed on one device, where it is a whole
                number of examples.
        """
        counts = (1, *self.devices)
        shared = {count for count in (*counts, *predict) if self.batch_size % count == 0}
        single = {self.batch_size // count for count in shared} | {self.batch_per_device}
        cases = [Case(1, rows) for rows in sorted(single, reverse=True)]
        for num_devices in self.devices:
            for kind in KINDS:
                case = self.case(kind, num_devices)
                if num_devices > 1 and case not in cases:
                    cases += [case, case._replace(alone=True)]
        return cases


def message_sizes(num_bytes: int) -> tuple[int, ...]:
    """Bytes of the all-reduces to time: from 4 KiB to what a step sends, or to 1 MiB where that is less."""
    least, most, count = 2**12, max(num_bytes, 2**20), 4
    ratio = (most / least) ** (1 / (count - 1))
    return tuple(round(least * ratio**index / 4) * 4 for index in range(count))
