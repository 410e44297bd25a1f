"""Deep networks of equal layers: rematerialization, and a scan over layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jaxnn.types import Params

type Remat = bool | Callable[..., bool]


def rematerialized(call: Callable[..., Any], remat: Remat, *, in_scan: bool = False) -> Callable[..., Any]:
    """``call(module, *arrays)``, recomputed in the backward pass if ``remat``; names of parameters stay as they are.

    ``remat`` may be a policy of ``jax.checkpoint_policies``: what of it is stored. In a scan, the loop itself keeps XLA
    from merging the recomputation with the forward pass.
    """
    if not remat:
        return call
    lift: Any = linen.remat  # typed for classes, it takes functions of a module too
    lifted: Callable[..., Any] = lift(call, policy=remat if callable(remat) else None, prevent_cse=not in_scan)
    return lifted


def apply_layers(
    make: Callable[[], linen.Module], num_layers: int, x: jax.Array, *, remat: Remat, scan: bool, **options: Any
) -> jax.Array:
    """Calls ``num_layers`` modules of ``make()``, alike and of equal input and output shapes, one after another.

    They become submodules of the calling module: with ``scan`` a single one, whose parameters have a first axis of
    layers, in a program that holds the layer once. ``options`` are of each layer's call.
    """
    layer = rematerialized(lambda module, x: module(x, **options), remat, in_scan=scan)
    if not scan:
        for _ in range(num_layers):
            x = layer(make(), x)
        return x
    lift: Any = linen.scan
    scanned = lift(
        lambda module, x, _: (layer(module, x), None),
        variable_axes={True: 0},  # every collection
        split_rngs={True: True},
        length=num_layers,
        metadata_params={linen.PARTITION_NAME: None},
    )
    out: jax.Array = scanned(make(), x, None)[0]
    return out


def stack_layers(params: Params, num_layers: int, *, name: str = "TransformerBlock") -> Params:
    """Converts parameters of ``name_0``, ``name_1``, … to those of the model with ``scan=True``: one, ``name_0``.

    >>> model, inputs = jn.models.ViT(10, num_layers=2, features=6), jnp.ones((1, 8, 8, 3))
    >>> params = linen.unbox(model.init(jax.random.key(0), inputs)["params"])
    >>> stacked = jn.models.stack_layers(params, num_layers=2)
    >>> jnp.allclose(model.apply({"params": params}, inputs), model.clone(scan=True).apply({"params": stacked}, inputs))
    Array(True, dtype=bool)
    """
    names = [f"{name}_{number}" for number in range(num_layers)]
    rest = {other: params[other] for other in params if other not in names}
    return {**rest, names[0]: jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[layer] for layer in names))}
