"""Reports of a run: its startup, each window, and a summary at its end."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxnn._clock import Throughput
from jaxnn._compat import platform
from jaxnn._text import format_bytes, format_rate, format_split
from jaxnn.engine import Stall, Trainer
from jaxnn.kernels import describe_native, native_fault, native_missing
from jaxnn.parallel import find_devices
from jaxnn.run._watchdog import spoken

# A loop this much slower than a step alone is worth a hint.
SLOW_LOOP = 1.5
# Seconds of a step of a network from which on native kernels are worth a hint.
SLOW_STEP = 5e-4
# What the native package gains, by an operation: whole steps of the benchmark networks (docs/performance.md).
GAINS = {
    "trees": "trees grow several times as fast",
    "convolution": "steps of CNNs take 0.4 to 0.5 of the time",
    "lookup": "steps of networks with large tables take 0.4 of the time",
    "recurrence": "steps of LSTMs take 0.7 of the time",
    "attention": "steps of transformers take 0.8 of the time",
}
# A summary reports the time spent waiting for data from this share of training on.
WORTH_REPORTING = 0.01


def startup_report(
    trainer: Trainer, record: str | None, resumed: dict[str, Any] | None
) -> list[tuple[str, str | None]]:
    """Rows of name and value."""
    steps_per_call = trainer.plan.steps_per_call
    parameters = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(trainer.state.params)})
    dtypes = trainer.programs.traced_step.product_dtypes
    products = ", ".join(f"{count} in {dtype}" for dtype, count in dtypes.items())
    if any(dtype.endswith(" as TF32") for dtype in dtypes):
        products += " (jax_default_matmul_precision=highest: in float32)"
    implementations = trainer.programs.traced_step.implementations
    used = (f"{operation} {' and '.join(names)}" for operation, names in implementations.items())
    tried = ", ".join(f"{n}: {_milliseconds(seconds)} a step" for n, seconds in trainer.seconds_per_step.items())
    layout, size = trainer.programs.layout, trainer.experiment.config.batch_size
    strategy: str | None = f"{layout}: a batch of {size} is {layout.data_size} × {size // layout.data_size} examples"
    if layout.mesh is None:
        idle = len(find_devices()) - 1
        strategy = f"1 device; --devices all would use the other {idle} too" if idle else None
    continued = None
    if resumed is not None:
        length = [change for change in resumed["changed"] if change.startswith("num_steps ")]
        changed = "; ".join(change for change in resumed["changed"] if change not in length)
        note = f", not bit for bit, since these changed: {changed}" if changed else ""
        continued = "; ".join([f"after step {resumed['step']}{note}", *length, *resumed["damaged"]])
    return [
        ("strategy", strategy),
        ("starts from", str(trainer.programs.start) if trainer.programs.start.arrays else None),
        *(("placement", str(tree)) for tree in trainer.placement()),
        ("precision", f"parameters {', '.join(parameters)}; matrix products and convolutions: {products or 'none'}"),
        ("implementations", ", ".join(used) or None),
        ("native", describe_native() if "native" in sum(implementations.values(), []) or native_fault() else None),
        ("steps per call", f"{steps_per_call} ({tried})" if tried else str(steps_per_call)),
        ("hint", speed_hint(trainer)),
        *trainer.notes,
        ("record", record),
        ("resumed", continued),
    ]


def speed_hint(trainer: Trainer) -> str | None:
    """Returns a hint, with the measured cost, if other implementations would be faster."""
    count, measured = trainer.programs.traced_step.plain_convolutions, trainer.seconds_per_step
    if platform() != "cpu":
        return None
    if count == 0:
        missing, is_slow = native_missing(), min(measured.values(), default=0.0) > SLOW_STEP
        wanted = {"trees": trainer.programs.layout.num_devices == 1}
        for name, gain in GAINS.items() if missing else ():
            if wanted.get(name, is_slow) and f"{name} without native: {missing}" in trainer.programs.reasons:
                return f"with native kernels {gain}, but {missing}"
        return None
    if measured:
        alone = measured[1]
        looped = min((seconds for steps, seconds in measured.items() if steps > 1), default=0.0)
        cost = f"{_milliseconds(alone)} a step alone, {_milliseconds(looped)} in a loop"
        slow = looped > SLOW_LOOP * alone
    else:
        cost, slow = "not measured here", trainer.plan.steps_per_call > 1
    if not slow:
        return None
    subject = "1 convolution is" if count == 1 else f"{count} convolutions are"
    return (
        f"{subject} not jaxnn's, and slow in a loop on a CPU ({cost}): use jn.nn.Conv, which has the same parameters, "
        "or flax.linen.Conv(…, conv_general_dilated=jn.nn.conv_general_dilated)"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"


@dataclasses.dataclass(frozen=True)
class Report:
    """One window: its metrics, and how fast it was. All host values."""

    step: int  # updates done at its end
    num_steps: int  # updates the run is to do
    # ``train_*`` are means over the window's steps; those of an eval split, such as ``test_*``, are exact over all
    # of the split, and present only if it was evaluated.
    metrics: Mapping[str, float]
    seconds: float  # wall time of the window, without evaluation, checkpoints and the caller's work
    steps_per_second: float  # updates per second
    examples_per_second: float  # training examples per second

    @property
    def rates(self) -> str:
        """``4,560 steps/s  146,000 examples/s``."""
        return f"{format_rate(self.steps_per_second)} steps/s  {format_rate(self.examples_per_second)} examples/s"

    @property
    def numbers(self) -> str:
        """``train loss 0.123  test accuracy 0.98``."""
        return "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in self.metrics.items())

    @property
    def is_milestone(self) -> bool:
        """Whether the eval split was evaluated, or it is the last."""
        evaluated = any(name.startswith(("validation_", "test_")) for name in self.metrics)
        return evaluated or self.step == self.num_steps

    def __str__(self) -> str:
        return f"step {self.step:>{len(str(self.num_steps))}}/{self.num_steps}  {self.numbers}  {self.rates}"


@dataclasses.dataclass(frozen=True)
class Summary:
    """A run at its end, as host values; those after ``metrics`` are absent if a killed run is opened again."""

    status: str  # ``finished``, ``stopped early``, ``interrupted``, ``diverged`` or ``failed``
    step: int  # updates done
    metrics: Mapping[str, float]  # the last value of each metric
    throughput: Throughput | None = None  # steady steps/s with their spread; None without a window to measure
    examples_per_second: float | None = None  # at that rate
    # ``total``, from the call of ``fit`` to the first step, and its parts by span.
    first_step_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Wall time since the call by span: load, compile, train, data (waiting for batches), caller (printing, a loop), …
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peak_bytes: tuple[int, str] | None = None  # the most memory taken, and of what
    compilations: Mapping[str, float] = dataclasses.field(default_factory=dict)  # totals of the ledger
    stalls: Sequence[Stall] = ()  # times in which no step completed, oldest first
    compiler: Sequence[str] = ()  # why programs were compiled without options for speed

    def as_json(self) -> dict[str, Any]:
        """Returns its part of ``record.json``."""
        throughput = self.throughput and self.throughput._asdict()
        return {**dataclasses.asdict(self), "throughput": throughput}

    def rows(self) -> list[tuple[str, str]]:
        """Returns rows of name and value, for a terminal or a notebook."""
        rows = [(self.status, f"step {self.step}")]
        rows += [(name.replace("_", " "), f"{value:.4g}") for name, value in self.metrics.items()]
        if (steady := self.throughput) is not None:
            rates = (
                f"{format_rate(steady.steps_per_second)} steps/s (median of {steady.num_windows} windows, quartiles "
                f"±{50 * steady.spread:.0f} %), {format_rate(self.examples_per_second or 0)} examples/s"
            )
            rows.append(("throughput", rates))
        if self.first_step_seconds:
            parts = {name: value for name, value in self.first_step_seconds.items() if name != "total"}
            rows.append(("time to first step", f"{self.first_step_seconds['total']:.2f} s ({format_split(parts)})"))
            rows.append(("time", f"{sum(self.seconds.values()):.2f} s ({format_split(self.seconds)})"))
        waited, trained = self.seconds.get("data", 0.0), self.seconds.get("train", 0.0)
        if waited > 0 and (share := waited / (waited + trained)) >= WORTH_REPORTING:
            rows.append(("waited for data", f"{waited:.2f} s, {100 * share:.0f} % of training"))
        if self.peak_bytes:
            rows.append(("peak memory", f"{format_bytes(self.peak_bytes[0])} {self.peak_bytes[1]}"))
        if hits := self.compilations.get("num_cache_hits"):
            total, saved = self.compilations["num_compilations"], self.compilations["saved_seconds"]
            rows.append(("compile cache", f"{hits:.0f} of {total:.0f} programs, {saved:.1f} s saved"))
        rows += [("compiler", line) for line in self.compiler]
        if self.stalls:
            places = ", ".join(dict.fromkeys(stall.where for stall in self.stalls))
            times = "once" if len(self.stalls) == 1 else f"{len(self.stalls)} times"
            stalled = spoken(sum(stall.seconds for stall in self.stalls))
            rows.append(("stalled", f"{times}, {stalled} in all ({places})"))
        return rows
