"""What a sweep prints: before it trains, at each window, at its end."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxnn.engine import MemberLog, Trainer
from jaxnn.observe import cpu_count, format_bytes
from jaxnn.parallel import find_devices
from jaxnn.record import metrics_of
from jaxnn.run import format_metrics, format_rate, format_split
from jaxnn.sweeps._plan import SweepPlan, describe_members, members_layout
from jaxnn.sweeps.results import Sweep


@dataclasses.dataclass(frozen=True)
class SweepReport:
    """One window of one block of members. All host values.

    Attributes:
        step: updates done so far by all members of the sweep together.
        num_steps: updates they will do at most.
        member_step: updates done by each of those that are trained now.
        group: which group they are in, and of how many, counted from 1.
        counts: the number of members of each status.
        best: the best evaluation of any member so far, in words; empty before the first.
        member_steps_per_second: updates per second, of all members in the window together.
        evaluated: whether the eval split was evaluated.
    """

    step: int
    num_steps: int
    member_step: int
    group: tuple[int, int]
    counts: dict[str, int]
    best: str
    member_steps_per_second: float
    evaluated: bool

    @property
    def rates(self) -> str:
        """The throughput."""
        return f"{format_rate(self.member_steps_per_second)} member-steps/s"

    @property
    def numbers(self) -> str:
        """The state of the members."""
        alive = self.counts.get("running", 0) + self.counts.get("waiting", 0)
        rest = {"alive": alive, **{name: n for name, n in self.counts.items() if name not in ("running", "waiting")}}
        listed = ", ".join(f"{count} {name}" for name, count in rest.items() if count)
        return f"{listed}{'; best ' if self.best else ''}{self.best}"

    @property
    def is_milestone(self) -> bool:
        """Whether it should stay in sight."""
        return self.evaluated or self.step == self.num_steps

    def __str__(self) -> str:
        group = f"group {self.group[0]}/{self.group[1]}  " if self.group[1] > 1 else ""
        return f"{group}step {self.member_step}  {self.numbers}  {self.rates}"


class Leader:
    """The best evaluation of any member so far.

    Args:
        monitored: the metric that ranks them, as reports name it.
        higher_is_better: whether more of it is better.
    """

    def __init__(self, monitored: str, *, higher_is_better: bool) -> None:
        self.monitored = monitored
        self.higher_is_better = higher_is_better
        self._value = -math.inf if higher_is_better else math.inf
        self._point: Mapping[str, Any] = {}

    def see(self, point: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes note of what a member reported."""
        for line in lines:
            value = line.get(self.monitored, math.nan)
            if value > self._value if self.higher_is_better else value < self._value:
                self._value, self._point = value, point

    def __str__(self) -> str:
        """``test accuracy 0.981 (learning_rate 0.01, seed 2)``; empty before the first evaluation."""
        if math.isinf(self._value):
            return ""
        point = ", ".join(f"{name} {value}" for name, value in self._point.items())
        return f"{self.monitored.replace('_', ' ')} {self._value:.4g} ({point})"


def count_statuses(logs: Iterable[MemberLog]) -> dict[str, int]:
    """The number of members of each status, most first."""
    return dict(Counter(log.status for log in logs).most_common())


def sweep_rows(plan: SweepPlan) -> list[tuple[str, str | None]]:
    """Rows of name and value for the whole sweep, before its first group."""
    num_groups, failed = len(plan.groups), [member for member in plan.members.values() if member.error is not None]
    groups = "1 group, one compilation" if num_groups == 1 else f"{num_groups} groups, a compilation each"
    devices = find_devices(plan.options.device)
    largest = max(plan.groups, key=lambda group: len(group.members))
    layout = members_layout(plan.options, largest.members[0].experiment.config.batch_size, len(largest.members))
    static = {name for group in plan.groups for name in group.static}
    varying = {name for name in static if len({repr(group.static.get(name)) for group in plan.groups}) > 1}
    return [
        ("sharded over", f"{layout.num_devices} of {len(devices)} devices" if len(devices) > 1 else None),
        ("members", f"{len(plan.members) - len(failed)} in {groups}"),
        ("one program for", _all_values({name for group in plan.groups for name in group.traced})),
        ("a program each", _all_values(varying)),
        ("cannot be run", describe_members(failed) or None),
        ("halving", _halving(plan)),
        ("hint", _cores_hint(devices)),
    ]


def group_rows(number: int, trainer: Trainer, static: Mapping[str, Any], num_groups: int) -> list[tuple[str, str]]:
    """Rows of name and value for one group, whose vmap size is chosen."""
    spec, choice, shape = trainer.programs.spec, trainer.vmapped, trainer.shape(trainer.block)
    assert choice is not None and shape is not None
    shared = ", ".join(f"{name} {value}" for name, value in static.items())
    count = len(trainer.logs)
    members = f"{count} members" if count > 1 else "1 member"
    chunks = "1 chunk" if shape.chunks == 1 else f"{shape.chunks} chunks"
    devices = f" on {spec.num_devices} devices" if spec.num_devices > 1 else ""
    each = spec.layout.num_devices // spec.num_devices
    devices += f", {each} devices per member" if each > 1 else ""
    return [
        (f"group {number + 1}/{num_groups}", f"{members}{f', all with {shared}' if shared else ''}"),
        ("a member takes", format_bytes(trainer.programs.member_bytes)),
        *(("plan", line) for line in choice.lines()),
        ("vmap size", f"{choice.size}{devices}, {chunks}, {trainer.plan.steps_per_call} steps per call"),
    ]


def closing_rows(results: Sweep) -> list[tuple[str, str]]:
    """Rows of name and value for the end."""
    summary = results.summary
    rows = [(results.status, ", ".join(f"{count} {status}" for status, count in summary["members"].items()))]
    if any(member.best for member in results.members if member not in results.lost):
        best = results.best(at="best")
        point = ", ".join(f"{name} {value}" for name, value in best.point.items())
        rows.append(("best evaluation", f"member {best.index} ({point}): {format_metrics(metrics_of(best.best))}"))
    if summary["member_steps_per_second"]:
        rows.append(("throughput", f"{format_rate(summary['member_steps_per_second'])} member-steps/s in all"))
    rows.append(("time", format_split(summary["spent"])))
    if results.dir is not None:
        rows.append(("record", str(results.dir)))
        if results.status == "interrupted":
            rows.append(("to resume", f"--resume {results.dir}"))
    return rows


def _cores_hint(devices: Sequence[jax.Device]) -> str | None:
    """How to use the other cores: XLA computes small operations on one."""
    cores = cpu_count() or 1
    if len(devices) > 1 or devices[0].platform != "cpu" or cores == 1:
        return None
    return (
        f"{cores} cores are one device: jax.config.update('jax_num_cpu_devices', {cores}) before JAX is used makes "
        "each a device, so that members use all; scripts do so"
    )


def _all_values(names: Iterable[str]) -> str | None:
    listed = ", ".join(sorted(names))
    return f"all values of {listed}" if listed else None


def _halving(plan: SweepPlan) -> str | None:
    """Which members continue after which step; rungs that would end in one window are one."""
    if plan.halving is None:
        return None
    if len(plan.rungs) == 1:
        return "none: a run is too short, or there are too few members; more reports per run make shorter rungs"
    ends = ", ".join(str(plan.rung_end(plan.groups[0], share)) for share in plan.rungs[:-1])
    return f"one of {plan.halving.eta} continues after step {ends}"
