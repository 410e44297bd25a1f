"""The benchmark's networks as a user of Flax writes them: plain flax.linen, as its documentation shows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class MnistMLP(nn.Module):
    """784-512-512-10."""

    dropout: bool = True

    @nn.compact
    def __call__(self, x, train: bool = False):
        for _ in range(2):
            x = nn.relu(nn.Dense(512)(x))
            x = nn.Dropout(0.2 * self.dropout, deterministic=not train)(x)
        return nn.Dense(10)(x)


class MnistCNN(nn.Module):
    """Keras's mnist_cnn."""

    dropout: bool = True

    @nn.compact
    def __call__(self, x, train: bool = False):
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, (3, 3), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.Dropout(0.25 * self.dropout, deterministic=not train)(x)
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5 * self.dropout, deterministic=not train)(x)
        return nn.Dense(10)(x)


class Cifar10CNN(nn.Module):
    """Keras's cifar10_cnn."""

    dropout: bool = True

    @nn.compact
    def __call__(self, x, train: bool = False):
        for features in (32, 64):
            for padding in ("SAME", "VALID"):
                x = nn.relu(nn.Conv(features, (3, 3), padding=padding)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
            x = nn.Dropout(0.25 * self.dropout, deterministic=not train)(x)
        x = nn.relu(nn.Dense(512)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5 * self.dropout, deterministic=not train)(x)
        return nn.Dense(10)(x)


class ImdbLSTM(nn.Module):
    """An embedding, an LSTM, its last output."""

    @nn.compact
    def __call__(self, ids, train: bool = False):
        x = nn.Embed(20_000, 128)(ids)
        outputs: Any = nn.RNN(nn.OptimizedLSTMCell(64, parent=None), name="LSTM_0")(x)
        return nn.Dense(2)(outputs[:, -1])


class FastText(nn.Module):
    """The mean of embedded words."""

    @nn.compact
    def __call__(self, ids, train: bool = False):
        return nn.Dense(2)(nn.Embed(20_000, 50)(ids).mean(axis=1))


class Block(nn.Module):
    """A pre-norm transformer block."""

    heads: int

    @nn.compact
    def __call__(self, x):
        batch, time, width = x.shape
        qkv = nn.Dense(3 * width)(nn.LayerNorm()(x)).reshape(batch, time, 3, self.heads, width // self.heads)
        attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + nn.Dense(width)(attended.reshape(batch, time, width))
        h = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
        return x + nn.Dense(width)(h)


class GPT(nn.Module):
    """GPT, by default of characters."""

    vocabulary: int = 65
    layers: int = 4
    width: int = 128
    heads: int = 4
    length: int = 64

    @nn.compact
    def __call__(self, ids, train: bool = False):
        positions = nn.Embed(self.length, self.width, name="Embed_1")(jnp.arange(self.length))
        x = nn.Embed(self.vocabulary, self.width, name="Embed_0")(ids) + positions[None]
        for index in range(self.layers):
            x = Block(self.heads, name=f"Block_{index}")(x)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


class ResNetBlock(nn.Module):
    """Two convolutions and a shortcut."""

    features: int
    strides: int

    @nn.compact
    def __call__(self, x, train: bool):
        conv = partial(nn.Conv, padding=((1, 1), (1, 1)), use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5)
        y = nn.relu(norm()(conv(self.features, (3, 3), (self.strides, self.strides))(x)))
        y = norm()(conv(self.features, (3, 3))(y))
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), (self.strides, self.strides), padding="VALID", use_bias=False)(x)
            x = norm()(x)
        return nn.relu(x + y)


class ResNet20(nn.Module):
    """He et al. 2015 for CIFAR, with projections."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Conv(16, (3, 3), padding=((1, 1), (1, 1)), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5)(x))
        for index in range(9):
            stage, first = index // 3, index % 3 == 0
            x = ResNetBlock(16 * 2**stage, 2 if stage and first else 1, name=f"ResNetBlock_{index}")(x, train)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


def network(name: str, dropout: bool) -> nn.Module:
    """The module called ``name``."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "mnist_mlp": partial(MnistMLP, dropout),
        "mnist_cnn": partial(MnistCNN, dropout),
        "cifar10_cnn": partial(Cifar10CNN, dropout),
        "imdb_lstm": ImdbLSTM,
        "fasttext": FastText,
        "char_gpt": GPT,
        "gpt2_124m": partial(GPT, 50_257, 12, 768, 12, 1024),
        "resnet20": ResNet20,
    }
    return makers[name]()
