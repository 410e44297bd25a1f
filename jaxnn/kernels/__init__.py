"""Operations with native forms: pure JAX defines each, and native code computes it where it fits.

An operation is a file, and a `Kernel` in it. Layers call them; ``docs/kernels.md`` has the recipe for a new one.
"""

from jaxnn.kernels._adam_update import adam
from jaxnn.kernels._attention import attention
from jaxnn.kernels._batch_statistics import channel_sums, moments
from jaxnn.kernels._choice import Size, choose, collect_reasons, portable, scope
from jaxnn.kernels._convolution import (
    Geometry,
    channels_last_conv,
    conv_dimension_numbers,
    convolution,
    convolve,
    native_conv,
)
from jaxnn.kernels._custom_vjp import custom_vjp, vary_together
from jaxnn.kernels._kernel import Kernel, products_of
from jaxnn.kernels._lookup import lookup
from jaxnn.kernels._lstm import delayed, lstm, summed_products
from jaxnn.kernels._package import ABI, describe_native, native_call, native_fault, native_missing
from jaxnn.kernels._product import dense, product
from jaxnn.kernels._random_bits import random_bits

__all__ = [
    "Kernel",
    "Size",
    "adam",
    "attention",
    "channel_sums",
    "choose",
    "collect_reasons",
    "convolution",
    "custom_vjp",
    "dense",
    "describe_native",
    "lookup",
    "lstm",
    "moments",
    "native_call",
    "native_fault",
    "native_missing",
    "portable",
    "product",
    "products_of",
    "random_bits",
    "scope",
    "vary_together",
]
