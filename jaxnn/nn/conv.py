"""The convolution layer: Flax's, in the form that is fast where it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flax import linen

from jaxnn.nn.convolution import conv_general_dilated
from jaxnn.types import ConfigError


class Conv(linen.Conv):
    """``flax.linen.Conv`` by `jaxnn.nn.conv_general_dilated`: the same parameters, names and results (to rounding).

    On CPU its gradients are as fast inside `jax.lax.scan` as outside, and with members of `jax.vmap` that have each
    their own kernel it is no slower than one member after another.

    Attributes:
        implementation: ``"canonical"``, ``"xla"`` or None for the best that can be used here.
    """

    implementation: str | None = None

    def __post_init__(self) -> None:
        given: Any = self.conv_general_dilated
        # A clone brings along what its original was given here.
        if given is None or given is _by(getattr(given, "keywords", {}).get("implementation")):
            self.conv_general_dilated = _by(self.implementation)
        elif self.implementation is not None:
            raise ConfigError("Conv: give an implementation or a conv_general_dilated, not both.")
        super().__post_init__()


@functools.cache
def _by(implementation: str | None) -> Callable[..., Any]:
    """One object for each name, so that equal layers compare equal."""
    return functools.partial(conv_general_dilated, implementation=implementation)
