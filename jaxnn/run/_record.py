"""A run and its directory: created or resumed, kept up to date, completed also after a failure; its writers."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxnn import engine, parallel
from jaxnn import record as records
from jaxnn._clock import Clock, Throughput
from jaxnn._fields import check_config
from jaxnn._figures import draw_curves
from jaxnn._json import check_same_config, config_json, jsonable
from jaxnn._provenance import file_name_of, script
from jaxnn._text import short_path
from jaxnn.engine import RunOptions
from jaxnn.observe import Compilation, given_up, peak_memory_bytes
from jaxnn.run._display import Display
from jaxnn.run._report import Summary
from jaxnn.run._resume import FIXED, check_checkpoint, continued_options
from jaxnn.types import Experiment, RecordError, TrainingError


@dataclasses.dataclass
class Session:
    """A run under way: a population of one, and its record."""

    trainer: engine.Trainer  # what trains it
    ready_seconds: dict[str, float]  # by span, from the call of ``fit`` to the moment the first step could run
    record: engine.PopulationRecord | None = None
    ending: Summary | None = None  # what the record has of its end

    @property
    def resumed(self) -> dict[str, Any] | None:
        """The ``step`` that a resumed run continues from, what ``changed`` since, and what is ``damaged``."""
        return None if self.record is None or self.record.before is None else self.record.facts["resumed"][-1]

    @property
    def log(self) -> engine.MemberLog:
        """The status of the run, and the lines that it reported."""
        return self.trainer.logs[0]

    @property
    def name(self) -> str:
        """That of its record, else the option ``name``, the file that defines the experiment's config, or its data."""
        if self.record is not None:
            return str(self.record.facts["name"])
        return self.trainer.options.name or file_name_of(self.trainer.experiment) or self.trainer.splits.name


@contextlib.contextmanager
def open_session(experiment: Experiment[Any], options: RunOptions, clock: Clock, display: Display) -> Iterator[Session]:
    """Opens a run that is ready to train, and its record; completes the record at the end, also after a failure.

    ``display`` shows the device as soon as JAX has opened it. ConfigError, DataError or RecordError if the run cannot
    start; then nothing was written.
    """
    with contextlib.ExitStack() as stack:
        before = record = None
        parallel.all_agree("config", config_json(experiment.config))
        shared = {"progress": None, "run_dir": options.run_dir, "resume": options.resume}
        parallel.all_agree("options", jsonable(options.recorded() | shared))
        if (resume := options.resume) is not None:
            # Before a lock file is written.
            parallel.broadcast_from_primary(lambda: records.RecordReader(resume).run_facts())
            record = stack.enter_context(records.Record.open(resume, writes=parallel.is_primary()))
            before = parallel.broadcast_from_primary(lambda: records.RecordReader(resume).run_facts())
            experiment = options.resumed_experiment(experiment, before)
            # A run can be continued for more steps; with anything else changed it would be another experiment.
            check_same_config(before["config"], experiment.config, "run", resume, but="num_steps")
            trains = before["status"] != "finished" or before["config"].get("num_steps") != experiment.config.num_steps
            options = continued_options(options, before["options"], resume, "run", trains=trains, fixed=FIXED)
        writers = stack.enter_context(options.opened_writers())
        if (run_dir := options.run_dir) is not None:
            parallel.broadcast_from_primary(lambda: records.Record.check_vacant(run_dir))
        check_config(experiment.config)
        layout = parallel.Layout.make(options.strategy, options.devices, options.mesh, options.device)
        layout.check_divides(experiment.config.batch_size)
        if options.eval_batch_size is not None:
            layout.check_divides(options.eval_batch_size, "eval_batch_size")
        display.device(layout.num_devices)
        with clock.span("load", "loading the data"):
            splits = engine.load_data(experiment)
        steps_per_call, budget = before["groups"][0]["steps_per_call"] if before else None, None
        if before is None and options.budget is not None:
            trial = functools.partial(engine.open_trainer, experiment, options, splits, layout, clock)
            budget = engine.Budget.found(experiment, options, [trial], clock)
            experiment, steps_per_call = experiment.replace(num_steps=budget.num_steps), budget.steps_per_call[0]
        trainer = engine.open_trainer(experiment, options, splits, layout, clock, steps_per_call=steps_per_call)
        if budget is not None:
            trainer.notes = [("budget", budget.note), *trainer.notes]
        stack.callback(trainer.programs.spec.feed.close)
        session = Session(trainer, clock.seconds)
        if options.record:
            # Before there is a directory: an interruption meanwhile leaves none.
            session.record, how = _new_record(session, before), trainer.facts()
            if record is None:
                wanted = options.run_dir or records.Record.unused_path(session.name)
                path = parallel.broadcast_from_primary(lambda: str(records.Record.create(wanted)))
                record = stack.enter_context(records.Record.open(Path(path), writes=parallel.is_primary()))
            parallel.set_resume_hint(f"resume with --resume {short_path(record.path)}")
            session.record.directory = record
            check = functools.partial(check_checkpoint, trainer, before)
            session.record.open_group(0, trainer, how, "the run", check)
        # A run that is over is loaded, not run: its record stays as it is, unless a kill left it without its end.
        if session.log.unfinished or (before is not None and before["status"] != session.log.status):
            if session.record is not None:
                stack.enter_context(_described(session, session.record))
            stack.enter_context(observed(session, writers))
        yield session


def _new_record(session: Session, before: dict[str, Any] | None) -> engine.PopulationRecord:
    """Returns the record, without its directory, of a run that starts, or continues what was there ``before``."""
    trainer, origin = session.trainer, script()
    if before is None:
        groups = [{"members": [0], "static": {}, "traced": []}]
        parts = trainer.experiment, trainer.options, trainer, groups, session.name, origin
        return engine.PopulationRecord.start(*parts)
    return engine.PopulationRecord.resume(before, trainer.experiment, trainer.options, origin, trainer)


@contextlib.contextmanager
def _described(session: Session, record: engine.PopulationRecord) -> Iterator[None]:
    """Writes ``record.json`` and the files beside it at the start, and with the status at the end."""
    trainer, log, refused = session.trainer, session.log, list[RecordError]()
    directory, checkpoints = record.directory, trainer.checkpoints
    assert directory is not None and checkpoints is not None
    if session.resumed is None and directory.writes:
        # Another run may have used the directory between the first check and the lock.
        records.Record.check_vacant(directory.path, held=True)
    record.write()
    directory.write("placement.json", {tree.name: dataclasses.asdict(tree) for tree in trainer.placement()})

    def attempt(action: Callable[[], None]) -> None:
        try:
            action()
        except RecordError as error:
            refused.append(error)

    error: BaseException | None = None  # that of the run: its caller may be handling another one
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        # Also if the last save of a run was broken off: its state is lost.
        broken = error is not None and not isinstance(error, GeneratorExit)
        if log.unfinished or (broken and log.status in ("finished", "stopped early")):
            log.status = "failed" if isinstance(error, Exception) else "interrupted"
        # Other processes may not fail with this one, and at the interpreter's exit saves do not end: no waiting then.
        failed = error is not None and not isinstance(error, TrainingError)
        alone = (failed and parallel.process_count() > 1) or not threading.main_thread().is_alive()
        with trainer.clock.span("checkpoint"):
            attempt(lambda: checkpoints.close(wait=not alone))
        # The rest is tried if the disk refused a part: what is small may find room.
        if refused:
            log.status = "failed"
        kept = () if alone else checkpoints.steps()
        session.ending = summarise(session)
        record.set_group(0, checkpoints=kept)
        summary = session.ending.as_json()
        attempt(lambda: record.write(status=log.status, summary=summary))
        attempt(lambda: record.write_compilations([(0, one) for one in trainer.programs.ledger]))
        # An error that ended the run is reported in place of the disk's; leaving the loop by `break` is none.
        if refused and (error is None or isinstance(error, GeneratorExit)):
            raise refused[0]


def summarise(session: Session) -> Summary:
    """Returns the summary of the run so far."""
    trainer, throughput = session.trainer, Throughput.of(session.trainer.rates)
    return Summary(
        status=session.log.status,
        step=session.log.step,
        metrics=session.log.final,
        throughput=throughput,
        examples_per_second=throughput and throughput.steps_per_second * trainer.experiment.config.batch_size,
        first_step_seconds={"total": sum(session.ready_seconds.values()), **session.ready_seconds},
        seconds=trainer.clock.seconds,
        peak_bytes=peak_memory_bytes(),
        compilations=Compilation.totals(trainer.programs.ledger),
        stalls=tuple(trainer.flight.stalls),
        compiler=tuple(given_up()),
    )


@contextlib.contextmanager
def observed(session: Session, writers: records.Writers) -> Iterator[None]:
    """Opens the writers for a run, connects them to the trainer, and sends the curves at the end."""
    trainer, path = session.trainer, None if session.trainer.record is None else session.trainer.record.path
    step = None if session.resumed is None else session.resumed["step"]
    config = config_json(trainer.experiment.config)
    trainer.writers = writers
    writers.open(records.WriterFacts(session.name, path, config, resumed=step))
    yield
    if trainer.logs[0].lines and writers.take_media:
        curves = draw_curves(trainer.logs[0].lines, str(path or session.name))
        writers.media("curves", curves, trainer.logs[0].step)
