"""Saved states: everything jaxnn asks of Orbax, in one file.

A checkpoint is one directory, complete or absent, that plain Orbax reads back as the fields of ``TrainState``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxnn.types import PyTree, RecordError, TrainState


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

    def save(self, step: int, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Starts saving ``state``; returns once the arrays are copied, before they are written.

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
        """The step with the best monitored metric among those kept; the newest where none was measured."""
        scored = {
            step: metrics[self.monitor]
            for step in self.steps()
            if self.monitor in (metrics := self.manager.metrics(step) or {})
        }
        if not scored:
            return self.latest()
        choose = min if self.mode == "min" else max
        return choose(scored, key=lambda step: (scored[step], step))

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state saved at ``step``, with the shapes, dtypes and placement of ``like``."""
        return TrainState(**_restore(self.manager, step, like._asdict()))

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
    sign = -1.0 if mode == "min" else 1.0
    policies: list[Any] = [preservation.LatestN(keep_last)]
    if keep_best:
        # Unmeasured checkpoints rank below every measured one.
        score = lambda metrics: sign * metrics.get(monitor, -sign * math.inf)  # noqa: E731
        policies.append(preservation.BestN(get_metric_fn=score, n=keep_best))
    options = ocp.CheckpointManagerOptions(
        preservation_policy=preservation.AnyPreservationPolicy(policies),
        enable_async_checkpointing=True,
    )
    manager = ocp.CheckpointManager(directory.absolute(), options=options)
    return Checkpoints(manager, monitor, mode)


def save(path: Path | str, state: PyTree) -> None:
    """Writes any pytree of arrays to the new directory ``path``, complete or not at all.

    Raises:
        RecordError: ``path`` exists already.
    """
    import orbax.checkpoint as ocp

    target = Path(path).absolute()
    if target.exists():
        raise RecordError(f"{target} exists already: choose a new path, or delete it first.")
    _quieten_orbax()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target, _detached(state))


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
            return checkpointer.restore(target, like)
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{target} does not hold a state like the one asked for: {error}") from error


def _restore(manager: Any, step: int, like: PyTree) -> PyTree:
    import orbax.checkpoint as ocp

    try:
        return manager.restore(step, args=ocp.args.StandardRestore(like))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RecordError(
            f"the checkpoint of step {step} in {manager.directory} cannot be read back into this experiment's "
            f"state ({str(error).splitlines()[0]}): was it saved with another model or optimizer?"
        ) from error


def _detached(state: PyTree) -> PyTree:
    """A copy whose buffers nobody donates.

    On a CPU Orbax's copy to the host is a view of the same memory, which the next step would overwrite while it
    is being written.
    """
    return jax.tree.map(jnp.copy, state)


def _quieten_orbax() -> None:
    # Orbax tells of each phase of each save through absl at INFO and of deprecations at WARNING.
    logging.getLogger("absl").setLevel(logging.ERROR)
