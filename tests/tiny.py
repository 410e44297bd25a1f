"""The smallest experiment that trains: a linear classifier of a few points, for the tests of the loop."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxnn as jn

NUM_TRAIN, NUM_TEST = 37, 23


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 0.1
    batch_size: int = 8
    num_steps: int = 20
    seed: int = 0


def points(num_examples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noisy points ``[n, 3]`` labelled by their largest coordinate."""
    inputs = np.random.default_rng(seed).normal(size=(num_examples, 3)).astype(np.float32)
    return inputs, (inputs + 0.1).argmax(axis=1)


def splits() -> jn.Splits:
    return jn.data.arrays(train=points(NUM_TRAIN), test=points(NUM_TEST, 1), name="points")


def init(key: jax.Array, inputs: jax.Array) -> dict[str, jax.Array]:
    return {"kernel": jax.random.normal(key, (inputs.shape[-1], 3)), "bias": jnp.zeros(3)}


def apply(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    return inputs @ params["kernel"] + params["bias"][None]


MODEL = (init, apply)
TASK = jn.tasks.classification(MODEL)


def nats(params: dict[str, jax.Array], batch: jn.Batch) -> jax.Array:
    """The cross-entropy of each example."""
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, batch.inputs), batch.targets)


def experiment(
    *,
    data: Any = None,
    model: Any = None,
    task: Any = None,
    optimizer: Any = None,
    step: Any = None,
    params: Any = None,
    **fields: Any,
) -> jn.Experiment[Config]:
    """The linear classifier trained by SGD on points, with other parts where they are given."""
    return jn.Experiment(
        Config(**fields),
        data=lambda config: data or splits(),
        task=task or (lambda config: jn.tasks.classification(model or MODEL)),
        optimizer=optimizer or (lambda config: optax.sgd(config.learning_rate, momentum=0.9)),
        step=step,
        params=params,
    )


class Acting:
    """A split that calls ``action`` when the batches of ``step`` are requested."""

    def __init__(self, source: Any, step: int, action: Callable[[], object]) -> None:
        self._source, self._step, self._action = source, step, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def order(self, seed: Any, steps: Any, batch_size: int) -> Any:
        if self._step in np.asarray(steps):
            self._action()
        return self._source.order(seed, steps, batch_size)


def acting(step: int, action: Callable[[], object]) -> jn.Experiment[Config]:
    """The experiment whose data call ``action`` when the batches of ``step`` are requested."""
    parts = splits()
    return experiment(data=parts._replace(train=Acting(parts.train, step, action)))


HOW: dict[str, Any] = {"steps_per_call": 5, "report_every": 5, "eval_every": 10, "progress": "none"}
MEMBERS: dict[str, Any] = {**HOW, "vmap_size": 2, "devices": 1}


def fit(tiny: jn.Experiment[Any], run_dir: Path | None = None, **options: Any) -> jn.Run:
    """``jn.fit`` with nothing measured and nothing printed; no record without a directory."""
    where = {"run_dir": run_dir} if run_dir is not None else {"record": False}
    return jn.fit(tiny, **{**HOW, **({} if "resume" in options else where), **options})


def break_off(tiny: jn.Experiment[Any], run_dir: Path, step: int, **options: Any) -> None:
    """Leaves the loop of ``jn.iterate`` after the report of ``step``."""
    for report in jn.iterate(tiny, run_dir=run_dir, **{**HOW, **options}):
        if report.step == step:
            break


def read(run_dir: Path, name: str = "record.json") -> Any:
    return json.loads((run_dir / name).read_text())


def lines(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of a file of a record, by default its reports."""
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
