"""Scaling of an MLP on digits: measured on 1, 2, 4 and 8 devices, predicted for up to 1,024.

Claim     a step reduces the bytes of the parameters and at most 12 more; devices that share cores gain no speed
Command   JAX_NUM_CPU_DEVICES=8 python experiments/articles/bench.py experiments/scaling.py
Result    8 bytes more; 0.55 of one device's speed on eight, 0.71 predicted, two CPU cores: docs/scaling.md; 2 minutes
"""

import dataclasses

import optax
from articles.studies.study_scaling import Settings, make_study

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    features: tuple[int, ...] = (1024, 1024)  # Widths of the hidden layers: 1.1 million parameters
    learning_rate: float = 1e-3  # Learning rate of Adam
    batch_size: int = 512  # Examples per step, sharded over all devices
    num_steps: int = 1_000  # Updates of a full run
    seed: int = 0  # Determines initial parameters and data order


def data(config):
    return jn.data.digits()


def task(config):
    return jn.tasks.classification(jn.models.MLP((*config.features, 10)))


def optimizer(config):
    return optax.adam(config.learning_rate)


experiment = jn.Experiment(Config(), data, task, optimizer)

STUDY = make_study(experiment, name="digits_scaling", full=Settings(batch_size=512, batch_per_device=64, steps=16))
