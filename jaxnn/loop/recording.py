"""A session and its run directory: created or resumed, kept up to date, and closed whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxnn.loop.options import RunOptions, recorded_options
from jaxnn.loop.report import Summary
from jaxnn.loop.resuming import continued_options, restored_facts
from jaxnn.loop.session import Session, prepare_session
from jaxnn.loop.startup import Startup
from jaxnn.observe import describe_devices, peak_memory_bytes, steady_throughput
from jaxnn.parallel import all_agree, from_leader, is_leader, process_count, when_lost
from jaxnn.record import (
    FOLDER,
    Checkpoints,
    Record,
    check_unused,
    check_vacant,
    config_json,
    create_run_dir,
    draw_curves,
    final_metrics,
    jax_flags,
    jsonable,
    new_run_dir,
    open_record,
    read_run,
    script,
)
from jaxnn.types import Experiment, RecordError, Splits, TrainingError


@contextlib.contextmanager
def open_session(experiment: Experiment[Any], options: RunOptions, startup: Startup | None = None) -> Iterator[Session]:
    """A session ready to train, with its record open; the record is completed on the way out, come what may.

    Args:
        experiment: what to run.
        options: how.
        startup: where the start is reported; None: nowhere.

    Raises:
        ConfigError, DataError, RecordError: the run cannot start; nothing was written.
    """
    with contextlib.ExitStack() as stack:
        before = record = None
        all_agree("config", config_json(experiment.config))
        all_agree("options", jsonable(dataclasses.asdict(options) | {"progress": None}))
        if (resume := options.resume) is not None:
            from_leader(lambda: read_run(resume))  # before a lock is left where there is no run
            record = stack.enter_context(open_record(resume, writes=is_leader()))
            before = from_leader(lambda: read_run(resume))
            options = continued_options(experiment, options, before)
        if (run_dir := options.run_dir) is not None:
            from_leader(lambda: check_vacant(run_dir))
        session = prepare_session(experiment, options, stack, before["steps_per_call"] if before else None, startup)
        if options.record:
            # Before there is a directory: an interruption meanwhile leaves none.
            facts = _facts(session)
            session.record = record or stack.enter_context(_new_record(session))
            when_lost(f"resume with --resume {session.record.path}")
            if before is not None:
                facts = restored_facts(session, before, facts)
            # A run that is over is loaded, not run: its record stays as it is.
            if session.status == "running":
                stack.enter_context(_described(session, facts))
        yield session


def _new_record(session: Session) -> contextlib.AbstractContextManager[Record]:
    wished = session.options.run_dir or new_run_dir(run_name(session))
    path = from_leader(lambda: str(create_run_dir(wished)))
    return open_record(Path(path), writes=is_leader())


def _facts(session: Session) -> dict[str, Any]:
    """What ``run.json`` says from the start."""
    return {
        "name": run_name(session),
        "status": "running",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": config_json(session.experiment.config),
        "options": recorded_options(session.options),
        "steps_per_call": session.choice.steps_per_call,
        "seconds_per_step_measured": session.choice.seconds_per_step,
        "data": session.splits.name,
        "fingerprint": session.fingerprint,
        "precision": session.programs.product_dtypes,
        "implementations": session.programs.implementations,
        "allocator": session.allocation._asdict(),
        "layout": session.programs.layout.as_json(),
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
        check_unused(record.path)
    record.describe(facts)
    record.write("placement.json", session.placement().as_json())
    try:
        yield
    finally:
        error = sys.exception()
        # Also where the last save of a run was broken off: its state is lost.
        broken = error is not None and not isinstance(error, GeneratorExit)
        if session.status == "running" or (broken and session.status in ("finished", "stopped early")):
            session.status = _status_of(error, session)
        refused = _complete(session, record, facts, alone=_fails_alone(error))
        # What ended the run is what its user hears of; one who left the loop by `break` heard of nothing yet.
        if refused is not None and (error is None or isinstance(error, GeneratorExit)):
            raise refused


def _fails_alone(error: BaseException | None) -> bool:
    """Whether the other processes, if there are any, may not fail with this one, so that it must not wait for them."""
    return process_count() > 1 and error is not None and not isinstance(error, TrainingError)


def _complete(session: Session, record: Record, facts: dict[str, Any], *, alone: bool) -> RecordError | None:
    """Writes what a record holds of a run that is over.

    Args:
        session: the run.
        record: its record.
        facts: what ``run.json`` said from the start.
        alone: whether not to wait for other processes.

    Returns:
        The first thing that the disk refused, if it refused any. All is tried: what is small may find room.
    """
    refused: list[RecordError] = []

    def attempt(action: Callable[[], None]) -> None:
        try:
            action()
        except RecordError as error:
            refused.append(error)

    if session.checkpoints is not None:
        with session.clock.span("checkpoint"):
            checkpoints = session.checkpoints
            attempt(lambda: checkpoints.close(wait=not alone))
    if refused:
        session.status = "failed"
    summary = summarise(session).as_json()
    kept = Checkpoints(record.path / FOLDER).steps()
    attempt(lambda: record.describe({**facts, "status": session.status, "summary": summary, "checkpoints": kept}))
    attempt(lambda: record.write("compiles.json", session.programs.ledger.as_json()))
    if session.lines and record.lock is not None:
        figure = draw_curves(session.lines, f"{facts['name']} · {facts['data']}")
        attempt(lambda: record.draw("curves.png", figure))
    return refused[0] if refused else None


def _status_of(error: BaseException | None, session: Session) -> str:
    """How a run ended that did not say so itself."""
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return "interrupted"
    if error is not None:
        return "failed"
    done = int(session.state.step) >= session.plan.num_steps
    return "finished" if done else "interrupted"


def summarise(session: Session) -> Summary:
    """The session so far, as host values."""
    throughput = steady_throughput(session.windows)
    batch_size = session.experiment.config.batch_size
    seconds = {name: value for name, value in session.clock.seconds.items() if name != "caller"}
    totals = session.programs.ledger.totals()
    return Summary(
        status=session.status,
        step=session.lines[-1]["step"] if session.lines else 0,
        metrics=final_metrics(session.lines),
        throughput=throughput,
        examples_per_second=throughput and throughput.steps_per_second * batch_size,
        first_step_seconds={
            "total": session.ready_seconds,
            "trace": totals["trace_seconds"] + totals["lower_seconds"],
            "compile": totals["compile_seconds"],
            "measure": seconds.get("measure", 0.0),
        },
        seconds=seconds,
        peak_bytes=peak_memory_bytes(),
        compilations=totals,
        stalls=tuple(session.flight.stalls),
    )


def run_name(session: Session) -> str:
    """The name of what a session runs."""
    return run_name_of(session.experiment, session.splits)


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
