"""The hot loop: dispatches calls, closes each window with one block, one window behind the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from jaxnn.loop.feed import Feed
from jaxnn.loop.plan import Plan
from jaxnn.loop.programs import Totals, TrainProgram
from jaxnn.loop.watchdog import Flight
from jaxnn.observe import Clock
from jaxnn.types import TrainState

# So many calls of a window are under way before the host waits for the window before it: enough that the device never
# runs dry, and few enough that the wait ends when that window does, so that its seconds are its own.
CALLS_AHEAD = 4


class Closed(NamedTuple):
    """A window whose steps are done.

    Attributes:
        step: updates done at its end.
        num_steps: updates in it.
        metrics: the mean of each metric over its steps, named ``train_*``, the loss first; ``[]``, or of the shape of
            a population.
        bad_step: the first step whose loss was not finite, or -1; of the same shape.
        seconds: from the end of the window before, or from where the loop went on after a pause.
        state: the state at its end where the loop has drained, else None: it is in use by the next window.
    """

    step: int
    num_steps: int
    metrics: dict[str, np.ndarray]
    bad_step: np.ndarray
    seconds: float
    state: TrainState | None


class Pending(NamedTuple):
    """A window whose calls are dispatched.

    Attributes:
        step: updates done at its end.
        num_steps: updates in it.
        totals: its sums, on the device.
        done_at: when it was noticed to be done; None before.
    """

    step: int
    num_steps: int
    totals: Totals
    done_at: float | None = None

    def noticed(self) -> Pending:
        """The window with its ``done_at``, if it is done now and nobody noticed before."""
        done = self.done_at is None and all(total.is_ready() for total in jax.tree.leaves(self.totals))
        return self._replace(done_at=time.perf_counter()) if done else self


def run_windows(
    programs: dict[int, TrainProgram],
    plan: Plan,
    feed: Feed,
    state: TrainState,
    zeros: Totals,
    *,
    drains: Callable[[int], bool],
    clock: Clock,
    flight: Flight,
) -> Iterator[Closed]:
    """Trains to the end of ``plan``; yields each window once its numbers are on the host.

    A window's numbers are fetched while the next one runs, unless ``drains(step)`` at its end: then nothing is in
    flight while the consumer works, its ``state`` may be used, and the consumer's time is not counted.

    Args:
        programs: the compiled training programs by their number of steps.
        plan: where windows and calls end.
        feed: where examples come from.
        state: where to start; its buffers are given away.
        zeros: totals of no steps.
        drains: whether to let the device run dry at the end of a window; asked once a window.
        clock: gets ``data`` for the time spent preparing examples.
        flight: gets the calls, for who looks on.
    """
    step = int(state.step)
    flight.start(step)
    pending: Pending | None = None
    mark = time.perf_counter()

    def close(window: Pending, state: TrainState | None) -> Closed:
        nonlocal mark
        sums, bad_step = jax.device_get(window.totals)
        since, mark = mark, window.done_at or time.perf_counter()
        # JAX sorts the keys of a dict; the loss is what a reader looks for first.
        names = sorted(sums, key=lambda name: name != "loss")
        metrics = {f"train_{name}": sums[name] / window.num_steps for name in names}
        return Closed(window.step, window.num_steps, metrics, bad_step, mark - since, state)

    while step < plan.num_steps:
        start, end, totals, num_calls = step, plan.window_end(step), zeros, 0
        while step < end:
            length = plan.call_length(step)
            with clock.span("data"):
                examples = feed.prepare(step, length)
            # A CPU runs a call within its dispatch when it is idle: what was done by then must not be charged for it.
            pending = pending and pending.noticed()
            flight.begun = step + length
            state, totals = programs[length](state, totals, examples)
            step, num_calls = step + length, num_calls + 1
            flight.dispatched(step, totals.bad_step)
            current = Pending(end, end - start, totals).noticed()
            if pending is not None and (num_calls == CALLS_AHEAD or step == end):
                if step == end:
                    pending, current = _tell_apart(pending, current, mark)
                yield close(pending, None)
                pending = None
        pending = current
        if drains(end):
            yield close(pending, state)
            pending, mark = None, time.perf_counter()


def _tell_apart(earlier: Pending, later: Pending, mark: float) -> tuple[Pending, Pending]:
    """Waits for ``earlier``; where ``later`` was over too before the host looked, both share the time."""
    jax.block_until_ready(earlier.totals)
    if earlier.done_at is None:
        earlier, later = earlier.noticed(), later.noticed()
        if later.done_at is not None:
            share = earlier.num_steps / (earlier.num_steps + later.num_steps)
            earlier = earlier._replace(done_at=mark + share * (later.done_at - mark))
    return earlier, later
