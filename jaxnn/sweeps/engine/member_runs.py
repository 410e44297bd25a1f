"""A member's own run directory, as its solo run would have left it: `jn.fit` loads it, or goes on from it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxnn.loop import recorded_options
from jaxnn.observe import describe_devices
from jaxnn.parallel import SINGLE
from jaxnn.record import (
    FOLDER,
    Checkpoints,
    LogDigest,
    config_json,
    jax_flags,
    metrics_of,
    open_record,
    text_fingerprint,
)
from jaxnn.sweeps.engine.group_run import GroupRun
from jaxnn.sweeps.engine.layout import member_state


def write_member_runs(run: GroupRun, sweep: Path, facts: Mapping[str, Any]) -> None:
    """Writes a run directory for each member of ``run`` that was trained, and notes it in its log.

    Args:
        run: a group that is over.
        sweep: the sweep's directory.
        facts: what its ``sweep.json`` says.

    Raises:
        RecordError: the disk refused.
    """
    common = _common_facts(run, facts)
    for row, (member, log) in enumerate(zip(run.group.members, run.logs, strict=True)):
        if not log.lines:
            continue
        path = sweep / "members" / f"{member.number:04d}"
        # What a process left that was killed while writing is not whole.
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        own = {"status": log.status, "config": config_json(member.experiment.config), "member": member.number}
        _write(run, row, path, {**common, **own})
        log.dir = str(path.relative_to(sweep))


def _write(run: GroupRun, row: int, path: Path, facts: dict[str, Any]) -> None:
    assert run.host is not None
    log, batch_size = run.logs[row], run.programs.formula.experiment.config.batch_size
    state = member_state(run.host, run.programs.solo.shapes, row)
    with open_record(path) as record:
        record.describe(facts)
        lines = _with_rates(log.lines, batch_size)
        written = record.report(*lines)
        mode = "max" if run.options.higher_is_better else "min"
        folder = Checkpoints(path / FOLDER, monitor=run.monitored, mode=mode)
        with contextlib.closing(folder) as checkpoints:
            step = int(state.step)
            at: dict[str, Any] = next((line for line in reversed(lines) if line["step"] <= step), {})
            count = sum(line["step"] <= step for line in lines)
            checkpoints.save(step, state, metrics_of(at), record.log(LogDigest(written[:count])))


def _with_rates(lines: list[dict[str, Any]], batch_size: int) -> list[dict[str, Any]]:
    """A member's lines with its speed: that at which all members of its block went on together."""
    told, before = [], 0
    for line in lines:
        rate = (line["step"] - before) / line["seconds"]
        told.append({**line, "steps_per_second": rate, "examples_per_second": rate * batch_size})
        before = line["step"]
    return told


def _common_facts(run: GroupRun, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the ``run.json`` of all members says alike."""
    return {
        "name": facts["name"],
        "started": facts["started"],
        "options": recorded_options(run.options),
        "steps_per_call": run.plan.steps_per_call,
        "seconds_per_step_measured": {},
        "data": run.splits.name,
        # The program of a whole population: one that goes on alone is equal to it to rounding, and is told so.
        "fingerprint": {
            **run.fingerprint,
            "program": text_fingerprint(f"{run.fingerprint['program']} {run.width} {run.group.traced}"),
        },
        "precision": run.programs.solo.product_dtypes,
        "implementations": run.programs.solo.implementations,
        "layout": SINGLE.as_json(),
        "devices": describe_devices(),
        "jax_flags": jax_flags(),
        "sweep": {"width": run.width.width, "traced": run.group.traced},
        "command": facts["command"],
        "git": facts["git"],
    }
