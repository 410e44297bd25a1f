"""Drop-in replacements of Flax layers that are fast on CPU, in scans and under vmap; losses; mixed precision.

Arguments that do not fit together raise `ConfigError`, and so does an implementation that does not support them.
"""

from jaxnn._batch_context import batch_mask
from jaxnn.nn._attention import attention
from jaxnn.nn._choice import choose, collect_reasons, portable, scope
from jaxnn.nn._cross_entropy import cross_entropy, linear_cross_entropy
from jaxnn.nn._dense import Dense, Dropout, Embed, dot_general
from jaxnn.nn._layer_arguments import Policy, add_broadcast, at_least_int32, partitioned
from jaxnn.nn._normalization import BatchNorm, LayerNorm, RMSNorm
from jaxnn.nn._onednn import adam_update, native_obstacle, onednn_missing
from jaxnn.nn._rnn import GRU, LSTM, Bidirectional, Recurrent
from jaxnn.nn._spatial import Conv, avg_pool, conv_general_dilated, max_pool

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
    "linear_cross_entropy",
    "max_pool",
    "partitioned",
]
