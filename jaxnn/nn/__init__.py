"""Layers as Flax's where Flax's fall short: traced dropout, fast pooling, mixed precision."""

from jaxnn.nn.dropout import Dropout as Dropout
from jaxnn.nn.policy import Policy as Policy
from jaxnn.nn.pooling import avg_pool as avg_pool
from jaxnn.nn.pooling import max_pool as max_pool
