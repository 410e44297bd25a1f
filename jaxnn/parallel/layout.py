"""How a run lies on its devices: the strategy, and what follows from it for states, batches and programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxnn.observe import available_bytes, nbytes
from jaxnn.parallel.devices import Wanted, choose_devices, find_devices
from jaxnn.parallel.mesh import DATA, format_mesh, make_mesh, parse_mesh
from jaxnn.parallel.processes import broadcast_from_primary
from jaxnn.parallel.shardings import check_named, state_shardings
from jaxnn.types import ConfigError, PyTree, TrainState

STRATEGIES = ("auto", "data", "fsdp", "pmap")
# The share of a device's free memory that a whole state may take, since a step takes several times that.
WHOLE_SHARE = 0.2


class Layout(NamedTuple):
    """How a run lies on its devices.

    Attributes:
        strategy: ``single``, one device; ``data``, the state whole on each and batches split; ``fsdp``, the state
            split too; ``pmap``, as ``data``, in its classic form; ``auto``, see `resolve`.
        mesh: the devices; None for one.
        data_axes: the axes of the mesh that are split over whatever the model names.
    """

    strategy: str = "single"
    mesh: Mesh | None = None
    data_axes: tuple[str, ...] = (DATA,)

    @property
    def num_devices(self) -> int:
        """How many devices take part."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def device(self) -> jax.Device:
        """The first device of this process."""
        if self.mesh is not None:
            return self.mesh.local_devices[0]
        return next(device for device in find_devices() if device.process_index == jax.process_index())

    @property
    def data_size(self) -> int:
        """How many parts a batch is split into."""
        return 1 if self.mesh is None else self.mesh.shape[DATA]

    @property
    def replicated(self) -> NamedSharding | None:
        """Where what every device holds lies; None for one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding | None:
        """Where the batches of a call, ``[steps, batch, ...]``, lie."""
        if self.mesh is None or self.strategy == "pmap":
            return self.replicated
        return NamedSharding(self.mesh, PartitionSpec(None, DATA))

    @property
    def axis_name(self) -> str | None:
        """The axis that a program speaks over itself; None where XLA splits it."""
        return DATA if self.strategy == "pmap" else None

    def resolve(self, shapes: TrainState) -> Layout:
        """With ``auto`` decided: ``fsdp`` where a whole state would take much of a device's memory, else ``data``."""
        if self.strategy != "auto" or self.mesh is None:
            return self
        free = broadcast_from_primary(lambda: available_bytes(self.device))
        fits = free is None or nbytes(shapes) <= WHOLE_SHARE * free
        return self._replace(strategy="data" if fits else "fsdp")

    def state_shardings(self, shapes: TrainState, specs: PyTree) -> Any:
        """Where each array of a state lies, see `state_shardings`; None for one device.

        Raises:
            ConfigError: an axis of the mesh is split over by nobody, or a parameter cannot be split as it is named.
        """
        if self.mesh is None:
            return None
        check_named(self.mesh, specs, self.data_axes)
        return state_shardings(self.mesh, shapes, specs, fully_sharded=self.strategy == "fsdp")

    def constrain(self, batch: PyTree) -> PyTree:
        """Within a program: ``batch``, its rows split over the data axis."""
        return self._constrained(batch, PartitionSpec(DATA))

    def replicate(self, tree: PyTree) -> PyTree:
        """Within a program: ``tree``, whole on every device."""
        return self._constrained(tree, PartitionSpec())

    def local_shard(self, batch: PyTree) -> PyTree:
        """Within a program of `pmap`: this device's rows of a whole ``batch``; elsewhere the batch."""
        if self.strategy != "pmap":
            return batch
        rank, size = jax.lax.axis_index(DATA), self.data_size

        def own(rows: Any) -> Any:
            count = rows.shape[0] // size
            if isinstance(rows, np.ndarray) and np.all(rows == rows[:1]):
                return rows[:count]  # known while tracing, such as a mask of ones, and to stay so
            return jax.lax.dynamic_slice_in_dim(rows, rank * count, count)

        return jax.tree.map(own, batch)

    def place(self, tree: PyTree, sharding: NamedSharding | None = None) -> PyTree:
        """Arrays of the host, the same in every process, on the devices: whole, or as ``sharding`` says."""
        sharding = sharding or self.replicated
        if sharding is None or sharding.is_fully_addressable:
            return jax.device_put(tree, sharding)

        def put(array: Any) -> Any:
            array = np.asarray(array)
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        return jax.tree.map(put, tree)

    def local_rows(self, batch_size: int) -> slice:
        """Which rows of a batch the devices of this process hold: what it must read."""
        if self.batch_sharding is None or self.batch_sharding.is_fully_addressable or self.strategy == "pmap":
            return slice(0, batch_size)
        places = self.batch_sharding.addressable_devices_indices_map((1, batch_size)).values()
        bounds = [index[1].indices(batch_size) for index in places if index is not None]
        return slice(min(start for start, *_ in bounds), max(stop for _, stop, _ in bounds))

    def place_batch(self, tree: PyTree, batch_size: int) -> PyTree:
        """This process's rows ``[steps, rows, ...]`` of batches become ``[steps, batch, ...]`` on all devices."""
        sharding = self.batch_sharding
        if sharding is None or sharding.is_fully_addressable:
            return jax.device_put(tree, sharding)

        def put(rows: np.ndarray) -> Any:
            return jax.make_array_from_process_local_data(sharding, rows, (rows.shape[0], batch_size, *rows.shape[2:]))

        return jax.tree.map(put, tree)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as each device is to run it under `pmap`: all are given the same, and all give the same.

        ``jax.pmap`` is ``jit`` of ``shard_map`` since JAX 0.8. It is written as these here, so that states need no
        leading axis of devices, and are the same for every strategy.
        """
        if self.strategy != "pmap":
            return function
        whole = PartitionSpec()
        return jax.shard_map(function, mesh=self.mesh, in_specs=whole, out_specs=whole, check_vma=False)

    def _constrained(self, tree: PyTree, spec: PartitionSpec) -> PyTree:
        if self.mesh is None or self.data_size == 1 or self.strategy == "pmap":
            return tree
        # Within `jax.shard_map` over other axes the mesh is another: the one that this is traced under.
        around = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if around.empty else around
        sharding = NamedSharding(mesh, spec)

        def constrain(leaf: Any) -> Any:
            # What is known while tracing, such as a mask of ones, is to stay so.
            return leaf if isinstance(leaf, np.ndarray) else jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree.map(constrain, tree)

    def as_json(self) -> dict[str, Any]:
        """What a record tells of it."""
        return {"strategy": self.strategy, "mesh": None if self.mesh is None else dict(self.mesh.shape)}

    def __str__(self) -> str:
        if self.mesh is None:
            return "1 device"
        return f"{self.strategy}, {format_mesh(self.mesh.shape)}"


SINGLE_DEVICE = Layout()


def make_layout(
    strategy: str = "auto", devices: Wanted = None, mesh: str | None = None, platform: str | None = None
) -> Layout:
    """The layout that run options ask for.

    Args:
        strategy: one of `STRATEGIES`.
        devices: how many, or ``"all"``; None: all where a strategy, a mesh or several processes ask for them, else 1.
        mesh: axes and their sizes, as `parse_mesh` reads them; None: all devices along the data axis.
        platform: ``cpu``, ``gpu`` or ``tpu``; None: JAX's default.

    Returns:
        `SINGLE_DEVICE` for one device of which nothing else was said.

    Raises:
        ConfigError: devices that are not there, a mesh that does not fit them, or not the strategy.
    """
    axes = None if mesh is None else parse_mesh(mesh)
    # First of all: nothing else that is asked of JAX answers with a sentence where it cannot open a device.
    there = find_devices(platform)
    alone = strategy == "auto" and axes is None and jax.process_count() == 1
    wanted = devices if devices is not None or axes is None else math.prod(axes.values())
    chosen = choose_devices(there, wanted, default=1 if alone else None)
    if alone and len(chosen) == 1:
        return SINGLE_DEVICE
    if strategy == "pmap" and axes is not None and set(axes) != {DATA}:
        raise ConfigError(f"strategy pmap has the axis {DATA} alone, and mesh is {mesh}: choose data or fsdp.")
    return Layout(strategy, make_mesh(chosen, axes or {DATA: len(chosen)}))
