"""Flax Linen models, which know nothing of losses, data or devices."""

from jaxnn.models.cnn import CNN as CNN
from jaxnn.models.mlp import MLP as MLP
