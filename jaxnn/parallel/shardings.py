"""How a training state lies on a mesh: what a model names is split as it says, and the rest is whole or in shards.

Fully sharded data parallelism keeps of each array, optimizer state included, a share on each device of the data axis
(Rajbhandari et al., ZeRO, 2020, stage 3; Zhao et al., PyTorch FSDP, 2023). XLA gathers what a layer needs and scatters
its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxnn.parallel.mesh import DATA
from jaxnn.types import ConfigError, PyTree, TrainState

# A smaller array is kept whole: it takes next to nothing, and gathering it costs as much time as a larger one.
LEAST_SHARDED = 256

type Path = tuple[Any, ...]


def state_shardings(mesh: Mesh, shapes: TrainState, specs: PyTree, *, fully_sharded: bool) -> TrainState:
    """Where each array of a state lies: a tree of shardings like ``shapes``.

    Args:
        mesh: the devices.
        shapes: the state's shapes and dtypes.
        specs: for each of its parameters, the mesh axes that the model names; those the mesh lacks do not count.
        fully_sharded: whether all but small arrays are split over the data axis too.

    Raises:
        ConfigError: a mesh axis does not divide the axis of a parameter that is to be split over it.
    """
    named = dict(_named_specs(mesh, shapes.params, specs))

    def sharding(path: Path, leaf: Any) -> NamedSharding:
        spec = _spec_of(path, leaf.shape, named)
        if fully_sharded and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            spec = _with_data(mesh, spec, leaf.shape)
        return NamedSharding(mesh, spec)

    # Statistics of the model itself are small, and every device needs them.
    whole = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes.model_state)
    split: TrainState = jax.tree.map_with_path(sharding, shapes._replace(model_state={}))
    return split._replace(model_state=whole)


def check_named(mesh: Mesh, specs: PyTree, spread: Sequence[str]) -> None:
    """Confirms that each axis of ``mesh`` has something split over it: devices along another would all do the same.

    Args:
        mesh: the devices.
        specs: the axes that the model names, for each of its parameters.
        spread: the axes that are split over in any case.

    Raises:
        ConfigError: nobody splits over one.
    """
    named = {name for spec in jax.tree.leaves(specs, is_leaf=_is_spec) for part in spec for name in _names(part)}
    for axis, size in mesh.shape.items():
        if size > 1 and axis not in named and axis not in spread:
            own = f"this model names {', '.join(sorted(named))}" if named else "this model names no axis of its own"
            raise ConfigError(
                f"mesh has {axis}={size}, and nothing is split over {axis}: {own}, and batches are split over {DATA}."
            )


def shardings_of(tree: PyTree) -> Any:
    """Where each array of ``tree`` lies."""
    return jax.tree.map(lambda array: array.sharding, tree)


def _named_specs(mesh: Mesh, params: PyTree, specs: PyTree) -> Iterator[tuple[Path, tuple[Any, PartitionSpec]]]:
    by_path = dict(jax.tree.leaves_with_path(specs, is_leaf=_is_spec))
    for path, leaf in jax.tree.leaves_with_path(params):
        given = by_path[path]
        told = f"parameter {jax.tree_util.keystr(path, simple=True, separator='/')} has {list(leaf.shape)}"
        flat = [name for part in given for name in _names(part)]
        if len(given) > leaf.ndim or len(set(flat)) < len(flat):
            raise ConfigError(
                f"{told}, and is named {tuple(given)}: name each axis once at most, by a mesh axis or None."
            )
        parts = [tuple(name for name in _names(part) if name in mesh.shape) for part in given]
        for axis, names in enumerate(parts):
            size = math.prod(mesh.shape[name] for name in names)
            if leaf.shape[axis] % size:
                raise ConfigError(
                    f"{told}, whose axis {axis} cannot be split over {','.join(names)}={size} evenly: choose another "
                    "mesh or width."
                )
        if any(parts):
            yield (
                path,
                (leaf.shape, PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in parts))),
            )


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _names(part: Any) -> tuple[str, ...]:
    """The mesh axes that an axis of a parameter is split over."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _spec_of(path: Path, shape: tuple[int, ...], named: dict[Path, tuple[Any, PartitionSpec]]) -> PartitionSpec:
    """That of the parameter, or of the parameter that an array of the optimizer's state is kept for.

    Optimizers keep moments in trees like the parameters: their paths end alike.
    """
    for start in range(len(path)):
        known, spec = named.get(path[start:], (None, PartitionSpec()))
        if known == shape:
            return spec
    return PartitionSpec()


def _with_data(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """``spec`` with the longest free axis that can be split over the data axis split."""
    names = [*spec, *[None] * (len(shape) - len(spec))]
    if DATA in [name for part in spec for name in _names(part)]:
        return spec
    size = mesh.shape[DATA]
    free = [axis for axis, name in enumerate(names) if name is None and shape[axis] % size == 0]
    if size == 1 or not free or math.prod(shape) < LEAST_SHARDED:
        return spec
    names[max(free, key=lambda axis: shape[axis])] = DATA
    return PartitionSpec(*names)
