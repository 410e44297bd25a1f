"""What a traced program contains: its equations, implementations of layers, and precisions of matrix products."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

# The last two are those of nn.Dense and nn.Conv.
_PRODUCTS = "dot_general", "conv_general_dilated", "ragged_dot_general", "dense_product", "channels_last_convolution"
# The named scopes in which `jaxnn.nn` traces its implementations; a test compares the two.
_SCOPE = re.compile(r"\bjaxnn\.(\w+)\.(\w+)")


def equations(jaxpr: Any, scopes: str = "") -> Iterator[tuple[Any, str]]:
    """The equations of ``jaxpr`` and of all jaxprs within it, each once as written, with their named scopes.

    Scopes have the outermost first, ``jvp(Model)/Conv_0``; ``scopes`` are around all of it. Equations made by a
    transformation have scopes in ``jvp(…)``, ``transpose(…)`` and so on.
    """
    for equation in jaxpr.eqns:
        # Within a jit or a scan, names start again.
        within = f"{scopes}/{equation.source_info.name_stack}"
        yield equation, within
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner, within)


def implementations(function: Callable[..., Any], *args: Any) -> dict[str, list[str]]:
    """The implementations of each operation of ``jaxnn.nn`` that ``function`` uses, in order of appearance.

    ``{"convolution": ["canonical"], "attention": ["cudnn"]}``; ``{}`` if there is none. ``args`` are its arguments, or
    ``jax.ShapeDtypeStruct`` in their place. Costs one trace, or none if ``function`` is jitted and was traced before.
    """
    found: dict[str, dict[str, None]] = {}
    for _, scopes in equations(jax.make_jaxpr(function)(*args)):
        for operation, name in _SCOPE.findall(scopes):
            found.setdefault(operation, {})[name] = None
    return {operation: list(names) for operation, names in found.items()}


def plain_convolutions(function: Callable[..., Any], *args: Any) -> int:
    """Number of convolutions in ``function`` that are not a jaxnn layer's, without those of gradients.

    Takes the arguments of `implementations` and costs the same.
    """
    return sum(
        equation.primitive.name == "conv_general_dilated" and "transpose(" not in scopes and not _SCOPE.search(scopes)
        for equation, scopes in equations(jax.make_jaxpr(function)(*args))
    )


def product_dtypes(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Number of matrix products and convolutions of ``function`` by the dtype of their inputs, most frequent first.

    A product of unequal dtypes is named ``"bfloat16*float32"``. Products are counted as written: one in the body of a
    ``scan`` once, one in each branch of a ``cond``. Takes the arguments of `implementations` and costs the same.
    """
    counts: collections.Counter[str] = collections.Counter()
    for equation, _ in equations(jax.make_jaxpr(function)(*args)):
        if equation.primitive.name in _PRODUCTS:
            left, right = (str(operand.aval.dtype) for operand in equation.invars[:2])
            counts[left if left == right else f"{left}*{right}"] += 1
    return dict(counts.most_common())
