"""What the loop tells: one window's report, and the summary of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxnn.engine import Stall
from jaxnn.observe import Throughput, format_bytes
from jaxnn.run._watchdog import spoken

# The share of training spent waiting for data from which on a summary says so.
WORTH_TELLING = 0.01


@dataclasses.dataclass(frozen=True)
class Report:
    """One window: what was learnt, and how fast. All host values.

    Attributes:
        step: updates done at its end.
        num_steps: updates the run is to do.
        metrics: ``train_*`` are means over the window's steps; those of a held-out split, such as ``test_*``, are
            exact over the whole split and there only where it was evaluated.
        seconds: wall time of the window, without evaluation, checkpoints and the caller's own work.
        steps_per_second: updates a second.
        examples_per_second: training examples a second.
    """

    step: int
    num_steps: int
    metrics: Mapping[str, float]
    seconds: float
    steps_per_second: float
    examples_per_second: float

    def line(self) -> dict[str, Any]:
        """What ``metrics.jsonl`` holds of it."""
        return {
            "step": self.step,
            **self.metrics,
            "seconds": self.seconds,
            "steps_per_second": self.steps_per_second,
            "examples_per_second": self.examples_per_second,
        }

    @property
    def rates(self) -> str:
        """``4,560 steps/s  146,000 examples/s``."""
        return f"{format_rate(self.steps_per_second)} steps/s  {format_rate(self.examples_per_second)} examples/s"

    @property
    def numbers(self) -> str:
        """``train loss 0.123  test accuracy 0.98``."""
        return format_metrics(self.metrics)

    @property
    def is_milestone(self) -> bool:
        """Whether held-out data were looked at, or it is the last."""
        held_out = any(name.startswith(("validation_", "test_")) for name in self.metrics)
        return held_out or self.step == self.num_steps

    def __str__(self) -> str:
        return f"step {self.step:>{len(str(self.num_steps))}}/{self.num_steps}  {self.numbers}  {self.rates}"


@dataclasses.dataclass(frozen=True)
class Summary:
    """A run at its end. All host values.

    Attributes:
        status: ``finished``, ``stopped early``, ``interrupted``, ``diverged`` or ``failed``.
        step: updates done.
        metrics: the last value of each metric.
        throughput: steady steps per second with their spread; None if no window tells.
        examples_per_second: at that rate.
        first_step_seconds: from the call of ``fit`` to the end of the first call, and of that
            ``trace_seconds``, ``compile_seconds``; a mapping.
        seconds: wall time by what it went into: load, train, data (waiting for batches), evaluation, checkpoint, …
        peak_bytes: the most memory taken, and of what.
        compilations: totals of the ledger.
        stalls: the times in which nothing got done, as a watchdog saw them, oldest first.
    """

    status: str
    step: int
    metrics: Mapping[str, float]
    throughput: Throughput | None
    examples_per_second: float | None
    first_step_seconds: Mapping[str, float]
    seconds: Mapping[str, float]
    peak_bytes: tuple[int, str]
    compilations: Mapping[str, float]
    stalls: Sequence[Stall] = ()

    def as_json(self) -> dict[str, Any]:
        """What ``run.json`` holds of it."""
        throughput = self.throughput and self.throughput._asdict()
        return {**dataclasses.asdict(self), "throughput": throughput}

    def rows(self) -> list[tuple[str, str]]:
        """The summary as (what, value), for a terminal or a notebook."""
        rows = [(self.status, f"step {self.step}")]
        rows += [(name.replace("_", " "), f"{value:.4g}") for name, value in self.metrics.items()]
        if self.throughput is not None and self.examples_per_second is not None:
            rows.append(("throughput", self._throughput(self.throughput)))
        rows.append(("time to first step", self._first_step()))
        rows.append(("time", format_split(self.seconds)))
        if (waited := self._waited()) is not None:
            rows.append(("waited for data", waited))
        rows.append(("peak memory", f"{format_bytes(self.peak_bytes[0])} {self.peak_bytes[1]}"))
        if hits := self.compilations["num_cache_hits"]:
            total, saved = self.compilations["num_compilations"], self.compilations["saved_seconds"]
            rows.append(("compile cache", f"{hits:.0f} of {total:.0f} programs, {saved:.1f} s saved"))
        if self.stalls:
            rows.append(("stalled", self._stalled()))
        return rows

    def _stalled(self) -> str:
        places = ", ".join(dict.fromkeys(stall.where for stall in self.stalls))
        times = "once" if len(self.stalls) == 1 else f"{len(self.stalls)} times"
        return f"{times}, {spoken(sum(stall.seconds for stall in self.stalls))} in all ({places})"

    def _waited(self) -> str | None:
        """How long the steps waited for their data; None where that is not worth a word."""
        waited, trained = self.seconds.get("data", 0.0), self.seconds.get("train", 0.0)
        share = waited / (waited + trained) if waited else 0.0
        return f"{waited:.2f} s, {100 * share:.0f} % of training" if share >= WORTH_TELLING else None

    def _throughput(self, throughput: Throughput) -> str:
        return (
            f"{format_rate(throughput.steps_per_second)} steps/s (median of {throughput.num_windows} windows, "
            f"quartiles ±{50 * throughput.spread:.0f} %), {format_rate(self.examples_per_second or 0)} examples/s"
        )

    def _first_step(self) -> str:
        parts = {name: value for name, value in self.first_step_seconds.items() if name != "total"}
        return f"{self.first_step_seconds['total']:.2f} s ({format_split(parts)})"


def format_metrics(metrics: Mapping[str, float]) -> str:
    """``train loss 0.123  test accuracy 0.98``."""
    return "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())


def format_split(seconds: Mapping[str, float]) -> str:
    """``train 1.20 s, evaluation 0.10 s``: what took any time, most first."""
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.2f} s" for name, value in parts if value >= 0.005) or "0.00 s"


def format_rate(rate: float) -> str:
    """``12.3``, ``4,560``: three digits or a whole number."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
