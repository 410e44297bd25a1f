"""Training an experiment: ``fit`` to the end, or ``iterate`` window by window."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxnn.engine import RunOptions, train, with_changes
from jaxnn.observe import Clock
from jaxnn.parallel import computing_on
from jaxnn.record import metrics_of
from jaxnn.run._display import Display, open_display
from jaxnn.run._record import Session, open_session
from jaxnn.run._report import NAME_WIDTH, Report, startup_report
from jaxnn.run._run import Run, run_of
from jaxnn.run._signals import interruptible
from jaxnn.run._watchdog import watching
from jaxnn.types import ConfigError, Experiment, TrainingError, TrainState


def fit(experiment: Experiment[Any], options: RunOptions | None = None, **changes: Any) -> Run:
    """Trains ``experiment``, reports the device and the speed, and writes a record.

    SIGINT and SIGTERM end the run after the current window, saved and ready to resume; its status is then
    ``interrupted``, in ``run.summary.status``. A second one, or one before the first step, raises KeyboardInterrupt.

    >>> run = jn.fit(experiment, record=False, progress="none", steps_per_call=5)
    >>> run.summary.status, round(run.final["test_accuracy"], 1)
    ('finished', 0...)

    Args:
        experiment: what to compute. A resumed run needs the config of its record; only ``num_steps`` may differ.
        options: how to run it. A resumed run takes those left at their defaults from its record.
        **changes: single run options by name, such as ``resume="runs/mnist/…"``. On resume they replace those of the
            record, also at their defaults: ``patience=None``.

    Raises:
        ConfigError, DataError, RecordError: the run cannot start; nothing was written.
        TrainingError: the loss is no longer finite; the record and earlier checkpoints are kept.
    """
    options = _checked(experiment, options, changes)
    clock = Clock()
    with interruptible() as interruption, computing_on(options.device), contextlib.ExitStack() as around:
        display = around.enter_context(open_display(options.progress))
        with contextlib.ExitStack() as opened:
            with display.announcing(clock):
                session = opened.enter_context(open_session(experiment, options, clock, display))
                # From here on there is something to save, and its record to complete.
                around.enter_context(interruption.finishing("the current window"))
                path = None if session.trainer.record is None else str(session.trainer.record.path)
                display.rows(startup_report(session.trainer, path, session.resumed), NAME_WIDTH)
            _watch(session, around, aloud=options.progress != "none")
            for report in _reports(session, lambda: interruption.signum is not None):
                with interruption.stopping_if_unread():
                    display.report(report)
        display.close()
        run = run_of(session)
        display.rows(run.closing_rows())
        return run


class Iteration:
    """A run to iterate over, window by window; ``run`` is its result."""

    def __init__(self, experiment: Experiment[Any], options: RunOptions) -> None:
        self._experiment = experiment
        self._options = options
        self._session: Session | None = None

    def __iter__(self) -> Iterator[Report]:
        """Trains; the clock is paused while the caller works. Leaving the loop saves and completes the record."""
        with contextlib.closing(self._reports()) as reports:
            atexit.register(reports.close)  # for a loop that is left open; closing again does nothing
            while True:
                # The option `device` is not for the caller's computations.
                with computing_on(self._options.device):
                    report = next(reports, None)
                if report is None:
                    return
                yield report

    def _reports(self) -> Generator[Report]:
        opened = open_session(self._experiment, self._options, Clock(), Display())
        with contextlib.ExitStack() as around, opened as session:
            self._session = session
            _watch(session, around, aloud=False)
            with contextlib.closing(_reports(session, lambda: False, step_by_step=True)) as reports:
                try:
                    yield from reports
                except GeneratorExit:
                    if session.log.unfinished:
                        # Python hides from a generator whether its loop was left by `break` or by an exception.
                        session.log.status = "interrupted"
                        step = int(session.trainer.state.step)
                        # At the interpreter's exit no thread can be started to save.
                        if threading.main_thread().is_alive() and session.trainer.save_due(step, ending=True):
                            session.trainer.save(step)
                            _check_finite(session)
                    raise

    @property
    def state(self) -> TrainState:
        """The state at the end of the latest window: a copy, since the next window takes the original's memory."""
        state: TrainState = jax.tree.map(jnp.copy, self._started().trainer.state)
        return state

    @property
    def run(self) -> Run:
        """The run so far, or at its end."""
        session = self._started()
        return dataclasses.replace(run_of(session), _state=self.state)

    def _started(self) -> Session:
        if self._session is None:
            raise ConfigError("nothing has run yet: iterate first, as in `for report in iteration`.")
        return self._session


def iterate(experiment: Experiment[Any], options: RunOptions | None = None, **changes: Any) -> Iteration:
    """Trains ``experiment`` one window at a time, in the caller's loop; prints nothing.

    Between two reports the device is idle and ``iteration.state`` is complete, at the cost of one wait per window.
    Leaving the loop, by ``break`` or an exception, saves the run and ends it as ``interrupted``. Signals are the
    caller's: Ctrl-C raises KeyboardInterrupt.

    >>> for report in jn.iterate(experiment, record=False, steps_per_call=5, report_every=10, eval_every=10):
    ...     print(report.step, sorted(report.metrics)[:2])
    10 ['test_accuracy', 'test_loss']
    20 ['test_accuracy', 'test_loss']
    """
    return Iteration(experiment, _checked(experiment, options, changes))


def _checked(experiment: Any, options: RunOptions | None, changes: Mapping[str, Any]) -> RunOptions:
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"{experiment!r:.60} is no experiment: give jn.Experiment(config, data, task, optimizer).")
    return with_changes(RunOptions() if options is None else options, changes, experiment.config)


def _reports(session: Session, wants_stop: Callable[[], bool], *, step_by_step: bool = False) -> Generator[Report]:
    """Trains a run to its end, and sets its status; TrainingError if loss or parameters are no longer finite."""
    trainer = session.trainer
    if not session.log.unfinished:  # a resumed run that is over
        return
    for window in train(trainer, wants_stop, step_by_step=step_by_step):
        _check_finite(session)
        line = window.lines[0]
        speed = {name: line[name] for name in ("seconds", "steps_per_second", "examples_per_second")}
        yield Report(window.step, trainer.plan.num_steps, metrics_of(line), **speed)
    if session.log.unfinished:
        session.log.status = "interrupted"


def _check_finite(session: Session) -> None:
    log, checkpoints = session.log, session.trainer.checkpoints
    if log.status == "diverged":
        kept = max(checkpoints.steps(), default=None) if checkpoints is not None else None
        last = f"the last good checkpoint is that of step {kept}; " if kept is not None else ""
        raise TrainingError(
            f"{log.error}: {last}lower the learning rate, clip gradients (jn.optim.with_clipping), or inspect the data."
        )


def _watch(session: Session, around: contextlib.ExitStack, *, aloud: bool) -> None:
    """Watches for stalls until ``around`` ends: after the session, which waits for its last checkpoint at its end."""
    trainer = session.trainer
    around.enter_context(watching(trainer.clock, trainer.flight, trainer.options.stall_after, aloud=aloud))
