"""Which implementations of jaxnn's operations a program holds, and which convolutions are not jaxnn's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

from jaxnn.observe.equations import equations

# What `jaxnn.nn` traces its implementations in; a test holds the two together.
_SCOPE = re.compile(r"\bjaxnn\.(\w+)\.(\w+)")


def implementations(function: Callable[..., Any], *args: Any) -> dict[str, list[str]]:
    """The implementations of each operation of ``jaxnn.nn`` that ``function`` computes with, in order of appearance.

    ``{"convolution": ["canonical"], "attention": ["cudnn"]}``; ``{}`` if there is none. Costs one trace, or none where
    ``function`` is jitted and was traced before.

    Args:
        function: a traceable function.
        *args: its arguments, or ``jax.ShapeDtypeStruct`` in their place.
    """
    found: dict[str, list[str]] = {}
    for _, scopes in equations(jax.make_jaxpr(function)(*args)):
        for operation, name in _SCOPE.findall(scopes):
            names = found.setdefault(operation, [])
            if name not in names:
                names.append(name)
    return found


def plain_convolutions(function: Callable[..., Any], *args: Any) -> int:
    """How many convolutions ``function`` computes that no layer of jaxnn traced, those of gradients left out.

    Args:
        function: a traceable function.
        *args: its arguments, or ``jax.ShapeDtypeStruct`` in their place.
    """
    return sum(
        equation.primitive.name == "conv_general_dilated" and "transpose(" not in scopes and not _SCOPE.search(scopes)
        for equation, scopes in equations(jax.make_jaxpr(function)(*args))
    )
