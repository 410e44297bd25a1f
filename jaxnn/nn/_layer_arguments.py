"""Helpers of layers: argument checks, choice of implementation, dtypes, and the batch's mapped axis and mask."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from flax.linen import intercept_methods, with_partitioning
from flax.linen.dtypes import promote_dtype
from jax.typing import ArrayLike

from jaxnn.nn._choice import Context, setting
from jaxnn.types import Array, ConfigError, PyTree, is_half, suggest

_DTYPES = ("float32", "bfloat16", "float16")
_axis: ContextVar[str | None] = ContextVar("batch_axis", default=None)
_mask: ContextVar[Array | None] = ContextVar("batch_mask", default=None)
_sharding: ContextVar[BatchSharding | None] = ContextVar("batch_sharding", default=None)


def positive_ints(name: str, values: Any, example: str, *, nonempty: bool = False) -> tuple[int, ...]:
    """Returns a sequence of integers >= 1, empty unless ``nonempty``, as a tuple; ``example`` is a valid value."""
    if not isinstance(values, Sequence) or not all(map(_is_count, values)):
        raise ConfigError(f"{name} must be a tuple of integers >= 1, as {example}, not {values!r}.")
    if nonempty and not values:
        raise ConfigError(f"{name} is empty: give at least one, as {example}.")
    return tuple(map(int, values))


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def check_rate(rate: ArrayLike) -> None:
    """Raises ConfigError if a dropout rate is a plain number outside 0…1 or NaN; JAX arrays and tracers pass."""
    if isinstance(rate, numbers.Real) and not 0 <= rate <= 1:
        raise ConfigError(f"a dropout rate must be a probability in 0…1, not {rate!r}.")


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
unbox = meta.unbox
"""``unbox(tree)``: replaces the boxes, which hold an array and the names of its axes, by plain arrays."""
partition_specs = meta.get_partition_spec
"""``partition_specs(tree)``: the names of each array's axes as a ``PartitionSpec``; an empty one for a plain array."""


def use_batch_axis(axis_name: str | None) -> Context:
    """Context in which a batch is this device's shard of a batch sharded over ``axis_name``, as in `pmap`.

    Layers average batch statistics over the axis and take this device's rows of the full batch's random draws.
    """
    return setting(_axis, axis_name)


def batch_axis() -> str | None:
    """The mapped axis over which batches are sharded here; None if a layer sees the full batch."""
    return _axis.get()


def normal_rows(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal random numbers ``[batch, ...]``; under a mapped batch axis, this device's rows of the full batch's."""
    axis, rows = batch_axis(), shape[0]
    if axis is None:
        return jax.random.normal(key, shape, dtype)
    full = jax.random.normal(key, (rows * jax.lax.axis_size(axis), *shape[1:]), dtype)
    return jax.lax.dynamic_slice_in_dim(full, jax.lax.axis_index(axis) * rows, rows)


class BatchSharding(NamedTuple):
    """How the batch that a model computes on is sharded over devices, in a program that XLA partitions."""

    size: int  # examples; arrays with as many rows are taken to have a batch axis
    constrain: Callable[[jax.Array], jax.Array]  # shards an array ``[batch, ...]`` by rows
    map_rows: Callable[[Callable[..., Any], Sequence[int | None], Any], Callable[..., Any]]  # see `map_rows`


@contextlib.contextmanager
def use_batch_sharding(sharding: BatchSharding) -> Iterator[None]:
    """Context in which the output of each Flax module stays sharded by rows.

    Without it XLA may shard activations as parameters are, by features, and exchange them before every layer.
    """

    def interceptor(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        out = method(*args, **kwargs)
        return shard_rows(out) if context.method_name == "__call__" else out

    with setting(_sharding, sharding), intercept_methods(interceptor):
        yield


def batch_sharding(num_rows: int) -> BatchSharding | None:
    """How ``num_rows`` rows are sharded here; None if batches are not, or if these are not those of whole batches.

    >>> jn.nn.batch_sharding(128) is None  # outside of a task that trains on several devices
    True
    """
    sharding = _sharding.get()
    return None if sharding is None or num_rows % sharding.size else sharding


def sharding_obstacle(num_rows: int) -> str | None:
    """The reason why `map_rows` cannot give each device its rows, of whose library calls XLA would give it all."""
    unknown = batch_sharding(0) is not None and batch_sharding(num_rows) is None
    return "devices share the batch, whose axis is not the first" if unknown else None


def map_rows(
    function: Callable[..., Any], num_rows: int, in_axes: Sequence[int | None], out_axes: Any
) -> Callable[..., Any]:
    """The function as each device runs it on its rows if ``num_rows`` rows are sharded here; otherwise ``function``.

    XLA cannot partition calls to libraries, and would give each device all rows. ``in_axes`` and ``out_axes``, which is
    an int or None for one result, are the batch axes of arguments and results; None for what all devices share.
    """
    if (sharding := batch_sharding(num_rows)) is None:
        return function

    def local(*args: Any) -> Any:
        with setting(_sharding, None):
            return function(*args)

    return sharding.map_rows(local, in_axes, out_axes)


def shard_rows(tree: PyTree) -> PyTree:
    """Shards the arrays ``[batch, ...]`` of ``tree`` by rows if batches are sharded here."""
    sharding = _sharding.get()
    if sharding is None:
        return tree

    def shard(leaf: Any) -> Any:
        has_rows = isinstance(leaf, jax.Array) and leaf.shape[:1] == (sharding.size,)
        return sharding.constrain(leaf) if has_rows else leaf

    return jax.tree.map(shard, tree)


def is_full(mask: Array) -> bool:
    """Whether ``mask`` is known to be all ones at trace time: a NumPy array, as data sources give."""
    return isinstance(mask, np.ndarray) and bool(np.all(mask))


def use_batch_mask(mask: Array) -> Context:
    """Context in which the rows of a batch with ``mask [batch]`` 0 are padding."""
    return setting(_mask, None if is_full(mask) else mask)


def batch_mask() -> jax.Array | None:
    """Returns the rows that are not padding, for models that compute across rows, while a task traces them.

    `nn.BatchNorm` applies it itself; Flax's takes it as an argument: ``BatchNorm(…)(x, mask=counts[:, None])``.

    >>> jn.nn.batch_mask() is None  # outside of a task: no padding
    True

    Returns:
        ``[batch]`` bool, False for padding (``Batch.mask`` is 0); None if no row is padding.
    """
    mask = _mask.get()
    return None if mask is None else jnp.asarray(mask) > 0


def mean_over_batch_axis(x: jax.Array) -> jax.Array:
    """Returns the mean of ``x`` over the devices that share the batch; ``x`` if the batch is not sharded."""
    axis = batch_axis()
    return x if axis is None else jax.lax.pmean(x, axis)
