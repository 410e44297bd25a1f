"""Whether an experiment's functions give what they are asked for."""

from __future__ import annotations

from typing import Any

from jaxnn.types import ConfigError, Experiment, Splits, Task


def check_made(experiment: Experiment[Any], splits: Any) -> None:
    """Raises ConfigError unless data, task and optimizer of ``experiment`` are what they are called."""
    made = {
        "data": splits,
        "task": experiment.task(experiment.config),
        "optimizer": experiment.optimizer(experiment.config),
    }
    right = {
        "data": (isinstance(splits, Splits), "Splits, as jn.data.arrays(train=(inputs, targets)) does"),
        "task": (isinstance(made["task"], Task), "a Task, as jn.tasks.classification(model) does"),
        "optimizer": (
            all(callable(getattr(made["optimizer"], name, None)) for name in ("init", "update")),
            "an Optax optimizer, as optax.adam(config.learning_rate) does",
        ),
    }
    for name, (is_right, wanted) in right.items():
        if not is_right:
            raise ConfigError(f"the experiment's {name} gave a {type(made[name]).__name__}: it must give {wanted}.")
