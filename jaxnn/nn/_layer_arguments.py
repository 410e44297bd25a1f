"""Helpers of layers: argument checks, choice of implementation, dtypes, and the batch's mapped axis and mask."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import with_partitioning
from flax.linen.dtypes import promote_dtype

from jaxnn._compat import platform
from jaxnn.types import ConfigError, PyTree, is_half, suggest

_DTYPES = ("float32", "bfloat16", "float16")
_MANY_CLASSES = 1024


def at_least_int32(ids: jax.Array) -> jax.Array:
    """Casts narrow integer ids: compared with a ``uint8``, a count of 256 classes would wrap around to 0."""
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of computation and outputs; ``Policy(compute="bfloat16")`` is the usual mixed precision.

    Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740). Parameters stay float32, since an update
    below 1/256 of a weight is lost in bfloat16. bfloat16 needs no loss scaling, float16 may:
    `jaxnn.optim.with_loss_scale`. Dtypes (float32, bfloat16 or float16) are stored by name, so that a policy can be a
    config's field. Casts change only the floating arrays of a tree.

    >>> policy = jn.nn.Policy(compute=jnp.bfloat16)
    >>> policy
    Policy(compute='bfloat16', outputs='float32')
    >>> policy.cast_to_compute({"images": np.zeros(2, np.float32), "labels": np.arange(2)})
    {'images': array([0, 0], dtype=bfloat16), 'labels': array([0, 1])}

    Attributes:
        compute: dtype in which the model runs.
        outputs: dtype in which the model's outputs enter the loss.
    """

    compute: Any = "float32"
    outputs: Any = "float32"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            dtype = getattr(self, field.name)
            try:
                name = dtype if isinstance(dtype, str | None) else jnp.dtype(dtype).name
            except TypeError:
                name = None
            if name not in _DTYPES:
                raise ConfigError(f"Policy: {field.name}={dtype!r} is not supported: {suggest(str(name), _DTYPES)}.")
            object.__setattr__(self, field.name, name)

    def cast_to_params(self, tree: PyTree) -> PyTree:
        """Casts the floating arrays of ``tree`` to float32, in which parameters are kept and updated."""
        return _cast(tree, "float32")

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """Casts the floating arrays of ``tree`` to ``compute``."""
        return _cast(tree, self.compute)

    def cast_to_outputs(self, tree: PyTree) -> PyTree:
        """Casts the floating arrays of ``tree`` to ``outputs``."""
        return _cast(tree, self.outputs)


def padded_classes(count: int) -> int:
    """Returns the width of a product with ``count`` classes: on a GPU a multiple of 128 for 1,024 classes or more.

    Tensor cores load rows in units of 16 bytes, which 8 numbers of two bytes fill; a row of 50,257, as GPT-2's, starts
    anywhere. Of fewer than 1,024 classes the padding would be a large share, and the product is a small one.
    """
    is_ragged = count >= _MANY_CLASSES and count % 8 != 0
    return count + -count % 128 if is_ragged and platform() == "gpu" else count


def add_broadcast(values: jax.Array, shared: jax.Array) -> jax.Array:
    """``values + shared`` in the dtype of ``values``; ``shared`` is broadcast, and its gradient summed in float32.

    The gradient of what is broadcast is a sum over rows. JAX sums it in the dtype of ``values``, and bfloat16 stops at
    256 of equal terms, float16 at 2,048. Here both are added in float32 and rounded once, forward and backward, which
    XLA fuses with the addition. Values in float32 or wider are added as they are.

    >>> jn.nn.add_broadcast(jnp.ones((2, 3), "bfloat16"), jnp.arange(3.0)[None])[0]
    Array([1, 2, 3], dtype=bfloat16)
    """
    if not is_half(values.dtype):
        return values + shared
    return (values.astype(jnp.float32) + jnp.asarray(shared, jnp.float32)).astype(values.dtype)


def with_wide_bias(*arrays: Any, **options: Any) -> list[Any]:
    """Flax's ``promote_dtype`` of inputs, kernel and bias of a layer; in half precision the bias stays float32.

    Then Flax adds it in float32, and `narrowed` rounds the sum.
    """
    *promoted, bias = promote_dtype(*arrays, **options)
    is_narrow = bias is not None and is_half(bias.dtype)
    return [*promoted, arrays[-1].astype(jnp.float32) if is_narrow else bias]


def narrowed(call: Callable[..., Any], layer: Any, inputs: Any) -> jax.Array:
    """The outputs of Flax's ``call`` of a layer, in the dtype that they have without `with_wide_bias`."""
    # Not by `super()`: Flax would intercept and capture the call twice.
    outputs: jax.Array = inspect.unwrap(call)(layer, inputs)
    kept = [layer.get_variable("params", name) for name in ("kernel", "bias")]
    return outputs.astype(layer.dtype or jnp.result_type(jnp.asarray(inputs), *jax.tree.leaves(kept)))


def _cast(tree: PyTree, dtype: str) -> PyTree:
    def cast(leaf: Any) -> Any:
        floating = jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree)


partitioned = with_partitioning
"""``partitioned(initializer, (None, "model"))``: shards the parameter's second axis along the mesh axis ``model``."""
