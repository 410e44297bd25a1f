"""Timing many programs in one process, in turn: what disturbs the machine for a while disturbs all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

from jaxnn.loop.tuning import Call, timed_round


class Contender(NamedTuple):
    """A program to be timed.

    Attributes:
        begin: puts on the devices what it needs, and gives the call; what it needs is freed with that.
        num_steps: how many steps, or other units, a call has.
    """

    begin: Callable[[], Call]
    num_steps: int


class Timing(NamedTuple):
    """How long a step takes, by round.

    Attributes:
        seconds: by the clock.
        cpu_seconds: how long the cores of this process worked for it, added up.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median over rounds, in seconds."""
        return median(self.seconds)

    @property
    def work(self) -> float:
        """The median of the cores' seconds."""
        return median(self.cpu_seconds)


def time_in_turn[Key](
    contenders: Mapping[Key, Contender], rounds: int, seconds: float, say: Callable[[str], None]
) -> dict[Key, Timing]:
    """Times all contenders once a round, another one first each round.

    Args:
        contenders: by any key.
        rounds: how many.
        seconds: how long each is timed in a round; a call at the least.
        say: gets a line a round.
    """
    measured: dict[Key, list[tuple[float, float]]] = {key: [] for key in contenders}
    keys = list(contenders)
    for index in range(rounds):
        started, first = time.perf_counter(), index * len(keys) // rounds
        for key in [*keys[first:], *keys[:first]]:
            measured[key].append(_take_turn(contenders[key], seconds))
        say(f"round {index + 1} of {rounds}: {len(keys)} programs in {time.perf_counter() - started:.0f} s")
    return {key: Timing(*zip(*turns, strict=True)) for key, turns in measured.items()}


def _take_turn(contender: Contender, seconds: float) -> tuple[float, float]:
    """The seconds of a step, and those of the cores, after a call that touches all memory and is not counted."""
    call, length = contender.begin(), contender.num_steps
    estimate = timed_round(call, length, 1)
    num_calls = max(1, round(seconds / (estimate * length)))
    before = time.process_time()
    taken = timed_round(call, length, num_calls)
    return taken, (time.process_time() - before) / (num_calls * length)
