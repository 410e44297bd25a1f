"""What Ray's workers do for a sweep: plan it, and train some of its members in a directory of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxnn.parallel import computing_on
from jaxnn.record import is_locked, is_sweep, jax_flags
from jaxnn.sweeps.engine.checks import check_devices
from jaxnn.sweeps.engine.local import sweep_here
from jaxnn.sweeps.engine.plan import plan_sweep
from jaxnn.sweeps.engine.resuming import check_same
from jaxnn.sweeps.engine.running import opened_group
from jaxnn.sweeps.engine.store import member_lines, sweep_facts
from jaxnn.sweeps.options import SweepOptions
from jaxnn.sweeps.search import Halving, Points
from jaxnn.types import Experiment

# A driver that was killed leaves workers, which Ray ends within seconds.
SECONDS_TO_WAIT = 60.0
# Settings of JAX that a worker shares, besides those that change numbers: what one compiled is there for all.
CACHE_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


class Sent(NamedTuple):
    """What every worker gets.

    Attributes:
        experiment: what is swept.
        points: those of all members.
        options: how they are run.
        origin: where the record says it comes from.
        settings: those of JAX in the process that asks.
    """

    experiment: Experiment[Any]
    points: Points | Halving
    options: SweepOptions
    origin: Mapping[str, Any]
    settings: Mapping[str, Any]


class Planned(NamedTuple):
    """A sweep as planned.

    Attributes:
        facts: what its ``sweep.json`` says from the start.
        groups: the numbers of the members that can share a program.
        members: the lines of ``members.jsonl``.
        warnings: what was warned of.
    """

    facts: dict[str, Any]
    groups: Sequence[Sequence[int]]
    members: list[dict[str, Any]]
    warnings: Sequence[str]


def jax_settings() -> dict[str, Any]:
    """The settings of JAX that workers are to have too."""
    settings = jax_flags() | {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    return {name: value for name, value in settings.items() if hasattr(jax.config, name)}


def plan_there(sent: Sent, before: Mapping[str, Any] | None) -> Planned:
    """Plans the sweep in this process, so that the one that asks need not open a device.

    Args:
        sent: what is to be swept.
        before: what the record says of a sweep that is resumed, or None.

    Raises:
        ConfigError, DataError: it cannot start.
    """
    # On the CPU, whatever the workers have; with a width given nothing is measured: that is for those who train.
    given = dataclasses.replace(sent.options, device="cpu", devices=1, width=1, steps_per_call=1)
    with _settled(sent), computing_on(given.device), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_devices(sent.experiment, sent.points, given)
        plan = plan_sweep(sent.experiment, sent.points, sent.options)
        if before is not None and sent.options.resume is not None:
            check_same(plan, before, sent.options.resume)
        first = opened_group(dataclasses.replace(plan, options=given), plan.groups[0])
        facts = dict(before or sweep_facts(plan, first, sent.origin))
        groups = [[member.number for member in group.members] for group in plan.groups]
        lines = list(member_lines(plan, facts))
    told = [str(warning.message) for warning in caught if warning.category is UserWarning]
    return Planned(facts, groups, lines, told)


def train_there(sent: Sent, numbers: Sequence[int], folder: Path) -> dict[str, Any]:
    """Trains these members on the one device of this worker, into ``folder``; goes on with what a lost worker left.

    Returns:
        The summary of their sweep.

    Raises:
        ConfigError, DataError, RecordError: they cannot be trained.
    """
    with _settled(sent), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _wait_until_free(folder)
        begun = is_sweep(folder)
        options = dataclasses.replace(
            sent.options,
            engine="local",
            devices=1,
            num_workers=None,
            progress="none",
            run_dir=None if begun else folder,
            resume=folder if begun else None,
        )
        found = sweep_here(sent.experiment, sent.points, options, numbers, sent.origin)
    return dict(found.summary)


def _wait_until_free(folder: Path) -> None:
    """Waits for a process that still writes ``folder``; if it goes on to, opening the folder says so."""
    until = time.monotonic() + SECONDS_TO_WAIT
    while is_locked(folder) and time.monotonic() < until:
        time.sleep(0.2)


@contextlib.contextmanager
def _settled(sent: Sent) -> Iterator[None]:
    """JAX set as where the sweep was asked for; a worker serves one sweep after another."""
    before = jax_settings()
    for name, value in sent.settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
