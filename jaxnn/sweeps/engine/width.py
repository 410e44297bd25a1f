"""How many members go side by side: planned from compiled memory and short timed calls, on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxnn.loop import CALL_SECONDS, ENOUGH_STEPS, MOST_STEPS, Call, near_divisor
from jaxnn.observe import format_bytes
from jaxnn.sweeps.engine.probing import Trial, try_size, widen
from jaxnn.types import TrainingError

# Each width tried is so many times the one before: throughput changes slowly with it, and each costs a compilation.
FACTOR = 4


class WidthPlan(NamedTuple):
    """What was decided for a group.

    Attributes:
        width: members side by side on a device.
        steps_per_call: training steps a call.
        block: members that are on the devices at a time; fewer than the group where memory is short.
        trials: the widths that were tried, narrowest first.
        note: why wider ones were not, where memory forbade it.
    """

    width: int
    steps_per_call: int
    block: int
    trials: tuple[Trial, ...] = ()
    note: str | None = None

    def lines(self) -> list[str]:
        """The curve, a line a width, and what was chosen."""
        curve = [
            f"width {trial.size:>4}: {trial.per_second:>9,.0f} member-steps/s a device, "
            f"{format_bytes(trial.temporary_bytes)} of temporaries" + ("  ← chosen" if trial.size == self.width else "")
            for trial in self.trials
        ]
        return [*curve, *([self.note] if self.note else [])]

    def width_for(self, num_members: int) -> int:
        """The fastest width that was tried for so many members on a device; as chosen where none was."""
        known = {trial.size: trial.seconds for trial in self.trials} or {self.width: 1.0}
        return min(known, key=lambda width: (-(-num_members // width) * known[width], width))


class Bench(NamedTuple):
    """What the planner may ask for.

    Attributes:
        call: ``(block, width, num_steps) -> call``: a compiled call of one chunk of a block, to be blocked on.
        temporary_bytes: ``(block, width, num_steps)``: what that call takes and frees again.
        member_bytes: the state of one member.
        free_bytes: what members may take of a device; None: unknown.
        num_steps: how many steps each member is to do.
    """

    call: Callable[[int, int, int], Call]
    temporary_bytes: Callable[[int, int, int], int]
    member_bytes: int
    free_bytes: float | None
    num_steps: int


def candidate_widths(num_members: int) -> Iterator[int]:
    """1, 4, 16 and so on up to ``num_members``, each made so wide that the last chunk is full too, or nearly."""
    width, last = 1, 0
    while True:
        balanced = -(-num_members // -(-num_members // width))
        if balanced != last:
            yield balanced
        if width >= num_members:
            return
        last, width = balanced, width * FACTOR


def plan_width(bench: Bench, num_members: int, window: int, given: int | None, given_steps: int | None) -> WidthPlan:
    """Chooses width, steps per call, and how many members are on a device at a time.

    Args:
        bench: what is measured.
        num_members: how many members a device has to train.
        window: the number of steps a call should divide.
        given: the width that is not to be measured, or None.
        given_steps: the steps per call that are not to be measured, or None.

    Raises:
        TrainingError: not even one member fits.
    """
    block, note = _fitting_block(bench, num_members)
    steps = min(given_steps or near_divisor(window, ENOUGH_STEPS), window)
    if given is not None and given_steps is not None:
        return WidthPlan(min(given, block), steps, block, (), note)
    first = given or 1

    def attempt(width: int) -> Trial:
        return try_size(width, steps, bench.call(block, width, steps), bench.temporary_bytes(block, width, steps))

    started = time.perf_counter()
    trials = [attempt(min(first, block))]
    cost = time.perf_counter() - started

    def worthwhile(seconds: float) -> bool:
        """Whether all that is to be done takes longer than another attempt."""
        fastest = max(trial.per_second for trial in trials)
        return num_members * bench.num_steps / fastest > (seconds or cost)

    if given_steps is None:
        steps = _steps_per_call(trials[0], num_members, window, steps)
    if given is None:
        states = 2.0 * block * bench.member_bytes
        short = widen(candidate_widths(block), trials, attempt, lambda _: states, bench.free_bytes, worthwhile)
        note = "; ".join(filter(None, [note, short and f"width {short}"])) or None
    best = min(trials, key=lambda trial: -(-block // trial.size) * trial.seconds)
    return WidthPlan(best.size, steps, block, tuple(trials), note)


def _fitting_block(bench: Bench, num_members: int) -> tuple[int, str | None]:
    """How many members fit on a device with their state twice: as it is and as it will be after a call."""
    if bench.free_bytes is None:
        return num_members, None
    fitting = int(bench.free_bytes // (2 * bench.member_bytes))
    if fitting < 1:
        raise TrainingError(
            f"not one member fits: its state takes twice {format_bytes(bench.member_bytes)}, and "
            f"{format_bytes(bench.free_bytes)} are free: make the model smaller."
        )
    if fitting >= num_members:
        return num_members, None
    num_blocks = -(-num_members // fitting)
    block = -(-num_members // num_blocks)
    return block, (
        f"{num_members} members of {format_bytes(2 * bench.member_bytes)} do not fit in "
        f"{format_bytes(bench.free_bytes)} at once: {block} at a time, in {num_blocks} rounds"
    )


def _steps_per_call(trial: Trial, num_members: int, window: int, tried: int) -> int:
    """So many steps that a call of all members would take a while one by one, and page faults are shared."""
    wanted = CALL_SECONDS / (trial.seconds / trial.size * num_members)
    return near_divisor(window, round(min(MOST_STEPS, max(tried, wanted))))
