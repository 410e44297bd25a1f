"""The run of torture.py: a small network with a complete state and several checkpoints per second.

Claim     killed and resumed any number of times, it ends bitwise equal to an undisturbed run
Command   python experiments/benchmarks/torture.py kills

It also writes every array of its last state to ``final.npz``.
"""

import dataclasses

import jax
import numpy as np
import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    features: tuple[int, ...] = (128, 128)  # Widths of the hidden layers
    dropout: float = 0.2  # Dropout rate of the hidden layers
    batch_size: int = 16  # Examples per step
    num_steps: int = 2_000  # Updates
    seed: int = 0  # Determines initial parameters, data order and dropout


def data(config):
    return jn.data.digits()


def task(config):
    return jn.tasks.classification(jn.models.MLP((*config.features, 10), dropout=config.dropout))


def optimizer(config):
    return jn.optim.with_ema(optax.adamw(jn.schedules.cosine(1e-2, config.num_steps)), 0.99)


experiment = jn.Experiment(Config(), data, task, optimizer)


def arrays_of(state):
    """Returns every array of a state by its path, on the host."""
    leaves = jax.tree_util.tree_leaves_with_path(state._replace(key=jax.random.key_data(state.key)))
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


if __name__ == "__main__":
    run = jn.main(experiment)
    if isinstance(run, jn.Run) and run.dir is not None:
        np.savez(run.dir / "final.npz", **arrays_of(run.state))
