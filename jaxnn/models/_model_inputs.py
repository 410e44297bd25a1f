"""What models share: checks of sizes, images and token ids; the number of parameters; remat and scan over layers."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jaxnn._fields import check_rate
from jaxnn.nn import at_least_int32
from jaxnn.types import DataError, Params, check_int

type Remat = bool | Callable[..., bool]  # whether to, or a policy of `jax.checkpoint_policies`


def num_parameters(model: linen.Module, inputs: Any, **options: Any) -> int:
    """Returns the number of trained parameters; running statistics do not count. Computes shapes only.

    >>> jn.models.num_parameters(jn.models.ResNet(10), jax.ShapeDtypeStruct((1, 32, 32, 3), "float32"))
    272474

    Args:
        model: a Flax Linen module.
        inputs: arrays or ``jax.ShapeDtypeStruct``, as for a call.
        options: further arguments of the call, such as ``train=False``.
    """
    variables = jax.eval_shape(lambda inputs: model.init(jax.random.key(0), inputs, **options), inputs)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables.get("params", {})))


def check_fields(model: linen.Module, *names: str) -> None:
    """Converts fields to ``int``; raises ConfigError unless they are positive and a ``dropout`` is a probability."""
    for name in names:
        setattr(model, name, check_int(f"{type(model).__name__}: {name}", getattr(model, name)))
    check_rate(getattr(model, "dropout", 0.0))


def check_images(model: str, x: jax.Array) -> None:
    """Raises DataError unless ``x`` is of rank 4."""
    if x.ndim != 4:
        hint = ": add a channel axis, images[..., None]" if x.ndim == 3 else ""
        raise DataError(f"{model} needs images [batch, height, width, channels], not of shape {x.shape}{hint}.")


def checked_tokens(model: str, tokens: jax.Array) -> jax.Array:
    """Returns ``tokens`` as int32 or wider; raises DataError unless they are integers ``[batch, time]``."""
    if tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer):
        return at_least_int32(tokens)
    # Data sets scale uint8 to floats, as images.
    hint = ": pass ids as int32, uint8 is for images" if jnp.issubdtype(tokens.dtype, jnp.floating) else ""
    raise DataError(
        f"{model} needs token ids [batch, time] of integers, not {tokens.dtype} {list(tokens.shape)}{hint}."
    )


def rematerialized(call: Callable[..., Any], remat: Remat, *, in_scan: bool = False) -> Callable[..., Any]:
    """``call(module, *arrays)``, recomputed in the backward pass if ``remat``; parameters keep their names."""
    lift: Any = linen.remat  # typed for classes, it takes functions of a module too
    policy = remat if callable(remat) else None
    # A loop keeps XLA from merging the recomputation with the forward pass.
    lifted: Callable[..., Any] = lift(call, policy=policy, prevent_cse=not in_scan) if remat else call
    return lifted


def apply_layers(
    call: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
    make: Callable[[], linen.Module],
    num_layers: int,
    x: jax.Array,
    states: Any = None,
    *,
    remat: Remat,
    scan: bool,
) -> tuple[jax.Array, Any]:
    """Calls ``num_layers`` modules of ``make()`` one after another; returns the last output and the layers' states.

    They become submodules of the calling module. ``call(module, x, state)`` returns an output like ``x`` and the new
    state, of which there may be none. With ``scan`` it is one module in a loop, whose variables (`stack_layers`) and
    states have a first axis of layers.
    """
    layer = rematerialized(call, remat, in_scan=scan)
    if not scan:
        results = []
        for number in range(num_layers):
            x, result = layer(make(), x, None if states is None else states[number])
            results.append(result)
        return x, tuple(results)
    lift: Any = linen.scan
    options = {"metadata_params": {linen.PARTITION_NAME: None}, "length": num_layers}
    options |= {"variable_axes": {True: 0}, "split_rngs": {True: True}}  # of all collections
    out: tuple[jax.Array, Any] = lift(layer, **options)(make(), x, states)
    return out


def stack_layers(params: Params, name: str, num_layers: int) -> Params:
    """Replaces the parameters of ``name_0``, ``name_1``, … by those of ``name_0`` in a scan: with an axis of layers."""
    layers = [params[f"{name}_{number}"] for number in range(num_layers)]
    rest = {other: params[other] for other in params if not other.startswith(f"{name}_")}
    return rest | {f"{name}_0": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}
