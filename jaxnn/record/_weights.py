"""Parameters as safetensors files, which other libraries and languages read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen

from jaxnn._compat import needs_extra
from jaxnn._disk import open_regular, write_bytes
from jaxnn.types import ConfigError, PyTree, RecordError

SEPARATOR = "."
MOST_GROUPS = 100  # of a name, one in the other: nested deeper, dicts exhaust the stack of what walks them


def save_weights(path: str | Path, params: PyTree) -> None:
    """Writes nested dicts of arrays to a safetensors file, replacing it; each is named by its path, with dots.

    Names are as in PyTorch's files, ``Dense_0.kernel``; dtypes are kept, bfloat16 too. Flax's boxes are removed. Needs
    ``pip install "jaxnn[safetensors]"``. `Run.export` writes the parameters and statistics of a run.

    >>> jn.save_weights("mlp.safetensors", run.state.params)
    >>> sorted(jn.load_weights("mlp.safetensors"))
    ['Dense_0', 'Dense_1']

    Raises:
        ConfigError: safetensors is not installed, or the tree has another node than dicts, a key with a dot, or a dtype
            that the format lacks, such as float8 and those of keys of ``jax.random``.
        RecordError: the file cannot be written.
    """
    with needs_extra("safetensors", "a safetensors file"):
        from safetensors.numpy import save

    tensors = {}
    for where, leaf in jax.tree.leaves_with_path(linen.unbox(params), is_leaf=lambda node: node is None):
        if not where or any(not isinstance(key, jax.tree_util.DictKey) or SEPARATOR in str(key.key) for key in where):
            raise ConfigError("weights must be arrays in dicts, whose keys have no dots.")
        name = jax.tree_util.keystr(where, simple=True, separator=SEPARATOR)
        dtype = (leaf if hasattr(leaf, "dtype") else np.asarray(leaf)).dtype
        usual = issubclass(dtype.type, np.number | np.bool_) and dtype.itemsize <= 8
        if not (usual or dtype == jax.numpy.bfloat16) or name == "__metadata__":  # the format's own
            raise ConfigError(f"weights: safetensors cannot hold {name} of dtype {dtype}: convert it or leave it out.")
        # Contiguous, since the format has no strides; which makes a number an array of one.
        tensors[name] = np.ascontiguousarray(jax.device_get(leaf)).reshape(np.shape(leaf))
    write_bytes(Path(path), save(tensors, {"format": "flax"}))


def load_weights(path: str | Path) -> dict[str, Any]:
    """Reads a safetensors file, of any library, as nested dicts of NumPy arrays: names are split at their dots.

    The result of `save_weights` is what was saved. ``model.apply({"params": weights}, inputs)`` uses it.

    >>> jn.save_weights("w.safetensors", {"Dense_0": {"bias": jnp.ones(2, jnp.bfloat16)}})
    >>> jn.load_weights("w.safetensors")
    {'Dense_0': {'bias': array([1, 1], dtype=bfloat16)}}

    Raises:
        ConfigError: safetensors is not installed.
        RecordError: the file is missing or damaged, or has a dtype or names that become no dicts of NumPy arrays.
    """
    with needs_extra("safetensors", "a safetensors file"):
        from safetensors import SafetensorError, safe_open
    try:
        # Not `safetensors.numpy.load_file`, which does not know bfloat16.
        with open_regular(path), safe_open(Path(path), framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    # The last two for dtypes and shapes that NumPy does not have.
    except (OSError, SafetensorError, AttributeError, ValueError) as error:
        raise RecordError(f"{path} cannot be read as safetensors ({error}): check the path and the file.") from error
    tree: dict[str, Any] = {}
    for name in sorted(tensors):  # a group comes after a tensor of its name
        *groups, last = name.split(SEPARATOR)
        if len(groups) > MOST_GROUPS:
            raise RecordError(
                f"{path} has a name of {len(groups)} dots, {name[:40]!r}…, and {MOST_GROUPS} become dicts."
            )
        node = tree
        for depth, group in enumerate(groups, 1):
            node = node.setdefault(group, {})
            if not isinstance(node, dict):
                both = SEPARATOR.join(groups[:depth])[:60]
                raise RecordError(
                    f"{path} has a tensor {both} and others below this name: rename it to load them as dicts."
                )
        node[last] = tensors[name]
    return tree
