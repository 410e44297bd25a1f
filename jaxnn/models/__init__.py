"""Flax Linen models, which know nothing of losses, data or devices.

Models of images take ``[batch, height, width, channels]``, models of text token ids ``[batch, time]``, integers below
``vocabulary_size``; inputs of another rank or dtype raise `DataError`. With ``train=True`` dropout is active, which
needs ``rngs={"dropout": key}``, and batch statistics are updated, which needs ``mutable=["batch_stats"]``: running
statistics, at momentum 0.9, are in that collection. Sizes that are not positive integers, dropout rates outside 0…1 and
arguments that do not fit together raise `ConfigError` where a model is made.
"""

from jaxnn.models._feedforward import CNN, MLP
from jaxnn.models._model_inputs import num_parameters
from jaxnn.models._residual import Bottleneck, MobileNetV2, ResNet, ResNetBlock
from jaxnn.models._text_models import GPT, FastText, RecurrentClassifier, RecurrentLanguageModel, TextGenRNN

__all__ = [
    "Bottleneck",
    "CNN",
    "FastText",
    "GPT",
    "MLP",
    "MobileNetV2",
    "RecurrentClassifier",
    "RecurrentLanguageModel",
    "ResNet",
    "ResNetBlock",
    "TextGenRNN",
    "num_parameters",
]
