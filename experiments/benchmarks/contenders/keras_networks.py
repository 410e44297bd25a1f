"""The benchmark's networks as a user of Keras writes them, given Flax's weights; a layer's name is its Flax path."""

from collections.abc import Mapping

import keras
import numpy as np
from keras import layers

SEPARATOR = "__"


def mnist_mlp(dropout: bool) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(512, "relu", name="Dense_0"),
            layers.Dropout(0.2 * dropout),
            layers.Dense(512, "relu", name="Dense_1"),
            layers.Dropout(0.2 * dropout),
            layers.Dense(10, name="Dense_2"),
        ]
    )


def mnist_cnn(dropout: bool) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu", name="Conv_0"),
            layers.Conv2D(64, 3, activation="relu", name="Conv_1"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25 * dropout),
            layers.Flatten(),
            layers.Dense(128, "relu", name="Dense_0"),
            layers.Dropout(0.5 * dropout),
            layers.Dense(10, name="Dense_1"),
        ]
    )


def cifar10_cnn(dropout: bool) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="Conv_0"),
            layers.Conv2D(32, 3, activation="relu", name="Conv_1"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25 * dropout),
            layers.Conv2D(64, 3, padding="same", activation="relu", name="Conv_2"),
            layers.Conv2D(64, 3, activation="relu", name="Conv_3"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25 * dropout),
            layers.Flatten(),
            layers.Dense(512, "relu", name="Dense_0"),
            layers.Dropout(0.5 * dropout),
            layers.Dense(10, name="Dense_1"),
        ]
    )


def imdb_lstm() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((100,), dtype="int32"),
            layers.Embedding(20_000, 128, name="Embed_0"),
            layers.LSTM(64, name="LSTM_0"),
            layers.Dense(2, name="Dense_0"),
        ]
    )


def fasttext() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((400,), dtype="int32"),
            layers.Embedding(20_000, 50, name="Embed_0"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2, name="Dense_0"),
        ]
    )


class Positions(layers.Layer):
    """Adds an embedding of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = layers.Embedding(64, 128, name="Embed_1")

    def call(self, x):
        return x + self.embed(keras.ops.arange(64))


def char_gpt() -> keras.Model:
    ids = keras.Input((64,), dtype="int32")
    x = Positions()(layers.Embedding(65, 128, name="Embed_0")(ids))
    for index in range(4):
        x = block(x, f"Block_{index}{SEPARATOR}")
    x = layers.LayerNormalization(epsilon=1e-6, name="LayerNorm_0")(x)
    return keras.Model(ids, layers.Dense(65, name="Dense_0")(x))


def block(x: keras.KerasTensor, prefix: str) -> keras.KerasTensor:
    """A pre-norm transformer block of 128 features and 4 heads."""
    normed = layers.LayerNormalization(epsilon=1e-6, name=prefix + "LayerNorm_0")(x)
    attention = layers.MultiHeadAttention(num_heads=4, key_dim=32, name=prefix + "Attention")
    x = x + attention(normed, normed, use_causal_mask=True)
    normed = layers.LayerNormalization(epsilon=1e-6, name=prefix + "LayerNorm_1")(x)
    hidden = layers.Dense(512, gelu, name=prefix + "Dense_2")(normed)
    return x + layers.Dense(128, name=prefix + "Dense_3")(hidden)


def gelu(x: keras.KerasTensor) -> keras.KerasTensor:
    return keras.activations.gelu(x, approximate=True)


def resnet20() -> keras.Model:
    images = keras.Input((32, 32, 3))
    x = convolution(images, 16, 3, 1, "Conv_0")
    x = layers.ReLU()(normalization(x, "BatchNorm_0"))
    for index in range(9):
        width = 16 * 2 ** (index // 3)
        x = residual(x, width, 2 if index in (3, 6) else 1, f"ResNetBlock_{index}{SEPARATOR}")
    return keras.Model(images, layers.Dense(10, name="Dense_0")(layers.GlobalAveragePooling2D()(x)))


def residual(x: keras.KerasTensor, width: int, stride: int, prefix: str) -> keras.KerasTensor:
    """Two convolutions, each with its norm, and a shortcut."""
    y = convolution(x, width, 3, stride, prefix + "Conv_0")
    y = layers.ReLU()(normalization(y, prefix + "BatchNorm_0"))
    y = normalization(convolution(y, width, 3, 1, prefix + "Conv_1"), prefix + "BatchNorm_1")
    if x.shape != y.shape:
        x = normalization(convolution(x, width, 1, stride, prefix + "Conv_2"), prefix + "BatchNorm_2")
    return layers.ReLU()(x + y)


def convolution(x: keras.KerasTensor, width: int, size: int, stride: int, name: str) -> keras.KerasTensor:
    """A convolution without bias; a strided one is padded by 1 on each side, which "same" would not do."""
    padded = size == 3 and stride == 2
    if padded:
        x = layers.ZeroPadding2D(1)(x)
    padding = "valid" if padded else "same"
    return layers.Conv2D(width, size, stride, padding=padding, use_bias=False, name=name)(x)


def normalization(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)(x)


def build(network: str, weights: Mapping[str, np.ndarray], *, dropout: bool) -> keras.Model:
    """The network with these weights."""
    makers = {
        "mnist_mlp": lambda: mnist_mlp(dropout),
        "mnist_cnn": lambda: mnist_cnn(dropout),
        "cifar10_cnn": lambda: cifar10_cnn(dropout),
        "imdb_lstm": imdb_lstm,
        "fasttext": fasttext,
        "char_gpt": char_gpt,
        "resnet20": resnet20,
    }
    model = makers[network]()
    for layer in map(inner, model.layers):
        if layer.weights:
            layer.set_weights(layer_weights(layer, weights))
    return model


def inner(layer: layers.Layer) -> layers.Layer:
    """The layer that has the weights."""
    return layer.embed if isinstance(layer, Positions) else layer


def layer_weights(layer: layers.Layer, weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """A layer's weights in Keras's order."""
    path = layer.name.replace(SEPARATOR, "/")
    if isinstance(layer, layers.MultiHeadAttention):
        return attention_weights(weights, path.removesuffix("Attention"))
    if isinstance(layer, layers.LSTM):
        return lstm_weights(weights, path)
    leaves = [f"{path}/{leaf}" for leaf in ("kernel", "embedding", "scale", "bias")]
    statistics = layer.get_weights()[2:] if isinstance(layer, layers.BatchNormalization) else []
    return [*(weights[leaf] for leaf in leaves if leaf in weights), *statistics]


def attention_weights(weights: Mapping[str, np.ndarray], prefix: str) -> list[np.ndarray]:
    """Query, key and value, each a kernel and a bias by head, then the output's."""
    kernels = np.split(weights[f"{prefix}Dense_0/kernel"], 3, axis=1)
    biases = np.split(weights[f"{prefix}Dense_0/bias"], 3)
    parts = []
    for kernel, bias in zip(kernels, biases, strict=True):
        parts += [kernel.reshape(128, 4, 32), bias.reshape(4, 32)]
    output, bias = weights[f"{prefix}Dense_1/kernel"], weights[f"{prefix}Dense_1/bias"]
    return [*parts, output.reshape(4, 32, 128), bias]


def lstm_weights(weights: Mapping[str, np.ndarray], path: str) -> list[np.ndarray]:
    """The gates' kernels, recurrent kernels and biases, side by side."""
    join = lambda source, leaf: np.concatenate(  # noqa: E731
        [weights[f"{path}/cell/{source}{gate}/{leaf}"] for gate in "ifgo"], axis=-1
    )
    return [join("i", "kernel"), join("h", "kernel"), join("h", "bias")]
