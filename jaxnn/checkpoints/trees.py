"""Pytrees of arrays in and out of Orbax: read back only into what they were saved from."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.checkpoints.quiet import tame_orbax
from jaxnn.types import PyTree

# What Orbax raises for a checkpoint that is another's.
UNREADABLE = (ValueError, KeyError, TypeError, OSError)
# What it raises where it cannot write one.
UNWRITABLE = (OSError, ValueError)
# What the system says of a disk, or of a user's share of it, that is full.
FULL = (errno.ENOSPC, errno.EDQUOT)
FREE_SPACE = "free disk space"


def read_tree(folder: Path, like: PyTree) -> PyTree:
    """The tree in ``folder``, with the structure, shapes, dtypes and placement of ``like``.

    Raises:
        ValueError, KeyError, TypeError, OSError: it holds no such tree.
    """
    import orbax.checkpoint as ocp

    tame_orbax()
    with ocp.StandardCheckpointer(multiprocessing_options=all_processes()) as checkpointer:
        _check_fit(checkpointer.metadata(folder).item_metadata, like)
        return checkpointer.restore(folder, like)


def read_arrays(folder: Path) -> PyTree:
    """The tree in ``folder`` as NumPy arrays, whatever devices it was saved on.

    Raises:
        ValueError, KeyError, TypeError, OSError: it holds no tree.
    """
    import orbax.checkpoint as ocp

    tame_orbax()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=all_processes()) as checkpointer:
        metadata = checkpointer.metadata(folder).item_metadata
        if metadata is None:
            raise ValueError("it holds no arrays")
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
        return checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


def all_processes() -> Any:
    """Orbax's word for every process, said outright.

    Left out, Orbax has processes meet in a computation on their devices, which meets those of the training that goes
    on meanwhile; said, they meet on the host.
    """
    import orbax.checkpoint as ocp

    return ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))


def folders_first() -> Any:
    """Orbax's word for making a checkpoint's folders before anything is written into them.

    Left out, other threads wait for the folders: if the disk refuses one, they wait for it, and keep the process from
    ending, for five minutes.
    """
    import orbax.checkpoint as ocp

    return ocp.AsyncOptions(create_directories_asynchronously=False)


def detached(state: PyTree) -> PyTree:
    """A copy whose buffers nobody donates.

    On a CPU Orbax's copy to the host is a view of the same memory, which the next step would overwrite while it
    is being written.
    """

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jnp.copy(leaf)
        # NumPy's wide dtypes stay as they are; in JAX they would be cut to 32 bits. A number becomes what JAX makes of
        # it, but of no device: it is not for one of several processes.
        return np.array(leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf))

    return jax.tree.map(copied, state)


def first_line(error: BaseException) -> str:
    """What an error says, or its name where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def refusal(error: BaseException) -> tuple[str, str]:
    """Why a state could not be written, in the system's words, and what to do; Orbax's own words are long."""
    for number in FULL:
        if (words := os.strerror(number)) in str(error):
            return words, FREE_SPACE
    # TensorStore's words end in a page on how it opens files.
    words = getattr(error, "strerror", None) or first_line(error).partition(" [tensorstore_spec=")[0]
    return words, "check that the folder exists, may be written, and that no other process writes there"


def _check_fit(metadata: Any, like: PyTree) -> None:
    """Raises ValueError where the arrays that Orbax holds are not those of ``like``, naming the first.

    Orbax itself casts other dtypes in silence, and reports other shapes from a task nobody listens to.
    """
    if metadata is None:
        raise ValueError("it holds no arrays")
    found, wanted = _described(getattr(metadata, "tree", metadata)), _described(like)
    for name in sorted(found.keys() | wanted.keys()):
        saved, asked = found.get(name, "absent"), wanted.get(name, "absent")
        if saved != asked:
            raise ValueError(f"its {name} is {saved}, that asked for {asked}")


def _described(tree: PyTree) -> dict[str, str]:
    """Each leaf's dtype and shape by its path, as Orbax spells paths and keeps typed PRNG keys."""

    def described(leaf: Any) -> str:
        leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        return f"{leaf.dtype} {list(leaf.shape)}"

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): described(leaf) for path, leaf in leaves}
