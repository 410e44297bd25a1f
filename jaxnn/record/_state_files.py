"""Pytrees of arrays on the disk: written and read by Orbax, with the SHA-256 of every file in a list beside them."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn._checked_json import parse
from jaxnn._compat import configure_orbax_logging
from jaxnn._disk import UNWRITABLE, open_regular, read_file, refusals, sync
from jaxnn._transfers import PINNED, fetching
from jaxnn.parallel import broadcast_from_primary, is_primary
from jaxnn.record._schemas import CHECKPOINT
from jaxnn.types import JaxnnError, PyTree, RecordError, is_key

ITEM = "default"  # the folder of the arrays in a run's checkpoint
ABOUT_FILE = "checkpoint.json"  # its step, metrics, and the number and digest of the lines of metrics.jsonl up to it
UNFINISHED = ".unfinished"  # the suffix of a folder while it is written
# The errors of Orbax for a checkpoint of another tree, or of none, and for one that it cannot write.
UNREADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError, OSError),
)
# Orbax expands a path with one of the first three as a pattern, and TensorStore reads a backslash as a slash.
SPECIAL = frozenset("*?[\\")
SUMS_FILE = "SHA256SUMS"
SUMS_HEAD = "# sha256 of the lines below: "  # `sha256sum -c` skips this line, which shows damage to the list itself


def save_checkpoint(path: Path | str, state: PyTree) -> None:
    """Saves any pytree of arrays to the new directory ``path``, which is complete or absent.

    Several processes of a run all call it, with NumPy arrays or arrays on the devices of all processes.

    >>> jn.save_checkpoint("ema", {"params": {"w": np.zeros(3)}, "step": 7})
    >>> int(jn.load_checkpoint("ema")["step"])
    7

    Raises:
        RecordError: ``path`` exists or cannot be written; ``state`` is a bare array or has none, or has arrays on the
            devices of one process although there are several.
    """
    target = Path(path).absolute()
    if jax.tree_util.all_leaves([state]) or not jax.tree.leaves(state):
        raise RecordError(f"cannot save a bare {type(state).__name__} to {target}: put arrays in a dict to save them.")
    count = jax.process_count()
    for name, leaf in leaves_by_path(state).items():
        if count > 1 and isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            raise RecordError(
                f"cannot save {name} to {target}: it is only on devices of process {jax.process_index()}; shard or "
                f"replicate it over all {count} processes, or save it as a NumPy array, which process 0 writes."
            )
    failure: JaxnnError | None = None

    def make_room() -> str:
        if target.exists():
            raise RecordError(f"{target} exists already: choose a new path, or delete it first.")
        target.parent.mkdir(parents=True, exist_ok=True)
        return str(target)

    def raise_failure() -> None:
        if failure is not None:
            raise failure

    try:
        with refusals(f"{target} cannot be written", ", or choose another path."):
            target = Path(broadcast_from_primary(make_room))
            start_writing(target, host_copy(state))()
    except JaxnnError as error:
        failure = error
    broadcast_from_primary(raise_failure)
    raise_failure()


def steps_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint in ``folder``, in order; none if the folder does not exist."""
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def read_about(checkpoint: Path) -> Any:
    """Reads ``checkpoint.json``: the ``step``, the finite ``metrics`` by name, the ``log`` or None.

    OSError or ValueError if it is missing or damaged.
    """
    return parse(read_file(checkpoint / ABOUT_FILE), CHECKPOINT)


def orbax_options(folder: Path) -> dict[str, Any]:
    """The keyword arguments of the Orbax objects that write or read ``folder``."""
    import orbax.checkpoint as ocp

    configure_orbax_logging()
    # With this list Orbax synchronizes the processes through the host, by keys with the folder's name. Otherwise it
    # runs a computation on their devices, which collides with those of the training.
    processes = set(range(jax.process_count()))
    options = ocp.options.MultiprocessingOptions(active_processes=processes, barrier_sync_key_prefix=folder.name)
    return {"multiprocessing_options": options}


@contextlib.contextmanager
def without_special(folder: Path) -> Iterator[Path]:
    """Yields a path to ``folder`` that Orbax takes literally: by a temporary link if it has `SPECIAL` characters."""
    if SPECIAL.isdisjoint(str(folder)):
        yield folder
        return
    place = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(dir=place if SPECIAL.isdisjoint(place) else "/tmp") as links:
        (link := Path(links, "folder")).symlink_to(folder)
        yield link


def start_writing(target: Path, state: PyTree, about: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """Starts to write a state, a :func:`host_copy`, with its checksums to the new folder ``target``.

    Arrays of several processes are copied to the host now. The returned function completes and names the folder, in any
    thread, without JAX. Both raise UNWRITABLE if the disk refuses, and remove the partial folder; so does a folder that
    does not hold what was written. ``about`` is the content of ``checkpoint.json`` in a run's checkpoint, whose arrays
    are in a subfolder.
    """
    import orbax.checkpoint as ocp

    name = "".join(f"%{ord(character):x}" if character in SPECIAL else character for character in target.name)
    unfinished = target.with_name(f"{name}{UNFINISHED}")
    opened = contextlib.ExitStack()
    # Otherwise threads wait for folders, which keeps the process alive for 300 s if the disk refuses one.
    in_order = ocp.AsyncOptions(create_directories_asynchronously=False)

    @contextlib.contextmanager
    def clearing() -> Iterator[None]:
        try:
            yield
        except UNWRITABLE:
            # After a save that failed at its start, threads of Orbax that are not joined may write for a moment.
            for seconds in (0.0, 0.1, 0.4) if is_primary() else ():
                time.sleep(seconds)
                # Orbax's temporary folders beside it have the same prefix.
                for remnant in unfinished.parent.glob("*"):
                    if remnant.name.startswith(unfinished.name):
                        shutil.rmtree(remnant, ignore_errors=True)
            raise

    def complete() -> None:
        with clearing(), opened:
            # Waits until all processes have written.
            checkpointer.close()
            if is_primary():
                _check_like(read_shapes(arrays), state)
                if about is not None:
                    (unfinished / ABOUT_FILE).write_text(json.dumps(about) + "\n")
                write_sums(unfinished)
                unfinished.rename(target)
                sync(target.parent)

    with contextlib.ExitStack() as failing, clearing():
        failing.push(opened)
        if about is not None and is_primary():
            unfinished.mkdir(exist_ok=True)
        arrays = opened.enter_context(without_special(unfinished.parent)) / unfinished.name
        arrays = arrays if about is None else arrays / ITEM
        checkpointer = ocp.StandardCheckpointer(async_options=in_order, **orbax_options(target))
        checkpointer.save(arrays, state, force=True)
        failing.pop_all()
    return complete


def read_shapes(folder: Path) -> PyTree:
    """Reads the shape and dtype of each array of a tree, without their values; raises UNREADABLE."""
    import orbax.checkpoint as ocp

    options = orbax_options(folder)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options), **options) as checkpointer:
        metadata = checkpointer.metadata(folder).item_metadata
    if metadata is None:
        raise ValueError("it holds no arrays")
    return getattr(metadata, "tree", metadata)


def read_tree(folder: Path, like: PyTree | None = None) -> PyTree:
    """Reads a tree of NumPy arrays, or one with the shapes, dtypes and shardings of ``like``; raises UNREADABLE."""
    import orbax.checkpoint as ocp

    options = orbax_options(folder)
    handler = ocp.PyTreeCheckpointHandler if like is None else ocp.StandardCheckpointHandler
    with without_special(folder) as place, ocp.Checkpointer(handler(**options), **options) as checkpointer:
        saved = read_shapes(place)
        if like is None:
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
            return checkpointer.restore(place, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
        # Orbax casts other dtypes silently, and reports other shapes from a task that is never awaited.
        _check_like(saved, like)
        return jax.tree.map(as_key_like, checkpointer.restore(place, args=ocp.args.StandardRestore(like)), like)


def _check_like(saved: PyTree, like: PyTree) -> None:
    """Raises ValueError for an array that one of the trees lacks, or that has another shape or dtype in it."""
    found, wanted = leaves_by_path(saved), leaves_by_path(like)
    for name in sorted(found.keys() | wanted.keys()):
        saved_as, wanted_as = (_described(one[name]) if name in one else "absent" for one in (found, wanted))
        if saved_as != wanted_as:
            raise ValueError(f"its {name} is {saved_as}, the requested one {wanted_as}")


def host_copy(state: PyTree) -> PyTree:
    """A copy that no training step donates: NumPy arrays, and JAX arrays if sharded over several processes."""

    def addressable(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            # NumPy arrays keep 64-bit dtypes; a Python number gets the dtype that JAX gives it.
            return np.array(leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf))
        leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
        return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) or not leaf.is_fully_addressable:
            return leaf if isinstance(leaf, np.ndarray) else jnp.copy(leaf)
        # Not a view of a device's buffer, which would prevent its donation.
        is_copy = leaf.sharding.memory_kind == PINNED
        return np.asarray(leaf if is_copy else jax.device_put(leaf, may_alias=False))

    return jax.tree.map(copied, fetching(jax.tree.map(addressable, state)))


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves by their paths in Orbax's notation: ``params.dense.kernel``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _described(leaf: Any) -> str:
    """A leaf's dtype and shape; those of its data for a typed PRNG key, which Orbax stores."""
    leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    leaf = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return f"{leaf.dtype} {list(leaf.shape)}"


def as_key_like(data: Any, like: Any) -> Any:
    """Wraps ``data`` as a typed key if ``like``, an array or a shape, is one."""
    if not is_key(like) or is_key(data):
        return data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(jnp.empty((), like.dtype)))


def write_sums(folder: Path) -> None:
    """Syncs all files below ``folder`` to the disk, and a list of their SHA-256 for ``sha256sum -c``."""
    names = sorted(files_below(folder))
    lines = "".join(f"{_digest(folder, name)}  {name}\n" for name in names)
    (folder / SUMS_FILE).write_text(f"{SUMS_HEAD}{hashlib.sha256(lines.encode()).hexdigest()}\n{lines}")
    # Together: the file system then commits once, and not once for each file.
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(sync, [os.path.join(folder, name) for name in (*names, SUMS_FILE)]))


def find_damage(folder: Path, step: int | None = None) -> str | None:
    """Describes the damage to a saved state, which must be that of ``step`` in a run; None if there is none."""
    changed = "has other bytes than were saved"
    try:
        head, _, lines = read_file(folder / SUMS_FILE).decode().partition("\n")
    except FileNotFoundError:
        return f"its file {SUMS_FILE} is missing"
    except (OSError, ValueError):
        head = lines = ""
    if head != SUMS_HEAD + hashlib.sha256(lines.encode()).hexdigest():
        return f"its file {SUMS_FILE} {changed}"
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines.splitlines())}
    files = set(files_below(folder)) - {SUMS_FILE}
    for name in sorted(sums.keys() | files):
        if name not in sums:
            return f"its file {name} was not there when it was saved"
        if name not in files:
            return f"its file {name} is missing"
        try:
            if _digest(folder, name) != sums[name]:
                return f"its file {name} {changed}"
        except OSError as error:
            return f"its file {name} cannot be read ({error.strerror or error})"
    if step is None:
        return None
    if ABOUT_FILE not in sums:
        return f"its file {ABOUT_FILE} is missing"
    # A copy of another step's checkpoint, or a link to one, is complete in itself.
    try:
        saved = read_about(folder)["step"]
    except ValueError as error:
        return f"its file {ABOUT_FILE} cannot be used ({error})"
    return None if saved == step else f"it holds the state of step {saved}"


def _digest(folder: Path, name: str) -> str:
    with open_regular(os.path.join(folder, name)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_below(folder: Path) -> Iterator[str]:
    """The names, relative to ``folder``, of all files and links below it."""
    # Without pathlib, which in Python 3.12 keeps each part of a path in memory: every checkpoint has new names.
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in (*files, *links):
            yield os.path.relpath(os.path.join(place, name), folder)
