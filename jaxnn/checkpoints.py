"""Saved states: everything jaxnn asks of Orbax, in one file.

A checkpoint is one directory, complete or absent, that plain Orbax reads back as the fields of ``TrainState``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.types import PyTree, RecordError

# What Orbax raises for a checkpoint that is damaged or another's.
UNREADABLE = (ValueError, KeyError, TypeError, OSError)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run: the newest few and the best few by a metric.

    Attributes:
        manager: the Orbax ``CheckpointManager``; saves run in its background thread.
        monitor: the evaluation metric that says which are best.
        mode: ``"min"`` or ``"max"``.
    """

    manager: Any
    monitor: str
    mode: str

    def save(self, step: int, state: NamedTuple, metrics: Mapping[str, float]) -> None:
        """Starts saving ``state``, such as a `TrainState`; returns once the arrays are copied, before they are written.

        Raises:
            RecordError: the disk refused, in this save or the one before it.
        """
        import orbax.checkpoint as ocp

        arguments = ocp.args.StandardSave(_detached(state)._asdict())
        known = {name: value for name, value in metrics.items() if math.isfinite(value)}
        try:
            self.manager.save(step, args=arguments, metrics=known, force=True)
        except (OSError, ValueError) as error:
            raise self._failure(step, error) from error

    def wait(self) -> None:
        """Blocks until the save under way is on the disk."""
        try:
            self.manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self._failure(self.manager.latest_step(), error) from error

    def close(self) -> None:
        """Waits, then lets the directory go."""
        self.wait()
        self.manager.close()

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, in order."""
        return sorted(self.manager.all_steps())

    def latest(self) -> int | None:
        """The newest step with a complete checkpoint."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the best monitored metric among those kept, the newest of equals and of unmeasured ones."""
        scores = {step: _score(self.manager.metrics(step) or {}, self.monitor, self.mode) for step in self.steps()}
        return max(scores, key=lambda step: (scores[step], step), default=None)

    def restore[State: tuple[Any, ...]](self, step: int, like: State) -> State:
        """The state saved at ``step``, with the shapes, dtypes and placement of the named tuple ``like``."""
        fields = _restore(self.manager, step, like._asdict())  # type: ignore[attr-defined]
        return type(like)(**fields)

    def _failure(self, step: int | None, error: Exception) -> RecordError:
        return RecordError(
            f"the checkpoint of step {step} could not be written to {self.manager.directory} ({error}): "
            "free disk space or choose another --run-dir; older checkpoints are intact."
        )


def open_checkpoints(
    directory: Path,
    *,
    keep_last: int = 2,
    keep_best: int = 1,
    monitor: str = "loss",
    mode: str = "min",
) -> Checkpoints:
    """Opens ``directory`` for saving and restoring, creating it if need be.

    Args:
        directory: where the checkpoints go, one folder a step.
        keep_last: how many of the newest are kept.
        keep_best: how many of the best by ``monitor`` are kept besides.
        monitor: a name in the metrics given to ``save``.
        mode: ``"min"`` if less is better, ``"max"`` if more is.
    """
    import orbax.checkpoint as ocp
    from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

    _quieten_orbax()

    def score(metrics: Mapping[str, float]) -> float:
        return _score(metrics, monitor, mode)

    best = preservation.BestN(get_metric_fn=score, n=keep_best, keep_checkpoints_without_metrics=False)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=preservation.AnyPreservationPolicy([preservation.LatestN(keep_last), best]),
        # Metrics are written only where there is a best_fn; a resumed run must know what was best before.
        best_fn=score,
        enable_async_checkpointing=True,
    )
    # Named here so that what a directory holds is known before anything is saved to it.
    handler = ocp.StandardCheckpointHandler()
    manager = ocp.CheckpointManager(directory.absolute(), options=options, item_handlers=handler)
    return Checkpoints(manager, monitor, mode)


def save(path: Path | str, state: PyTree) -> None:
    """Writes any pytree of arrays to the new directory ``path``, complete or not at all.

    Raises:
        RecordError: ``path`` exists already or cannot be written, or ``state`` is one bare array or holds none.
    """
    import orbax.checkpoint as ocp

    target = Path(path).absolute()
    if jax.tree_util.all_leaves([state]) or not jax.tree.leaves(state):
        raise RecordError(f"{target} is to hold {type(state).__name__} alone: put arrays in a dict to save them.")
    if target.exists():
        raise RecordError(f"{target} exists already: choose a new path, or delete it first.")
    _quieten_orbax()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(target, _detached(state))
    except OSError as error:
        raise RecordError(f"{target} cannot be written ({error.strerror or error}): choose another path.") from error


def load(path: Path | str, like: PyTree) -> PyTree:
    """Reads back what :func:`save` wrote.

    Args:
        path: the directory.
        like: a pytree of the same structure, shapes and dtypes (``jax.eval_shape`` of its maker will do).

    Raises:
        RecordError: nothing is there, or it does not fit ``like``.
    """
    import orbax.checkpoint as ocp

    target = Path(path).absolute()
    if not target.is_dir():
        raise RecordError(f"there is no checkpoint at {target}: check the path.")
    _quieten_orbax()
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            _check_fit(checkpointer.metadata(target).item_metadata, like)
            return checkpointer.restore(target, like)
        except UNREADABLE as error:
            raise RecordError(
                f"{target} does not hold a state like the one asked for ({_first_line(error)}): load it with the model "
                "and optimizer it was saved with."
            ) from error


def _restore(manager: Any, step: int, like: PyTree) -> PyTree:
    import orbax.checkpoint as ocp

    try:
        _check_fit(manager.item_metadata(step), like)
        return manager.restore(step, args=ocp.args.StandardRestore(like))
    except UNREADABLE as error:
        raise RecordError(
            f"the checkpoint of step {step} in {manager.directory} cannot be read back into this experiment's "
            f"state ({_first_line(error)}): was it saved with another model or optimizer?"
        ) from error


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


def _score(metrics: Mapping[str, float], monitor: str, mode: str) -> float:
    """More is better; what was not measured is worse than all that was."""
    sign = -1.0 if mode == "min" else 1.0
    return sign * metrics[monitor] if monitor in metrics else -math.inf


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _detached(state: PyTree) -> PyTree:
    """A copy whose buffers nobody donates.

    On a CPU Orbax's copy to the host is a view of the same memory, which the next step would overwrite while it
    is being written.
    """
    # NumPy's wide dtypes stay as they are; in JAX they would be cut to 32 bits.
    return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else jnp.copy(leaf), state)


def _quieten_orbax() -> None:
    # Orbax tells of each phase of each save through absl at INFO and of deprecations at WARNING.
    logging.getLogger("absl").setLevel(logging.ERROR)
