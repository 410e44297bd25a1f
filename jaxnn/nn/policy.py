"""Mixed precision as a value: the dtypes of parameters, computation and outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxnn.types import ConfigError, PyTree, suggest

_KNOWN = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a model: ``Policy(compute="bfloat16")`` is the usual mixed precision.

    Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740), without their loss
    scaling: bfloat16 needs none, float16 may. Each dtype is a name or a dtype, and is kept as its
    name, so that a policy can be a config's field.

    Attributes:
        params: in which the parameters are kept and updated.
        compute: in which the model runs.
        outputs: in which the model's outputs meet the loss.

    Raises:
        ConfigError: a dtype other than float32, bfloat16 and float16.
    """

    params: Any = "float32"
    compute: Any = "float32"
    outputs: Any = "float32"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name = _dtype_name(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, name)

    def cast_to_params(self, tree: PyTree) -> PyTree:
        """``tree`` with its floating arrays as ``params``; all other leaves as they are."""
        return _cast(tree, self.params)

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """``tree`` with its floating arrays as ``compute``; all other leaves as they are."""
        return _cast(tree, self.compute)

    def cast_to_outputs(self, tree: PyTree) -> PyTree:
        """``tree`` with its floating arrays as ``outputs``; all other leaves as they are."""
        return _cast(tree, self.outputs)


def _dtype_name(field: str, dtype: Any) -> str:
    try:
        name = dtype if isinstance(dtype, str | None) else jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in _KNOWN:
        raise ConfigError(f"Policy: {field}={dtype!r} is no dtype to train in: {suggest(str(name), _KNOWN)}.")
    return name


def _cast(tree: PyTree, dtype: str) -> PyTree:
    def cast(leaf: Any) -> Any:
        floating = jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree)
