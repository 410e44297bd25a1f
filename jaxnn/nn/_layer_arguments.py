"""What layers are given: arguments, the implementation to trace, and the batch's mapped axis and mask."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from flax.linen import with_partitioning
from jax.typing import ArrayLike

from jaxnn.types import Array, ConfigError, PyTree, suggest

# By operation and platform, best first; "other" is every platform not named. docs/performance.md has the measurements.
_PREFERRED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "convolution": {"cpu": ("channels_last", "xla"), "other": ("xla", "channels_last")},
    "recurrence": {"gpu": ("cudnn", "fused_inputs"), "other": ("fused_inputs", "cudnn")},
    "attention": {"cpu": ("math", "memory_efficient"), "gpu": ("cudnn", "xla"), "other": ("xla",)},
    "normalization": {"cpu": ("custom_vjp", "xla"), "other": ("xla", "custom_vjp")},
}
_DTYPES = ("float32", "bfloat16", "float16")
_axis: ContextVar[str | None] = ContextVar("batch_axis", default=None)
_mask: ContextVar[Array | None] = ContextVar("batch_mask", default=None)


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``: where a computation that names no device will run."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else str(device.platform)


def choose(operation: str, given: str | None, obstacles: Mapping[str, str | None]) -> str:
    """The implementation ``given``, or for None the first of `_PREFERRED` without an obstacle.

    ``obstacles`` maps an implementation to the reason why it cannot be used here, or None.
    """
    preferred = _PREFERRED[operation]
    if given is None:
        order = preferred.get(platform(), preferred["other"])
        found = next((name for name in order if obstacles.get(name) is None), None)
        if found is None:
            raise ConfigError(f"{operation} cannot be computed here: {'; '.join(map(str, obstacles.values()))}.")
        return found
    known = {name for names in preferred.values() for name in names}
    if given not in known:
        raise ConfigError(f"{operation} has no implementation {given!r}: {suggest(str(given), known)}.")
    if (obstacle := obstacles.get(given)) is not None:
        raise ConfigError(f"{operation} cannot use {given!r} here: {obstacle}; leave implementation out.")
    return given


def scope(operation: str, chosen: str | Callable[..., Any]) -> Any:
    """The context in which an implementation is traced: its operations carry ``jaxnn.operation.name``."""
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", "function").strip("<>")
    return jax.named_scope(f"jaxnn.{operation}.{name}")


def positive_int(name: str, value: Any) -> int:
    """``value`` as an ``int``; ConfigError, which names ``name``, unless it is an integer of at least 1."""
    if not _is_count(value):
        raise ConfigError(f"{name} must be an integer >= 1, not {value!r}.")
    return int(value)


def positive_ints(name: str, values: Any, example: str, *, nonempty: bool = False) -> tuple[int, ...]:
    """As `positive_int` for a sequence, which may be empty unless ``nonempty``; ``example`` shows a good one."""
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
        raise ConfigError(f"a dropout rate is a probability, 0…1, not {rate!r}.")


def at_least_int32(ids: jax.Array) -> jax.Array:
    """``ids`` of any integer dtype as at least int32.

    In a narrower dtype their comparison with a count of classes wraps around: among ``uint8`` 256 is 0.
    """
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a model: ``Policy(compute="bfloat16")`` is the usual mixed precision.

    Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740), without their loss scaling: bfloat16 needs
    none, float16 may. Each dtype is kept as its name, so that a policy can be a config's field. What a cast is given
    keeps all leaves but the floating arrays.

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
            dtype = getattr(self, field.name)
            try:
                name = dtype if isinstance(dtype, str | None) else jnp.dtype(dtype).name
            except TypeError:
                name = None
            if name not in _DTYPES:
                raise ConfigError(
                    f"Policy: {field.name}={dtype!r} is no dtype to train in: {suggest(str(name), _DTYPES)}."
                )
            object.__setattr__(self, field.name, name)

    def cast_to_params(self, tree: PyTree) -> PyTree:
        """``tree`` with its floating arrays as ``params``."""
        return _cast(tree, self.params)

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """``tree`` with its floating arrays as ``compute``."""
        return _cast(tree, self.compute)

    def cast_to_outputs(self, tree: PyTree) -> PyTree:
        """``tree`` with its floating arrays as ``outputs``."""
        return _cast(tree, self.outputs)


def _cast(tree: PyTree, dtype: str) -> PyTree:
    def cast(leaf: Any) -> Any:
        floating = jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree)


partitioned = with_partitioning
"""``partitioned(initializer, (None, "model"))``: the parameter's second axis is split over the mesh axis ``model``."""
unbox = meta.unbox
"""``unbox(tree)``: plain arrays in place of the boxes that hold an array and the names of its axes."""
partition_specs = meta.get_partition_spec
"""``partition_specs(tree)``: the names of each array's axes as a ``PartitionSpec``; an empty one for a plain array."""


@contextlib.contextmanager
def use_batch_axis(axis_name: str | None) -> Iterator[None]:
    """Within the traced block, batches are this device's rows of a batch sharded over ``axis_name``, as in `pmap`.

    Layers then average batch statistics over the axis, and their random draws are this device's part of all draws.
    """
    token = _axis.set(axis_name)
    try:
        yield
    finally:
        _axis.reset(token)


def batch_axis() -> str | None:
    """The mapped axis that batches are sharded over here; None if a layer sees the whole batch."""
    return _axis.get()


def is_full(mask: Array) -> bool:
    """Whether all of ``mask`` is known to be 1 while tracing: an array of NumPy, as a data source gives."""
    return isinstance(mask, np.ndarray) and bool(np.all(mask))


@contextlib.contextmanager
def use_batch_mask(mask: Array) -> Iterator[None]:
    """Within the traced block, rows of a batch with ``mask [batch]`` 0 are padding."""
    token = _mask.set(None if is_full(mask) else mask)
    try:
        yield
    finally:
        _mask.reset(token)


def batch_mask() -> jax.Array | None:
    """Which rows of the batch count, for a model that computes anything across them, while a task traces it.

    `nn.BatchNorm` asks for it itself; Flax's takes it as an argument: ``BatchNorm(…)(x, mask=counts[:, None])``.

    Returns:
        ``[batch]`` bool, False for padding (``Batch.mask`` is 0); None where all rows are known to count.
    """
    mask = _mask.get()
    return None if mask is None else jnp.asarray(mask) > 0


def mean_over_batch_axis(x: jax.Array) -> jax.Array:
    """The mean of ``x`` over the devices that share the batch; ``x`` if the batch is not sharded."""
    axis = batch_axis()
    return x if axis is None else jax.lax.pmean(x, axis)
