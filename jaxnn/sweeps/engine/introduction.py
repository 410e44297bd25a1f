"""What a sweep says before it trains: where, who with whom, how wide and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import jax

from jaxnn.observe import cpu_count, format_bytes
from jaxnn.parallel import choose_devices, find_devices, find_strategy, parse_mesh
from jaxnn.sweeps.engine.group_run import GroupRun
from jaxnn.sweeps.engine.plan import SweepPlan, describe_members


def introduction(plan: SweepPlan) -> list[tuple[str, str]]:
    """Rows of what and value for the whole sweep."""
    num_groups, failed = len(plan.groups), [member for member in plan.members.values() if member.error is not None]
    groups = "1 group, one compilation" if num_groups == 1 else f"{num_groups} groups, a compilation each"
    num_devices = len(find_devices(plan.options.device))
    rows: list[tuple[str, str | None]] = [
        ("spread over", f"{_num_devices(plan)} of {num_devices} devices" if num_devices > 1 else None),
        ("members", f"{len(plan.members) - len(failed)} in {groups}"),
        ("one program for", _told({name for group in plan.groups for name in group.traced})),
        ("a program each", _told({name for group in plan.groups for name in group.static if name in _varying(plan)})),
        ("cannot be run", describe_members(failed) or None),
        ("halving", _halving(plan)),
        ("hint", _cores_hint(find_devices(plan.options.device))),
    ]
    return [(name, value) for name, value in rows if value is not None]


def group_rows(run: GroupRun, num_groups: int) -> list[tuple[str, str]]:
    """Rows of what and value for one group, whose width is planned."""
    formula, width = run.programs.formula, run.width
    static = ", ".join(f"{name} {value}" for name, value in run.group.static.items())
    members = f"{run.num_members} members" if run.num_members > 1 else "1 member"
    shape = run.shape(run.block)
    chunks = "1 chunk" if shape.chunks == 1 else f"{shape.chunks} chunks"
    devices = f" on {formula.num_devices} devices" if formula.num_devices > 1 else ""
    shared = formula.layout.num_devices // formula.num_devices
    devices += f", {shared} devices a member" if shared > 1 else ""
    rows = [
        (f"group {run.group.number + 1}/{num_groups}", f"{members}{f', all with {static}' if static else ''}"),
        ("a member takes", format_bytes(run.programs.member_bytes)),
        *(("plan", line) for line in width.lines()),
        ("width", f"{width.width}{devices}, {chunks}, {run.plan.steps_per_call} steps a call"),
    ]
    return rows


def _cores_hint(devices: Sequence[jax.Device]) -> str | None:
    """What would use the other cores: XLA computes small operations on one."""
    cores = cpu_count() or 1
    if len(devices) > 1 or devices[0].platform != "cpu" or cores == 1:
        return None
    return (
        f"{cores} cores are one device: jax.config.update('jax_num_cpu_devices', {cores}) before JAX is used makes "
        "each a device, so that members use all; scripts do so"
    )


def _num_devices(plan: SweepPlan) -> int:
    """How many devices the largest group is spread over."""
    options = plan.options
    if options.mesh is not None:
        return math.prod(parse_mesh(options.mesh).values())
    num_devices = len(choose_devices(find_devices(options.device), options.devices))
    if find_strategy(options.strategy).choose is None:
        return num_devices
    return min(num_devices, max(len(group.members) for group in plan.groups))


def _told(names: Iterable[str]) -> str | None:
    listed = ", ".join(sorted(names))
    return f"all values of {listed}" if listed else None


def _varying(plan: SweepPlan) -> set[str]:
    """The fields of which the groups have several values."""
    values: dict[str, set[str]] = {}
    for group in plan.groups:
        for name, value in group.static.items():
            values.setdefault(name, set()).add(repr(value))
    return {name for name, found in values.items() if len(found) > 1}


def _halving(plan: SweepPlan) -> str | None:
    """Who goes on after which step; rungs that would end in one window are one."""
    if plan.halving is None:
        return None
    if len(plan.rungs) == 1:
        return "none: a run is too short, or there are too few members; more reports a run make shorter rungs"
    ends = ", ".join(str(plan.rung_end(plan.groups[0], share)) for share in plan.rungs[:-1])
    return f"one of {plan.halving.eta} goes on after step {ends}"
