"""Flax Linen models, which know nothing of losses, data or devices."""

from jaxnn.models.bag import BagOfTokens as BagOfTokens
from jaxnn.models.cnn import CNN as CNN
from jaxnn.models.gpt import GPT as GPT
from jaxnn.models.mlp import MLP as MLP
from jaxnn.models.recurrent import RecurrentClassifier as RecurrentClassifier
from jaxnn.models.resnet import ResNet as ResNet
