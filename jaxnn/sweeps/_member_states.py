"""The members of a recorded sweep with their states: predicted with and evaluated together, a program per group."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnn import engine, record
from jaxnn.sweeps._groups import traced_values, with_values
from jaxnn.sweeps._members import Member, count_by_status
from jaxnn.tasks import derived_metrics
from jaxnn.types import ConfigError, Experiment, PyTree, RecordError

GROUPS = "groups"  # the folder of the groups' checkpoints


class RestoredGroup(NamedTuple):
    """Members of one group, in the order of their rows."""

    folder: Path  # the directory of the sweep, or of the shard that trained it
    facts: dict[str, Any]  # of the group, in ``sweep.json``
    members: list[Member]
    programs: engine.Programs
    states: Any  # `HostStates`, ``[members, ...]``


def restored_groups(
    path: Path, experiment: Experiment[Any], members: Sequence[Member], *, with_data: bool = False
) -> Iterator[RestoredGroup]:
    """Yields ``members`` of the sweep in ``path``, by group, with the states of the newest checkpoint.

    The data are loaded ``with_data``, or if the record does not describe them. RecordError if there is no checkpoint.
    """
    for folder in record.sweep_folders(path):
        for number, facts in enumerate(record.read_facts(folder / record.SWEEP_FILE, ("groups",))["groups"]):
            found = [member for member in members if member.index in facts["members"]]
            if not found:
                continue
            # As recorded: the experiment given now may have other values for the fields that were not swept.
            configs = [record.config_from_json(dict(member.config), experiment.config) for member in found]
            each = [dataclasses.replace(experiment, config=config) for config in configs]
            splits = None if with_data else record.recorded_data(folder, facts)
            resident = None if splits is None else False
            if splits is None:
                splits = engine.load_data(each[0])
                record.check_same_data(folder, facts["fingerprint"], record.data_fingerprint(splits), "sweep")
            values, make = traced_values(each, facts["traced"]), functools.partial(with_values, each[0])
            given = engine.Members(tuple(member.index for member in found), values, make)
            programs = engine.programs_of(each[0], splits, resident=resident, members=given)
            checkpoints = record.Checkpoints(folder / GROUPS / f"{number}")
            restored = checkpoints.restore_newest(engine.host_shapes(programs.shapes, len(facts["members"])))
            if restored is None:
                raise RecordError(
                    f"{checkpoints.folder} holds no checkpoint: the sweep was run with checkpoint_every=0, or it was "
                    "deleted."
                )
            rows = [facts["members"].index(member.index) for member in found]
            take = functools.partial(np.take, indices=rows, axis=0)
            yield RestoredGroup(folder, facts, found, programs, jax.tree.map(take, restored.state))


def predict_members(sweep: Any, inputs: Any, batch_size: int) -> PyTree:
    """Returns the outputs ``[members, examples, ...]`` of the members of a `Sweep`, as `Sweep.predict`."""

    def outputs(group: RestoredGroup) -> list[PyTree]:
        programs = group.programs

        def predict(states: PyTree, values: PyTree, batch: PyTree) -> PyTree:
            def one(state: Any, values: Any) -> PyTree:
                member = programs.spec.member(values)
                return engine.make_predict(member.task(member.config), programs.source)(state, batch)

            return jax.lax.map(lambda row: one(*row), (states, values), batch_size=group.facts["vmap"]["size"])

        states = jax.device_put(engine.with_keys(group.states.states, programs.shapes))
        together = functools.partial(jax.jit(predict), states, programs.values)
        found = engine.predict_in_batches(together, programs.inputs, inputs, batch_size, axis=1)
        return [jax.tree.map(lambda leaf, row=row: leaf[row], found) for row in range(len(group.members))]

    rows = _by_member(sweep, outputs)
    if len({str(jax.tree.map(np.shape, row)) for row in rows}) > 1:
        raise ConfigError("the members give outputs of different shapes: select those with the same.")
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def evaluate_members(sweep: Any, split: str) -> dict[str, np.ndarray]:
    """Returns each metric ``[members]`` of the members of a `Sweep`, as `Sweep.evaluate`."""

    def metrics(group: RestoredGroup) -> list[dict[str, float]]:
        programs, count = group.programs, len(group.members)
        shape = engine.shape_of(count, min(count, group.facts["vmap"]["size"]), 1)
        slots = engine.arrange(range(count), shape)
        population = programs.lay_out(group.states, slots, np.ones(count, bool), 0)
        means = programs.evaluate(shape, split, population)
        places = [np.unravel_index(row, slots.shape) for row in range(count)]
        return [derived_metrics(programs.task, {name: mean[at] for name, mean in means.items()}) for at in places]

    rows = _by_member(sweep, metrics, with_data=True)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _by_member(
    sweep: Any, compute: Callable[[RestoredGroup], list[PyTree]], *, with_data: bool = False
) -> list[PyTree]:
    """What ``compute`` returns for each member of a `Sweep`; NaN for one that is not complete."""
    complete = [member for member in sweep.members if member.complete]
    if sweep.experiment is None or sweep.dir is None or not complete:
        lacking = "experiment: open_sweep(path, experiment)" if sweep.experiment is None else "record: sweep with one"
        lacking = lacking if complete else f"complete member ({count_by_status(sweep.members)}): resume it"
        raise ConfigError(f"the members of the sweep cannot be restored; it has no {lacking}.")
    found: dict[int, PyTree] = {}
    for group in restored_groups(sweep.dir, sweep.experiment, complete, with_data=with_data):
        found |= zip((member.index for member in group.members), compute(group), strict=True)

    def lost(leaf: Any) -> np.ndarray:
        return np.full(np.shape(leaf), np.nan, np.result_type(leaf, np.float16))

    empty = jax.tree.map(lost, next(iter(found.values())))
    return [found.get(member.index, empty) for member in sweep.members]
