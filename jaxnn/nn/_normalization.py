"""Normalization layers with Flax's results, whose backward passes sum over the inputs twice instead of four times."""

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import DTypeLike

from jaxnn._batch_context import batch_axis, batch_mask, mean_over_batch_axis
from jaxnn.kernels import channel_sums, choose, custom_vjp, moments, scope, vary_together
from jaxnn.types import ConfigError

RMSNorm = linen.RMSNorm
_PREFERRED = {"cpu": ("native", "custom_vjp", "xla"), "other": ("xla", "custom_vjp")}


class LayerNorm(linen.LayerNorm):
    """Layer normalization with a learned gain and bias, as ``flax.linen.LayerNorm``.

    Ba, Kiros and Hinton, Layer Normalization, 2016 (arXiv:1607.06450). Variances take two passes unless
    ``use_fast_variance=True``, and so are exact for a large mean too.

    >>> jn.nn.LayerNorm().init_with_output(jax.random.key(0), jnp.array([[1.0, 3.0]]))[0]
    Array([[-0.99..., 0.99...]], dtype=float32)
    """

    use_fast_variance: bool = False

    @linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes ``x [..., features]``, floats, over its last axis; ``mask`` is Flax's: the elements that count."""
        last = all(axes in (-1, x.ndim - 1) for axes in (self.reduction_axes, self.feature_axes))
        plain = last and mask is None and self.axis_name is None and self.force_float32_reductions
        if not plain or self.use_fast_variance or jax.typeof(x).sharding.mesh.explicit_axes:
            return cast(jax.Array, super().__call__(x, mask=mask))
        gain, bias, dtype = _gain_and_bias(self, x)
        mean, variance = _moments(moments.fallback, (x.ndim - 1,), gain.dtype, x, None)
        return _scale_rows(x, mean, jax.lax.rsqrt(variance + self.epsilon), gain, bias).astype(dtype)


class BatchNorm(linen.BatchNorm):
    """Batch normalization with a learned gain and bias per channel, as ``flax.linen.BatchNorm``.

    Ioffe and Szegedy, Batch Normalization, 2015 (arXiv:1502.03167). The same attributes, parameters, ``batch_stats``
    and results to rounding. If the batch is sharded, statistics are those of the full batch; padding, rows whose
    ``Batch.mask`` is 0, does not count. ``"custom_vjp"``, the default for training on a CPU, has a backward pass
    written by hand and takes two passes for variances, so they are exact for a large mean too. ``"native"``, the
    default with the package of ``make native``, does so too and reads the inputs half as often; it takes float32, no
    padding, and batches that devices do not share. ``"xla"`` is Flax's own code, which also takes a mask argument,
    named axes and another channel axis.

    >>> layer = jn.nn.BatchNorm(use_running_average=False)
    >>> sorted(jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((8, 3)))["batch_stats"])
    ['mean', 'var']

    Attributes:
        implementation: ``"native"``, ``"custom_vjp"``, ``"xla"``, or None for the fastest.
    """

    implementation: str | None = None

    @linen.compact
    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalizes ``x [..., channels]`` by the statistics of the batch or the running ones.

        Args:
            x: floats of any shape. Without ``mask``, their number of rows must be that of a batch with padding.
            use_running_average: True for evaluation; here or as the attribute.
            mask: the elements that count in the statistics, as Flax's; None: all rows that are not padding.
        """
        running = linen.merge_param("use_running_average", self.use_running_average, use_running_average)
        split = None if batch_axis() is None or running else "each device holds a shard of the batch, as under pmap"
        rows = None if running or mask is not None else batch_mask()  # those that are not padding; None: all
        obstacle = _obstacle(self, x, mask)
        native = obstacle or (None if running else _native_obstacle(self, x, rows))
        obstacles = {"native": native, "custom_vjp": obstacle, "xla": split}
        chosen = choose("normalization", self.implementation, obstacles, _PREFERRED)
        # With running statistics, all are one pass over the inputs.
        chosen = "xla" if running else chosen
        if rows is not None:
            if len(rows) != len(x):
                raise ConfigError(
                    f"BatchNorm has {len(x)} rows of inputs in a batch of {len(rows)} with a mask: its padding is "
                    "unknown. Pass it a mask made from jaxnn.nn.batch_mask(), or set Batch.mask to np.ones(…) inside "
                    "the traced function."
                )
            rows = rows.reshape(-1, *[1] * (x.ndim - 1))
        with scope("normalization", chosen):
            if chosen != "xla":
                return _normalized(self, x, rows, chosen == "native")
            # Without any element Flax would give NaN.
            mask = mask if rows is None else rows | ~rows.any()
            return cast(jax.Array, super().__call__(x, use_running_average, mask=mask))


def _obstacle(module: BatchNorm, x: jax.Array, mask: jax.Array | None) -> str | None:
    """The reason why the custom backward pass cannot be used, or None."""
    reasons = {
        "it takes batches with channels last": x.ndim < 2 or module.axis not in (-1, x.ndim - 1),
        "it takes no mask": mask is not None,
        "it does not average over a named axis": module.axis_name is not None,
        "it always sums in float32 or wider": not module.force_float32_reductions,
        "the mesh has explicit axes": bool(jax.typeof(x).sharding.mesh.explicit_axes),
        f"it takes floats, not {x.dtype}": not jnp.issubdtype(x.dtype, jnp.floating),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _native_obstacle(module: BatchNorm, x: jax.Array, rows: jax.Array | None) -> str | None:
    """The reason why the native kernels cannot compute the sums, or None."""
    dtypes = {jnp.dtype(dtype) for dtype in (x.dtype, module.dtype or x.dtype, module.param_dtype)}
    if len(dtypes) > 1:
        return "it sums in float32"
    return moments.obstacle(x, rows, axes=tuple(range(x.ndim - 1)), dtype=x.dtype)


def _normalized(module: BatchNorm, x: jax.Array, rows: jax.Array | None, native: bool) -> jax.Array:
    channels = x.shape[-1:]
    running_mean = module.variable("batch_stats", "mean", lambda: jnp.zeros(channels, jnp.float32))
    running_variance = module.variable("batch_stats", "var", lambda: jnp.ones(channels, jnp.float32))
    x, rows = vary_together(x, rows)
    gain, bias, dtype = _gain_and_bias(module, x)
    form = moments.compute if native else moments.fallback
    mean, variance = _moments(form, tuple(range(x.ndim - 1)), gain.dtype, x, rows)
    if batch_axis() is not None:
        # A device's weight is its share of the rows that are not padding: 1 on average.
        weight = 1 if rows is None else rows.sum() / jnp.maximum(mean_over_batch_axis(rows.sum(dtype=gain.dtype)), 1e-9)
        local_mean, mean = mean, mean_over_batch_axis(weight * mean)
        variance = mean_over_batch_axis(weight * (variance + jnp.square(local_mean - mean)))
    if not module.is_initializing():
        for running, batch in ((running_mean, mean), (running_variance, variance)):
            running.value = module.momentum * running.value + (1 - module.momentum) * batch.reshape(channels)
    factor = jax.lax.rsqrt(variance + module.epsilon) * gain
    sums = channel_sums.compute if native else channel_sums.fallback
    return _scale_channels(sums, x, mean, factor, bias).astype(dtype)


def _gain_and_bias(module: Any, x: jax.Array) -> tuple[jax.Array, jax.Array, DTypeLike]:
    """Gain and bias ``[1, ..., features]``, float32 or wider, 1 and 0 if unused; and the dtype of Flax's result."""
    wide = jnp.promote_types(x.dtype if module.dtype is None else module.dtype, jnp.float32)
    shape = x.shape[-1:]
    gain = module.param("scale", module.scale_init, shape, module.param_dtype) if module.use_scale else None
    bias = module.param("bias", module.bias_init, shape, module.param_dtype) if module.use_bias else None
    dtype = linen.dtypes.canonicalize_dtype(x, gain, bias, dtype=module.dtype)
    broad = (1,) * (x.ndim - 1) + shape
    wide_gain = jnp.ones(broad, wide) if gain is None else gain.astype(wide).reshape(broad)
    wide_bias = jnp.zeros(broad, wide) if bias is None else bias.astype(wide).reshape(broad)
    return wide_gain, wide_bias, dtype


type _Form = Callable[..., tuple[jax.Array, jax.Array]]


def _moments_forward(
    form: _Form, axes: tuple[int, ...], dtype: DTypeLike, x: jax.Array, rows: jax.Array | None
) -> tuple[Any, Any]:
    mean, variance = form(x, rows, axes=axes, dtype=dtype)
    return (mean, variance), (x, mean, rows)


def _moments_backward(
    form: _Form, axes: tuple[int, ...], dtype: DTypeLike, saved: Any, cotangents: Any
) -> tuple[jax.Array, None]:
    x, mean, rows = saved
    to_mean, to_variance = cotangents
    count: int | jax.Array = math.prod(x.shape[axis] for axis in axes)
    if rows is not None:
        count = jnp.maximum(rows.sum(), 1) * (count // max(1, len(x)))
    # The derivative of the variance by the mean is 0, so nothing is summed here.
    grad = to_mean / count + (x.astype(dtype) - mean) * (2 * to_variance / count)
    grad = grad if rows is None else jnp.where(rows, grad, 0)
    return grad.astype(x.dtype), None


_moments = custom_vjp(lambda *arguments: _moments_forward(*arguments)[0], num_static=3)
_moments.defvjp(_moments_forward, _moments_backward)


def _scale(sums: _Form, x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    """``(x - mean) * factor + bias`` with operands ``[1, ..., channels]``; ``sums`` are those of its gradient."""
    return (x.astype(mean.dtype) - mean) * factor + bias


def _channels_backward(sums: _Form, saved: Any, grad: jax.Array) -> tuple[jax.Array, ...]:
    x, mean, factor, _ = saved
    total, to_factor = sums(grad, x, mean)
    return (grad * factor).astype(x.dtype), -total * factor, to_factor, total


_scale_channels = custom_vjp(_scale, num_static=1)
# Forward mode cannot transpose the native sums.
_scale_channels.defvjp(lambda sums, *arrays: (_scale(sums, *arrays), arrays), _channels_backward, push_forward=True)


@custom_vjp
def _scale_rows(x: jax.Array, mean: jax.Array, factor: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    """``(x - mean) * factor * gain + bias`` with mean and factor ``[..., 1]`` per row."""
    return (x.astype(mean.dtype) - mean) * factor * gain + bias


def _rows_backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, ...]:
    x, mean, factor, gain = saved
    product = grad * (x.astype(mean.dtype) - mean)
    rows, column = grad.reshape(-1, grad.shape[-1]), gain.reshape(-1, 1)
    # On CPU a matrix product is faster than a sum of products.
    to_gain = factor.reshape(1, -1) @ product.reshape(rows.shape)
    to_bias = jnp.ones((1, rows.shape[0]), rows.dtype) @ rows
    to_x = (grad * factor * gain).astype(x.dtype)
    return to_x, -factor * (grad @ column), product @ column, to_gain.reshape(gain.shape), to_bias.reshape(gain.shape)


_scale_rows.defvjp(lambda *arrays: (_scale_rows(*arrays), arrays[:4]), _rows_backward)
