"""Drop-in replacements of Flax layers that are fast on CPU, in scans and under vmap; losses; mixed precision.

Arguments that do not fit together raise `ConfigError`, and so does an implementation that does not support them.
"""

from jaxnn._batch_context import batch_mask
from jaxnn.kernels import attention
from jaxnn.nn._conv import Conv, conv_general_dilated
from jaxnn.nn._cross_entropy import cross_entropy
from jaxnn.nn._dense import Dense, dot_general
from jaxnn.nn._dropout import Dropout
from jaxnn.nn._embedding import Embed
from jaxnn.nn._layer_arguments import Policy, add_broadcast, at_least_int32, partitioned
from jaxnn.nn._normalization import BatchNorm, LayerNorm, RMSNorm
from jaxnn.nn._pooling import avg_pool, max_pool
from jaxnn.nn._rnn import GRU, LSTM, Bidirectional, Recurrent

__all__ = [
    "BatchNorm",
    "Bidirectional",
    "Conv",
    "Dense",
    "Dropout",
    "Embed",
    "GRU",
    "LSTM",
    "LayerNorm",
    "Policy",
    "RMSNorm",
    "add_broadcast",
    "attention",
    "avg_pool",
    "batch_mask",
    "conv_general_dilated",
    "cross_entropy",
    "dot_general",
    "max_pool",
    "partitioned",
]
