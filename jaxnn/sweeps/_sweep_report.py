"""What a sweep prints before it trains and at each window; its results print themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxnn.engine import Trainer
from jaxnn.observe import cpu_count, format_bytes
from jaxnn.parallel import find_devices
from jaxnn.sweeps._plan import SweepPlan, members_layout

CORES_HINT = (
    "{0} cores are one device: jax.config.update('jax_num_cpu_devices', {0}) before JAX is used makes each a device, "
    "so that members use all; scripts do so"
)


@dataclasses.dataclass(frozen=True)
class SweepReport:
    """One window of one block of members, as a display shows it. Steps are those of all members together."""

    step: int
    num_steps: int
    title: str
    numbers: str
    rates: str
    is_milestone: bool

    def __str__(self) -> str:
        return f"{self.title}  {self.numbers}  {self.rates}"


def sweep_rows(plan: SweepPlan) -> list[tuple[str, str | None]]:
    """Rows of name and value for the sweep, before its first group."""
    num_groups, failed = len(plan.groups), [member for member in plan.members if member.log.error is not None]
    groups = "1 group, one compilation" if num_groups == 1 else f"{num_groups} groups, a compilation each"
    devices = find_devices(plan.options.device)
    largest = max(plan.groups, key=lambda group: len(group.members))
    layout = members_layout(plan.options, largest.members[0].experiment.config.batch_size, len(largest.members))
    traced = sorted({name for group in plan.groups for name in group.traced})
    static = sorted({name for group in plan.groups for name in group.static})
    varying = [name for name in static if len({repr(group.static.get(name)) for group in plan.groups}) > 1]
    cores = cpu_count() or 1
    idle = cores > 1 and len(devices) == 1 and devices[0].platform == "cpu"
    return [
        ("sharded over", f"{layout.num_devices} of {len(devices)} devices" if len(devices) > 1 else None),
        ("members", f"{len(plan.members) - len(failed)} in {groups}"),
        ("one program for", f"all values of {', '.join(traced)}" if traced else None),
        ("a program each", f"all values of {', '.join(varying)}" if varying else None),
        ("cannot be run", "; ".join(map(str, failed)) or None),
        ("halving", _halving(plan)),
        # XLA computes small operations on one core.
        ("hint", CORES_HINT.format(cores) if idle else None),
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


def _halving(plan: SweepPlan) -> str | None:
    """Which members continue after which step; rungs that would end in one window are one."""
    if plan.halving is None:
        return None
    if len(plan.rungs) == 1:
        return "none: a run is too short, or there are too few members; more reports per run make shorter rungs"
    ends = ", ".join(str(plan.rung_end(plan.groups[0], share)) for share in plan.rungs[:-1])
    return f"one of {plan.halving.eta} continues after step {ends}"
