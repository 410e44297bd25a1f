"""Convolution with Flax's results, in the form that is fast on each backend."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax

from jaxnn.kernels import (
    Geometry,
    channels_last_conv,
    choose,
    conv_dimension_numbers,
    convolution,
    convolve,
    native_conv,
    scope,
)
from jaxnn.nn._layer_arguments import narrowed, with_wide_bias
from jaxnn.types import ConfigError

type Implementation = str | Callable[..., jax.Array] | None
_PREFERRED = {
    "cpu": ("native", "channels_last", "xla"),
    "gpu": ("patches", "xla"),
    "other": ("xla", "channels_last"),
}


class Conv(linen.Conv):
    """``flax.linen.Conv`` with `jaxnn.nn.conv_general_dilated`: the same parameters, names and results (to rounding).

    On CPU its gradients are as fast inside `jax.lax.scan` as outside, and under `jax.vmap` over kernels it is no slower
    than one member after another.

    >>> layer = jn.nn.Conv(32, (3, 3))
    >>> jn.models.num_parameters(layer, jax.ShapeDtypeStruct((1, 28, 28, 1), "float32"))
    320

    Attributes:
        implementation: as in `jaxnn.nn.conv_general_dilated`.
    """

    implementation: Implementation = None
    promote_dtype: Callable[..., Any] = with_wide_bias

    def __post_init__(self) -> None:
        given: Any = self.conv_general_dilated
        # A clone is given what its original set here.
        if given is None or given is _by(getattr(given, "keywords", {}).get("implementation")):
            self.conv_general_dilated = _by(self.implementation)
        elif self.implementation is not None:
            raise ConfigError("Conv: pass an implementation or a conv_general_dilated, not both.")
        super().__post_init__()

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """``[batch, *spatial, in_features]`` to features; the bias is added, and its gradient summed, in float32."""
        return narrowed(linen.Conv.__call__, self, inputs)


@functools.cache
def _by(implementation: Implementation) -> Callable[..., Any]:
    """One object per implementation, so that equal layers compare equal."""
    return functools.partial(conv_general_dilated, implementation=implementation)


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """Convolves with any strides, padding, dilation and groups, as `jax.lax.conv_general_dilated`.

    For Flax's own layer: ``flax.linen.Conv(..., conv_general_dilated=jaxnn.nn.conv_general_dilated)``. Implementations:

    - ``"native"``: on CPUs, if the package `jaxnn-native` is installed (``make native``): all three forms, of float32
      and bfloat16, by Winograd's algorithm or oneDNN on XLA's threads. Bits depend on the CPU's instructions. In a
      jaxpr it is a ``channels_last_convolution`` too.
    - ``"xla"``: ``jax.lax``'s own. On CPU, gradients are slow in a loop such as `jax.lax.scan` (jax#12868), and so are
      grouped convolutions anywhere, which `jax.vmap` over kernels creates too (jax#26568).
    - ``"channels_last"``: the gradients have channels last too, and are as fast in a loop as outside. Groups and
      members of `jax.vmap` run one after another; a kernel of one element is a matrix product; a depthwise convolution
      is a sum over the kernel's elements. In a jaxpr it is a ``channels_last_convolution``, which `jax.checkpoint`
      policies that save products do not know: it is recomputed, unless its result has a saved name
      (`jax.ad_checkpoint.checkpoint_name`).
    - ``"patches"``: on GPUs. As ``"xla"``, except that members of `jax.vmap` with kernels of their own are one batched
      product of patches in each direction: cuDNN is slow with the groups that XLA makes of them. Also a
      ``channels_last_convolution``.

    Results are equal to rounding, and differentiable in either mode and to any order.

    >>> numbers = ("NHWC", "HWIO", "NHWC")
    >>> images, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 16))
    >>> jn.nn.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=numbers).shape
    (2, 8, 8, 16)

    Args are ``jax.lax``'s. ``"channels_last"`` takes ``lhs [batch, *spatial, in_features]``, ``rhs [*spatial,
    in_features // groups, out_features]``, the ``dimension_numbers`` of this layout (None is channels first, as in
    ``jax.lax``) and a ``batch_group_count`` of 1, as do ``"native"`` and ``"patches"``. ``implementation`` is a name
    above, a function called as ``jax.lax``'s, or None for the best that supports the arguments.
    """
    options = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    rest = (feature_group_count, batch_group_count, precision, preferred_element_type)
    if callable(implementation):
        with scope("convolution", implementation):
            return implementation(lhs, rhs, *options, *rest)
    try:
        output = jax.eval_shape(lambda lhs, rhs: lax.conv_general_dilated(lhs, rhs, *options, *rest), lhs, rhs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"convolution of {lhs.shape} with a kernel {rhs.shape}: {error}") from error
    obstacle = native = _obstacle(lhs, rhs, output, dimension_numbers, batch_group_count)
    if obstacle is None:
        kernel_dilation = tuple(rhs_dilation or (1,) * (rhs.ndim - 2))
        if isinstance(padding, str):
            window = [(size - 1) * factor + 1 for size, factor in zip(rhs.shape[:-2], kernel_dilation, strict=True)]
            padding = lax.padtype_to_pads(lhs.shape[1:-1], window, window_strides, padding)
        geometry = Geometry(
            input_size=lhs.shape[1:-1],
            kernel_size=rhs.shape[:-2],
            output_size=output.shape[1:-1],
            strides=tuple(window_strides),
            padding=tuple((int(low), int(high)) for low, high in padding),
            input_dilation=tuple(lhs_dilation or (1,) * (lhs.ndim - 2)),
            kernel_dilation=kernel_dilation,
            dtype=lhs.dtype,
            output_dtype=output.dtype,
            preferred_element_type=preferred_element_type,
            precision=_default_precision() if precision is None else precision,
        )
        grouped = geometry._replace(groups=feature_group_count, form="native")
        native = convolution.obstacle(lhs, rhs, missing="output", geometry=grouped)
    obstacles = {"native": native, "channels_last": obstacle, "patches": obstacle}
    name = choose("convolution", implementation, obstacles, _PREFERRED)
    with scope("convolution", name):
        if name == "xla":
            return lax.conv_general_dilated(lhs, rhs, *options, *rest)
        if name == "patches":
            return convolve(lhs, rhs, geometry._replace(form=name, groups=feature_group_count))
        by_name = native_conv if name == "native" else channels_last_conv
        return by_name(lhs, rhs, geometry, feature_group_count)


def _default_precision() -> lax.Precision | None:
    """That of the config while a layer is traced, as of `jax.lax`'s; its primitive is lowered later."""
    with contextlib.suppress(ValueError):  # the name of an algorithm for matrix products
        return lax.Precision(jax.config.jax_default_matmul_precision)
    return None


def _obstacle(
    lhs: jax.Array, rhs: jax.Array, output: jax.ShapeDtypeStruct, dimension_numbers: Any, batch_group_count: int
) -> str | None:
    if lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers) != conv_dimension_numbers(lhs.ndim):
        return "its dimension numbers are not channels last"
    if batch_group_count > 1:
        return "batch_group_count is not 1"
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        return f"{lhs.dtype} is not floating"
    if jax.typeof(lhs).sharding.mesh.explicit_axes:
        return "the mesh has explicit axes"
    return "an array is empty" if 0 in (*lhs.shape, *rhs.shape, *output.shape) else None
