"""Overhead of the training loop: ``fit`` against a handwritten per-step loop and a scan, in one process.

Claim     digits MLP: fit is at least 4 times the per-step loop and 0.95 times the scan;
          MNIST MLP: at least 0.97 times the better of the two;
          importing jaxnn: at most 1.2 times importing jax, flax and optax;
          MNIST MLP with each metric writer that is installed against none: the ratio is printed
Command   python experiments/benchmarks/overhead.py, or with `writers` for the last comparison alone
"""

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import interleaved, quantity, ratios

import jaxnn as jn
from jaxnn.engine import load_data
from jaxnn.record import MLflow
from jaxnn.types import Examples

sys.path.insert(0, str(Path(__file__).parents[1]))
import digits_mlp
import mnist_mlp

ROUNDS = 5


def hand_written(experiment: jn.Experiment) -> tuple[Callable[[], float], Callable[[], float]]:
    """Returns a per-step loop and a scan, as users of Flax and Optax write them; each returns steps/s.

    The loop is that of tutorials: NumPy gathers a batch on the host, a jitted step trains on it. The scan is an
    expert's version: data on the device, one call per epoch, keys drawn outside. Like ``fit``, both compute the
    mean loss and accuracy.
    """
    config = experiment.config
    source = load_data(experiment).train
    model, tx = experiment.task(config), experiment.optimizer(config)
    per_epoch = source.num_examples // config.batch_size
    num_epochs = max(1, config.num_steps // per_epoch)
    on_device = jax.device_put(source.examples)

    def update(carry, batch, key):
        params, opt_state = carry
        (loss, (_, metrics)), gradient = jax.value_and_grad(model.loss, has_aux=True)(params, {}, batch, key)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, **metrics}

    def start():
        batch = source.gather(source.examples, np.arange(config.batch_size))
        params, _ = jax.jit(model.init)(jax.random.key(config.seed), batch)
        return params, tx.init(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, inputs, targets, key, index):
        rows = Examples(inputs, targets)
        batch = source.gather(rows, jnp.arange(config.batch_size))
        return update(carry, batch, jax.random.fold_in(key, index))

    def per_step(carry, epoch):
        order = np.random.default_rng(epoch).permutation(source.num_examples)
        key, history = jax.random.key(epoch), []
        for index in range(per_epoch):
            rows = order[index * config.batch_size : (index + 1) * config.batch_size]
            carry, metrics = step(carry, source.examples.inputs[rows], source.examples.targets[rows], key, index)
            history.append(metrics)
        history = jax.device_get(history)
        return carry, {name: np.mean([metrics[name] for metrics in history]) for name in history[0]}

    @functools.partial(jax.jit, donate_argnums=0)
    def scanned(carry, examples, epoch):
        key = jax.random.key(epoch)
        order = jax.random.permutation(key, source.num_examples)[: per_epoch * config.batch_size]
        drawn = order.reshape(per_epoch, -1), jax.random.split(key, per_epoch)
        body = lambda carry, d: update(carry, source.gather(examples, d[0]), d[1])  # noqa: E731
        carry, history = jax.lax.scan(body, carry, drawn)
        return carry, jax.tree.map(jnp.mean, history)

    def timed(run_epoch: Callable) -> Callable[[], float]:
        def rate() -> float:
            carry, _ = jax.block_until_ready(run_epoch(start(), 0))
            started = time.perf_counter()
            for epoch in range(num_epochs):
                carry, _ = run_epoch(carry, epoch)
            jax.block_until_ready(carry)
            return num_epochs * per_epoch / (time.perf_counter() - started)

        return rate

    return timed(per_step), timed(lambda carry, epoch: scanned(carry, on_device, epoch))


def fitted(experiment: jn.Experiment, writer: str | None = None) -> Callable[[], float]:
    """Returns steps/s of ``fit`` with its record and 50 reports, over all windows, without compilation.

    With ``writer``, or ``none`` as what to compare it with, the time that records and writers take counts too.
    """
    how: dict[str, Any] = {"progress": "none", "eval_every": 0, "checkpoint_every": 0}

    def rate() -> float:
        with tempfile.TemporaryDirectory() as folder:
            made = MLflow(f"sqlite:///{folder}/mlflow.db") if writer == "mlflow" else writer
            writers = (made,) if made not in (None, "none") else ()
            run = jn.fit(experiment, run_dir=Path(folder) / "run", writers=writers, **how)
        seconds = run.summary.seconds
        spent = run.metrics["seconds"].sum() if writer is None else seconds["train"] + seconds["record"]
        return experiment.config.num_steps / spent

    return rate


def compare(name: str, experiment: jn.Experiment) -> None:
    """Runs the three in turn and prints ratios per round: median, minimum and maximum."""
    loop, scan = hand_written(experiment)
    contenders = {"fit": fitted(experiment), "loop": loop, "scan": scan}
    rates = interleaved(contenders, rounds=ROUNDS)
    for other in ("loop", "scan"):
        ours, theirs = quantity(rates["fit"], "steps/s"), quantity(rates[other], "steps/s")
        print(f"{name:<7} fit / {other}: {ratios(rates['fit'], rates[other])}   {ours} / {theirs}")


def compare_writers() -> None:
    """Trains with each writer that is installed and without, in turn."""
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    modules = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
    names = ["none", *(name for name, module in modules.items() if importlib.util.find_spec(module))]
    rates = interleaved({name: fitted(mnist_mlp.experiment, name) for name in names}, rounds=ROUNDS)
    for name in names[1:]:
        print(f"{name:<11} / no writer: {ratios(rates[name], rates['none'])}   {quantity(rates[name], 'steps/s')}")


def compare_imports() -> None:
    """Starts processes that import jaxnn, or its dependencies, and prints the ratios."""

    def seconds(statement: str) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - started

    seconds("import jaxnn")
    statements = ("import jaxnn", "import jax, flax, optax")
    ours, theirs = interleaved({each: functools.partial(seconds, each) for each in statements}, rounds=ROUNDS).values()
    print(f"import  jaxnn / jax, flax, optax: {ratios(ours, theirs)}")


def main() -> None:
    """Compares the imports, then both networks, then the writers."""
    if "writers" in sys.argv[1:]:
        compare_writers()
        return
    compare_imports()
    compare("digits", digits_mlp.experiment.replace(num_steps=20_000))
    compare("mnist", mnist_mlp.experiment)
    compare_writers()


if __name__ == "__main__":
    main()
