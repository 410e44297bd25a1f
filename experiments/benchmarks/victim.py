"""The runs of torture.py: small models with complete states and several checkpoints per second.

Claim     killed and resumed any number of times, each ends bitwise equal to an undisturbed run
Command   python experiments/benchmarks/torture.py kills

The first word names the kind, if it is not the network: ``victim.py trees --num-steps 100``.
"""

import dataclasses
import sys

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


def normalized(config):
    return jn.tasks.classification(jn.models.CNN(10, blocks=((8,),), dense=(), dropout=config.dropout, batch_norm=True))


def uniform_average(config):
    clipped = jn.optim.with_clipping(optax.adamw(1e-3), 1.0)
    return jn.optim.with_ema(jn.optim.with_accumulation(clipped, 3), 1.0)


def noisy(rng, image):
    return image + rng.normal(0.0, 0.1, image.shape).astype(image.dtype)


def stream(config):
    train, test = (list(zip(*source.examples[:2], strict=True)) for source in jn.data.digits().named().values())
    return jn.data.stream(train, test, num_classes=10, augment=noisy)


def table(config):
    train, test = (source.examples for source in jn.data.digits().named().values())
    return jn.data.binned(*((np.reshape(inputs, (-1, 64)), targets * 1.0) for inputs, targets, *_ in (train, test)))


def booster(config):
    return jn.trees.boosting(
        jn.trees.squared_error(), num_trees=config.num_steps, max_depth=3, row_fraction=0.5, column_fraction=0.5
    )


def language_model(config):
    network = jn.models.GPT(128, num_layers=1, features=32, num_heads=2, max_length=16, dropout=config.dropout)
    return jn.tasks.next_token(network)


experiment = jn.Experiment(Config(), data, task, optimizer)
KINDS = {
    "average": jn.Experiment(Config(), data, normalized, uniform_average),
    "stream": jn.Experiment(Config(), stream, task, optimizer),
    "text": jn.Experiment(Config(), lambda config: jn.data.char_corpus(__file__, length=16), language_model, optimizer),
    "trees": jn.trees.experiment(Config(batch_size=1437), table, booster),
}

if __name__ == "__main__":
    jn.main(KINDS[sys.argv.pop(1)] if sys.argv[1] in KINDS else experiment)
