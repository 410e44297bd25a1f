"""Flax Linen models, independent of losses, data and devices.

Image models take ``[batch, height, width, channels]``, text models integer token ids ``[batch, time]`` below
``vocabulary_size``; inputs of another rank or dtype raise `DataError`. ``num_classes`` is the number of logits,
``layer`` the class of recurrent layers, `jaxnn.nn.LSTM` or `jaxnn.nn.GRU`, and a dropout rate may be a tracer.

With ``train=True`` dropout is active, which needs ``rngs={"dropout": key}``, and running statistics, at momentum 0.9,
are updated, which needs ``mutable=["batch_stats"]``. Constructors raise `ConfigError` for sizes that are not positive
integers, dropout rates outside 0…1 and arguments that do not fit together.
"""

from jaxnn.models._feedforward import CNN, MLP, TableMLP
from jaxnn.models._generation import generate, stream
from jaxnn.models._generative import VAE, ConvDecoder, UNet, VAEOutputs
from jaxnn.models._gpt import GPT
from jaxnn.models._model_inputs import num_parameters
from jaxnn.models._pretrained import create, from_torch
from jaxnn.models._residual import Bottleneck, MobileNetV2, ResNet, ResNetBlock, WideResNet
from jaxnn.models._text_models import FastText, RecurrentClassifier, RecurrentLanguageModel, TextGenRNN
from jaxnn.models._transformer import TransformerClassifier, ViT

__all__ = [
    "Bottleneck",
    "CNN",
    "ConvDecoder",
    "FastText",
    "GPT",
    "MLP",
    "MobileNetV2",
    "RecurrentClassifier",
    "RecurrentLanguageModel",
    "ResNet",
    "ResNetBlock",
    "TableMLP",
    "TextGenRNN",
    "TransformerClassifier",
    "UNet",
    "VAE",
    "VAEOutputs",
    "ViT",
    "WideResNet",
    "create",
    "from_torch",
    "generate",
    "num_parameters",
    "stream",
]
