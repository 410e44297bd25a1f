"""What the loop costs: ``fit`` against a per-step loop and a scan written by hand, in one process, in turn.

Claim     digits MLP: fit is at least 4 times the per-step loop and 0.95 times the scan;
          MNIST MLP: at least 0.97 times the better of the two
Command   python experiments/benchmarks/overhead.py
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxnn as jn
from jaxnn.types import Examples

sys.path.insert(0, str(Path(__file__).parents[1]))
import digits_mlp
import mnist_mlp

ROUNDS = 7


def hand_written(experiment: jn.Experiment) -> tuple[Callable[[], float], Callable[[], float]]:
    """A per-step loop and a scan over whole epochs, as a user of Flax and Optax writes them; steps a second each."""
    config = experiment.config
    source = experiment.data(config).train
    inputs, targets = jax.device_put(source.examples)
    model, tx = experiment.task(config), experiment.optimizer(config)
    per_epoch = source.num_examples // config.batch_size
    batch = source.gather(source.examples, jnp.arange(config.batch_size))
    init = jax.jit(lambda key: (params := model.init(key, batch)[0], tx.init(params)))

    def update(carry, rows, inputs, targets):
        params, opt_state, key = carry
        key, dropout_key = jax.random.split(key)
        batch = source.gather(Examples(inputs, targets), rows)
        (loss, _), gradient = jax.value_and_grad(model.loss, has_aux=True)(params, {}, batch, dropout_key)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), loss

    @jax.jit
    def shuffled(key):
        order = jax.random.permutation(key, source.num_examples)
        return order[: per_epoch * config.batch_size].reshape(per_epoch, config.batch_size)

    step = jax.jit(update, donate_argnums=0)
    epoch = jax.jit(
        lambda carry, rows, inputs, targets: jax.lax.scan(
            lambda carry, rows: update(carry, rows, inputs, targets), carry, rows
        ),
        donate_argnums=0,
    )

    def per_step(carry, rows):
        for row in rows:
            carry, loss = step(carry, row, inputs, targets)
        return carry, loss

    def scanned(carry, rows):
        return epoch(carry, rows, inputs, targets)

    def timed(run_epoch: Callable) -> Callable[[], float]:
        def rate() -> float:
            key = jax.random.key(config.seed)
            carry = (*init(key), key)
            carry, _ = run_epoch(carry, shuffled(key))
            jax.block_until_ready(carry)
            num_epochs = max(1, config.num_steps // per_epoch)
            start = time.perf_counter()
            for index in range(num_epochs):
                carry, _ = run_epoch(carry, shuffled(jax.random.fold_in(key, index)))
            jax.block_until_ready(carry)
            return num_epochs * per_epoch / (time.perf_counter() - start)

        return rate

    return timed(per_step), timed(scanned)


def fitted(experiment: jn.Experiment) -> Callable[[], float]:
    """``fit`` with its record and fifty reports; steps a second over all its windows, compilation apart."""

    def rate() -> float:
        with tempfile.TemporaryDirectory() as folder:
            run = jn.fit(experiment, run_dir=Path(folder) / "run", progress="none", eval_every=0, checkpoint_every=0)
        return experiment.config.num_steps / run.metrics["seconds"].sum()

    return rate


def compare(name: str, experiment: jn.Experiment) -> None:
    """Runs the three in turn and prints the ratios of each round: median, least and most."""
    loop, scan = hand_written(experiment)
    contenders = {"fit": fitted(experiment), "loop": loop, "scan": scan}
    rates = {key: [] for key in contenders}
    for _ in range(ROUNDS):
        for key, rate in contenders.items():
            rates[key].append(rate())
    for other in ("loop", "scan"):
        ratios = [fit / hand for fit, hand in zip(rates["fit"], rates[other], strict=True)]
        print(
            f"{name:<7} fit / {other}: {statistics.median(ratios):5.2f}  ({min(ratios):.2f} to {max(ratios):.2f})"
            f"   {statistics.median(rates['fit']):8,.0f} / {statistics.median(rates[other]):8,.0f} steps/s"
        )


def main() -> None:
    """Compares on both networks."""
    compare("digits", digits_mlp.experiment.replace(num_steps=20_000))
    compare("mnist", mnist_mlp.experiment.replace(num_steps=1_500))


if __name__ == "__main__":
    main()
