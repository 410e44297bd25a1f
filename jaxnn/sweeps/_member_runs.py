"""A member as a run of its own: its state from the stacked checkpoint, and a directory as its solo run leaves it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxnn.engine import HostStates, RunOptions, host_shapes, make_init, member_state
from jaxnn.parallel import SINGLE_DEVICE
from jaxnn.record import (
    FOLDER,
    METRICS_FILE,
    RUN_FILE,
    SWEEP_FILE,
    Checkpoints,
    LogDigest,
    config_from_json,
    metrics_of,
    open_record,
    read_facts,
    text_fingerprint,
)
from jaxnn.run import Run, fit
from jaxnn.sweeps._sweep_record import GROUPS, MEMBER_FOLDER
from jaxnn.sweeps._sweep_resume import shard_folders
from jaxnn.sweeps.results import Member, Sweep, read_sweep
from jaxnn.sweeps.search import with_fields
from jaxnn.types import Experiment, RecordError, TrainState


def open_sweep(path: str | Path, experiment: Experiment[Any] | None = None) -> Sweep:
    """Returns the sweep that is recorded in ``path``, or those of its shards that started as one.

    Members whose shard did not start are ``waiting``. A sweep that was killed, and its running members, read
    ``interrupted``. The summary of shards adds up theirs: seconds of all processes together, and the member-steps per
    second of one of them.

    Args:
        path: the sweep's directory.
        experiment: what was swept, for :meth:`Sweep.run`.

    Raises:
        RecordError: there is no sweep, or its record is damaged.
    """
    return read_sweep(path, experiment, open_member)


def open_member(sweep: Sweep, member: Member) -> Run:
    """Loads a member as a run, from its run directory, which is exported first if there is none."""
    assert sweep.experiment is not None
    # As recorded, so that it is not trained any further.
    config = config_from_json(dict(member.config), sweep.experiment.config)
    path = member.dir if member.dir is not None and member.dir.is_dir() else export_members(sweep, [member])[0]
    experiment = dataclasses.replace(sweep.experiment, config=config)
    # The sweep's own stopping rule may not be at hand; a complete member stays as it is.
    return fit(experiment, resume=path, progress="none", stop=lambda lines: True)


def export_members(sweep: Sweep, members: Sequence[Member]) -> list[Path]:
    """Writes a run directory for each of ``members``, with a checkpoint that `fit` can resume."""
    assert sweep.dir is not None and sweep.experiment is not None
    parts = [sweep.dir] if (sweep.dir / SWEEP_FILE).is_file() else shard_folders(sweep.dir)
    groups = {
        number: (part, index)
        for part in parts
        for index, group in enumerate(read_facts(part / SWEEP_FILE, ("groups",))["groups"])
        for number in group["members"]
    }
    by_group: dict[tuple[Path, int], list[Member]] = {}
    for member in members:
        if member.index not in groups:
            raise RecordError(f"{sweep.dir} holds no state of member {member.index}: it was not trained.")
        by_group.setdefault(groups[member.index], []).append(member)
    exported = {}
    for (part, index), found in by_group.items():
        facts = read_facts(part / SWEEP_FILE, ("groups", "options", "name", "started"))
        like, host = _group_states(part, index, facts, sweep.experiment, found[0])
        rows = facts["groups"][index]["members"]
        for member in found:
            state = member_state(host, like, rows.index(member.index))
            path = exported[member.index] = part / MEMBER_FOLDER / f"{member.index:04d}"
            _export(path, _facts(facts, index, member), member, state, sweep)
    return [exported[member.index] for member in members]


def _group_states(
    part: Path, index: int, facts: Mapping[str, Any], experiment: Experiment[Any], member: Member
) -> tuple[TrainState, HostStates]:
    """The shapes of one state, and the newest whole states of a group."""
    config = with_fields(experiment.config, member.point)
    source = experiment.data(config).train
    examples = source.read(np.arange(config.batch_size))
    like = jax.eval_shape(make_init(dataclasses.replace(experiment, config=config), source), examples)
    folder = part / GROUPS / f"{index}"
    restored = Checkpoints(folder).restore_newest(host_shapes(like, len(facts["groups"][index]["members"])))
    if restored is None:
        raise RecordError(
            f"{folder} holds no checkpoint: the sweep was run with checkpoint_every=0, or it was deleted."
        )
    return like, restored.state


def _export(path: Path, facts: Mapping[str, Any], member: Member, state: TrainState, sweep: Sweep) -> None:
    # What a process left that was killed while writing is not whole.
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    lines = [line for line in sweep.lines if line["member"] == member.index]
    own = [{name: value for name, value in line.items() if name != "member"} for line in lines]
    with open_record(path) as record:
        record.write(RUN_FILE, facts)
        written = record.report(*own)
        step = int(state.step)
        checkpoints = Checkpoints(path / FOLDER, monitor=sweep.monitor, higher_is_better=sweep.higher_is_better)
        with contextlib.closing(checkpoints):
            at: Mapping[str, Any] = next((line for line in reversed(own) if line["step"] <= step), {})
            count = sum(line["step"] <= step for line in own)
            checkpoints.save(step, state, metrics_of(at), LogDigest(path / METRICS_FILE, written[:count]))


def _facts(facts: Mapping[str, Any], index: int, member: Member) -> dict[str, Any]:
    """The content of a member's ``run.json``."""
    group = facts["groups"][index]
    names = {field.name for field in dataclasses.fields(RunOptions)}
    options = {name: value for name, value in facts["options"].items() if name in names}
    shared = ("name", "started", "data", "devices", "jax_flags", "command", "git")
    return {
        **{name: facts[name] for name in shared},
        "status": member.status,
        "config": member.config,
        "member": member.index,
        "options": options | {"devices": None, "strategy": "auto", "mesh": None},
        "steps_per_call": group["steps_per_call"],
        "seconds_per_step_measured": {},
        # The program of a population: one that continues alone is equal to it to rounding, and the run says so.
        "fingerprint": {
            **group["fingerprint"],
            "program": text_fingerprint(f"{group['fingerprint']['program']} {group['vmap']} {group['traced']}"),
        },
        "precision": group["precision"],
        "implementations": group["implementations"],
        "layout": SINGLE_DEVICE.as_json(),
        "sweep": {"vmap_size": group["vmap"]["size"], "traced": group["traced"]},
    }
