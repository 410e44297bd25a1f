"""Whether an experiment's functions give what they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxnn.loop.compiling import Programs, for_one_call
from jaxnn.nn.batch_axis import batch_split_over
from jaxnn.parallel import DATA
from jaxnn.steps import make_evaluate_step
from jaxnn.types import (
    ConfigError,
    Examples,
    Experiment,
    Metrics,
    Source,
    Splits,
    Task,
    TrainState,
    suggest,
)


def check_data(splits: Any) -> None:
    """Raises ConfigError unless ``splits`` are what an experiment's ``data`` must give."""
    if not isinstance(splits, Splits):
        raise _wrong("data", splits, "Splits, as jn.data.arrays(train=(inputs, targets)) does")


def check_parts(experiment: Experiment[Any]) -> None:
    """Raises ConfigError unless task and optimizer of ``experiment`` are what they are called."""
    task = experiment.task(experiment.config)
    if not isinstance(task, Task):
        raise _wrong("task", task, "a Task, as jn.tasks.classification(model) does")
    optimizer = experiment.optimizer(experiment.config)
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise _wrong("optimizer", optimizer, "an Optax optimizer, as optax.adam(config.learning_rate) does")


def check_patience(patience: int | None, held_out: str | None) -> None:
    """Raises ConfigError where members or runs are to stop early and no split says when."""
    if patience is not None and held_out is None:
        raise ConfigError("patience needs held-out data: give the data a validation or test split.")


def check_monitor(monitor: str, known: Iterable[str]) -> None:
    """Raises ConfigError unless ``monitor`` is among the metrics that are ``known``."""
    known = list(known)
    if monitor not in known:
        raise ConfigError(f"monitor is {monitor!r}, no metric of this task: {suggest(monitor, known)}.")


def check_examples(programs: Programs, splits: Splits) -> None:
    """Lets the task check the data of all splits against its model; raises what `Task.check` raises."""
    task, shapes = programs.experiment.task(programs.experiment.config), programs.shapes
    batch = jax.eval_shape(programs.source.as_batch, programs.first_examples)
    task.check(shapes.params, shapes.model_state, batch, splits)


def check_sums(programs: Programs, source: Source, make_state: Callable[[], TrainState]) -> None:
    """Confirms that an evaluation gives masked sums: of an example twice, twice what it gives of it once.

    jaxnn's own tasks do, and cost nothing here; any other evaluation is compiled for two examples.

    Args:
        programs: those of the run.
        source: the split that the example is taken from.
        make_state: gives any state; called where there is something to check.

    Raises:
        ConfigError: a sum or the count stays as it is, as that of a mean does.
    """
    task, layout = programs.experiment.task(programs.experiment.config), programs.layout
    if getattr(task.evaluate, "__module__", "").startswith("jaxnn."):
        return
    step = make_evaluate_step(task)

    def evaluate(state: TrainState, examples: Examples, mask: jax.Array) -> Metrics:
        return step(state, source.as_batch(examples, mask))

    state = make_state()
    masks = [layout.place(np.array([1, second], np.float32)) for second in (0, 1)]
    examples = layout.place(source.read(np.zeros(2, np.int32)))
    jit = for_one_call()
    if programs.shardings is not None:
        jit |= {"in_shardings": (programs.shardings, layout.whole, layout.whole), "out_shardings": layout.whole}
    program = programs.compile(evaluate, "evaluate two examples", "to check sums", state, examples, masks[0], **jit)
    once, twice = (jax.device_get(program(state, examples, mask)) for mask in masks)
    if not once["count"]:
        # Such as a text of nothing but padding: it says nothing of its sums.
        return
    if _stays(once["count"], twice["count"]):
        raise ConfigError(
            f"the count of the task's evaluate is {once['count']:g} for an example, and for two of it: sum the mask, "
            "batch.mask.sum()."
        )
    for name in (name for name in once if name != "count" and _stays(once[name], twice[name])):
        raise ConfigError(
            f"{name!r} of the task's evaluate is {np.max(once[name]):.3g} for an example, and for two of it, whose "
            f"count is {twice['count']:g}: return the masked sum, not a mean: jnp.sum(values * batch.mask)."
        )


def _stays(once: np.ndarray, twice: np.ndarray) -> bool:
    return bool(np.any(once) and np.allclose(once, twice, rtol=1e-3, atol=0.0))


def check_alike_on_devices(programs: Programs) -> None:
    """Confirms that a model's own state will be the same on all devices under `pmap`, where each sees its rows alone.

    Raises:
        ConfigError: some of it, such as the statistics of Flax's own BatchNorm, would not; the first is named.
    """
    layout, experiment = programs.layout, programs.experiment
    if layout.strategy != "pmap" or not programs.shapes.model_state:
        return
    varying: list[str] = []

    def trace(state: TrainState, examples: Examples) -> None:
        with batch_split_over(DATA):
            loss, batch = experiment.task(experiment.config).loss, programs.source.as_batch(examples)
            _, (model_state, _) = loss(state.params, state.model_state, batch, state.key)
        for path, leaf in jax.tree.leaves_with_path(model_state):
            if DATA in jax.typeof(leaf).mat.varying:
                varying.append(jax.tree_util.keystr(path, simple=True, separator="/"))

    specs = PartitionSpec(), PartitionSpec(DATA)
    sharded = jax.shard_map(trace, mesh=layout.mesh, in_specs=specs, out_specs=None)
    jax.eval_shape(sharded, programs.shapes, programs.first_examples)
    if varying:
        raise ConfigError(
            f"{varying[0]} would differ between devices under pmap: use jaxnn's layers, whose statistics are those of "
            "the whole batch, or strategy data."
        )


def _wrong(name: str, made: Any, wanted: str) -> ConfigError:
    return ConfigError(f"the experiment's {name} gave a {type(made).__name__}: it must give {wanted}.")
