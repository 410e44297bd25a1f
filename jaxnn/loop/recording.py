"""A session and its run directory: created or resumed, kept up to date, and closed whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxnn.loop.options import RunOptions
from jaxnn.loop.report import Summary
from jaxnn.loop.saving import restore_newest
from jaxnn.loop.session import Session, prepare_session
from jaxnn.loop.stopping import status_after
from jaxnn.observe import describe_devices, peak_memory_bytes, steady_throughput
from jaxnn.record import (
    check_vacant,
    config_from_json,
    config_json,
    create_run_dir,
    data_fingerprint,
    draw_curves,
    jax_flags,
    metrics_of,
    new_run_dir,
    open_record,
    read_run,
    rewind_metrics,
    script,
    text_fingerprint,
)
from jaxnn.types import ConfigError, Experiment, RecordError, Splits

# Options that shape what a run leaves behind: a resumed run takes them from the record unless told otherwise.
KEPT_OPTIONS = (
    "report_every",
    "eval_every",
    "eval_batch_size",
    "checkpoint_every",
    "keep_last",
    "keep_best",
    "monitor",
    "monitor_mode",
    "patience",
)


@contextlib.contextmanager
def open_session(experiment: Experiment[Any], options: RunOptions) -> Iterator[Session]:
    """A session ready to train, with its record open; the record is completed on the way out, come what may.

    Raises:
        ConfigError, DataError, RecordError: the run cannot start; nothing was written.
    """
    before = None
    if options.resume is not None:
        before = read_run(options.resume)
        options = _continued(experiment, options, before)
    config_json(experiment.config)
    if options.run_dir is not None:
        check_vacant(options.run_dir)
    with contextlib.ExitStack() as stack:
        session = prepare_session(experiment, options, stack, before["steps_per_call"] if before else None)
        if options.record:
            path = options.resume or create_run_dir(options.run_dir or new_run_dir(run_name(session)))
            session.record = stack.enter_context(open_record(path))
            facts = _facts(session) if before is None else _restore(session, before)
            # A run that is over is loaded, not run: its record stays as it is.
            if session.status == "running":
                stack.enter_context(_described(session, facts))
        yield session


def _continued(experiment: Experiment[Any], options: RunOptions, before: dict[str, Any]) -> RunOptions:
    """The options to go on with: the record's, where the caller leaves them at their defaults.

    Raises:
        ConfigError: the experiment is not the one of the record.
    """
    if not options.record:
        raise ConfigError("a resumed run goes on with its record: leave record at its default.")
    config = config_json(experiment.config)
    recorded = config_json(config_from_json(before["config"], experiment.config))
    for name, value in recorded.items():
        # More steps are a wish that can be met; anything else would be another experiment.
        if config[name] != value and name != "num_steps":
            raise ConfigError(
                f"the run in {options.resume} has {name} = {value!r}, this experiment {config[name]!r}: resume it "
                f"with experiment.replace({name}={value!r}), or start a new run."
            )
    kept = {name: before["options"][name] for name in KEPT_OPTIONS}
    return dataclasses.replace(options, **kept | options.explicit())


def _facts(session: Session) -> dict[str, Any]:
    """What ``run.json`` says from the start."""
    options = dataclasses.asdict(session.options)
    return {
        "name": run_name(session),
        "status": "running",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": config_json(session.experiment.config),
        "options": {name: options[name] for name in options if name not in ("run_dir", "resume")},
        "steps_per_call": session.choice.steps_per_call,
        "seconds_per_step_measured": session.choice.seconds_per_step,
        "data": session.splits.name,
        "fingerprint": {
            "program": text_fingerprint(session.programs.lowered_step()),
            "data": data_fingerprint(session.splits),
        },
        "precision": session.programs.product_dtypes,
        "implementations": session.programs.implementations,
        "allocator": session.allocation._asdict(),
        "devices": describe_devices(),
        "jax_flags": jax_flags(),
        **script(),
    }


def _restore(session: Session, before: dict[str, Any]) -> dict[str, Any]:
    """Puts the session where the newest checkpoint left it; returns the new content of ``run.json``.

    Raises:
        RecordError: the data are not those of the record, there is no checkpoint to go on from, it cannot be read, or
            it is past ``num_steps``; nothing was written.
    """
    assert session.record is not None
    path = session.record.path
    facts = _facts(session)
    if facts["fingerprint"]["data"] != before["fingerprint"]["data"]:
        raise RecordError(
            f"the data are not those that the run in {path} was trained on: restore the data, or start a new run."
        )
    step = restore_newest(session)
    if step is None and before["options"]["checkpoint_every"] == 0:
        raise RecordError(f"the run in {path} kept no checkpoints, so there is nothing to go on from: start a new run.")
    if (step or 0) > session.plan.num_steps:
        raise RecordError(
            f"the run in {path} has done {step} steps already, more than num_steps = {session.plan.num_steps}: resume "
            "it with more, or start a new run."
        )
    session.lines = rewind_metrics(path, step or 0)
    session.status = status_after(session, step or 0)
    session.resumed = {"step": step or 0, "time": facts["started"], "changed": _changes(before, facts)}
    told = {name: before[name] for name in ("command", "git", "devices", "jax_flags")}
    kept = {name: before[name] for name in ("started", "seconds_per_step_measured")}
    return {**facts, **kept, "resumed": [*before.get("resumed", []), session.resumed | {"before": told}]}


def _changes(before: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """What differs from the record and may change numbers: the program, versions, JAX's flags."""
    changes = []
    if facts["fingerprint"]["program"] != before["fingerprint"]["program"]:
        changes.append("the program of a step")
    pairs = (before["devices"]["versions"], facts["devices"]["versions"]), (before["jax_flags"], facts["jax_flags"])
    for old, new in pairs:
        changes += [f"{name} {old.get(name)} → {new[name]}" for name in new if new[name] != old.get(name)]
    return changes


@contextlib.contextmanager
def _described(session: Session, facts: dict[str, Any]) -> Iterator[None]:
    record = session.record
    assert record is not None
    record.describe(facts)
    record.write("placement.json", session.placement().as_json())
    try:
        yield
    finally:
        if session.status == "running":
            session.status = _status_of(sys.exception(), session)
        try:
            if session.checkpoints is not None:
                with session.clock.span("checkpoint"):
                    session.checkpoints.close()
        finally:
            summary = summarise(session).as_json()
            record.describe({**facts, "status": session.status, "summary": summary})
            record.write("compiles.json", session.programs.ledger.as_json())
            if session.lines:
                figure = draw_curves(session.lines, f"{facts['name']} · {facts['data']}")
                figure.savefig(record.path / "curves.png", dpi=120)


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
    metrics: dict[str, float] = {}
    for line in session.lines:
        metrics |= metrics_of(line)
    seconds = {name: value for name, value in session.clock.seconds.items() if name != "caller"}
    totals = session.programs.ledger.totals()
    return Summary(
        status=session.status,
        step=session.lines[-1]["step"] if session.lines else 0,
        metrics=metrics,
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
