"""Files of tree models: arrays and facts as NumPy's ``.npz`` with a checksum, and checks of what a file holds."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxnn.data import Bins


def pack(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> bytes:
    """Returns ``arrays``, which must not be of objects, and ``facts`` as the content of a file."""
    arrays = {**arrays, "facts": np.array(json.dumps(facts, default=_plain))}
    file = io.BytesIO()
    np.savez(file, **arrays, sha256=np.array(_digest(arrays)))  # type: ignore[arg-type]
    return file.getvalue()


def unpack(content: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the arrays and facts that `pack` wrote; raises an error of any kind if ``content`` is damaged."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        if sum(one.file_size for one in file.infolist()) > len(content):
            raise ValueError("its arrays are larger than the file")
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = dict(file)
    if "sha256" not in arrays:
        raise ValueError("it has no checksum")
    if str(arrays.pop("sha256")) != _digest(arrays):
        raise ValueError("its checksum is wrong: it is damaged")
    return arrays, json.loads(str(arrays.pop("facts")))


def _plain(value: Any) -> Any:
    """``value``, an array or a collection, of JSON's types."""
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def check_bins(bins: Bins, names: np.ndarray | None, classes: np.ndarray | None) -> None:
    """Raises ValueError for edges, column names and classes that no training could have found."""
    if not bins.edges:
        raise ValueError("it has no columns")
    for column, edges in enumerate(bins.edges):
        is_category = column in bins.categorical
        fits = edges.ndim == 1 and is_category <= len(edges) < bins.missing + is_category
        if edges.dtype != np.float64 or not fits:
            raise ValueError(f"the edges of column {column} are {edges.dtype} {list(edges.shape)}")
        if not (np.isfinite(edges).all() and (np.diff(edges) > 0).all()):
            raise ValueError(f"the edges of column {column} do not ascend")
    if names is not None and (names.dtype.kind != "U" or names.shape != (len(bins.edges),)):
        raise ValueError(f"its column names are {names.dtype} {list(names.shape)}")
    if classes is not None and (
        classes.ndim != 1 or len(classes) < 2 or not np.array_equal(np.unique(classes), classes)
    ):
        raise ValueError(f"its classes are {classes.dtype} {list(classes.shape)}, and do not ascend")


def check_arrays(arrays: Mapping[str, np.ndarray], like: Mapping[str, Any], num_columns: int, max_depth: int) -> None:
    """Raises ValueError unless ``arrays`` have the names, dtypes and shapes of ``like``, and hold possible trees.

    Both are flat, with names such as ``trees.column``.
    """
    found, wanted = ({n: f"{a.dtype} {list(a.shape)}" for n, a in sorted(each.items())} for each in (arrays, like))
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            raise ValueError(f"{name!r:.60} is {found.get(name, 'missing')} instead of {wanted.get(name, 'nothing')}")
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{name} has numbers that are not finite")
    size = arrays["trees.left"].shape[-1]
    column, left, weight = (arrays[f"trees.{name}"].reshape(-1, size) for name in ("column", "left", "weight"))
    nodes, splits = np.arange(size), column >= 0
    wrong = (column < -1) | (column >= num_columns) | (weight < 0) | (splits & (weight == 0))
    # Children come after their parents, two and two: no path has an end elsewhere than in a leaf.
    wrong |= np.where(splits, (left <= nodes) | (left >= size - 1) | (left % 2 == 0), left != nodes)
    depth = np.zeros_like(left)
    for node in range(0 if wrong.any() else size):
        tree = np.flatnonzero(splits[:, node])
        for side in range(2):
            depth[tree, left[tree, node] + side] = depth[tree, node] + 1
    if wrong.any() or depth.max() > max_depth or not 0 < arrays["num_trees"] <= arrays["trees.left"].shape[0]:
        raise ValueError("its trees are none that can be grown")
