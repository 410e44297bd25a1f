"""A run and its directory: created or resumed, kept up to date, and completed whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxnn.engine import (
    RUNNING,
    WAITING,
    RunOptions,
    Store,
    Trainer,
    check_config,
    check_data,
    check_parts,
    closing_writers,
    open_trainer,
    recorded_options,
)
from jaxnn.observe import Clock, describe_devices, peak_memory_bytes, steady_throughput
from jaxnn.parallel import (
    all_agree,
    broadcast_from_primary,
    check_divides,
    is_primary,
    make_layout,
    process_count,
    set_resume_hint,
)
from jaxnn.record import (
    FOLDER,
    Record,
    check_vacant,
    config_json,
    create_run_dir,
    final_metrics,
    jax_flags,
    jsonable,
    new_run_dir,
    open_record,
    preload_orbax,
    read_run,
    script,
)
from jaxnn.run._display import Display
from jaxnn.run._report import Summary
from jaxnn.run._resume import continued_options, restored_facts
from jaxnn.run._startup import NAME_WIDTH, device_rows
from jaxnn.types import Experiment, RecordError, Splits, TrainingError


@dataclasses.dataclass
class Session:
    """A run under way: a population of one, and its record.

    Attributes:
        trainer: what trains it.
        ready_seconds: from the call of ``fit`` to the moment the first step could run.
        record: the open run directory, or None.
        resumed: of a resumed run, the ``step`` it continues from, and descriptions of what ``changed`` since and of
            newer checkpoints that are ``damaged``.
    """

    trainer: Trainer
    ready_seconds: float
    record: Record | None = None
    resumed: dict[str, Any] | None = None

    @property
    def status(self) -> str:
        """``running``, then how the run ended."""
        status = self.trainer.logs[0].status
        return RUNNING if status == WAITING else status

    @status.setter
    def status(self, status: str) -> None:
        """Sets how the run ended."""
        self.trainer.logs[0].status = status

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What was reported so far, oldest first, as in ``metrics.jsonl``."""
        return self.trainer.logs[0].lines

    @property
    def name(self) -> str:
        """The experiment's name: that of the file its config is defined in, else that of its data."""
        return run_name_of(self.trainer.experiment, self.trainer.splits)


@contextlib.contextmanager
def open_session(experiment: Experiment[Any], options: RunOptions, clock: Clock, display: Display) -> Iterator[Session]:
    """A run ready to train, with its record open; the record is completed on the way out, whatever happens.

    Args:
        experiment: what to run.
        options: how.
        clock: gets the time.
        display: gets the device, as soon as JAX has opened it.

    Raises:
        ConfigError, DataError, RecordError: the run cannot start; nothing was written.
    """
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(closing_writers(options))
        before = record = None
        all_agree("config", config_json(experiment.config))
        shared = {"progress": None, "run_dir": options.run_dir, "resume": options.resume}
        all_agree("options", jsonable(recorded_options(options) | shared))
        if (resume := options.resume) is not None:
            broadcast_from_primary(lambda: read_run(resume))  # before a lock is left where there is no run
            record = stack.enter_context(open_record(resume, writes=is_primary()))
            before = broadcast_from_primary(lambda: read_run(resume))
            options = continued_options(experiment, options, before)
        if (run_dir := options.run_dir) is not None:
            broadcast_from_primary(lambda: check_vacant(run_dir))
        check_config(experiment.config)
        if options.record and options.checkpoint_every != 0:
            preload_orbax()
        layout = make_layout(options.strategy, options.devices, options.mesh, options.device)
        check_divides(experiment.config.batch_size, layout.data_size)
        if options.eval_batch_size is not None:
            check_divides(options.eval_batch_size, layout.data_size, "eval_batch_size")
        display.rows(device_rows(layout.num_devices), NAME_WIDTH)
        with clock.span("load", "loading the data"):
            splits = experiment.data(experiment.config)
            check_data(splits)
            check_parts(experiment)
        steps_per_call = before["steps_per_call"] if before else None
        trainer = open_trainer(experiment, options, splits, layout, clock, steps_per_call=steps_per_call)
        stack.callback(trainer.programs.spec.feed.close)
        session = Session(trainer, time.perf_counter() - started)
        if options.record:
            # Before there is a directory: an interruption meanwhile leaves none.
            facts = _facts(session)
            session.record = record or stack.enter_context(_new_record(session))
            trainer.store = _store(session)
            set_resume_hint(f"resume with --resume {session.record.path}")
            if before is not None:
                facts, session.resumed = restored_facts(trainer, before, facts)
            # A run that is over is loaded, not run: its record stays as it is.
            if session.status == RUNNING:
                stack.enter_context(_described(session, facts))
        yield session


def _new_record(session: Session) -> contextlib.AbstractContextManager[Record]:
    wanted = session.trainer.options.run_dir or new_run_dir(session.name)
    path = broadcast_from_primary(lambda: str(create_run_dir(wanted)))
    return open_record(Path(path), writes=is_primary())


def _store(session: Session) -> Store:
    record, options = session.record, session.trainer.options
    assert record is not None
    return Store(
        record,
        record.path / FOLDER,
        keep_last=options.keep_last,
        keep_best=options.keep_best,
        monitored=session.trainer.monitored,
        higher_is_better=options.higher_is_better,
    )


def _facts(session: Session) -> dict[str, Any]:
    """The content of ``run.json`` from the start."""
    trainer, programs = session.trainer, session.trainer.programs
    return {
        "name": session.name,
        "status": RUNNING,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": config_json(trainer.experiment.config),
        "options": recorded_options(trainer.options),
        "steps_per_call": trainer.choice.steps_per_call,
        "seconds_per_step_measured": getattr(trainer.choice, "seconds_per_step", {}),
        "data": trainer.splits.name,
        "fingerprint": trainer.fingerprint,
        "precision": programs.product_dtypes,
        "implementations": programs.implementations,
        "layout": programs.layout.as_json(),
        "devices": describe_devices(),
        "jax_flags": jax_flags(),
        **script(),
    }


@contextlib.contextmanager
def _described(session: Session, facts: dict[str, Any]) -> Iterator[None]:
    record = session.record
    assert record is not None
    if session.resumed is None and record.writes:
        # Another run may have come and gone between the first look and the lock.
        check_vacant(record.path, held=True)
    record.write("run.json", facts)
    record.write("placement.json", {tree.name: dataclasses.asdict(tree) for tree in session.trainer.placement()})
    try:
        yield
    finally:
        error = sys.exception()
        # Also if the last save of a run was broken off: its state is lost.
        broken = error is not None and not isinstance(error, GeneratorExit)
        if session.status == RUNNING or (broken and session.status in ("finished", "stopped early")):
            session.status = _status_of(error, session)
        # Other processes, if there are any, may not fail with this one, so that it must not wait for them.
        alone = process_count() > 1 and error is not None and not isinstance(error, TrainingError)
        refused = _complete(session, record, facts, wait=not alone)
        # What ended the run is what its user hears of; one who left the loop by `break` heard of nothing yet.
        if refused is not None and (error is None or isinstance(error, GeneratorExit)):
            raise refused


def _complete(session: Session, record: Record, facts: dict[str, Any], *, wait: bool) -> RecordError | None:
    """Writes what a record holds of a run that is over.

    Args:
        session: the run.
        record: its record.
        facts: the content of ``run.json`` from the start.
        wait: whether to wait for other processes.

    Returns:
        The first thing that the disk refused, if it refused any. All is tried: what is small may find room.
    """
    store, refused = session.trainer.store, list[RecordError]()
    assert store is not None

    def attempt(action: Callable[[], None]) -> None:
        try:
            action()
        except RecordError as error:
            refused.append(error)

    with session.trainer.clock.span("checkpoint"):
        attempt(lambda: store.close(wait=wait))
    if refused:
        session.status = "failed"
    summary = summarise(session).as_json()
    kept = store.kept_steps() if wait else ()
    attempt(
        lambda: record.write("run.json", {**facts, "status": session.status, "summary": summary, "checkpoints": kept})
    )
    attempt(lambda: record.write("compiles.json", session.trainer.programs.ledger.as_json()))
    return refused[0] if refused else None


def _status_of(error: BaseException | None, session: Session) -> str:
    """How a run ended that did not decide so itself."""
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return "interrupted"
    if error is not None:
        return "failed"
    done = int(session.trainer.state.step) >= session.trainer.plan.num_steps
    return "finished" if done else "interrupted"


def summarise(session: Session) -> Summary:
    """The run so far, as host values."""
    trainer = session.trainer
    throughput = steady_throughput(trainer.windows)
    seconds = {name: value for name, value in trainer.clock.seconds.items() if name != "caller"}
    totals = trainer.programs.ledger.totals()
    return Summary(
        status=session.status,
        step=trainer.logs[0].step,
        metrics=final_metrics(session.lines),
        throughput=throughput,
        examples_per_second=throughput and throughput.steps_per_second * trainer.experiment.config.batch_size,
        first_step_seconds={
            "total": session.ready_seconds,
            "trace": totals["trace_seconds"] + totals["lower_seconds"],
            "compile": totals["compile_seconds"],
            "measure": seconds.get("measure", 0.0),
        },
        seconds=seconds,
        peak_bytes=peak_memory_bytes(),
        compilations=totals,
        stalls=tuple(trainer.flight.stalls),
    )


def run_name_of(experiment: Experiment[Any], splits: Splits) -> str:
    """The experiment's name: that of the file its config is defined in, else that of its data."""
    return file_name_of(experiment) or splits.name


def file_name_of(experiment: Experiment[Any]) -> str | None:
    """The name of the file that the experiment's config is defined in; None if there is none."""
    module = type(experiment.config).__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    # The config of `jn.train` is jaxnn's own, whose file says nothing of the experiment.
    ours = module.partition(".")[0] == __name__.partition(".")[0]
    return Path(file).stem if file and not ours else None
