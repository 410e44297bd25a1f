"""Which learning rate? Sixteen of them with four seeds each, an MLP on Fashion-MNIST, trained as one program.

Claim     Adam's best learning rate lies between 2e-3 and 1.6e-2; from 0.25 on nothing is learnt
Command   python experiments/lr_sweep.py
Seen      88.0 ± 0.2 % at 4e-3, 86.9 % at 1e-3, 86.1 % at 0.03, 10 % from 0.25; docs/sweeps.md has the picture; a minute
"""

import dataclasses

import numpy as np
import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 1e-3  # Peak learning rate of Adam, decayed to zero along a cosine
    batch_size: int = 128  # Examples a step
    num_steps: int = 2_000  # Updates in all: a little more than four epochs
    seed: int = 0  # Decides initial parameters and data order


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
