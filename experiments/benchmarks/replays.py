"""Steps of a recorded CNN and of a member of a sweep, chosen at random and replayed: how many exactly, and how fast.

Claim     fifty random steps of a run of 10,000, and of a member, are replayed to the bit, in a median of at most 3 s
          each after the first
Command   python experiments/benchmarks/replays.py
"""

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import optax
import tyro

import jaxnn as jn
from jaxnn.cli import exit_on_user_error
from jaxnn.observe import cpu_count, text_table


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train and to replay."""

    num_steps: int = 10_000
    num_replays: int = 50
    num_members: int = 8
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Config:
    """Of the network."""

    learning_rate: float = 3e-3
    dropout: float = 0.1
    batch_size: int = 32
    num_steps: int = 10_000
    seed: int = 0


def experiment_of(num_steps: int) -> jn.Experiment[Config]:
    """Returns a small CNN for Fashion-MNIST, or for digits where there are no such data."""
    try:
        splits = jn.data.fashion_mnist()
    except (jn.DataError, jn.ConfigError):
        splits = jn.data.digits()
    splits = jn.data.with_augmentation(splits, jn.data.random_shift(1))

    def task(config: Config) -> jn.Task:
        return jn.tasks.classification(jn.models.CNN(10, blocks=((8,), (16,)), dense=(32,), dropout=config.dropout))

    return jn.Experiment(
        Config(num_steps=num_steps), lambda _: splits, task, lambda config: optax.adam(config.learning_rate)
    )


def replayed(
    name: str, path: Path, experiment: jn.Experiment[Config], options: Options, member: int | None
) -> list[str]:
    """Replays random steps; returns a row of the table."""
    steps = np.random.default_rng(options.seed).integers(1, options.num_steps + 1, options.num_replays).tolist()
    started, seconds, exact = time.perf_counter(), [], 0
    replay = None
    for step in steps:
        replay = jn.replay(path, experiment, step, member=member) if replay is None else replay.at(step)
        exact += replay.exact
        if not replay.exact:
            print(f"{name}, step {step}: {replay.why}")
        now = time.perf_counter()
        seconds.append(now - started)
        started = now
    assert replay is not None
    kept = dict(replay.rows())["kept"]
    return [
        name,
        f"{exact} of {len(steps)}",
        f"{seconds[0]:.1f}",
        f"{statistics.median(seconds[1:]):.2f}",
        f"{max(seconds[1:]):.2f}",
        kept,
    ]


@exit_on_user_error()
def main() -> None:
    """Trains, replays, and prints a table."""
    options = tyro.cli(Options, description=__doc__)
    jax.config.update("jax_num_cpu_devices", cpu_count() or 1)
    experiment, rows = experiment_of(options.num_steps), []
    with tempfile.TemporaryDirectory() as place:
        jn.fit(experiment, run_dir=Path(place, "run"), devices=1, progress="plain")
        rows.append(replayed("a run", Path(place, "run"), experiment, options, None))
        points = jn.search.random(key=0, num=options.num_members, learning_rate=jn.search.log_uniform(1e-3, 1e-2))
        jn.sweep(experiment, points, run_dir=Path(place, "sweep"), progress="plain")
        rows.append(replayed("a member", Path(place, "sweep"), experiment, options, options.num_members // 2))
    print(text_table(rows, ("of", "exact", "first, s", "median, s", "longest, s", "kept")))


if __name__ == "__main__":
    main()
