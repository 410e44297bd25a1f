"""Strategies: how a training state, its batches and its programs are distributed over a mesh, as values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxnn.observe import available_bytes, nbytes
from jaxnn.parallel._devices import DATA
from jaxnn.parallel._processes import broadcast_from_primary
from jaxnn.types import ConfigError, PyTree, TrainState, named_object, path_name, suggest

LEAST_SHARDED = 256  # smaller arrays are replicated: gathering one costs as much time as a larger one
REPLICATED_SHARE = 0.2  # of a device's free memory, for a replicated state; a step takes several times as much

type Path = tuple[Any, ...]


class Strategy(NamedTuple):
    """How training is distributed over a mesh of devices, as pure functions; results change by no more than rounding.

    ZeRO's first stage, for example, shards the optimizer state and replicates the parameters:

    >>> from jaxnn.parallel import STRATEGIES, Strategy
    >>> def shard_state(mesh, shapes, specs):
    ...     data, fsdp = (STRATEGIES[name].shard_state(mesh, shapes, specs) for name in ("data", "fsdp"))
    ...     return data._replace(opt_state=fsdp.opt_state)
    >>> jn.RunOptions(devices=4, strategy=Strategy("zero1", shard_state)).strategy.name
    'zero1'

    Attributes:
        name: its name in reports and records.
        shard_state: maps the mesh, the state's shapes and the `PartitionSpec` of each parameter, with the axes that the
            model names, to a `NamedSharding` for each array of the state.
        batch_spec: maps the mesh to the `PartitionSpec` of arrays ``[batch, ...]``, for their first axis.
        wrap: maps the mesh and a function to the function that the devices run; with an ``axis_name``, all its
            arguments and results are replicated.
        axis_name: ``"data"`` if each device computes on its rows of a batch, as under `jax.pmap`: loss, gradients and
            metrics are averaged over that axis, and the mesh has no other. None if the program is written for the full
            batch, and XLA partitions it.
        choose: maps the mesh and the state's shapes to the strategy to use instead, which shards batches as this one
            does; None to use this one.
    """

    name: str
    shard_state: Callable[[Mesh, TrainState, PyTree], Any]
    batch_spec: Callable[[Mesh], PartitionSpec] = lambda mesh: PartitionSpec(DATA)
    wrap: Callable[[Mesh, Callable[..., Any]], Callable[..., Any]] = lambda mesh, function: function
    axis_name: str | None = None
    choose: Callable[[Mesh, TrainState], Strategy] | None = None

    @staticmethod
    def find(which: str | Strategy) -> Strategy:
        """Returns a strategy by its name in `STRATEGIES` or as ``package.module:name``, or one itself, checked."""
        found: Any = STRATEGIES.get(which, which) if isinstance(which, str) else which
        if isinstance(found, str) and ":" not in found:
            raise ConfigError(
                f"strategy is {which!r}, which is unknown: {suggest(which, STRATEGIES)}; pass your own as "
                "package.module:name, or pass the Strategy itself."
            )
        if isinstance(found, str):
            found = named_object(found, "strategy")
        if not isinstance(found, Strategy):
            raise ConfigError(f"strategy is {which!r}, of type {type(found).__name__}: pass a jaxnn.parallel.Strategy.")
        if found.axis_name not in (None, DATA):
            raise ConfigError(
                f"axis_name of strategy {found.name} is {found.axis_name!r}: it must be {DATA!r} or None."
            )
        return found

    def fits(self, axes: Mapping[str, int]) -> bool:
        """Whether the strategy can use a mesh with these axes."""
        return self.axis_name is None or set(axes) == {self.axis_name}


def spec_axes(spec: PartitionSpec) -> list[str]:
    """The mesh axes that ``spec`` names, in order."""
    return [name for part in spec for name in _names(part)]


def shard_state(mesh: Mesh, shapes: TrainState, specs: PyTree, *, fully_sharded: bool) -> TrainState:
    """Shards the arrays of a state along the axes that the model names; other axes are replicated or fully sharded.

    Fully sharded data parallelism keeps a shard of each array, optimizer state included, on each device of the data
    axis (Rajbhandari et al., ZeRO, 2020, stage 3; Zhao et al., PyTorch FSDP, 2023). XLA gathers the parameters of a
    layer and scatters their gradients. Axes in ``specs``, one spec per parameter, that the mesh lacks are ignored.
    """
    named = _named_specs(mesh, shapes.params, specs)

    def sharding(path: Path, leaf: Any) -> NamedSharding:
        # Optimizers keep moments in trees like the parameters, whose paths have the same end.
        matches = (named[path[start:]] for start in range(len(path)) if path[start:] in named)
        spec = next((spec for shape, spec in matches if shape == leaf.shape), PartitionSpec())
        if fully_sharded and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            spec = _with_data(mesh, spec, leaf.shape)
        return NamedSharding(mesh, spec)

    # The model's own statistics are small, and every device needs them; frozen parameters are as large as trained ones.
    replicated = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes.model_state)
    sharded: TrainState = jax.tree.map_with_path(sharding, shapes)
    if "frozen" in replicated:
        replicated = {**replicated, "frozen": sharded.model_state["frozen"]}
    return sharded._replace(model_state=replicated)


def _named_specs(mesh: Mesh, params: PyTree, specs: PyTree) -> dict[Path, tuple[tuple[int, ...], PartitionSpec]]:
    """The shape and spec, by path, of each parameter for which the model names an axis of the mesh."""
    given = dict(jax.tree.leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)))
    found: dict[Path, tuple[tuple[int, ...], PartitionSpec]] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        spec = given[path]
        what = f"parameter {path_name(path)} has {list(leaf.shape)}"
        if len(spec) > leaf.ndim or len(set(spec_axes(spec))) < len(spec_axes(spec)):
            raise ConfigError(f"{what}, and is named {tuple(spec)}: name each axis once, by a mesh axis or None.")
        parts = [tuple(name for name in _names(part) if name in mesh.shape) for part in spec]
        for axis, names in enumerate(parts):
            size = math.prod(mesh.shape[name] for name in names)
            if leaf.shape[axis] % size:
                raise ConfigError(
                    f"{what}, whose axis {axis} cannot be sharded along {','.join(names)}={size} evenly: change the "
                    "mesh or the width."
                )
        if any(parts):
            found[path] = leaf.shape, PartitionSpec(*parts)
    return found


def _names(part: Any) -> tuple[str, ...]:
    """The mesh axes along which one axis of an array is sharded."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _with_data(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """Adds the data axis to ``spec``, at the longest free axis that it divides."""
    names, size = [*spec, *[None] * (len(shape) - len(spec))], mesh.shape[DATA]
    free = [axis for axis, name in enumerate(names) if name is None and shape[axis] % size == 0]
    if DATA in spec_axes(spec) or size == 1 or not free or math.prod(shape) < LEAST_SHARDED:
        return spec
    names[max(free, key=lambda axis: shape[axis])] = DATA
    return PartitionSpec(*names)


def _run_on_each(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs ``function`` on each device with the same arguments and results, without a leading axis of devices."""
    spec = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _choose_by_memory(mesh: Mesh, shapes: TrainState) -> Strategy:
    # ``fsdp`` if a replicated state takes a large share of a device's free memory.
    return strategy_for(shapes, broadcast_from_primary(lambda: available_bytes(mesh.local_devices[0])))


def strategy_for(shapes: TrainState, free_bytes: int | None) -> Strategy:
    """What ``auto`` chooses for a state of ``shapes`` on devices with ``free_bytes`` each; None: unknown."""
    return _data if free_bytes is None or nbytes(shapes) <= REPLICATED_SHARE * free_bytes else _fsdp


_data = Strategy("data", functools.partial(shard_state, fully_sharded=False))
_fsdp = Strategy("fsdp", functools.partial(shard_state, fully_sharded=True))
STRATEGIES: Mapping[str, Strategy] = {
    "auto": _data._replace(name="auto", choose=_choose_by_memory),
    "data": _data,
    "fsdp": _fsdp,
    "pmap": _data._replace(name="pmap", wrap=_run_on_each, axis_name=DATA),
}
"""The strategies of jaxnn, by name."""
