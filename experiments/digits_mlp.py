"""A small MLP reads handwritten digits: the main job, in seconds on a laptop.

Claim     at least 97 % of scikit-learn's 360 held-out 8×8 digits are read correctly
Command   python experiments/digits_mlp.py
Seen      97.8 to 98.9 % over seeds 0 to 7; 0.1 s of training on two cores of an AMD EPYC, jax 0.12.0.1
"""

import dataclasses

import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    features: tuple[int, ...] = (32, 32)  # Widths of the hidden layers
    learning_rate: float = 1e-2  # Peak learning rate of AdamW, decayed to zero along a cosine
    label_smoothing: float = 0.1  # Share of each target spread over all classes
    batch_size: int = 32  # Examples a step
    num_steps: int = 4_000  # Updates in all: about ninety epochs
    seed: int = 0  # Decides initial parameters, data order and dropout


def data(config):
    return jn.data.digits()


def task(config):
    return jn.tasks.classification(jn.models.MLP((*config.features, 10)), label_smoothing=config.label_smoothing)


def optimizer(config):
    return optax.adamw(jn.schedules.cosine(config.learning_rate, config.num_steps), weight_decay=0.1)


experiment = jn.Experiment(Config(), data, task, optimizer)

if __name__ == "__main__":
    jn.main(experiment)
