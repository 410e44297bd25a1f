"""Layers as Flax's where Flax's fall short: fast on CPU too, in loops and populations; mixed precision."""

from jaxnn.nn.attention import attention as attention
from jaxnn.nn.attention import attention_fn as attention_fn
from jaxnn.nn.batch_axis import batch_mask as batch_mask
from jaxnn.nn.conv import Conv as Conv
from jaxnn.nn.convolution import conv_general_dilated as conv_general_dilated
from jaxnn.nn.cross_entropy import cross_entropy as cross_entropy
from jaxnn.nn.dense import Dense as Dense
from jaxnn.nn.dense import dot_general as dot_general
from jaxnn.nn.dropout import Dropout as Dropout
from jaxnn.nn.embed import Embed as Embed
from jaxnn.nn.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from jaxnn.nn.normalization import BatchNorm as BatchNorm
from jaxnn.nn.normalization import LayerNorm as LayerNorm
from jaxnn.nn.normalization import RMSNorm as RMSNorm
from jaxnn.nn.partitioning import partitioned as partitioned
from jaxnn.nn.policy import Policy as Policy
from jaxnn.nn.pooling import avg_pool as avg_pool
from jaxnn.nn.pooling import max_pool as max_pool
from jaxnn.nn.recurrent import GRU as GRU
from jaxnn.nn.recurrent import LSTM as LSTM
from jaxnn.nn.recurrent import Bidirectional as Bidirectional
from jaxnn.nn.recurrent_stacks import Stacked as Stacked
