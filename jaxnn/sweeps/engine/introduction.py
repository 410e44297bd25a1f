"""What a sweep says before it trains: where, who with whom, how wide and why."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from jaxnn.loop.introduction import describe_device
from jaxnn.observe import cpu_count, format_bytes, missing_gpu
from jaxnn.sweeps.engine.group_run import GroupRun
from jaxnn.sweeps.engine.plan import SweepPlan, describe_members


def introduction(plan: SweepPlan) -> list[tuple[str, str]]:
    """Rows of what and value for the whole sweep."""
    num_groups, failed = len(plan.groups), [member for member in plan.members.values() if member.error is not None]
    groups = "1 group, one compilation" if num_groups == 1 else f"{num_groups} groups, a compilation each"
    num_used = min(plan.options.devices or jax.local_device_count(), max(len(group.members) for group in plan.groups))
    rows: list[tuple[str, str | None]] = [
        ("device", describe_device(num_used)),
        ("warning", missing_gpu()),
        ("members", f"{len(plan.members) - len(failed)} in {groups}"),
        ("one program for", _told({name for group in plan.groups for name in group.traced})),
        ("a program each", _told({name for group in plan.groups for name in group.static if name in _varying(plan)})),
        ("cannot be run", describe_members(failed) or None),
        ("halving", _halving(plan)),
        ("hint", _cores_hint()),
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
    rows = [
        (f"group {run.group.number + 1}/{num_groups}", f"{members}{f', all with {static}' if static else ''}"),
        ("a member takes", format_bytes(run.programs.member_bytes)),
        *(("plan", line) for line in width.lines()),
        ("width", f"{width.width}{devices}, {chunks}, {run.plan.steps_per_call} steps a call"),
    ]
    return rows


def _cores_hint() -> str | None:
    """What would use the other cores: XLA computes small operations on one."""
    cores = cpu_count() or 1
    if jax.default_backend() != "cpu" or jax.local_device_count() > 1 or cores == 1:
        return None
    return (
        f"{cores} cores are one device: jax.config.update('jax_num_cpu_devices', {cores}) before JAX is used makes "
        "each a device, so that members use all; scripts do so"
    )


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
