"""A watchdog thread: reports when no step completes for a while, what is waited for, and the Python stacks."""

import contextlib
import dataclasses
import faulthandler
import io
import sys
import threading

import jax

from jaxnn._clock import Clock
from jaxnn.engine import Flight, Stall
from jaxnn.run._display import in_background

SECONDS_BETWEEN_LOOKS = 1.0
# So that a stall is noticed in time if the bound is short.
LOOKS_PER_BOUND = 4
# What a run waits for, by the span of its clock.
WAITS = {
    "train": "for this process itself",
    "data": "for data",
    "evaluation": "for the evaluation",
    "checkpoint": "for a checkpoint to be written",
    "record": "for the record to be written",
    "trace": "for a program to be traced",
    "compile": "for a program to be compiled",
    "measure": "for calls to be measured",
}
# The caller's loop body takes as long as it takes; outside every span nothing is trained.
NOT_WATCHED = ("caller", None)


class Watch:
    """The stalls of a run, noticed by checking now and then; ``reports`` is how often the present one was reported."""

    def __init__(self, clock: Clock, flight: Flight, stall_after: float) -> None:
        self._clock = clock
        self._flight = flight
        self._stall_after = self._due = stall_after
        self._done = flight.done
        self._alive_at = clock.now()
        self._wait: str | None = None
        self.reports = 0

    def look(self) -> list[str]:
        """Checks whether anything completed since the last look; returns a line for each thing to report."""
        now, done, stalls, lines = self._clock.now(), self._flight.done, self._flight.stalls, list[str]()
        name, _, since = self._clock.current
        alive_at = now if done != self._done else max(since, self._alive_at)
        if alive_at > self._alive_at:
            if self._wait is not None:
                stalls[-1] = dataclasses.replace(stalls[-1], seconds=alive_at - self._alive_at)
                lines.append(f"the wait {self._wait} is over, after {spoken(stalls[-1].seconds)}")
            self._wait, self._due, self.reports = None, self._stall_after, 0
        self._alive_at, self._done = alive_at, done
        quiet = now - alive_at
        if name in NOT_WATCHED or quiet < self._stall_after:
            return lines
        where = "device" if name == "train" and done < self._flight.started else str(name)
        if self._wait is None:
            stalls.append(Stall(where, done, quiet))
        else:
            stalls[-1] = Stall(where, done, quiet)
        if quiet >= self._due:
            while self._due <= quiet:
                self._due *= 2
            if where == "device":
                first, last = done + 1, self._flight.started
                steps = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
                self._wait = f"for the device to finish {steps}"
            else:
                self._wait = f"{WAITS.get(where, f'for {where}')} (after step {done:,})"
            self.reports += 1
            lines.append(f"nothing finished for {spoken(quiet)}: waiting {self._wait}")
        return lines


def watching(
    clock: Clock, flight: Flight, stall_after: float, *, aloud: bool
) -> contextlib.AbstractContextManager[None]:
    """Has a thread note the stalls of the block in ``flight``: ``stall_after`` seconds without a step; 0 disables.

    It checks once a second, costs the loop nothing, and notices nothing while other code holds Python's lock. The open
    span of ``clock`` is what is waited for. If ``aloud``, it reports on standard error too, again each time a stall has
    lasted twice as long, then with the stack of every Python thread.
    """
    if not stall_after:
        return contextlib.nullcontext()
    watch = Watch(clock, flight, stall_after)
    seconds = min(SECONDS_BETWEEN_LOOKS, stall_after / LOOKS_PER_BOUND)

    def look_at_intervals(over: threading.Event) -> None:
        running = True
        while running:  # and once more at the end
            running = not over.wait(seconds)
            lines = watch.look()
            if lines and aloud:
                # Processes may wait for different things.
                who = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
                sys.stderr.write("".join(f"{who}{line}\n" for line in lines))
                sys.stderr.flush()
                if watch.reports == 2:
                    # Standard error may be replaced by an object without a file, as in a notebook.
                    with contextlib.suppress(io.UnsupportedOperation, AttributeError):
                        faulthandler.dump_traceback(sys.stderr)

    return in_background(look_at_intervals, "watchdog")


def spoken(seconds: float) -> str:
    """``0.2 s``, ``12 s``, ``5 min 0 s``, ``2 h 5 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
