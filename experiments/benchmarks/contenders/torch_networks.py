"""The benchmark's networks as a user of PyTorch writes them, given Flax's weights; images are channels-last."""

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Flatten(nn.Module):
    """Images to rows in the order of their memory: height, width, channel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).flatten(1)


class LastOutput(nn.Module):
    """An embedding, an LSTM, a classifier of its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.Embed_0 = nn.Embedding(20_000, 128)
        self.LSTM_0 = nn.LSTM(128, 64, batch_first=True)
        self.Dense_0 = nn.Linear(64, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.LSTM_0(self.Embed_0(ids))
        return self.Dense_0(hidden[-1])


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.LayerNorm_0, self.LayerNorm_1 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.Dense_0, self.Dense_1 = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.Dense_2, self.Dense_3 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = self.Dense_0(self.LayerNorm_0(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.Dense_1(attended.transpose(1, 2).reshape(batch, time, width)))
        return x + self.dropout(self.Dense_3(F.gelu(self.Dense_2(self.LayerNorm_1(x)), approximate="tanh")))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a head; by default of characters."""

    def __init__(
        self,
        vocabulary: int = 65,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        length: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.Embed_0, self.Embed_1 = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for index in range(layers):
            self.add_module(f"Block_{index}", Block(width, heads, dropout))
        self.blocks = [self.get_submodule(f"Block_{index}") for index in range(layers)]
        self.LayerNorm_0, self.Dense_0 = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, vocabulary)
        self.register_buffer("positions", torch.arange(length), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.Embed_0(ids) + self.Embed_1(self.positions))
        for block in self.blocks:
            x = block(x)
        return self.Dense_0(self.LayerNorm_0(x))


class ResNetBlock(nn.Module):
    """Two convolutions, each with its norm, and a shortcut."""

    def __init__(self, features_in: int, features: int, stride: int) -> None:
        super().__init__()
        self.Conv_0 = nn.Conv2d(features_in, features, 3, stride, padding=1, bias=False)
        self.Conv_1 = nn.Conv2d(features, features, 3, padding=1, bias=False)
        self.BatchNorm_0, self.BatchNorm_1 = nn.BatchNorm2d(features), nn.BatchNorm2d(features)
        self.projects = features_in != features
        if self.projects:
            self.Conv_2 = nn.Conv2d(features_in, features, 1, stride, bias=False)
            self.BatchNorm_2 = nn.BatchNorm2d(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.BatchNorm_0(self.Conv_0(x)), inplace=True)
        y = self.BatchNorm_1(self.Conv_1(y))
        if self.projects:
            x = self.BatchNorm_2(self.Conv_2(x))
        y += x
        return F.relu(y, inplace=True)


class ResNet20(nn.Module):
    """He et al. 2015 for CIFAR, with projections."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv_0, self.BatchNorm_0 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        widths = [16, *(width for width in (16, 32, 64) for _ in range(3))]
        self.blocks = []
        for index, (features_in, features) in enumerate(zip(widths, widths[1:], strict=False)):
            self.blocks.append(ResNetBlock(features_in, features, features // features_in))
            self.add_module(f"ResNetBlock_{index}", self.blocks[-1])
        self.Dense_0 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.BatchNorm_0(self.Conv_0(x)), inplace=True)
        for block in self.blocks:
            x = block(x)
        return self.Dense_0(F.adaptive_avg_pool2d(x, 1).flatten(1))


def named(**layers: nn.Module) -> nn.Module:
    """Layers in sequence, each under its name."""
    return nn.Sequential(OrderedDict(layers))


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def mnist_mlp(dropout: bool) -> nn.Module:
    return named(
        Dense_0=nn.Linear(784, 512),
        relu_0=relu(),
        dropout_0=nn.Dropout(0.2 * dropout),
        Dense_1=nn.Linear(512, 512),
        relu_1=relu(),
        dropout_1=nn.Dropout(0.2 * dropout),
        Dense_2=nn.Linear(512, 10),
    )


def mnist_cnn(dropout: bool) -> nn.Module:
    return named(
        Conv_0=nn.Conv2d(1, 32, 3),
        relu_0=relu(),
        Conv_1=nn.Conv2d(32, 64, 3),
        relu_1=relu(),
        pool=nn.MaxPool2d(2),
        dropout_0=nn.Dropout(0.25 * dropout),
        flatten=Flatten(),
        Dense_0=nn.Linear(9216, 128),
        relu_2=relu(),
        dropout_1=nn.Dropout(0.5 * dropout),
        Dense_1=nn.Linear(128, 10),
    )


def cifar10_cnn(dropout: bool) -> nn.Module:
    return named(
        Conv_0=nn.Conv2d(3, 32, 3, padding=1),
        relu_0=relu(),
        Conv_1=nn.Conv2d(32, 32, 3),
        relu_1=relu(),
        pool_0=nn.MaxPool2d(2),
        dropout_0=nn.Dropout(0.25 * dropout),
        Conv_2=nn.Conv2d(32, 64, 3, padding=1),
        relu_2=relu(),
        Conv_3=nn.Conv2d(64, 64, 3),
        relu_3=relu(),
        pool_1=nn.MaxPool2d(2),
        dropout_1=nn.Dropout(0.25 * dropout),
        flatten=Flatten(),
        Dense_0=nn.Linear(2304, 512),
        relu_4=relu(),
        dropout_2=nn.Dropout(0.5 * dropout),
        Dense_1=nn.Linear(512, 10),
    )


def fasttext() -> nn.Module:
    return named(Embed_0=nn.EmbeddingBag(20_000, 50, mode="mean"), Dense_0=nn.Linear(50, 2))


def build(network: str, weights: Mapping[str, np.ndarray], *, dropout: bool) -> nn.Module:
    """The network in training mode with these weights, on the CPU."""
    makers = {
        "mnist_mlp": lambda: mnist_mlp(dropout),
        "mnist_cnn": lambda: mnist_cnn(dropout),
        "cifar10_cnn": lambda: cifar10_cnn(dropout),
        "imdb_lstm": LastOutput,
        "fasttext": fasttext,
        "char_gpt": GPT,
        "gpt2_124m": lambda: GPT(50_257, 12, 768, 12, 1024),
        "resnet20": ResNet20,
    }
    model = makers[network]()
    state = state_dict(weights)
    for name, parameter in model.named_parameters():
        if "bias_ih" in name:  # PyTorch's LSTM has two biases, Flax's one
            nn.init.zeros_(parameter).requires_grad_(False)
        else:
            parameter.data.copy_(torch.from_numpy(state.pop(name)))
    if state:
        raise ValueError(f"{network} has no place for the weights {sorted(state)}.")
    return model


def state_dict(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Flax's weights in PyTorch's layout, by PyTorch's names."""
    names = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
    state = {}
    for path, array in weights.items():
        module, _, leaf = path.replace("/", ".").rpartition(".")
        if ".cell." not in path.replace("/", "."):
            state[f"{module}.{names[leaf]}"] = in_out_swapped(array) if leaf == "kernel" else array
    if "LSTM_0/cell/ii/kernel" in weights:
        gates = [("weight_ih", "i", "kernel"), ("weight_hh", "h", "kernel"), ("bias_hh", "h", "bias")]
        for name, source, leaf in gates:
            parts = [in_out_swapped(weights[f"LSTM_0/cell/{source}{gate}/{leaf}"]) for gate in "ifgo"]
            state[f"LSTM_0.{name}_l0"] = np.concatenate(parts)
    return state


def in_out_swapped(array: np.ndarray) -> np.ndarray:
    """[in, out] as [out, in], [height, width, in, out] as [out, in, height, width], a bias as it is."""
    return np.ascontiguousarray(array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T)
