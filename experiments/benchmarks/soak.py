"""Soak test: 200,000 tiny steps with evaluations and checkpoints, and the memory of the process.

Claim     resident memory grows by at most 5 % over the run, by its slope; the number of file handles and threads does
          not grow
Command   python experiments/benchmarks/soak.py
          python experiments/benchmarks/soak.py --checkpoint-every 0

A sample is taken at each report. The first tenth of the run is excluded, while caches and the allocator warm up. The
remaining slope without checkpoints is that of the reports, which a run keeps for its curves. Exits with status 1 and a
message if something grew.
"""

import dataclasses
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optax
import tyro
from harness import describe_machine

import jaxnn as jn

KIB = 1024
WARM_UP = 0.1
# Counts and their index in a sample.
COUNTS = {"file handles": 2, "threads": 3}


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 8  # Examples per step
    num_steps: int = 200_000  # Updates
    seed: int = 0  # Determines initial parameters and data order


def data(config):
    inputs = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
    labels = inputs[:, :3].argmax(axis=1)
    return jn.data.arrays(train=(inputs[:64], labels[:64]), test=(inputs[64:], labels[64:]), name="points")


def task(config):
    return jn.tasks.classification(jn.models.MLP((8, 3)))


def optimizer(config):
    return optax.adam(1e-3)


@dataclasses.dataclass(frozen=True)
class Options:
    """Length and cadences of the run."""

    num_steps: int = 200_000
    """Number of updates."""
    report_every: int = 100
    """Steps between reports."""
    eval_every: int = 200
    """Steps between evaluations."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0: none."""
    most_share: float = 0.05
    """Maximum growth of memory over the run, by the slope, as a fraction."""


class Sample(NamedTuple):
    """Resources of the process at a report."""

    step: int
    resident: int
    handles: int
    threads: int


def sampled(options: Options, run_dir: Path) -> Iterator[Sample]:
    """Trains and samples the process at each report."""
    experiment = jn.Experiment(Config(num_steps=options.num_steps), data, task, optimizer)
    names = ("report_every", "eval_every", "checkpoint_every")
    cadences = {name: getattr(options, name) for name in names}
    for report in jn.iterate(experiment, run_dir=run_dir, **cadences):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        yield Sample(report.step, resident, len(os.listdir("/proc/self/fd")), threading.active_count())


def slope(samples: Sequence[Sample]) -> float:
    """Returns bytes per step after the warm-up, by least squares."""
    warm = [sample for sample in samples if sample.step > WARM_UP * samples[-1].step]
    steps, resident = (np.array([sample[axis] for sample in warm], float) for axis in (0, 1))
    return float(np.polyfit(steps, resident, 1)[0])


def main(options: Options) -> None:
    """Prints the samples.

    Raises:
        SystemExit: something grew.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        samples = list(sampled(options, Path(folder) / "run"))
    last, growth = samples[-1], 1000 * slope(samples)
    share = growth * options.num_steps / 1000 / last.resident
    saves = options.num_steps // options.checkpoint_every if options.checkpoint_every else 0
    print(describe_machine())
    done = f"{len(samples):,} reports, {options.num_steps // options.eval_every:,} evaluations, {saves:,} checkpoints"
    print(f"{last.step:,} steps, {done}, {time.perf_counter() - started:,.0f} s")
    print(f"resident memory  {samples[0].resident / KIB**2:.1f} MiB first, {last.resident / KIB**2:.1f} MiB last")
    print(f"its slope        {growth:,.0f} bytes per 1,000 steps: {share:.2%} of the total over the run")
    for name, axis in COUNTS.items():
        values = [sample[axis] for sample in samples]
        print(f"{name:<15}  {values[0]} first, {values[-1]} last, {max(values)} at most")
    if share > options.most_share:
        sys.exit(f"claim violated: resident memory grows by {growth:,.0f} bytes per 1,000 steps")
    check_counts(samples)


def check_counts(samples: Sequence[Sample]) -> None:
    """Exits if the minimum of the last tenth of the run exceeds the maximum of the first tenth."""
    tenth = -(-len(samples) // 10)
    for name, axis in COUNTS.items():
        before, after = ([sample[axis] for sample in part] for part in (samples[:tenth], samples[-tenth:]))
        if min(after) > max(before):
            sys.exit(f"claim violated: {name} grew from {max(before)} to {min(after)}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
