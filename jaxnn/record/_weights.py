"""Parameters as safetensors files, which other libraries and languages read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxnn.record._run_directory import write_bytes
from jaxnn.types import ConfigError, PyTree, RecordError

SEPARATOR = "."


@contextlib.contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turns a failed import of the libraries of an ``extra`` into a ConfigError with the command that installs them."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f'{what} needs {error.name or extra}, which is not installed: pip install "jaxnn[{extra}]".'
        ) from error


def save_weights(path: str | Path, params: PyTree) -> None:
    """Writes nested dicts of arrays to a safetensors file, replacing it; each is named by its path, with dots.

    ``Dense_0.kernel`` is a name as in PyTorch's files. Shapes, dtypes (bfloat16 too) and bytes are kept. Needs
    ``pip install "jaxnn[safetensors]"``. `Run.export` writes the parameters and statistics of a run.

    >>> jn.save_weights("mlp.safetensors", run.state.params)
    >>> sorted(jn.load_weights("mlp.safetensors"))
    ['Dense_0', 'Dense_1']

    Raises:
        ConfigError: safetensors is not installed, or the tree has another node than dicts, another leaf than an array,
            or a name with a dot.
        RecordError: the file cannot be written.
    """
    with needs_extra("safetensors", "a safetensors file"):
        from safetensors.numpy import save

    flat: dict[tuple[Any, ...], Any] = flatten_dict({"": params})  # type: ignore[no-untyped-call]
    tensors = {}
    for (_, *names), leaf in flat.items():
        if not names or any(not isinstance(name, str) or SEPARATOR in name for name in names):
            raise ConfigError(f"weights must be in dicts whose keys are names without dots, not under {names!r}.")
        if not isinstance(leaf, np.ndarray | jax.Array):
            raise ConfigError(f"the weight {SEPARATOR.join(names)} is a {type(leaf).__name__}, not an array.")
        # Of sharded arrays the parts of all devices; contiguous, since the format has no strides.
        tensors[SEPARATOR.join(names)] = np.ascontiguousarray(jax.device_get(leaf)).reshape(leaf.shape)
    write_bytes(Path(path), save(tensors, {"format": "flax"}))


def load_weights(path: str | Path) -> dict[str, Any]:
    """Reads a safetensors file, of any library, as nested dicts of NumPy arrays: names are split at their dots.

    The result of `save_weights` is what was saved. ``model.apply({"params": weights}, inputs)`` uses it.

    >>> jn.save_weights("w.safetensors", {"Dense_0": {"bias": jnp.ones(2, jnp.bfloat16)}})
    >>> jn.load_weights("w.safetensors")
    {'Dense_0': {'bias': array([1, 1], dtype=bfloat16)}}

    Raises:
        ConfigError: safetensors is not installed.
        RecordError: the file is missing or damaged.
    """
    with needs_extra("safetensors", "a safetensors file"):
        from safetensors import SafetensorError, safe_open
    try:
        # Not `safetensors.numpy.load_file`, which does not know bfloat16.
        with safe_open(Path(path), framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        weights: dict[str, Any] = unflatten_dict(tensors, sep=SEPARATOR)  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError, ValueError) as error:
        raise RecordError(f"{path} cannot be read as safetensors ({error}): check the path and the file.") from error
    return weights
