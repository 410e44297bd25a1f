"""Layouts: the devices and the strategy of a run, and the shardings of its states, batches and programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxnn._transfers import GPU, send_pinned
from jaxnn.parallel._devices import DATA, Wanted, choose_devices, find_devices, format_mesh, make_mesh, parse_mesh
from jaxnn.parallel._strategies import STRATEGIES, Strategy, spec_axes
from jaxnn.types import ConfigError, PyTree, TrainState, path_name


class Layout(NamedTuple):
    """How a run is distributed over its devices."""

    strategy: Strategy = STRATEGIES["data"]  # one with ``choose`` is to be resolved
    mesh: Mesh | None = None  # None for one device, on which the strategy has no effect
    data_axes: tuple[str, ...] = (DATA,)  # mesh axes along which data are sharded; the model need not name them
    abstract: bool = False  # whether programs are only compiled: arrays are then their shapes and shardings

    @staticmethod
    def make(
        strategy: str | Strategy = "auto", devices: Wanted = None, mesh: str | None = None, platform: str | None = None
    ) -> Layout:
        """Makes the layout of some run options; `SINGLE_DEVICE` by default. ConfigError if they do not fit together.

        ``devices`` None means all for a strategy or several processes, those of the mesh, or else 1; ``mesh`` (see
        `parse_mesh`) None means all devices along the data axis; ``platform`` None is JAX's default.
        """
        axes, how = None if mesh is None else parse_mesh(mesh), Strategy.find(strategy)
        # First, since its error message is the clearest if JAX cannot open a device.
        available = find_devices(platform)
        alone = how.choose is not None and axes is None and jax.process_count() == 1
        wanted = devices if devices is not None or axes is None else math.prod(axes.values())
        chosen = choose_devices(available, wanted, default=1 if alone else None)
        if alone and len(chosen) == 1:
            return SINGLE_DEVICE
        if axes is not None and not how.fits(axes):
            raise ConfigError(
                f"strategy {how.name} has the axis {DATA} alone, and mesh is {mesh}: choose data or fsdp."
            )
        return Layout(how, make_mesh(chosen, axes or {DATA: len(chosen)}))

    @property
    def num_devices(self) -> int:
        """Number of devices that take part."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def device(self) -> jax.Device:
        """The first device of this process."""
        if self.mesh is not None:
            return self.mesh.local_devices[0]
        return next(device for device in find_devices() if device.process_index == jax.process_index())

    @property
    def platform(self) -> str:
        """The kind of its devices: ``cpu``, ``gpu`` or ``tpu``."""
        return str(self.device.platform)

    @property
    def batch_spec(self) -> PartitionSpec:
        """The spec of arrays ``[batch, ...]``; ConfigError unless the strategy's spec fits them and the mesh."""
        if self.mesh is None:
            return PartitionSpec()
        spec: Any = self.strategy.batch_spec(self.mesh)
        if not isinstance(spec, PartitionSpec) or len(spec) > 1:
            raise ConfigError(
                f"batch_spec of strategy {self.strategy.name} returned {spec!r}: return a PartitionSpec of the first "
                "axis of a batch, the only one that inputs, targets and masks share."
            )
        if missing := [name for name in spec_axes(spec) if name not in self.mesh.shape]:
            raise ConfigError(
                f"strategy {self.strategy.name} shards batches along {', '.join(missing)}, which the mesh "
                f"{format_mesh(self.mesh.shape)} lacks: add it with mesh."
            )
        return spec

    @property
    def data_size(self) -> int:
        """Number of shards of a batch."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in spec_axes(self.batch_spec))

    def check_divides(self, batch_size: int, name: str = "batch_size") -> None:
        """Raises ConfigError, with the nearest sizes that fit, unless a batch divides evenly among the devices."""
        size = self.data_size
        if batch_size % size:
            below, above = batch_size // size * size, (batch_size // size + 1) * size
            nearest = f"{below} and {above}" if below else f"{above}"
            raise ConfigError(
                f"{name} is {batch_size}, which {size} devices cannot share evenly: the nearest that they can are "
                f"{nearest}; or choose another number of devices."
            )

    @property
    def replicated(self) -> NamedSharding | None:
        """The sharding of replicated arrays; None for one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding | None:
        """The sharding of the batches of a call, ``[steps, batch, ...]``; None for one device."""
        if self.mesh is None or self.axis_name is not None:
            return self.replicated
        return NamedSharding(self.mesh, PartitionSpec(None, *self.batch_spec))

    @property
    def axis_name(self) -> str | None:
        """The axis over which programs average explicitly; None if XLA partitions the program."""
        return None if self.mesh is None else self.strategy.axis_name

    def resolve(self, shapes: TrainState) -> Layout:
        """The layout with the strategy that this one chooses for a state of ``shapes``."""
        if self.mesh is None or self.strategy.choose is None:
            return self
        return self._replace(strategy=self.strategy.choose(self.mesh, shapes))

    def state_shardings(self, shapes: TrainState, specs: PyTree) -> Any:
        """A sharding for each array of a state of ``shapes``; None for one device.

        ``specs`` has a `PartitionSpec` for each parameter, with the mesh axes that the model names. Raises ConfigError
        if nothing is sharded along an axis of the mesh, or a sharding is missing or does not fit its array.
        """
        if self.mesh is None:
            return None
        shardings: Any = self.strategy.shard_state(self.mesh, shapes, specs)
        source = f"shard_state of strategy {self.strategy.name}"
        expected: Any = jax.tree.structure(shapes)
        if jax.tree.structure(shardings) != expected:
            raise ConfigError(f"{source} must return a tree like the state's, with a sharding for each of its arrays.")
        used = {*self.data_axes, *spec_axes(self.batch_spec)}
        for (path, leaf), sharding in zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True):
            array = f"for {path_name(path)} {list(leaf.shape)}"
            if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
                raise ConfigError(f"{source} returned {sharding!r} {array}: return a NamedSharding on the given mesh.")
            try:
                sharding.shard_shape(leaf.shape)
            except ValueError as error:
                raise ConfigError(f"{source} returned {sharding.spec} {array}, which does not fit: {error}") from error
            used |= set(spec_axes(sharding.spec))
        for axis, size in self.mesh.shape.items():
            # Devices along an unused axis would repeat each other's work.
            if size > 1 and axis not in used:
                leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
                named = ", ".join(sorted({name for spec in leaves for name in spec_axes(spec)})) or "no axis of its own"
                raise ConfigError(
                    f"mesh has {axis}={size}, and nothing is split over {axis}: this model names {named}, and batches "
                    f"are split over {', '.join(spec_axes(self.batch_spec))}."
                )
        return shardings

    def constrain(self, tree: PyTree, spec: PartitionSpec | None = None) -> PyTree:
        """Shards ``tree`` within a program by ``spec``; None: by rows ``[batch, ...]``, and as XLA likes otherwise."""
        if self.mesh is None or self.data_size == 1 or self.axis_name is not None:
            return tree
        mesh = self._mesh_here

        def constrain(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):  # such as a mask of ones: it stays known while tracing
                return leaf
            rest = [PartitionSpec.UNCONSTRAINED] * (leaf.ndim - 1)
            rows = PartitionSpec(*self.batch_spec, *rest) if spec is None else spec
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, rows))

        return jax.tree.map(constrain, tree)

    def map_rows(
        self, function: Callable[..., Any], in_axes: Sequence[int | None], out_axes: Any
    ) -> Callable[..., Any]:
        """Within a program, the function that each device runs on its rows; see `BatchSharding`."""

        def specs(axes: Any) -> Any:
            if isinstance(axes, Sequence):
                return tuple(map(specs, axes))
            return PartitionSpec() if axes is None else PartitionSpec(*[None] * axes, *self.batch_spec)

        mesh = self._mesh_here
        # Within `jax.shard_map` over other axes, along all that are left: what JAX cannot partition there is repeated.
        axes = frozenset(spec_axes(self.batch_spec) if mesh is self.mesh else mesh.auto_axes)
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=specs(in_axes),
            out_specs=specs(out_axes),
            axis_names=axes,
            check_vma=False,
        )

    @property
    def _mesh_here(self) -> Any:
        """The mesh; within `jax.shard_map` over other axes, that of the trace."""
        around = jax.sharding.get_abstract_mesh()
        return self.mesh if around.empty else around

    def local_shard(self, batch: PyTree) -> PyTree:
        """Within a program with an `axis_name`, this device's rows of ``batch``; otherwise the batch."""
        if self.axis_name is None:
            return batch
        rank, size = jax.lax.axis_index(self.axis_name), self.data_size

        def local(rows: Any) -> Any:
            count = rows.shape[0] // size
            if isinstance(rows, np.ndarray) and np.all(rows == rows[:1]):
                return rows[:count]  # stays known while tracing
            return jax.lax.dynamic_slice_in_dim(rows, rank * count, count)

        return jax.tree.map(local, batch)

    def whole_batch(self, tree: PyTree) -> PyTree:
        """Within a program with an `axis_name`, the rows of all devices; otherwise ``tree``."""
        if self.axis_name is None:
            return tree
        return jax.tree.map(lambda rows: jax.lax.all_gather(rows, self.axis_name, tiled=True), tree)

    def place(self, tree: PyTree, sharding: NamedSharding | None = None) -> PyTree:
        """Puts host arrays, which are the same in every process, on the devices: replicated, or by ``sharding``."""
        sharding = sharding or self.replicated
        if self.abstract:
            return jax.tree.map(lambda array: _shape(np.shape(array), array, sharding), tree)
        if sharding is None or sharding.is_fully_addressable:
            return jax.device_put(tree, sharding)
        make: Any = jax.make_array_from_callback
        return jax.tree.map(lambda array: make(np.shape(array), sharding, np.asarray(array).__getitem__), tree)

    def local_rows(self, batch_size: int) -> slice:
        """The rows of a batch on the devices of this process, which it must read."""
        sharding = self.batch_sharding
        if sharding is None or sharding.is_fully_addressable or sharding.is_fully_replicated:
            return slice(0, batch_size)
        indices = sharding.addressable_devices_indices_map((1, batch_size)).values()
        bounds = [index[1].indices(batch_size) for index in indices if index is not None]
        return slice(min(start for start, *_ in bounds), max(stop for _, stop, _ in bounds))

    def place_batch(self, tree: PyTree, batch_size: int) -> PyTree:
        """Makes batches ``[steps, batch, ...]`` on all devices from this process's rows ``[steps, rows, ...]``."""
        sharding = self.batch_sharding
        if self.abstract:
            return jax.tree.map(lambda rows: _shape((len(rows), batch_size, *rows.shape[2:]), rows, sharding), tree)
        if sharding is None or sharding.is_fully_addressable:
            if self.platform == GPU:
                return send_pinned(tree, sharding or SingleDeviceSharding(self.device))
            return jax.device_put(tree, sharding)
        make: Any = jax.make_array_from_process_local_data
        return jax.tree.map(lambda rows: make(sharding, rows, (len(rows), batch_size, *rows.shape[2:])), tree)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``function`` as the strategy requires."""
        return function if self.mesh is None else self.strategy.wrap(self.mesh, function)

    def as_json(self) -> dict[str, Any]:
        """The strategy's name and the axes of the mesh, for a record."""
        if self.mesh is None:
            return {"strategy": "single", "mesh": None}
        return {"strategy": self.strategy.name, "mesh": dict(self.mesh.shape)}

    def __str__(self) -> str:
        return "1 device" if self.mesh is None else f"{self.strategy.name}, {format_mesh(self.mesh.shape)}"


SINGLE_DEVICE = Layout()


def _shape(shape: tuple[int, ...], array: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(array.dtype), sharding=sharding)
