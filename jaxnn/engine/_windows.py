"""Windows and calls, which end at the same steps in a resumed run, and the hot loop that dispatches them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnn._clock import Clock
from jaxnn.engine._feed import DeviceFeed
from jaxnn.steps import Totals
from jaxnn.types import Examples

type TrainProgram = Callable[[Any, Totals, Examples], tuple[Any, Totals]]

# A window that calls do not divide ends in a shorter call, which is another program. At most this many lengths are
# compiled; instead of more, powers of two, since every length is a sum of them.
MOST_TAILS = 3

# Calls of a window that are in flight before the host waits for the previous window: enough that the device is never
# idle, and few enough that the wait ends with that window, so that its seconds are measured right.
CALLS_AHEAD = 4

# Calls kept before finished ones are released: checking them costs the loop time.
MANY_CALLS = 64


class Plan(NamedTuple):
    """How ``num_steps`` are cut into windows (what is reported) and calls (what is compiled)."""

    num_steps: int  # the last step
    report_every: int  # steps between reports
    eval_every: int  # steps between evaluations; 0 for one at the end
    checkpoint_every: int  # steps between checkpoints; 0 for none that are due by step
    steps_per_call: int = 1  # the most steps one compiled call runs
    # The lengths of shorter calls at the end of windows, longest first; see `with_tails`.
    tails: tuple[int, ...] = ()

    @property
    def cadences(self) -> tuple[int, ...]:
        """The distances at which windows must end."""
        due = (self.report_every, self.eval_every, self.checkpoint_every)
        return tuple(every for every in due if every)

    def window_end(self, step: int) -> int:
        """The end of the window that starts at or contains ``step``."""
        return min(self.num_steps, *((step // every + 1) * every for every in self.cadences))

    def call_length(self, step: int) -> int:
        """The number of steps of the call that starts at ``step``."""
        rest = self.window_end(step) - step
        if rest >= self.steps_per_call:
            return self.steps_per_call
        return next(length for length in (*self.tails, rest) if length <= rest)

    def evaluates(self, step: int) -> bool:
        """Whether the eval split is evaluated after ``step``."""
        return step == self.num_steps or (self.eval_every > 0 and step % self.eval_every == 0)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step`` by its number."""
        return self.checkpoint_every > 0 and step % self.checkpoint_every == 0

    def call_lengths(self, start: int = 0) -> list[int]:
        """The different lengths of call that the run needs after the step ``start``, longest first."""
        windows, first, end = set(self._windows()), set[int](), self.window_end(start)
        longest = {self.steps_per_call} if max(windows) >= self.steps_per_call else set()
        while start < end:  # a run that continues in the middle of a window
            first.add(self.call_length(start))
            start += self.call_length(start)
        return sorted({*longest, *self.tails, *first}, reverse=True)

    def _windows(self) -> Iterator[int]:
        """The lengths of windows: those of one period of the cadences, after which they repeat, and the last one's."""
        step, period = 0, min(self.num_steps, math.lcm(*self.cadences))
        while step < period:
            end = self.window_end(step)
            yield end - step
            step = end
        yield self.num_steps - max((self.num_steps - 1) // every * every for every in self.cadences)


def with_tails(plan: Plan) -> Plan:
    """``plan`` with its tails: the rests of windows, or powers of two if those would be many programs."""
    left_over = {window % plan.steps_per_call for window in set(plan._windows())} - {0}
    if len(left_over) > MOST_TAILS:
        left_over = {2**power for power in range(max(left_over).bit_length())}
    return plan._replace(tails=tuple(sorted(left_over, reverse=True)))


def typical_window(plan: Plan) -> int:
    """The length that steps per call should divide: a divisor of all windows, or of most if that is tiny."""
    common, shortest = math.gcd(*plan.cadences), min(plan.cadences)
    return common if 2 * common >= shortest else shortest


def near_divisor(whole: int, about: int) -> int:
    """The divisor of ``whole`` nearest to ``about`` by ratio, or ``about`` if none is within a factor of two.

    Calls that divide their window need no shorter last call, which is another program; likewise windows.
    """
    about = max(1, min(about, whole))
    low, high = -(-about // 2), min(whole, 2 * about)
    # The larger of two factors is found by the smaller: a hundred million steps have few tenths, and many tens.
    divisors = (
        (n for n in range(low, high + 1) if whole % n == 0)
        if about * about <= whole
        else (whole // n for n in range(whole // low, -(-whole // high) - 1, -1) if whole % n == 0)
    )
    return min(divisors, key=lambda n: abs(math.log(n / about)), default=about)


@dataclasses.dataclass(frozen=True)
class Stall:
    """A period in which no step completed."""

    where: str  # the cause: ``device``, or the span of the clock, such as ``data`` or ``checkpoint``
    step: int  # the last step that was known to be done
    seconds: float  # its length so far


class Flight:
    """The calls in flight: written by the training thread, read by the watchdog's."""

    def __init__(self) -> None:
        self.stalls: list[Stall] = []  # oldest first; written by the watchdog's thread
        self.start(0)

    def start(self, step: int) -> None:
        """Starts with nothing in flight and ``step`` as the last one done."""
        # The last step of the call that was dispatched last, or is being dispatched.
        self.started = self._done = step
        self._calls: deque[tuple[int, Any]] = deque()

    def dispatched(self, step: int, result: Any) -> None:
        """Adds a call whose last step is ``step``; ``result`` is an array that it returns."""
        self._calls.append((step, result))
        if len(self._calls) > MANY_CALLS:
            while self._calls and self._calls[0][1].is_ready():
                self._done, _ = self._calls.popleft()

    @property
    def done(self) -> int:
        """The last step known to be done: that of the last call whose result is there."""
        done, index = self._done, 0
        # By index, because the other thread may add and remove calls meanwhile.
        with contextlib.suppress(IndexError):
            while self._calls[index][1].is_ready():
                done, index = self._calls[index][0], index + 1
        return done


class WindowResult(NamedTuple):
    """A window whose steps are done."""

    step: int  # updates done at its end
    num_steps: int  # updates in it
    # The mean of each metric over its steps, named ``train_*``, the loss first; ``[]``, or of a population's shape.
    metrics: dict[str, np.ndarray]
    bad_step: np.ndarray  # the first step whose loss was not finite, or -1; of the same shape
    digests: np.ndarray  # ``[..., parts, 2]`` uint32, of the state at its end, see `state_digests`; or zeros
    seconds: float  # from the end of the window before, or from where the loop continued after a pause
    state: Any | None  # the state at its end if nothing is in flight, else None: it is in use by the next window


class InFlightWindow(NamedTuple):
    """A window whose calls are dispatched."""

    step: int  # updates done at its end
    num_steps: int  # updates in it
    totals: Totals  # its sums, on the device
    done_at: float | None = None  # when it was noticed to be done; None before

    def noticed(self) -> InFlightWindow:
        """The window with its ``done_at``, if it is done now and was not noticed before."""
        done = self.done_at is None and all(total.is_ready() for total in jax.tree.leaves(self.totals))
        return self._replace(done_at=time.perf_counter()) if done else self


def run_windows(
    programs: dict[int, TrainProgram],
    plan: Plan,
    feed: DeviceFeed,
    state: Any,
    zeros: Totals,
    sync_after: Callable[[int], bool],
    *,
    clock: Clock,
    flight: Flight,
) -> Iterator[WindowResult]:
    """Trains to the end of ``plan``; yields each window once its numbers are on the host.

    A window's numbers are fetched while the next one runs, unless ``sync_after(step)``, called once at its end, is
    true: then nothing is in flight, the consumer may use ``state``, and its time is not counted.
    ``programs`` are the compiled calls by their number of steps, and ``zeros`` totals of no steps. The buffers of
    ``state`` are donated.
    """
    step = int(state.step)
    flight.start(step)
    pending: InFlightWindow | None = None
    mark = time.perf_counter()

    def close(window: InFlightWindow, state: Any | None) -> WindowResult:
        nonlocal mark
        sums, _, bad_step, _, digests = jax.device_get(window.totals)
        since, mark = mark, window.done_at or time.perf_counter()
        # JAX sorts the keys of a dict; the loss comes first in reports.
        names = sorted(sums, key=lambda name: name != "loss")
        metrics = {f"train_{name}": sums[name] / window.num_steps for name in names}
        return WindowResult(window.step, window.num_steps, metrics, bad_step, digests, mark - since, state)

    while step < plan.num_steps:
        start, end, totals, num_calls = step, plan.window_end(step), zeros, 0
        at_end = np.full_like(zeros.notes, 2 if plan.evaluates(end) or plan.saves(end) else 1)
        while step < end:
            length = plan.call_length(step)
            with clock.span("data"):
                examples = feed.prepare(step, length)
            # An idle CPU runs a call within its dispatch: that time must not count for the window before.
            pending = pending and pending.noticed()
            flight.started = step + length
            totals = totals._replace(notes=at_end if step + length == end else zeros.notes)
            state, totals = programs[length](state, totals, examples)
            step, num_calls = step + length, num_calls + 1
            flight.dispatched(step, totals.bad_step)
            current = InFlightWindow(end, end - start, totals).noticed()
            if pending is not None and (num_calls == CALLS_AHEAD or step == end):
                if step == end:
                    pending, current = _share_time(pending, current, mark)
                yield close(pending, None)
                pending = None
        pending = current
        if sync_after(end):
            yield close(pending, state)
            pending, mark = None, time.perf_counter()


def _share_time(earlier: InFlightWindow, later: InFlightWindow, mark: float) -> tuple[InFlightWindow, InFlightWindow]:
    """Waits for ``earlier``; if ``later`` was done too before the host noticed, both share the time."""
    jax.block_until_ready(earlier.totals)
    if earlier.done_at is None:
        earlier, later = earlier.noticed(), later.noticed()
        if later.done_at is not None:
            share = earlier.num_steps / (earlier.num_steps + later.num_steps)
            earlier = earlier._replace(done_at=mark + share * (later.done_at - mark))
    return earlier, later
