"""One state in a directory of its own, complete and checked."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax

from jaxnn.checkpoints.folder import (
    ABOUT_FILE,
    FOLDER,
    ITEM,
    UNFINISHED,
    clear_unfinished,
    give_name,
    step_path,
    steps_in,
)
from jaxnn.checkpoints.quiet import tame_orbax
from jaxnn.checkpoints.sums import SUMS_FILE, find_damage, step_damage, write_sums
from jaxnn.checkpoints.team import Team
from jaxnn.checkpoints.trees import (
    FREE_SPACE,
    UNREADABLE,
    UNWRITABLE,
    all_processes,
    detached,
    first_line,
    folders_first,
    read_arrays,
    read_tree,
    refusal,
)
from jaxnn.types import PyTree, RecordError


def save(path: Path | str, state: PyTree, team: Team) -> None:
    """Writes any pytree of arrays to the new directory ``path``, complete or not at all.

    Args:
        path: the directory; that of the process that leads counts.
        state: what is written, by each process what lies on its devices.
        team: the processes that write together; it is whole when the first of them returns.

    Raises:
        RecordError: ``path`` exists already or cannot be written; ``state`` is one bare array or holds none, or holds
            arrays of one process where there are several.
    """
    target = Path(path).absolute()
    _check_arrays(target, state)
    target = Path(team.from_leader(lambda: _make_room(target)))
    unfinished = target.with_name(f".{target.name}{UNFINISHED}")
    failure = _write(unfinished, state)
    # Orbax returns once all have written.
    team.from_leader(lambda: _finish(unfinished, target, failure))
    if failure is not None:
        raise _refusal(target, failure) from failure


def load(path: Path | str, like: PyTree | None = None) -> PyTree:
    """Reads a saved state: of `jn.save`, or of a run, without the run's script and data.

    >>> jn.load("runs/digits/…")["params"]  # doctest: +SKIP
    {'dense_0': {'bias': array([...], dtype=float32), ...

    Args:
        path: a directory that `jn.save` wrote, the checkpoint of a step (``runs/…/checkpoints/4000``), or the directory
            of a run, whose newest checkpoint is read; its best is that of `Run.best_state`.
        like: a pytree of the same structure, shapes, dtypes and placement (``jax.eval_shape`` of its maker will do);
            default: NumPy arrays in dicts and lists, wherever they were saved, with a typed key as its data.

    Raises:
        RecordError: nothing is there, it is damaged, or it does not fit ``like``.
    """
    target = Path(path).absolute()
    if not target.is_dir():
        raise RecordError(f"there is no checkpoint at {target}: check the path.")
    if steps := steps_in(target / FOLDER):
        target = step_path(target / FOLDER, steps[-1])
    in_run = (target / ABOUT_FILE).is_file()
    if not (target / SUMS_FILE).is_file():
        raise RecordError(
            f"{target} does not hold a state (it has neither {SUMS_FILE} nor complete {FOLDER}): give what jn.save "
            "wrote, the directory of a run, or a checkpoint in it."
        )
    what = step_damage(target.parent, int(target.name)) if in_run and target.name.isdecimal() else find_damage(target)
    if what is not None:
        raise RecordError(f"{target} is damaged, {what}: bring it back from a copy.")
    folder = target / ITEM if in_run else target
    try:
        if like is None:
            return read_arrays(folder)
        if in_run and isinstance(like, tuple) and hasattr(like, "_asdict"):
            return type(like)(**read_tree(folder, like._asdict()))
        return read_tree(folder, like)
    except UNREADABLE as error:
        raise RecordError(
            f"{target} does not hold a state like the one asked for ({first_line(error)}): load it with the model "
            "and optimizer it was saved with."
        ) from error


def _check_arrays(target: Path, state: PyTree) -> None:
    if jax.tree_util.all_leaves([state]) or not jax.tree.leaves(state):
        raise RecordError(f"{target} is to hold {type(state).__name__} alone: put arrays in a dict to save them.")
    if (count := jax.process_count()) == 1:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise RecordError(
                f"{target} is to hold {name}, which is on the devices of process {jax.process_index()} alone: spread "
                f"it over those of all {count} processes, or save it as a NumPy array, which process 0 writes."
            )


def _make_room(target: Path) -> str:
    """Checks that there can be a directory ``target``; returns its name."""
    if target.exists():
        raise RecordError(f"{target} exists already: choose a new path, or delete it first.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(target, error) from error
    return str(target)


def _write(unfinished: Path, state: PyTree) -> BaseException | None:
    """Has Orbax write this process's part; returns what kept it from that."""
    import orbax.checkpoint as ocp

    tame_orbax()
    try:
        everyone, in_order = all_processes(), folders_first()
        with ocp.StandardCheckpointer(multiprocessing_options=everyone, async_options=in_order) as checkpointer:
            checkpointer.save(unfinished, detached(state), force=True)
    except UNWRITABLE as error:
        return error
    return None


def _finish(unfinished: Path, target: Path, failure: BaseException | None) -> None:
    """The part of one process for all: the sums and the name, or the end of what failed."""
    try:
        if failure is not None:
            raise failure
        write_sums(unfinished)
        give_name(unfinished, target)
    except UNWRITABLE as error:
        with contextlib.suppress(OSError):
            clear_unfinished(unfinished)
        raise _refusal(target, error) from error


def _refusal(target: Path, error: BaseException) -> RecordError:
    reason, cure = refusal(error)
    room = f"{FREE_SPACE}, or " if cure == FREE_SPACE else ""
    return RecordError(f"{target} cannot be written ({reason}): {room}choose another path.")
