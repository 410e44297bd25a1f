"""The precision of matrix products and convolutions, observed in the traced program."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax

from jaxnn.observe.equations import equations

_PRODUCTS = frozenset(
    {
        "dot_general",
        "conv_general_dilated",
        "ragged_dot_general",
        "dense_product",  # nn.Dense's
        "channels_last_convolution",  # nn.Conv's
    }
)


def product_dtypes(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Input dtypes of the products ``function`` computes, with how many there are, commonest first.

    A product of unequal dtypes reads ``"bfloat16*float32"``. Products are counted as written: one
    in the body of a ``scan`` once, one in each branch of a ``cond``. Costs one trace, or none where
    ``function`` is jitted and was traced before.

    Args:
        function: a traceable function.
        *args: its arguments, or ``jax.ShapeDtypeStruct`` in their place.
    """
    counts: collections.Counter[str] = collections.Counter()
    for equation, _ in equations(jax.make_jaxpr(function)(*args)):
        if equation.primitive.name in _PRODUCTS:
            left, right = (str(operand.aval.dtype) for operand in equation.invars[:2])
            counts[left if left == right else f"{left}*{right}"] += 1
    return dict(counts.most_common())
