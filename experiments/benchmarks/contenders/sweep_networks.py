"""The networks of the sweep benchmark as jaxnn experiments, and the members of a population."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import optax

import jaxnn as jn

NUM_EXAMPLES = 2_048
LENGTH = 32
VOCABULARY = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """The config of a member."""

    learning_rate: float = 1e-3
    batch_size: int = 32
    num_steps: int = 4_000
    seed: int = 0


class Network(NamedTuple):
    """A row of the benchmark.

    Attributes:
        title: a short description.
        experiment: one member.
        widths: vmap sizes of the curve.
        num_members: of the population whose vmap size is planned.
        in_torch: whether PyTorch trains it too.
    """

    title: str
    experiment: jn.Experiment
    widths: tuple[int, ...]
    num_members: int
    in_torch: bool


def members(experiment: jn.Experiment, num_members: int) -> jn.search.Points:
    """Returns members with their own learning rate, seed and data order; the first is the experiment."""
    rates = experiment.config.learning_rate * 0.1 ** (np.arange(num_members) / num_members)
    return jn.search.zip(learning_rate=[float(rate) for rate in rates], seed=list(range(num_members)))


def adam(config: Config) -> optax.GradientTransformation:
    return optax.adam(config.learning_rate)


# Cached, since a user's loop over runs also loads its data once.
@functools.cache
def digits() -> jn.Splits:
    return jn.data.digits()


@functools.cache
def images() -> jn.Splits:
    """Returns one noisy pattern per class, 28x28x1 bytes."""
    generator = np.random.default_rng(0)
    patterns = generator.normal(size=(10, 28, 28, 1))
    labels = generator.integers(10, size=NUM_EXAMPLES)
    noise = generator.normal(size=(NUM_EXAMPLES, 28, 28, 1))
    pixels = np.clip(128 + 32 * (patterns[labels] + 2 * noise), 0, 255).astype(np.uint8)
    return halves(pixels, labels)


@functools.cache
def texts() -> jn.Splits:
    """Returns random tokens; one class has more even, the other more odd tokens."""
    generator = np.random.default_rng(0)
    labels = generator.integers(2, size=NUM_EXAMPLES)
    tokens = generator.integers(VOCABULARY, size=(NUM_EXAMPLES, LENGTH))
    swapped = (tokens % 2 != labels[:, None]) & (generator.random(tokens.shape) < 0.2)
    return halves(tokens ^ swapped, labels)


@functools.cache
def walks() -> jn.Splits:
    """Returns noisy walks over the vocabulary; the target is the next token."""
    generator = np.random.default_rng(0)
    shape = (NUM_EXAMPLES, LENGTH + 1)
    steps = np.where(generator.random(shape) < 0.8, 7, generator.integers(VOCABULARY, size=shape))
    walk = np.cumsum(steps, axis=1) % VOCABULARY
    return halves(walk[:, :-1], walk[:, 1:])


def halves(inputs: np.ndarray, targets: np.ndarray) -> jn.Splits:
    """Splits the data: three quarters for training, the rest for testing."""
    cut = NUM_EXAMPLES * 3 // 4
    return jn.data.arrays((inputs[:cut], targets[:cut]), (inputs[cut:], targets[cut:]))


def mlp(config: Config) -> jn.Task:
    return jn.tasks.classification(jn.models.MLP((32, 32, 10)))


def cnn(config: Config) -> jn.Task:
    return jn.tasks.classification(jn.models.CNN(10, blocks=((8,), (16,)), dense=(32,)))


def lstm(config: Config) -> jn.Task:
    model = jn.models.RecurrentClassifier(2, vocabulary_size=VOCABULARY, embedding_features=32, features=32)
    return jn.tasks.classification(model)


def gpt(config: Config) -> jn.Task:
    return jn.tasks.next_token(jn.models.GPT(VOCABULARY, num_layers=2, features=32, max_length=LENGTH))


MANY, FEW = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8)
LARGE, SHORT = Config(batch_size=64, num_steps=200), Config(batch_size=16, num_steps=200)
NETWORKS = {
    "mlp": Network("digits MLP 64–32–32–10", jn.Experiment(Config(), lambda _: digits(), mlp, adam), MANY, 64, True),
    "cnn": Network("CNN 28×28, 8 and 16 channels", jn.Experiment(LARGE, lambda _: images(), cnn, adam), FEW, 8, True),
    "lstm": Network("LSTM 32, 32 tokens", jn.Experiment(SHORT, lambda _: texts(), lstm, adam), FEW, 8, False),
    "gpt": Network("GPT 2 × 32, 32 tokens", jn.Experiment(SHORT, lambda _: walks(), gpt, adam), FEW, 8, False),
}
