"""A run from its first window to its last: evaluates, saves, records, and stops when there is cause."""

from __future__ import annotations

import itertools
from collections.abc import Generator

from jaxnn.loop.report import Report
from jaxnn.loop.saving import advice, save_due, save_state
from jaxnn.loop.session import Session
from jaxnn.loop.signals import Interruption
from jaxnn.loop.stopping import status_after
from jaxnn.loop.windows import Closed, run_windows
from jaxnn.observe import Window
from jaxnn.parallel import StopVote
from jaxnn.types import TrainingError


def train_session(session: Session, interruption: Interruption, *, step_by_step: bool = False) -> Generator[Report]:
    """Trains ``session`` to its end, yielding a report a window; its ``status`` then says how it ended.

    Args:
        session: what to run; its ``state`` is replaced at each evaluation, checkpoint and at the end.
        interruption: asked at the end of each window whether to stop; of several processes all stop at one window.
        step_by_step: let the device run dry at the end of every window, so that the caller may look at what the
            session holds.

    Raises:
        TrainingError: the loss or the parameters are no longer finite; the step is named.
    """
    if session.status != "running":  # a resumed run that is over
        return
    plan, votes, windows = session.plan, StopVote(), itertools.count()
    stops = False

    def drains(step: int) -> bool:
        nonlocal stops
        stops = votes.poll(next(windows), interruption.signum is not None)
        return stops or step_by_step or plan.evaluates(step) or plan.saves(step)

    with session.clock.span("train"):
        for closed in run_windows(
            session.programs.train,
            plan,
            session.programs.feed,
            session.state,
            session.programs.zeros,
            drains=drains,
            clock=session.clock,
            flight=session.flight,
        ):
            report = _process(session, closed, interrupted=stops)
            with session.clock.span("caller"):
                yield report
            if session.status != "running":
                return


def _process(session: Session, closed: Closed, *, interrupted: bool) -> Report:
    """Everything that is done with a closed window, in the order that loses nothing."""
    metrics = {name: float(value) for name, value in closed.metrics.items()}
    if closed.state is not None:
        session.state = closed.state
        if session.plan.evaluates(closed.step):
            metrics |= _evaluate(session)
    report = _report(session, closed, metrics)
    session.windows.append(Window(closed.num_steps, closed.seconds))
    session.lines.append(report.line())
    if session.record is not None:
        with session.clock.span("record"):
            session.reported.add(session.record.report(report.line()))
    if closed.bad_step >= 0:
        session.status = "diverged"
        raise TrainingError(
            f"the loss is no longer finite at step {closed.bad_step} of {session.plan.num_steps}: {advice(session)}."
        )
    if closed.state is not None:
        session.status = status_after(session, closed.step, interrupted=interrupted)
        ending = session.status != "running"
        if save_due(session, closed.step, ending=ending):
            save_state(session, closed.step, metrics)
    return report


def _evaluate(session: Session) -> dict[str, float]:
    if session.held_out is None:
        return {}
    with session.clock.span("evaluation"):
        values = session.evaluate(session.held_out)
    return {f"{session.held_out}_{name}": value for name, value in values.items()}


def _report(session: Session, closed: Closed, metrics: dict[str, float]) -> Report:
    rate = closed.num_steps / closed.seconds
    return Report(
        step=closed.step,
        num_steps=session.plan.num_steps,
        metrics=metrics,
        seconds=closed.seconds,
        steps_per_second=rate,
        examples_per_second=rate * session.experiment.config.batch_size,
    )
