"""What sits where, observed from the arrays themselves."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import jax

from jaxnn.observe.memory import format_bytes, leaf_nbytes, nbytes
from jaxnn.types import PyTree, TrainingError

HOST = "host"


@dataclasses.dataclass(frozen=True)
class TreePlacement:
    """Where the leaves of one pytree sit.

    Attributes:
        name: what the pytree is, such as ``"parameters"``.
        num_leaves: how many leaves it has.
        num_committed: how many of them JAX may not move, which pins what is computed from them.
        num_bytes: their logical size; a copy on a second device does not count.
        device_bytes: bytes by device (``"gpu:0"``), copies counted; NumPy arrays are on ``"host"``.
        first_leaf: by platform (``"gpu"``, ``"cpu"``, ``"host"``), its first leaf's path.
    """

    name: str
    num_leaves: int
    num_committed: int
    num_bytes: int
    device_bytes: Mapping[str, int]
    first_leaf: Mapping[str, str]

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms it sits on: one if all is well."""
        return tuple(self.first_leaf)

    def line(self) -> str:
        """``parameters: 4 leaves, 1.5 MiB on gpu:0 (committed)``."""
        where = ", ".join(self.device_bytes) or "no device"
        leaves = f"{self.num_leaves} {'leaf' if self.num_leaves == 1 else 'leaves'}"
        committed = f" ({self._committed()})" if self.num_committed else ""
        return f"{self.name}: {leaves}, {format_bytes(self.num_bytes)} on {where}{committed}{self._each()}"

    def _each(self) -> str:
        """What the fullest of several devices holds of it."""
        if len(self.device_bytes) < 2:
            return ""
        return f", {format_bytes(max(self.device_bytes.values()))} each"

    def _committed(self) -> str:
        if self.num_committed == self.num_leaves:
            return "committed"
        return f"{self.num_committed} committed"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the pytrees of a run sit.

    Attributes:
        trees: one entry a pytree, in the order given.
    """

    trees: tuple[TreePlacement, ...]

    def check(self, platform: str) -> None:
        """Confirms that every leaf sits on ``platform``: ``"cpu"``, ``"gpu"`` or ``"tpu"``.

        Raises:
            TrainingError: a leaf sits elsewhere; the message names the first.
        """
        for tree in self.trees:
            for found, leaf in tree.first_leaf.items():
                if found != platform:
                    raise TrainingError(
                        f"{tree.name}{leaf} sits on {found}, not on {platform} where the run is "
                        "to compute: move it there with jax.device_put."
                    )

    def lines(self) -> list[str]:
        """One readable line a pytree."""
        return [tree.line() for tree in self.trees]

    def as_json(self) -> dict[str, Any]:
        """What ``placement.json`` holds: each pytree's entry by its name."""
        return {tree.name: dataclasses.asdict(tree) for tree in self.trees}


def observe_placement(**trees: PyTree) -> Placement:
    """Reads off where each pytree sits; it moves nothing and waits for nothing.

    Args:
        **trees: pytrees by name, such as ``parameters=state.params, data=examples``; an underscore
            in a name is shown as a space.
    """
    observed = (_observe(name.replace("_", " "), tree) for name, tree in trees.items())
    return Placement(tuple(observed))


def _observe(name: str, tree: PyTree) -> TreePlacement:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    device_bytes: dict[str, int] = {}
    first_leaf: dict[str, str] = {}
    for path, leaf in leaves:
        for device, num_bytes in _bytes_by_device(leaf).items():
            device_bytes[device] = device_bytes.get(device, 0) + num_bytes
            first_leaf.setdefault(device.partition(":")[0], jax.tree_util.keystr(path))
    return TreePlacement(
        name=name,
        num_leaves=len(leaves),
        num_committed=sum(getattr(leaf, "committed", False) for _, leaf in leaves),
        num_bytes=nbytes(tree),
        device_bytes=device_bytes,
        first_leaf=first_leaf,
    )


def _bytes_by_device(leaf: Any) -> dict[str, int]:
    if not isinstance(leaf, jax.Array):
        return {HOST: leaf_nbytes(leaf)}
    shard = leaf_nbytes(leaf, leaf.sharding.shard_shape(leaf.shape))
    devices: list[jax.Device] = sorted(leaf.sharding.device_set, key=operator.attrgetter("id"))
    return {f"{device.platform}:{device.id}": shard for device in devices}
