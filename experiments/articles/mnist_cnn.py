"""Keras's mnist_cnn, as benchmarked by Woolf on CPUs and GPUs in 2017: two convolutions, Adadelta, 12 epochs.

Claim     test accuracy within half a percent of the published 99.1 %
Command   python experiments/articles/mnist_cnn.py
Result    99.24 %; eight minutes on two cores of an AMD EPYC, jax 0.12.0.1
"""

import dataclasses

import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 128  # Digits per step
    num_steps: int = 5_628  # Updates: twelve epochs
    seed: int = 0  # Determines initial parameters, data order and dropout


def data(config):
    return jn.data.mnist()


def task(config):
    return jn.tasks.classification(
        jn.models.CNN(10, blocks=((32, 64),), padding="VALID", dropout=0.25, dense_dropout=0.5)
    )


experiment = jn.Experiment(Config(), data, task, lambda config: optax.adadelta(1.0, rho=0.95))

if __name__ == "__main__":
    jn.main(experiment)
