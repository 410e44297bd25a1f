"""The benchmark's networks as a user of jaxnn writes them."""

from collections.abc import Callable
from functools import partial

import jax
from flax import linen

from jaxnn import models, nn


class MnistCNN(linen.Module):
    """Keras's mnist_cnn."""

    dropout: bool = True

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for features in (32, 64):
            x = linen.relu(nn.Conv(features, (3, 3), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.Dropout(0.25 * self.dropout)(x, train=train)
        x = linen.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5 * self.dropout)(x, train=train)
        return nn.Dense(10)(x)


class Cifar10CNN(linen.Module):
    """Keras's cifar10_cnn."""

    dropout: bool = True

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for features in (32, 64):
            for padding in ("SAME", "VALID"):
                x = linen.relu(nn.Conv(features, (3, 3), padding=padding)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
            x = nn.Dropout(0.25 * self.dropout)(x, train=train)
        x = linen.relu(nn.Dense(512)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5 * self.dropout)(x, train=train)
        return nn.Dense(10)(x)


def network(name: str, dropout: bool) -> linen.Module:
    """The module called ``name``."""
    makers: dict[str, Callable[[], linen.Module]] = {
        "mnist_mlp": partial(models.MLP, (512, 512, 10), dropout=0.2 * dropout),
        "mnist_cnn": partial(MnistCNN, dropout),
        "cifar10_cnn": partial(Cifar10CNN, dropout),
        "imdb_lstm": partial(models.RecurrentClassifier, 2, vocabulary_size=20_000),
        "fasttext": partial(models.FastText, 2, vocabulary_size=20_000, features=50),
        "char_gpt": partial(models.GPT, 65),
        "gpt2_124m": partial(models.GPT, 50_257, num_layers=12, features=768, num_heads=12, max_length=1024),
        "resnet20": partial(models.ResNet, 10),
    }
    return makers[name]()
