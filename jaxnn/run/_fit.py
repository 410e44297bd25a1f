"""Training an experiment: ``fit`` to the end, or ``iterate`` window by window; ``train`` without an experiment."""

import atexit
import contextlib
import dataclasses
import functools
import math
import numbers
import shutil
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxnn import data as sources
from jaxnn import engine, tasks
from jaxnn._clock import Clock
from jaxnn._fields import check_config, with_changes
from jaxnn._json import metrics_of
from jaxnn._signals import interruptible
from jaxnn._text import autopsy_command, short_path
from jaxnn.engine import RunOptions
from jaxnn.parallel import computing_on
from jaxnn.run._display import Display
from jaxnn.run._probes import call_probes
from jaxnn.run._record import Session, open_session
from jaxnn.run._report import Report, startup_report
from jaxnn.run._run import Run, as_run, run_of
from jaxnn.run._watchdog import watching
from jaxnn.types import ENDLESS, ConfigError, Experiment, Splits, Task, TrainingError, TrainState, nearest


def fit(experiment: Experiment[Any], options: RunOptions | None = None, **changes: Any) -> Run:
    """Trains ``experiment``, reports the device and the speed, and writes a record.

    SIGINT, SIGTERM and SIGHUP end the run after the current window, saved and ready to resume; its status is then
    ``interrupted``, in ``run.summary.status``. A second one, or one before the first step, raises KeyboardInterrupt.

    >>> run = jn.fit(experiment, record=False, progress="none", steps_per_call=5)
    >>> run.summary.status, round(run.final["test_accuracy"], 1)
    ('finished', 0...)

    Args:
        experiment: what to compute. A resumed run needs the config of its record; only ``num_steps`` may differ. With
            the option ``member`` the sweep in ``resume`` has the swept fields, and a new run continues that member.
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
        display = around.enter_context(Display.open(options.progress))
        with contextlib.ExitStack() as opened:
            with display.announcing(clock):
                session = opened.enter_context(_opened(experiment, options, clock, display))
                # From here on there is something to save, and its record to complete.
                around.enter_context(interruption.finishing("the current window"))
                path = None if session.trainer.record is None else short_path(session.trainer.record.path)
                display.rows(startup_report(session.trainer, path, session.resumed), aligned=True)
            _watch(session, around, aloud=options.progress != "none")
            for report in _reports(session, lambda: interruption.signum is not None):
                with interruption.stopping_if_unread():
                    display.report(report)
        run = run_of(session)
        with interruption.stopping_if_unread(ended=True):
            display.close()
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
        opened = _opened(self._experiment, self._options, Clock(), Display())
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


@contextlib.contextmanager
def _opened(experiment: Experiment[Any], options: RunOptions, clock: Clock, display: Display) -> Iterator[Session]:
    """Opens a run, as `open_session`, that may continue a member of a sweep; one that cannot start leaves no copy."""
    experiment, started = as_run(experiment, options)
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(open_session(experiment, started, clock, display))
        except BaseException:
            if options.member is not None and started.resume is not None:
                shutil.rmtree(started.resume, ignore_errors=True)
            raise
        yield session


def _checked(experiment: Any, options: RunOptions | None, changes: Mapping[str, Any]) -> RunOptions:
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"{experiment!r:.60} is no experiment: give jn.Experiment(config, data, task, optimizer).")
    return with_changes(RunOptions() if options is None else options, changes, experiment.config)


def _reports(session: Session, wants_stop: Callable[[], bool], *, step_by_step: bool = False) -> Generator[Report]:
    """Trains a run to its end, and sets its status; TrainingError if loss or parameters are no longer finite."""
    trainer = session.trainer
    if not session.log.unfinished:  # a resumed run that is over
        return
    if probes := trainer.options.named_probes():
        trainer.probe = functools.partial(call_probes, session, probes)
    for window in engine.train(trainer, wants_stop, step_by_step=step_by_step):
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
        record = session.trainer.record
        cause = "look for NaN in the data" if record is None else f"find the cause: {autopsy_command(record.path)}"
        raise TrainingError(
            f"{log.error}: {last}lower the learning rate, clip gradients (jn.optim.with_clipping), or {cause}"
        )


def _watch(session: Session, around: contextlib.ExitStack, *, aloud: bool) -> None:
    """Watches for stalls until ``around`` ends: after the session, which waits for its last checkpoint at its end."""
    trainer = session.trainer
    around.enter_context(watching(trainer.clock, trainer.flight, trainer.options.stall_after, aloud=aloud))


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What ``train`` computes, besides the model and the optimizer it is given."""

    batch_size: int
    num_steps: int
    seed: int


def train(
    model: Any,
    optimizer: optax.GradientTransformation,
    data: Splits | Any,
    *,
    num_epochs: float | None = None,
    num_steps: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    options: RunOptions | None = None,
    **changes: Any,
) -> Run:
    """Trains ``model`` without a config class.

    >>> run = jn.train(jn.models.MLP((8, 10)), optax.adam(1e-2), jn.data.digits(), num_steps=20, record=False,
    ...                progress="none", steps_per_call=5)
    >>> run.summary.step
    20

    Args:
        model: a model that `tasks.as_model` takes, or a ``Task``. A model is trained to classify if the
            targets are integers ``[examples]``, and to regress if they are floats, but not one-hot rows.
        optimizer: any Optax optimizer.
        data: ``Splits``, or what `jaxnn.data.arrays` takes as ``train``, such as a pair ``(inputs, targets)``.
        num_epochs: passes over the training data; 10 if neither this nor ``num_steps`` is given.
        num_steps: number of updates, instead of epochs.
        batch_size: examples per step.
        seed: determines initial parameters, data order and dropout.
        options: how to run, as for ``fit``.
        **changes: single run options, as for ``fit``.

    Raises:
        As ``fit``; ConfigError: both ``num_epochs`` and ``num_steps`` are given, or no positive number of epochs.
    """
    options = RunOptions() if options is None else options
    for name in changes:
        if not hasattr(options, name) and (meant := nearest(name, ("num_epochs", "batch_size", "seed"))) is not None:
            raise ConfigError(f"train has no argument {name!r}: did you mean {meant!r}?")
    splits = data if isinstance(data, Splits) else sources.arrays(train=data)
    lengths = {"num_epochs": num_epochs, "num_steps": num_steps, "budget": changes.get("budget", options.budget)}
    if len(given := [name for name, value in lengths.items() if value is not None]) > 1:
        raise ConfigError(f"both {given[0]} and {given[1]} are given: give one of them.")
    check_config(TrainConfig(batch_size, 1, seed))
    if num_steps is None and splits.train.num_examples == ENDLESS:
        raise ConfigError("the training data have no end, so epochs have none either: give num_steps.")
    if num_steps is None:
        epochs = 10.0 if num_epochs is None else num_epochs
        if not isinstance(epochs, numbers.Real) or not 0 < epochs < math.inf:
            raise ConfigError(f"num_epochs is {epochs!r}, and must be a number above 0.")
        num_steps = max(1, round(epochs * sources.steps_per_epoch(splits.train.num_examples, batch_size)))
    task = model if isinstance(model, Task) else _task_for(model, splits)
    experiment = Experiment(
        TrainConfig(batch_size, num_steps, seed),
        data=lambda config: splits,
        task=lambda config: task,
        optimizer=lambda config: optimizer,
    )
    return fit(experiment, options, **changes)


def _task_for(model: Any, splits: Splits) -> Task:
    targets = splits.train.targets
    if not hasattr(targets, "dtype"):
        raise ConfigError("the targets are not one array, so the task is unknown: give one in place of the model.")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        rows = np.asarray(targets)
        if rows.ndim == 2 and rows.shape[1] > 1 and np.isin(rows, (0, 1)).all() and (rows.sum(axis=1) == 1).all():
            raise ConfigError(
                f"the targets {list(targets.shape)} are one-hot rows of floats: pass targets.argmax(axis=-1) to "
                "classify, or jn.tasks.regression(model) in place of the model to regress."
            )
        return tasks.regression(model)
    if targets.ndim != 1:
        raise ConfigError(
            f"integer targets {list(targets.shape)} are no labels [examples]: flatten them, give floats to regress, or "
            "give a task in place of the model."
        )
    return tasks.classification(model)
