"""Learning rate sweep of an MLP on Fashion-MNIST: 16 learning rates with four seeds each, as one program.

Claim     Adam's best learning rate is between 2e-3 and 1.6e-2; from 0.25 on accuracy is that of chance
Command   python experiments/lr_sweep.py
Result    88.0 ± 0.2 % at 4e-3, 86.9 % at 1e-3, 86.1 % at 0.03, 10 % from 0.25; docs/sweeps.md has the picture; a minute
"""

import dataclasses

import numpy as np
import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 1e-3  # Peak learning rate of Adam, with cosine decay to zero
    batch_size: int = 128  # Examples per step
    num_steps: int = 2_000  # Updates: a little more than four epochs
    seed: int = 0  # Determines initial parameters and data order


def data(config):
    return jn.data.fashion_mnist()


def task(config):
    return jn.tasks.classification(jn.models.MLP((128, 64, 10)))


def optimizer(config):
    return optax.adam(jn.schedules.cosine(config.learning_rate, config.num_steps))


experiment = jn.Experiment(Config(), data, task, optimizer)
points = jn.grid(learning_rate=np.logspace(-4.5, 0, 16).round(6), seed=range(4))

if __name__ == "__main__":
    jn.main(experiment, points=points)
