"""Training an experiment: ``fit`` to the end, or ``iterate`` window by window."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxnn.loop.introduction import introduction
from jaxnn.loop.options import RunOptions, with_changes
from jaxnn.loop.progress import Display, open_display, say_rows
from jaxnn.loop.recording import open_session, summarise
from jaxnn.loop.report import Report
from jaxnn.loop.run import Run, run_of
from jaxnn.loop.saving import save_due, save_state
from jaxnn.loop.session import Session
from jaxnn.loop.signals import Interruption, interruptible
from jaxnn.loop.startup import starting
from jaxnn.loop.training import train_session
from jaxnn.loop.watchdog import watching
from jaxnn.parallel import computing_on, is_primary
from jaxnn.record import metrics_of
from jaxnn.types import ConfigError, Experiment, TrainState


def fit(experiment: Experiment[Any], options: RunOptions | None = None, **changes: Any) -> Run:
    """Trains ``experiment``, reporting where it runs and how fast, and leaves a record.

    SIGINT and SIGTERM end the run after the window under way, saved and ready to resume; the run says so in
    ``run.summary.status``. A second one, or one before the first step, raises KeyboardInterrupt.

    Args:
        experiment: what to compute.
        options: how to run it.
        **changes: single run options, such as ``steps_per_call=16`` or ``resume="runs/mnist/…"``.

    Raises:
        ConfigError, DataError, RecordError: the run cannot start; nothing was written.
        TrainingError: the loss is no longer finite; the record and earlier checkpoints are kept.
    """
    options = with_changes(options or RunOptions(), changes, experiment.config)
    # Of several processes one tells of the run.
    progress = options.progress if is_primary() else "none"
    lines = "none" if progress == "none" else "plain"
    with interruptible() as interruption, computing_on(options.device), contextlib.ExitStack() as around:
        with contextlib.ExitStack() as opened:
            with starting(options.progress) as startup:
                session = opened.enter_context(open_session(experiment, options, startup))
                # From here on there is something to save, and its record to complete.
                around.enter_context(interruption.finishing("the current window"))
                startup.rows(introduction(session))
            _watch(session, around, aloud=options.progress != "none")
            with open_display(progress, session.plan.num_steps) as display:
                for report in train_session(session, interruption):
                    try:
                        display.report(report)
                    except BrokenPipeError:
                        # Whoever read it has ended, as `tee` does when its disk is full: nothing trained is lost.
                        interruption.wish("standard output was closed: stopping after the current window")
                _settle(session)
        with open_display(lines, session.plan.num_steps) as display:
            return _conclude(session, display)


class Iteration:
    """A run that its caller walks through, window by window: iterate over it, then ask it for its ``run``.

    Attributes:
        run: the run so far, or at its end.
        state: the state at the end of the latest window; nothing is in flight while the caller works.
    """

    def __init__(self, experiment: Experiment[Any], options: RunOptions) -> None:
        self._experiment = experiment
        self._options = options
        self._session: Session | None = None

    def __iter__(self) -> Iterator[Report]:
        """Trains; the clock is paused while the caller works. Breaking off saves and completes the record."""
        with contextlib.closing(self._reports()) as reports:
            while True:
                # The caller's own computations run where they always do.
                with computing_on(self._options.device):
                    report = next(reports, None)
                if report is None:
                    return
                yield report

    def _reports(self) -> Generator[Report]:
        with contextlib.ExitStack() as around, open_session(self._experiment, self._options) as session:
            self._session = session
            _watch(session, around, aloud=False)
            interruption = Interruption()
            with contextlib.closing(train_session(session, interruption, step_by_step=True)) as reports:
                try:
                    yield from reports
                except GeneratorExit:
                    _leave(session)
                    raise
            _settle(session)

    @property
    def state(self) -> TrainState:
        """The state at the end of the latest window: a copy, for the next window takes the memory of its own."""
        state: TrainState = jax.tree.map(jnp.copy, self._started().state)
        return state

    @property
    def run(self) -> Run:
        """The run so far, or at its end."""
        session = self._started()
        return dataclasses.replace(run_of(session, summarise(session)), state=self.state)

    def _started(self) -> Session:
        if self._session is None:
            raise ConfigError("nothing has run yet: iterate first, as in `for report in iteration`.")
        return self._session


def iterate(experiment: Experiment[Any], options: RunOptions | None = None, **changes: Any) -> Iteration:
    """Trains ``experiment`` under the caller's eyes: ``for report in jn.iterate(experiment)``.

    Nothing is printed. Between two reports the device is idle and ``iteration.state`` is whole, at the price of
    one wait a window; ``break`` ends the run, saved. Signals are the caller's: Ctrl-C raises as ever, and what was
    saved until then is kept.
    """
    return Iteration(experiment, with_changes(options or RunOptions(), changes, experiment.config))


def _watch(session: Session, around: contextlib.ExitStack, *, aloud: bool) -> None:
    """Has somebody look on until ``around`` ends: after the session, which waits for its last checkpoint at its end."""
    around.enter_context(watching(session.clock, session.flight, session.options.stall_after, aloud=aloud))


def _settle(session: Session) -> None:
    """A run that had nothing left to do has finished."""
    if session.status == "running":
        session.status = "finished"


def _leave(session: Session) -> None:
    """A run that its caller broke off is saved where it stands."""
    if session.status != "running":
        return
    session.status = "stopped early"
    step = int(session.state.step)
    if save_due(session, step, ending=True):
        newest = session.lines[-1] if session.lines else {"step": 0}
        save_state(session, step, metrics_of(newest) if newest["step"] == step else {})


def _conclude(session: Session, display: Display) -> Run:
    summary = summarise(session)
    run = run_of(session, summary)
    rows = summary.rows()
    if run.dir is not None:
        rows.append(("record", str(run.dir)))
        rows.append(("curves", str(run.dir / "curves.png")))
        if summary.status == "interrupted" and run.resumable:
            rows.append(("to go on", f"--resume {run.dir}"))
    say_rows(display, rows)
    return run
