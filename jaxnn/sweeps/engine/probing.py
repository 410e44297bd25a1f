"""How a size is chosen: compile, time a short call, go wider while it pays and fits in memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxnn.loop import Call, timed_round
from jaxnn.observe import format_bytes

# A size that is so much slower than the best ends the search: wider ones were never seen to be faster again.
SLOWER = 1.05
# Calls that are measured go on for so long, two at the least.
MEASURED_SECONDS = 0.3
# The share of a device's free memory that may be taken.
MEMORY_SHARE = 0.8


class Trial(NamedTuple):
    """A size that was tried.

    Attributes:
        size: members side by side on a device, or examples a batch.
        seconds: of one step of so many.
        per_second: the same as throughput of one device: member-steps or examples.
        temporary_bytes: what a call takes and frees again.
    """

    size: int
    seconds: float
    per_second: float
    temporary_bytes: int


def try_size(size: int, num_steps: int, call: Call, temporary_bytes: int) -> Trial:
    """Times a compiled ``call`` of ``num_steps`` steps, to be blocked on."""
    # The first call touches its memory for the first time.
    total, fewest, spent = timed_round(call, 1, 1), math.inf, 0.0
    while fewest == math.inf or spent + total < MEASURED_SECONDS:
        total = timed_round(call, 1, 1)
        fewest, spent = min(fewest, total), spent + total
    seconds = fewest / num_steps
    return Trial(size, seconds, size / seconds, temporary_bytes)


def widen(
    sizes: Iterable[int],
    trials: list[Trial],
    attempt: Callable[[int], Trial],
    fixed_bytes: Callable[[int], float],
    free_bytes: float | None,
    worthwhile: Callable[[float], bool] = lambda seconds: True,
    least: int = 0,
) -> str | None:
    """Tries larger and larger sizes, until they are slower, do not fit, or cost more than they can save.

    Args:
        sizes: what to try, ascending.
        trials: what was tried so far, at least one; gets the others.
        attempt: tries a size.
        fixed_bytes: what a size takes besides its temporaries.
        free_bytes: what may be taken; None: unknown.
        worthwhile: whether another attempt is, if it takes so many seconds as the one before, compilation included.
        least: a size up to which being slower is no reason to stop.

    Returns:
        Why no larger size was tried, where it was not speed that forbade it.
    """
    cost = 0.0
    for size in sizes:
        if size <= trials[-1].size:
            continue
        if not worthwhile(cost):
            return f"{size} not tried: it would take longer than what is to be done"
        needed = expected_bytes(trials, size) + fixed_bytes(size)
        if free_bytes is not None and needed > free_bytes:
            return f"{size} would take {format_bytes(needed)} of {format_bytes(free_bytes)} free: not tried"
        started = time.perf_counter()
        try:
            trials.append(attempt(size))
        # Smaller sizes ran: whatever a larger one breaks, memory or an operation that cannot be mapped, it is not used.
        except Exception as error:
            full = "RESOURCE_EXHAUSTED" in str(error)
            reason = "it does not fit in memory" if full else (str(error).strip().splitlines() or [""])[0]
            return f"{size} cannot be run: {reason}"
        cost = time.perf_counter() - started
        if size >= least and trials[-1].per_second * SLOWER < max(trial.per_second for trial in trials):
            return None
    return None


def expected_bytes(trials: Sequence[Trial], size: int) -> float:
    """Temporaries at ``size``: a fixed part and one for each, drawn through the last two sizes compiled."""
    last = trials[-1]
    before = trials[-2] if len(trials) > 1 else Trial(0, 0.0, 0.0, 0)
    each = (last.temporary_bytes - before.temporary_bytes) / (last.size - before.size)
    return last.temporary_bytes + (size - last.size) * max(each, 0.0)
