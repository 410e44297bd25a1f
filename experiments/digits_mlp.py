"""A small MLP classifies handwritten digits, in seconds on a laptop.

Claim     at least 97 % test accuracy on 360 of scikit-learn's 8×8 digits
Command   python experiments/digits_mlp.py
Result    97.8 to 98.9 % over seeds 0 to 7; 0.1 s of training on two cores of an AMD EPYC, jax 0.12.0.1
"""

import dataclasses

import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    features: tuple[int, ...] = (32, 32)  # Widths of the hidden layers
    learning_rate: float = 1e-2  # Peak learning rate of AdamW, with cosine decay to zero
    label_smoothing: float = 0.1  # Share of each target distributed over all classes
    batch_size: int = 32  # Examples per step
    num_steps: int = 4_000  # Updates: about 90 epochs
    seed: int = 0  # Determines initial parameters, data order and dropout


def data(config):
    return jn.data.digits()


def task(config):
    return jn.tasks.classification(jn.models.MLP((*config.features, 10)), label_smoothing=config.label_smoothing)


def optimizer(config):
    return optax.adamw(jn.schedules.cosine(config.learning_rate, config.num_steps), weight_decay=0.1)


experiment = jn.Experiment(Config(), data, task, optimizer)

if __name__ == "__main__":
    jn.main(experiment)
