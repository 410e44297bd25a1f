"""Thirteen differences, planted one at a time between two runs, and whether `jn.diff` names each, and its first step.

Claim     13 of 13 named: 8 with the exact step, 3 that no replay here repeats with the window, 2 change no number
Command   python experiments/benchmarks/planted_differences.py

Each run is a process of its own. The runs are compared by their records, and trained again to find the step.
"""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jaxnn as jn
from jaxnn.cli import exit_on_user_error
from jaxnn.observe import text_table
from jaxnn.proof import Diff

NUM_ROWS, LATE = 96, 13
HOW: dict[str, Any] = {"steps_per_call": 4, "report_every": 4, "eval_every": 4, "progress": "none"}


@dataclasses.dataclass(frozen=True)
class Config:
    """The experiment of all runs."""

    learning_rate: float = 0.1
    late_rate: float = 0.1  # Of steps from number 13 on
    batch_size: int = 8
    num_steps: int = 24
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Options:
    """What to plant, and where to write the results."""

    plants: tuple[str, ...] = ()
    """Default: all."""
    out: Path = Path("runs/benchmarks")
    """Folder for planted_differences.json."""
    train: tuple[str, Path] | None = None
    """Of a process that this script starts: the plant, and the directory of its run."""


def arrays(num_rows: int = NUM_ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noisy pictures ``[n, 8, 8, 1]`` of one of four bars."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, num_rows)
    inputs = random.normal(size=(num_rows, 8, 8, 1)).astype(np.float32)
    inputs[np.arange(num_rows), 2 * labels] += 2
    return inputs, labels


def data(plant: str) -> jn.Splits:
    """The data with what is planted in them."""
    inputs, labels = arrays()
    if plant == "row":
        inputs[41, 3, 3] += 1
    if plant == "shuffle":
        order = np.random.default_rng(1).permutation(NUM_ROWS)
        inputs, labels = inputs[order], labels[order]
    splits = jn.data.arrays((inputs, labels), arrays(24, 1))
    shift = 0.02 if plant == "augmentation" else 0.01

    def augment(key: jax.Array, batch: jn.Batch) -> jn.Batch:
        return batch._replace(inputs=batch.inputs + shift * jax.random.normal(key, batch.inputs.shape))

    return jn.data.with_augmentation(splits, augment)


def task(config: Config, plant: str) -> jn.Task:
    """The task with what is planted in it."""
    if plant.startswith("kernel"):
        return jn.tasks.classification(jn.models.CNN(4, blocks=((8,),), dense=()))

    def init(key: jax.Array, inputs: jax.Array) -> dict[str, jax.Array]:
        scale = 0.2 if plant == "initialisation" else 0.1
        return {"kernel": scale * jax.random.normal(key, (64, 4)), "bias": jnp.zeros(4)}

    def apply(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        logits = inputs.reshape(len(inputs), -1) @ params["kernel"] + params["bias"]
        if plant.startswith("callback"):
            noise = jax.pure_callback(
                lambda: np.float32(np.random.default_rng().random()), jax.ShapeDtypeStruct((), "float32")
            )
            logits += 1e-3 * jnp.arange(4.0) * noise
        return logits

    smoothing = 0.1 if plant == "loss" else 0.0
    return jn.tasks.classification((init, apply), label_smoothing=smoothing)


def optimizer(config: Config) -> optax.GradientTransformation:
    """SGD, whose rate changes late."""
    rate = optax.piecewise_constant_schedule(config.learning_rate, {LATE - 1: config.late_rate / config.learning_rate})
    return optax.sgd(rate, momentum=0.9)


def make(plant: str, **fields: Any) -> jn.Experiment[Config]:
    """The experiment with a plant; ``none`` has none."""
    config = Config(**fields, **FIELDS.get(plant, {}))
    return jn.Experiment(config, lambda config: data(plant), functools.partial(task, plant=plant), optimizer)


FIELDS: dict[str, dict[str, Any]] = {
    "learning rate": {"late_rate": 0.05},
    "seed": {"seed": 1},
    "batch size": {"batch_size": 4, "num_steps": 48},
}
experiment = make("none")


@dataclasses.dataclass(frozen=True)
class Plant:
    """A planted difference."""

    part: str  # that has to be named first
    words: str  # that have to be in its text
    step: Callable[[], int | tuple[int, int] | None]  # the first step, or its window; None: the numbers stay equal
    base: str = "none"  # the plant of the other run
    environment: tuple[tuple[str, str], ...] = ()  # of the process with the plant


def first_with_row(row: int) -> int:
    """The first step whose batch has a row."""
    source = data("none").train
    order = np.asarray(source.order(0, np.arange(24, dtype=np.int32), 8))
    return 1 + int(np.argmax((order == row).any(axis=1)))


TWO = (("XLA_FLAGS", "--xla_force_host_platform_device_count=2"),)
PLANTS = {
    "learning rate": Plant("config", "late_rate 0.1 → 0.05", lambda: LATE),
    "seed": Plant("config", "seed 0 → 1", lambda: 0),
    "batch size": Plant("config", "batch_size 8 → 4", lambda: 1),
    "row": Plant("data", "rows among 40 to 41 (1 of", lambda: first_with_row(41)),
    "shuffle": Plant("data", "the order of the rows of train/inputs", lambda: 1),
    "augmentation": Plant("program", "the order or augmentation of the data", lambda: 1),
    "loss": Plant("program", "the program of a step", lambda: 1),
    "initialisation": Plant("program", "the initial values", lambda: 0),
    "kernel without natives": Plant("program", "convolution", lambda: (1, 4), "kernel", (("JAXNN_NATIVE", "off"),)),
    "flag": Plant("flags", "jax_default_matmul_precision None → bfloat16", lambda: None),
    "script": Plant("code", "planted.py", lambda: None),
    "resumed": Plant(
        "resume", "B was resumed after step 12 with the layout single → data", lambda: (13, 16), "none", TWO
    ),
    "callback again": Plant("", "jn.verify", lambda: (1, 4), "callback"),
}


def train(plant: str, path: Path) -> None:
    """Trains a run with a plant in this process."""
    if plant == "flag":
        jax.config.update("jax_default_matmul_precision", "bfloat16")
    if plant != "resumed":
        jn.fit(make(plant), run_dir=path, **HOW)
        return
    for report in jn.iterate(make("none"), run_dir=path, **HOW, checkpoint_every=12):
        if report.step == 12:
            break
    jn.fit(make("none"), resume=path, devices=2, strategy="data", progress="none")


def start(script: Path, plant: str, path: Path, environment: tuple[tuple[str, str], ...] = ()) -> None:
    """Trains a run with a plant in another process."""
    command = [sys.executable, str(script), "--train", plant, str(path)]
    subprocess.run(command, check=True, env={**os.environ, **dict(environment)}, timeout=600)


def committed_script(folder: Path) -> Path:
    """A copy of this script in a new git repository."""
    folder.mkdir()
    script = folder / "planted.py"
    shutil.copy(__file__, script)
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "Plant differences")):
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)
    return script


def judge(plant: Plant, found: Diff) -> tuple[bool, str]:
    """Whether the plant and its first step were named, and the step."""
    cause = found.causes[0] if found.causes else None
    if plant.part:
        texts = [f"{one}" for one in found.differences if one.part == plant.part]
        named = any(plant.words in text for text in texts) and (
            plant.words in found.headline or plant.part in "flags code"
        )
    else:
        named = cause is None and plant.words in found.headline
    step = plant.step()
    if step is None:
        return named and found.parted is None, "none"
    if isinstance(step, tuple):
        return named and (found.equal_until + 1, found.parted) == step, f"{found.equal_until + 1} to {found.parted}"
    return named and found.parting is not None and found.parting.step == step, str(found.parting and found.parting.step)


def main(options: Options) -> None:
    """Plants all, and prints what `jn.diff` says."""
    if options.train is not None:
        train(*options.train)
        return
    rows, results = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = committed_script(folder / "code")
        for plant in options.plants or PLANTS:
            about = PLANTS[plant]
            if not (base := folder / about.base).exists():
                start(script, about.base, base)
            source = script.read_text()
            if plant == "script":
                script.write_text(f"{source}\n# This comment computes nothing.\n")
            start(script, plant, folder / plant, about.environment)
            script.write_text(source)
            found = jn.diff(base, folder / plant, (make(about.base), make(plant)))
            right, step = judge(about, found)
            rows.append((plant, "named" if right else "MISSED", step, found.headline))
            print(f"\n--- {plant}: {rows[-1][1]}\n{found}", flush=True)
            results.append({"plant": plant, "named": right, **found.as_json()})
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "planted_differences.json").write_text(json.dumps(results, indent=1))
    print("\n" + text_table(rows, ("planted", "found", "step", "first line")))
    print(f"{sum(one['named'] for one in results)} of {len(results)} named with their step")


if __name__ == "__main__":
    with exit_on_user_error():
        main(tyro.cli(Options))
