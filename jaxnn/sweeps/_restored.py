"""Restores the states of a sweep's members from its record, by group, to predict and evaluate with."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn import engine, record
from jaxnn._fields import check_config
from jaxnn._fingerprints import check_same_data, data_fingerprint
from jaxnn._json import config_from_json
from jaxnn.steps import make_evaluate_step
from jaxnn.sweeps._members import Member, count_by_status
from jaxnn.sweeps._plan import SweepOptions, members_layout
from jaxnn.tasks import derived_metrics
from jaxnn.types import ConfigError, Examples, Experiment, Metrics, PyTree, RecordError, TrainState


class RestoredGroup(NamedTuple):
    """Members of one group, in the order of their rows."""

    folder: Path  # the directory of the sweep, or of the shard that trained it
    facts: dict[str, Any]  # of the group, in ``record.json``
    members: list[Member]
    programs: engine.Programs
    states: Any  # `HostStates`, ``[members, ...]``


def restored_groups(
    path: Path,
    experiment: Experiment[Any],
    members: Sequence[Member],
    *,
    with_data: bool = False,
    devices: int | None = 1,
) -> Iterator[RestoredGroup]:
    """Yields ``members`` of the sweep in ``path``, by group, with the states of the newest checkpoint.

    The data are loaded ``with_data``, or if the record does not describe them. Programs shard the members over
    ``devices``; None: over all. RecordError if there is no checkpoint.
    """
    for part in record.RecordReader(path).parts():
        for number, facts in enumerate(part.facts["groups"]):
            found = [member for member in members if member.index in facts["members"]]
            if not found:
                continue
            part.check_trained(facts)
            # As recorded: the experiment given now may have other values for the fields that were not swept.
            configs = [config_from_json(dict(member.config), experiment.config) for member in found]
            for config in configs:
                check_config(config)
            each = [dataclasses.replace(experiment, config=config) for config in configs]
            splits = None if with_data else part.data(facts)
            resident = None if splits is None else False
            if splits is None:
                splits = engine.load_data(each[0])
                check_same_data(part.path, facts["fingerprint"], data_fingerprint(splits), "sweep")
            given = engine.Members.of(each, facts["traced"])
            layout = members_layout(SweepOptions(devices=devices), each[0].config.batch_size, len(found))
            programs = engine.programs_of(each[0], splits, resident=resident, layout=layout, members=given)
            checkpoints = record.Checkpoints(part.states(number))
            like = functools.partial(engine.HostStates.shapes, programs.shapes)
            restored = checkpoints.restore_members([member.index for member in found], facts["members"], like)
            if restored is None:
                raise RecordError(
                    f"{checkpoints.folder} holds no checkpoint: the sweep was run with checkpoint_every=0, or it was "
                    "deleted."
                )
            newest, rows = restored
            take = functools.partial(np.take, indices=rows, axis=0)
            yield RestoredGroup(part.path, facts, found, programs, jax.tree.map(take, newest.state))


def predict_members(sweep: Any, inputs: Any, batch_size: int, devices: int | None) -> PyTree:
    """Returns the outputs ``[members, examples, ...]`` of the members of a `Sweep`, as `Sweep.predict`."""

    def outputs(group: RestoredGroup) -> list[PyTree]:
        _, population, places = _laid_out(group)
        found = group.programs.predict_members(population, inputs, batch_size)
        return [jax.tree.map(lambda leaf, at=at: leaf[at], found) for at in places]

    rows = _by_member(sweep, outputs, devices)
    if len({str(jax.tree.map(np.shape, row)) for row in rows}) > 1:
        raise ConfigError("the members give outputs of different shapes: select those with the same.")
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def evaluate_members(sweep: Any, split: str, devices: int | None) -> dict[str, np.ndarray]:
    """Returns each metric ``[members]`` of the members of a `Sweep`, as `Sweep.evaluate`."""

    def metrics(group: RestoredGroup) -> list[dict[str, float]]:
        shape, population, places = _laid_out(group)
        means = group.programs.evaluate(shape, split, population)
        task = group.programs.task
        return [derived_metrics(task, {name: mean[at] for name, mean in means.items()}) for at in places]

    rows = _by_member(sweep, metrics, devices, with_data=True)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def sums_by_example(sweep: Any, split: str) -> list[dict[str, np.ndarray]]:
    """Returns the sums of each member of a `Sweep` for each example of a split, as `Sweep.example_sums`."""

    def sums(group: RestoredGroup) -> list[dict[str, np.ndarray]]:
        programs = group.programs
        source = programs.finite_source(split)
        size = min(programs.eval_batch_size, source.num_examples)

        @jax.jit
        def evaluate(values: dict[str, Any], state: TrainState, examples: Examples, numbers: jax.Array) -> Metrics:
            member = programs.spec.member(values)
            step = make_evaluate_step(member.task(member.config))

            def one(example: Examples, number: jax.Array) -> Metrics:
                batch = source.as_batch(jax.tree.map(lambda leaf: leaf[None], example), jnp.ones(1))
                return step(state, batch, jax.random.fold_in(state.key, number))

            return jax.vmap(one)(examples, numbers)

        found = []
        for row in range(len(group.members)):
            state = group.states.member(row, programs.shapes)
            values = {name: value[row] for name, value in programs.values.items()}
            parts = []
            for first in range(0, source.num_examples, size):
                numbers = np.minimum(np.arange(first, first + size), source.num_examples - 1)  # one size, one program
                parts.append(jax.device_get(evaluate(values, state, source.read(numbers), numbers)))
            found.append(jax.tree.map(lambda *leaves: np.concatenate(leaves)[: source.num_examples], *parts))
        return found

    return _by_member(sweep, sums, 1, with_data=True)


def _laid_out(group: RestoredGroup) -> tuple[engine.Shape, engine.Population, list[Any]]:
    """The members of a group on the devices: how they are arranged, their states, and the place of each."""
    count, num_devices = len(group.members), group.programs.spec.num_devices
    size = min(-(-count // num_devices), group.facts["vmap"]["size"])
    shape = engine.Shape.of(count, size, num_devices)
    slots = shape.arrange(range(count))
    population = group.programs.lay_out(group.states, slots, np.ones(count, bool), 0)
    return shape, population, [np.unravel_index(row, slots.shape) for row in range(count)]


def _by_member(
    sweep: Any, compute: Callable[[RestoredGroup], list[PyTree]], devices: int | None, *, with_data: bool = False
) -> list[PyTree]:
    """What ``compute`` returns for each member of a `Sweep`; NaN for one that is not complete."""
    complete = [member for member in sweep.members if member.complete]
    if sweep.experiment is None or sweep.dir is None or not complete:
        lacking = "experiment: open_sweep(path, experiment)" if sweep.experiment is None else "record: sweep with one"
        lacking = lacking if complete else f"complete member ({count_by_status(sweep.members)}): resume it"
        raise ConfigError(f"the members of the sweep cannot be restored; it has no {lacking}.")
    found: dict[int, PyTree] = {}
    for group in restored_groups(sweep.dir, sweep.experiment, complete, with_data=with_data, devices=devices):
        found |= zip((member.index for member in group.members), compute(group), strict=True)

    if not found:
        raise RecordError(f"{sweep.dir} has no members in its groups: the record is damaged.")

    def lost(leaf: Any) -> np.ndarray:
        return np.full(np.shape(leaf), np.nan, np.result_type(leaf, np.float16))

    empty = jax.tree.map(lost, next(iter(found.values())))
    return [found.get(member.index, empty) for member in sweep.members]
