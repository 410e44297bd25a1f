"""Flax Linen models, which know nothing of losses, data or devices."""

from jaxnn.models.bag import BagOfTokens as BagOfTokens
from jaxnn.models.cnn import CNN as CNN
from jaxnn.models.counting import num_parameters as num_parameters
from jaxnn.models.gpt import GPT as GPT
from jaxnn.models.language_model import RecurrentLanguageModel as RecurrentLanguageModel
from jaxnn.models.mlp import MLP as MLP
from jaxnn.models.mobilenet import MobileNetV2 as MobileNetV2
from jaxnn.models.recurrent import RecurrentClassifier as RecurrentClassifier
from jaxnn.models.resnet import ResNet as ResNet
from jaxnn.models.resnet_imagenet import BottleneckResNet as BottleneckResNet
from jaxnn.models.text_generator import TextGenerator as TextGenerator
