"""When a state is saved, and that only a good one is."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from jaxnn.loop.session import Session
from jaxnn.loop.stopping import is_best
from jaxnn.parallel import from_leader
from jaxnn.record import FOLDER, Checkpoints, Restored
from jaxnn.types import PyTree, TrainingError, TrainState

# Unless told otherwise a run saves at evaluations, and no more often than this.
SECONDS_BETWEEN_SAVES = 60.0


def open_session_checkpoints(session: Session) -> Checkpoints | None:
    """The run's checkpoints, opened if they were not yet; None for a run that keeps none."""
    options = session.options
    if session.record is None or options.checkpoint_every == 0:
        return None
    if session.checkpoints is None:
        session.checkpoints = Checkpoints(
            session.record.path / FOLDER,
            keep_last=options.keep_last,
            keep_best=options.keep_best,
            monitor=session.monitored,
            mode="max" if options.higher_is_better else "min",
            together=True,
        )
    return session.checkpoints


def restore_newest(session: Session) -> Restored[TrainState] | None:
    """Puts the session's state where the newest checkpoint of its record left it that is as it was saved.

    Returns:
        Its step, and the newer checkpoints that are damaged; None if there is none at all.

    Raises:
        RecordError: all are damaged, or it is not a state of this experiment.
    """
    restored = recorded_checkpoints(session).restore_newest(session.state)
    if restored is not None:
        session.state = restored.state
    return restored


def recorded_checkpoints(session: Session) -> Checkpoints:
    """Those of the session's record, for reading: it may save no more of them, and then closes none."""
    assert session.record is not None
    return Checkpoints(session.record.path / FOLDER, together=True)


def save_due(session: Session, step: int, *, ending: bool) -> bool:
    """Whether the state after ``step`` is to be saved: by its number, by the clock, as the last one or as a new best.

    The best is looked for where the run stops when nothing gets better: it would be behind by the time that is known.
    """
    if session.record is None or session.options.checkpoint_every == 0:
        return False
    if ending or session.plan.saves(step):
        return True
    if session.options.checkpoint_every is not None or not session.plan.evaluates(step):
        return False
    best = session.options.patience is not None and is_best(session)
    # Clocks differ between processes, and all must save or none.
    return best or from_leader(lambda: time.perf_counter() - session.saved_at > SECONDS_BETWEEN_SAVES)


def save_state(session: Session, step: int, metrics: dict[str, float]) -> None:
    """Starts saving the session's state.

    Raises:
        TrainingError: its parameters are not finite; the checkpoints before it are kept.
        RecordError: the disk refused.
    """
    with session.clock.span("checkpoint"):
        if not bool(_all_finite(session.state.params)):
            session.status = "diverged"
            raise TrainingError(f"the parameters are no longer finite after step {step}: {advice(session)}.")
        checkpoints = open_session_checkpoints(session)
        if checkpoints is not None and session.record is not None:
            checkpoints.save(step, session.state, metrics, session.record.log(session.reported))
            session.saved_at = time.perf_counter()


def advice(session: Session) -> str:
    """What a user whose run diverged can do."""
    kept = session.checkpoints.latest() if session.checkpoints is not None else None
    last = f"the last good checkpoint is that of step {kept}; " if kept is not None else ""
    return f"{last}lower the learning rate, clip gradients (jn.optim.clipped), or look at the data"


@jax.jit
def _all_finite(tree: PyTree) -> jax.Array:
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.bool_(True)
