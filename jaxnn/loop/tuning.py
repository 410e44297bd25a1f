"""Steps per call, chosen by measuring: one step a call against many, on this machine, for this program."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxnn.loop.plan import near_divisor
from jaxnn.parallel import broadcast_from_primary

# A probe of many steps is as long as this many seconds of single steps: enough to see the host's cost vanish, and
# short even where a compiler makes a scanned step thirty times slower, as XLA does for convolutions on a CPU.
PROBE_SECONDS = 0.1
MOST_STEPS = 1024
# Page faults on large temporaries are paid once a call: sixteen steps a call make them small.
ENOUGH_STEPS = 16
# Where a loop may be many times slower, so few steps show it.
WARY_STEPS = 2
ROUNDS = 3
WORTHWHILE, HARMLESS = 0.95, 1.05
# A call has a cost of its own, seen as a few percent at 0.1 seconds a call of an MNIST MLP and hardly at longer ones.
CALL_SECONDS = 0.3


type Call = Callable[[], object]


class Choice(NamedTuple):
    """How many steps a call runs, and why.

    Attributes:
        steps_per_call: what was chosen.
        seconds_per_step: what each length that was tried cost, by length.
    """

    steps_per_call: int
    seconds_per_step: dict[int, float]


def choose_steps_per_call(make_call: Callable[[int], Call], window: int, *, wary: bool = False) -> Choice:
    """Tries calls of one step, of a few, and where those were no slower, of many.

    Args:
        make_call: from a number of steps to a function that trains so many, compiled already, and returns arrays
            it does not wait for.
        window: the number of steps a call should divide.
        wary: there is cause to fear that a loop is slow: it is tried with two steps first.
    """
    measured = {1: seconds_per_step(make_call(1), 1)}
    probe = min(WARY_STEPS, window) if wary else near_divisor(window, first_probe(measured[1]))
    if probe not in measured:
        measured[probe] = seconds_per_step(make_call(probe), probe, give_up_above=2 * measured[1])
    if measured[probe] <= HARMLESS * measured[1]:
        # The compiler is no slower in a loop, so a long call is safe to try.
        steps = min(MOST_STEPS, round(CALL_SECONDS / measured[probe]))
        if measured[probe] < WORTHWHILE * measured[1]:
            steps = max(ENOUGH_STEPS, steps)
        length = near_divisor(window, steps)
        if length > probe:
            measured[length] = seconds_per_step(make_call(length), length)
    fastest = min(measured, key=lambda length: measured[length])
    return Choice(fastest, measured)


def first_probe(single_step_seconds: float) -> int:
    """The length to try first: about ``PROBE_SECONDS`` of steps, as a power of four so that reruns agree."""
    steps = max(2.0, PROBE_SECONDS / single_step_seconds)
    power = max(1, round(math.log(steps, 4)))
    return int(min(MOST_STEPS, 4**power))


def seconds_per_step(call: Call, length: int, give_up_above: float = math.inf) -> float:
    """The fastest of a few rounds of calls of ``length`` steps, after one to warm up."""
    warm_up = timed_round(call, length, 1)
    if warm_up > 4 * give_up_above:
        return warm_up
    num_calls = max(1, min(10, int(PROBE_SECONDS / (warm_up * length))))
    return min(timed_round(call, length, num_calls) for _ in range(ROUNDS))


def timed_round(call: Call, length: int, num_calls: int) -> float:
    """The seconds of each of ``length`` steps of ``num_calls`` calls, the last of which is waited for.

    Of several processes all are told what the first one measured: they must come to the same choice.
    """
    start = time.perf_counter()
    for _ in range(num_calls):
        result = call()
    jax.block_until_ready(result)
    seconds = (time.perf_counter() - start) / (num_calls * length)
    return broadcast_from_primary(lambda: seconds)
