"""Whether an experiment's functions give what they are asked for."""

from __future__ import annotations

from typing import Any

from jaxnn.types import ConfigError, Experiment, Splits, Task


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


def _wrong(name: str, made: Any, wanted: str) -> ConfigError:
    return ConfigError(f"the experiment's {name} gave a {type(made).__name__}: it must give {wanted}.")
