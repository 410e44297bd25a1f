"""The contenders on JAX: jaxnn with its own layers, jaxnn with Flax's, and a handwritten jitted step."""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import flax_networks
import jax
import jax.numpy as jnp
import jaxnn_networks
import numpy as np
import optax

import jaxnn as jn
from jaxnn.types import Examples

MANY_ROUNDS = 1000


@dataclasses.dataclass(frozen=True)
class Config:
    """The config of jaxnn's loop."""

    batch_size: int
    num_steps: int
    learning_rate: float
    seed: int = 0


def make(problem: Any, *, dropout: bool, steps: int, options: Any) -> Callable[[], float]:
    """Returns a round of ``steps`` training steps that returns their mean loss, for ``options.contender``."""
    networks = jaxnn_networks if options.contender == "jaxnn" else flax_networks
    train = hand_written if options.contender == "jax" else fitted
    return train(problem, networks.network(problem.network, dropout), steps, options.dtype)


def fitted(problem: Any, network: Any, steps: int, dtype: str) -> Callable[[], float]:
    """Returns jaxnn's loop with its record, one window per round."""
    config = Config(problem.batch_size, MANY_ROUNDS * steps, problem.learning_rate)
    make_task = jn.tasks.next_token if problem.targets.ndim == 2 else jn.tasks.classification
    params = nested(problem.weights)

    def task(config: Config) -> jn.Task:
        made = make_task(network, policy=jn.nn.Policy(compute=dtype))

        def init(key: jax.Array, batch: jn.Batch) -> Any:
            _, model_state = made.init(key, batch)
            return jax.tree.map(jnp.asarray, params), model_state

        return made._replace(init=init)

    experiment = jn.Experiment(
        config,
        lambda config: in_training_order(problem, config),
        task,
        lambda config: jn.optim.adam(config.learning_rate),
    )
    folder = tempfile.TemporaryDirectory()
    iteration = jn.iterate(
        experiment, run_dir=Path(folder.name) / "run", report_every=steps, eval_every=0, checkpoint_every=0
    )
    reports = iter(iteration)

    def round_() -> float:
        assert folder.name
        return next(reports).metrics["train_loss"]

    return round_


def in_training_order(problem: Any, config: Config) -> jn.Splits:
    """Orders the examples so that jaxnn's shuffling returns them in the problem's order."""
    num_examples = len(problem.targets)
    steps = np.arange(num_examples // config.batch_size)
    order = jn.data.batch_indices(config.seed, steps, num_examples, config.batch_size).reshape(-1)
    inputs, targets = np.empty_like(problem.inputs), np.empty_like(problem.targets)
    inputs[order], targets[order] = problem.inputs, problem.targets
    return jn.Splits(jn.data.ArraySource(Examples(inputs, targets)), name=problem.network)


def hand_written(problem: Any, network: Any, steps: int, dtype: str) -> Callable[[], float]:
    """Returns Flax and Optax as in their documentation: one jitted step, donated state, data on the device."""
    tx = optax.adam(problem.learning_rate)
    variables = jax.jit(network.init)(jax.random.key(0), problem.inputs[: problem.batch_size])
    params = jax.tree.map(jnp.asarray, nested(problem.weights))
    stats = {name: value for name, value in variables.items() if name != "params"}
    state = params, stats, tx.init(params), jnp.zeros((), jnp.int32)
    inputs, targets = jax.device_put((problem.inputs, problem.targets))
    key, order = jax.random.key(1), np.arange(len(problem.targets), dtype=np.int32)

    def loss_fn(params: Any, stats: Any, x: Any, y: Any, key: Any) -> Any:
        params, x = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.float32 else leaf, (params, x))
        logits, stats = network.apply({"params": params, **stats}, x, True, rngs={"dropout": key}, mutable=list(stats))
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), stats

    def update(state: Any, inputs: Any, targets: Any, rows: Any) -> Any:
        params, stats, opt_state, step = state
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = grad(params, stats, inputs[rows], targets[rows], jax.random.fold_in(key, step))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state, step + 1), loss

    train_step = jax.jit(update, donate_argnums=0)
    done = 0

    def round_() -> float:
        nonlocal state, done, order
        losses = []
        for _ in range(steps):
            start = done % problem.num_batches * problem.batch_size
            state, loss = train_step(state, inputs, targets, order[start : start + problem.batch_size])
            losses.append(loss)
            done += 1
            if done % problem.num_batches == 0:
                order = np.random.default_rng(done).permutation(order)
        return float(jnp.stack(losses).mean())

    return round_


def nested(weights: Any) -> Any:
    """Returns weights by path as a Flax tree."""
    return flax.traverse_util.unflatten_dict({name: weights[name] for name in weights}, sep="/")
