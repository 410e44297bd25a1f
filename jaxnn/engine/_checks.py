"""Checks of an experiment: the types of its functions, sums over examples, random numbers on several devices."""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxnn import observe
from jaxnn._batch_context import use_batch_axis
from jaxnn._fields import check_config
from jaxnn._text import format_bytes
from jaxnn.data import check_split_names, without_data
from jaxnn.engine._compiler import Programs
from jaxnn.engine._sums import check_sums
from jaxnn.parallel import DATA, broadcast_from_primary
from jaxnn.steps import make_evaluate_step
from jaxnn.tasks import own_step
from jaxnn.types import Batch, ConfigError, Experiment, Splits, Task, TrainingError, TrainState, is_half


def load_data(experiment: Experiment[Any]) -> Splits:
    """Returns the data of ``experiment``, after checking that it can be run."""
    check_config(experiment.config)
    splits = (experiment.data or without_data)(experiment.config)
    check_data(splits)
    check_parts(experiment)
    return splits


def check_memory(programs: Programs) -> None:
    """Raises TrainingError if a member's state and the largest compiled program exceed a device's free memory.

    Without a compiled program the state alone is compared. Nothing has been allocated for the state yet.
    """
    layout, shards = programs.layout, programs.shards
    # The devices of a CPU share its memory.
    copies = len(layout.mesh.local_devices) if layout.mesh is not None and layout.platform == "cpu" else 1
    parts = {"parameters": shards.params, "the optimizer state": shards.opt_state}
    parts["the model state"] = shards.model_state
    sizes = {name: copies * observe.nbytes(part) for name, part in parts.items()}
    sizes["temporary arrays"] = copies * programs.most_temporary_bytes
    free, needed = broadcast_from_primary(lambda: observe.available_bytes(layout.device)), sum(sizes.values())
    if free is not None and needed > free:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
        raise TrainingError(
            f"training does not fit in memory: it takes {format_bytes(needed)} ({listed}), and "
            f"{format_bytes(free)} are free: make the model or the batch smaller, or use more devices with "
            "strategy='fsdp'."
        )


def check_data(splits: Any) -> None:
    """Raises ConfigError unless ``splits`` are what an experiment's ``data`` must return."""
    if not isinstance(splits, Splits):
        raise _wrong("data", splits, "Splits, as jn.data.arrays(train=(inputs, targets)) does")
    check_split_names(splits.others)


def check_parts(experiment: Experiment[Any]) -> None:
    """Raises ConfigError unless ``experiment`` makes a task of functions and an Optax optimizer."""
    task = experiment.task(experiment.config)
    if not isinstance(task, Task):
        raise _wrong("task", task, "a Task, as jn.tasks.classification(model) does")
    if not isinstance(task.metrics, Mapping):
        raise ConfigError(f"the task's metrics are {task.metrics!r:.60}: give a dict of functions by name.")
    functions = task._asdict() | {f"metric {name}": metric for name, metric in task.metrics.items()}
    if not isinstance(task.directions, Mapping) or not {"min", "max"}.issuperset(task.directions.values()):
        raise ConfigError(f"the task's directions are {task.directions!r:.60}: give a dict, as {{'mae': 'min'}}.")
    for name, part in functions.items():
        is_missing = part is None and name == "evaluate_again"
        if name not in ("metrics", "directions") and not (callable(part) or is_missing):
            raise ConfigError(f"the task's {name} is {part!r}, and must be a function: see jn.Task.")
    optimizer = experiment.optimizer(experiment.config)
    for name, one in optimizer.items() if isinstance(optimizer, Mapping) else [(None, optimizer)]:
        if not all(callable(getattr(one, function, None)) for function in ("init", "update")):
            which = "optimizer" if name is None else f"optimizer, for {name!r},"
            raise _wrong(which, one, "an Optax optimizer, as optax.adam(config.learning_rate) does")
    if experiment.step is not None:
        own_step(experiment.step, task, optimizer, experiment.config)


def notes_on(programs: Programs, splits: Splits) -> list[tuple[str, str]]:
    """What a user should know before the first step, as name and text.

    Raises ConfigError for parameters in half precision, and as `_unchecked_parts`.
    """
    found, train = list[tuple[str, str]](), splits.train.examples
    _check_parameters(programs.shapes.params)
    if unchecked := _unchecked_parts(programs, evaluated=splits.eval_split is not None):
        found.append(("not checked", unchecked))
    for name, source in splits.named().items():
        if name != "train" and train is not None and source.examples is not None:
            if _holds(train.inputs, source.examples.inputs):
                found.append(("leak", f"the rows of {name} are among those of train: it says nothing about new data"))
    numbers = train.inputs.get("numbers") if train is not None and isinstance(train.inputs, Mapping) else None
    if hasattr(splits.train, "columns") and numbers is not None and np.isnan(numbers).any():
        found.append(("missing", "numbers of train are NaN where missing: jn.data.standardize(splits) replaces them"))
    if sums := programs.half_sums:
        more = f" (and {len(sums) - 1} more)" if len(sums) > 1 else ""
        remedy = "jn.nn.Dense, Conv, Embed and add_broadcast, with the parameters of Flax's, sum in float32"
        found.append(("warning", f"the step {sums[0]}{more}, and loses terms: {remedy}"))
    for fault in programs.traced_step.faults(programs.layout.platform):
        found.append(("compiler", f"jaxlib computes wrong numbers for {fault.pattern}: {fault.way_round}"))
    found += [("chosen", reason) for reason, was_measured in programs.reasons.items() if was_measured]
    if programs.deterministic and programs.layout.platform == "cpu":
        found.append(("deterministic", "it changes nothing on a CPU, whose bits are equal without it"))
    if getattr(programs.spec.experiment.config, "learning_rate", None) == 0 and "learning_rate" not in programs.values:
        found.append(("learning rate", "it is 0: the parameters stay as they are"))
    return found


def _check_parameters(params: Any) -> None:
    """Raises ConfigError for trained parameters in half precision."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if is_half(leaf.dtype):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ConfigError(
                f"the parameter {name} is {leaf.dtype}, which loses small updates (bfloat16 below 1/256 of a weight, "
                f"float16 1/2048): keep it float32, with policy=jn.nn.Policy(compute='{leaf.dtype}'), or freeze it."
            )


def _holds(whole: Any, part: Any) -> bool:
    """Whether the rows of ``part`` are the first or the last ones of ``whole``."""

    def equal(rows: slice) -> bool:
        # The first row alone tells most sets apart.
        few = jax.tree.map(lambda a, b: np.array_equal(a[rows][:1], b[:1]), whole, part)
        return jax.tree.all(few) and jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a[rows], b), whole, part))

    leaves, others = jax.tree.leaves(whole), jax.tree.leaves(part)
    if not leaves or any(a.shape[1:] != b.shape[1:] or len(a) < len(b) for a, b in zip(leaves, others, strict=True)):
        return False
    size = len(others[0])
    return size > 1 and (equal(slice(size)) or equal(slice(len(leaves[0]) - size, None)))


def _unchecked_parts(programs: Programs, *, evaluated: bool) -> str | None:
    """Checks what a task's traced programs show; returns what they do not show, and how to check that once.

    ConfigError if its own evaluation returns means or counts padding, or it draws random numbers itself under `pmap`.
    """
    task, unknown = programs.task, list[str]()
    # jaxnn's own tasks are known to return sums.
    if evaluated and not getattr(task.evaluate, "__module__", "").startswith("jaxnn."):
        if names := check_sums(make_evaluate_step(task), programs.shapes, programs.batch, programs.eval_batch_size):
            unknown.append(f"whether {', '.join(names)} of the task's evaluate is a sum over examples")
    if programs.layout.axis_name is not None and programs.layout.data_size > 1:
        _check_random_numbers(programs, evaluated=evaluated)
        unknown.append("whether the task couples the examples of a batch, which pmap divides among devices")
    return f"{'; '.join(unknown)}: check once, by jaxnn.testing.check_task(task, batch)" if unknown else None


def _check_random_numbers(programs: Programs, *, evaluated: bool) -> None:
    """Raises ConfigError if a task draws random numbers itself, which would be the same on all devices under `pmap`.

    They are searched in the traced program of a device: Flax's Dropout draws such numbers, that of jaxnn does not.
    """
    task, source, mesh = programs.task, programs.source, programs.layout.mesh
    batch = jax.eval_shape(source.as_batch, programs.first_examples)
    shapes = programs.shapes, jax.eval_shape(source.transform, batch, programs.shapes.key)

    def compute(axis_name: str | None, state: TrainState, batch: Batch) -> Any:
        # As in a run, it is known while tracing that nothing is padding.
        batch = batch._replace(mask=np.ones(batch.mask.shape, np.float32))
        arguments = state.params, state.model_state, batch, state.key
        with use_batch_axis(axis_name):
            trained = task.loss(*arguments)
        return trained, task.evaluate(*arguments) if evaluated else None

    def part(state: TrainState, batch: Batch) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], compute(DATA, state, batch))

    specs = PartitionSpec(), PartitionSpec(DATA)
    parts = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(DATA), check_vma=False)
    whole = functools.partial(compute, None)
    drawn, expected = (_draws(observe.Traced(function, *shapes).equations()) for function in (parts, whole))
    if own := [*(drawn - expected)]:
        raise ConfigError(
            f"the task draws random numbers of its own, {own[0]} on each device, and all would draw the same "
            "under pmap: use strategy data, as fast and with the numbers of one device, or jaxnn's layers."
        )


def _draws(found: Iterable[tuple[Any, str]]) -> Counter[str]:
    """The shapes of the random numbers and keys that a program draws, with the number of each."""
    drawn = (one for one, _ in found if one.primitive.name.startswith(("random_", "rng_")))
    return Counter(f"{list(one.outvars[0].aval.shape)}" for one in drawn)


def _wrong(name: str, made: Any, wanted: str) -> ConfigError:
    return ConfigError(f"the experiment's {name} gave a {type(made).__name__}: it must return {wanted}.")
