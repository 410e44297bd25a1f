"""Flax Linen models, which know nothing of losses, data or devices.

Models of images take ``[batch, height, width, channels]``, models of text token ids ``[batch, time]``, integers below
``vocabulary_size``. With ``train=True`` dropout is active, which needs ``rngs={"dropout": key}``, and batch statistics
are updated, which needs ``mutable=["batch_stats"]``. Sizes that are not positive integers, and dropout rates outside
0…1, raise `ConfigError` where a model is made.
"""

from jaxnn.models._bag_of_tokens import BagOfTokens as BagOfTokens
from jaxnn.models._feedforward import CNN as CNN
from jaxnn.models._feedforward import MLP as MLP
from jaxnn.models._gpt import GPT as GPT
from jaxnn.models._mobilenet import MobileNetV2 as MobileNetV2
from jaxnn.models._model_inputs import num_parameters as num_parameters
from jaxnn.models._resnet import BottleneckResNet as BottleneckResNet
from jaxnn.models._resnet import ResNet as ResNet
from jaxnn.models._rnn_models import RecurrentClassifier as RecurrentClassifier
from jaxnn.models._rnn_models import RecurrentLanguageModel as RecurrentLanguageModel
from jaxnn.models._rnn_models import TextGenerator as TextGenerator
