"""Which batch size fills the machine: examples a second and memory at sizes that double, measured as widths are."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxnn.loop import (
    ENOUGH_STEPS,
    PROBE_SECONDS,
    Feed,
    Programs,
    check_config,
    check_count,
    check_data,
    check_parts,
    make_calls,
    make_feed,
)
from jaxnn.observe import Clock, Ledger, available_bytes, format_bytes, temporary_bytes
from jaxnn.parallel import computing_on, find_devices
from jaxnn.sweeps.engine.probing import MEMORY_SHARE, Trial, try_size, widen
from jaxnn.types import ConfigError, Experiment, Source

# A size within so much of the fastest is as good, and leaves more updates for the same examples.
NEARLY = 0.9
# So many times the config's own size the search goes at most.
MOST = 64
# Where a call of fewer is short, its own cost would count as the steps'.
MANY_STEPS = 256


class BatchSizePlan(NamedTuple):
    """How fast an experiment trains at several batch sizes on this machine.

    Attributes:
        trials: the sizes that were tried, smallest first; ``per_second`` is of examples.
        smallest: the smallest size that reaches nine tenths of the best throughput.
        note: why larger ones were not tried, where memory forbade it.
    """

    trials: tuple[Trial, ...]
    smallest: int
    note: str | None

    def __str__(self) -> str:
        lines = [
            f"batch size {trial.size:>6}: {trial.per_second:>10,.0f} examples/s, {1e3 * trial.seconds:.3g} ms a step, "
            f"{format_bytes(trial.temporary_bytes)} of temporaries"
            + ("  ← the smallest that is nearly as fast as any" if trial.size == self.smallest else "")
            for trial in self.trials
        ]
        return "\n".join([*lines, *([f"batch size {self.note}"] if self.note else [])])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def plan_batch_size(
    experiment: Experiment[Any], batch_sizes: Sequence[int] | None = None, device: str | None = None
) -> BatchSizePlan:
    """Measures examples a second at several batch sizes, and what they take; nothing is trained or written.

    It says how the machine is filled, not what is learnt best: a larger batch may need another learning rate.

    Args:
        experiment: what would be run.
        batch_sizes: the sizes to try, ascending; default: doubling from a quarter of the config's until it is no
            faster, no longer fits, or is 64 times that.
        device: the kind of device, ``cpu``, ``gpu`` or ``tpu``; None: JAX's default.

    Raises:
        ConfigError, DataError: it cannot be run.
    """
    with computing_on(device):
        return _plan(experiment, batch_sizes, find_devices(device)[0])


def _plan(experiment: Experiment[Any], batch_sizes: Sequence[int] | None, device: jax.Device) -> BatchSizePlan:
    config = experiment.config
    check_config(config)
    splits = experiment.data(config)
    check_data(splits)
    check_parts(experiment)
    source = splits.train
    sizes = _sizes(config.batch_size, source.num_examples, batch_sizes)
    free = available_bytes(device)

    def attempt(size: int) -> Trial:
        return _try(experiment.replace(batch_size=size), source, make_feed(splits, config.seed, size))

    trials = [attempt(sizes[0])]
    memory = None if free is None else MEMORY_SHARE * free
    # The config's own is what others are compared with.
    note = widen(sizes, trials, attempt, lambda _: 0.0, memory, least=config.batch_size)
    best = max(trial.per_second for trial in trials)
    smallest = next(trial.size for trial in trials if trial.per_second >= NEARLY * best)
    return BatchSizePlan(tuple(trials), smallest, note)


def _sizes(own: int, num_examples: int, given: Sequence[int] | None) -> list[int]:
    if given is not None:
        for size in given:
            check_count("batch_size", size, 1)
        sizes = sorted(size for size in set(given) if size <= num_examples)
    else:
        sizes = [size for size in _doubling(max(1, own // 4), own * MOST) if size <= num_examples]
    if not sizes:
        raise ConfigError(f"no batch size to try is within the {num_examples} training examples: give smaller ones.")
    return sizes


def _doubling(size: int, most: int) -> Iterator[int]:
    while size <= most:
        yield size
        size *= 2


def _try(experiment: Experiment[Any], source: Source, feed: Feed) -> Trial:
    programs = Programs(experiment, source, feed, Ledger(), Clock())
    make_call = make_calls(programs, "to plan the batch size")
    for num_steps in (ENOUGH_STEPS, MANY_STEPS):
        call, taken = make_call(num_steps), temporary_bytes(programs.train[num_steps])
        trial = try_size(experiment.config.batch_size, num_steps, call, taken)
        if trial.seconds * num_steps > PROBE_SECONDS:
            break
    return trial
