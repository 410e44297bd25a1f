"""The local engine: the members of a sweep, or those of its members that are chosen, trained in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxnn.loop import (
    Display,
    Interruption,
    Startup,
    announcing,
    format_metrics,
    format_rate,
    format_split,
    interruptible,
    keep_from_the_start,
    open_display,
    say_rows,
    starting,
    watching,
)
from jaxnn.parallel import computing_on
from jaxnn.record import Record, check_vacant, create_run_dir, metrics_of, new_run_dir, open_record
from jaxnn.sweeps.engine.checks import check_devices
from jaxnn.sweeps.engine.group_run import GroupRun
from jaxnn.sweeps.engine.introduction import group_rows, introduction
from jaxnn.sweeps.engine.leader import Leader
from jaxnn.sweeps.engine.logs import RUNNING
from jaxnn.sweeps.engine.plan import SweepPlan, plan_sweep
from jaxnn.sweeps.engine.report import count_statuses
from jaxnn.sweeps.engine.resuming import check_same, continued_options, read_before, recall
from jaxnn.sweeps.engine.running import Running, is_over, let_go, opened_group, train_sweep
from jaxnn.sweeps.engine.shards import check_siblings
from jaxnn.sweeps.engine.store import Store, axes, member_lines, origin_of, sweep_facts
from jaxnn.sweeps.options import SweepOptions
from jaxnn.sweeps.results import Axis, Member, Sweep
from jaxnn.sweeps.search import Halving, Points, reason
from jaxnn.types import DataError, Experiment, RecordError, TrainingError


def sweep_here(
    experiment: Experiment[Any],
    points: Points | Halving,
    options: SweepOptions,
    numbers: Collection[int] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Sweep:
    """Trains members in this process; SIGINT and SIGTERM end it after the window under way, ready to resume.

    Args:
        experiment: what is run.
        points: those of all members.
        options: how to run them; a shard's directory is already its own.
        numbers: the members to train; default: those of the options' shard, or all. A resumed sweep knows its own.
        origin: where the record says it comes from; default: this process.

    Raises:
        ConfigError, DataError, RecordError: the sweep cannot start; nothing was written.
    """
    with interruptible() as interruption, computing_on(options.device), contextlib.ExitStack() as stack:
        keep_from_the_start(options.allocator, stack)
        before = None if options.resume is None else read_before(options.resume)
        if before is not None:
            options, numbers = continued_options(options, before), before["numbers"]
        elif options.run_dir is not None:
            check_vacant(options.run_dir)
        check_devices(experiment, points, options)
        with starting(options.progress) as startup:
            startup.device()
            plan, damaged = plan_sweep(experiment, points, options, numbers, startup.clock), []
            if before is not None and options.resume is not None:
                check_same(plan, before, options.resume)
                damaged = recall(plan, before)
            check_siblings(plan)
            startup.rows([*introduction(plan), *(("damaged", told) for told in damaged)])
            if options.plan_only:
                return _plan_only(plan, startup.display)
            if before is not None and options.resume is not None and _all_over(plan, before):
                # A sweep that is over is loaded, not run: its record stays as it is.
                with open_record(options.resume) as record:
                    results = _results(plan, before, record)
                say_rows(startup.display, _closing(results))
                return results
            # Before anything is written: what is wrong with the options is found when a group is opened.
            facts = before or sweep_facts(plan, _first_group(plan), origin or origin_of(experiment))
        # From here on there is something to save, and its record to complete.
        with interruption.finishing("the current window"):
            return _run(plan, facts, interruption, startup)


def _all_over(plan: SweepPlan, before: Mapping[str, Any]) -> bool:
    return before["status"] == "finished" and all(is_over(plan, group) for group in plan.groups)


def _plan_only(plan: SweepPlan, words: Display) -> Sweep:
    """Says how the sweep would be run."""
    facts: dict[str, Any] = {}
    for group in plan.groups:
        run = opened_group(plan, group)
        say_rows(words, group_rows(run, len(plan.groups)))
        facts = {**sweep_facts(plan, run, origin_of(plan.experiment)), "status": "planned"}
        del plan.open[group.number]
    return _results(plan, facts, None)


def _run(
    plan: SweepPlan,
    facts: dict[str, Any],
    interruption: Interruption,
    startup: Startup,
) -> Sweep:
    with _open_store(plan, facts) as store:
        leader = Leader(facts["monitor"], higher_is_better=facts["higher_is_better"])
        running = Running(plan, store, interruption, startup.display, leader)
        for group in plan.groups:
            running.see(group)
        progress, stall_after = plan.options.progress, plan.options.stall_after
        with watching(plan.clock, running.flight, stall_after, aloud=progress != "none"), announcing(startup):
            with _described(running), open_display(progress, plan.num_left) as display:
                for report in train_sweep(running):
                    display.report(report)
        results = _results(plan, store.facts, store.record)
        # The parts of a sweep that one process hands out are drawn together.
        if store.record is not None and plan.numbers is None and results.monitor in results.metric_names():
            store.record.draw("sweep.png", results.plot())
    say_rows(startup.display, _closing(results))
    return results


def _first_group(plan: SweepPlan) -> GroupRun:
    """The first group that can be opened; those before it will fail when their turn comes, and be noted.

    Raises:
        ConfigError: the options are wrong.
        TrainingError: none can be.
    """
    for group in plan.groups:
        try:
            return opened_group(plan, group)
        except (DataError, TrainingError, jax.errors.JaxRuntimeError, MemoryError) as error:
            failure = error
    raise TrainingError(f"no group of the sweep can be trained; the last, {reason(failure)}") from failure


@contextlib.contextmanager
def _open_store(plan: SweepPlan, facts: dict[str, Any]) -> Iterator[Store]:
    options = plan.options
    if not options.record:
        yield Store(None, facts)
        return
    path = options.resume or create_run_dir(options.run_dir or new_sweep_dir(facts["name"]))
    with open_record(path) as record:
        yield Store(record, facts)


def new_sweep_dir(name: str) -> Path:
    """``runs/<name>/sweep-<time>-<four hex digits>``: a path nobody has yet, not created."""
    path = new_run_dir(name)
    return path.with_name(f"sweep-{path.name}")


@contextlib.contextmanager
def _described(running: Running) -> Iterator[None]:
    """Keeps ``sweep.json`` true: running, then how it ended, come what may."""
    plan, store = running.plan, running.store
    store.describe(status="running")
    store.tell_members(plan)
    started = time.perf_counter()
    try:
        yield
    finally:
        # What ended the sweep is what its user hears of, whatever the disk refuses after that.
        ended = isinstance(sys.exception(), Exception)
        with contextlib.suppress(*([RecordError] if ended else [])):
            _complete(running, time.perf_counter() - started)


def _complete(running: Running, seconds: float) -> None:
    """Lets go of what is open, and writes what became of it.

    Raises:
        RecordError: the disk refused.
    """
    plan, store = running.plan, running.store
    for run in list(plan.open.values()):
        let_go(running, run)
    open_ends = any(log.goes_on for log in plan.logs.values())
    for log in plan.logs.values():
        if log.status == RUNNING:
            log.status = "interrupted"
    store.tell_members(plan)
    if store.record is not None:
        store.record.write("compiles.json", running.compilations)
    status = "interrupted" if open_ends else "finished"
    store.describe(status=status, summary=_summary(running, seconds))


def _summary(running: Running, seconds: float) -> dict[str, Any]:
    spent = running.plan.clock.seconds
    training = spent.get("train", 0.0)
    return {
        "seconds": seconds,
        "spent": spent,
        "member_steps": running.member_steps,
        "member_steps_per_second": running.member_steps / training if training else None,
        "num_compilations": len(running.compilations),
        "members": count_statuses(running.plan.logs.values()),
        "stalls": [dataclasses.asdict(stall) for stall in running.flight.stalls],
    }


def _results(plan: SweepPlan, facts: Mapping[str, Any], record: Record | None) -> Sweep:
    """The sweep as it stands."""
    path = None if record is None else record.path
    members = tuple(
        Member(
            index=line["member"],
            point=line["point"],
            config=line["config"],
            status=line["status"],
            step=line["step"],
            final=line["final"],
            best=line["best"],
            error=line["error"],
            dir=path / line["dir"] if path is not None and line["dir"] else None,
        )
        for line in member_lines(plan, facts)
    )
    return Sweep(
        members=members,
        axes=tuple(Axis(**axis) for axis in axes(plan.points)),
        lines=tuple({"member": index, **line} for index, log in plan.logs.items() for line in log.lines),
        monitor=facts["monitor"],
        higher_is_better=facts["higher_is_better"],
        status=facts["status"],
        dir=path,
        summary=facts["summary"] or {},
        experiment=plan.experiment,
    )


def draw(results: Sweep) -> None:
    """Leaves a picture in the sweep's directory, once there is something to draw."""
    if results.dir is not None and results.monitor in results.metric_names():
        results.plot().savefig(results.dir / "sweep.png", dpi=120)


def _closing(results: Sweep) -> list[tuple[str, str]]:
    """Rows of what and value for the end."""
    summary = results.summary
    told = ", ".join(f"{count} {status}" for status, count in summary["members"].items())
    rows = [(results.status, told)]
    if any(member.best for member in results.members if member not in results.lost):
        best = results.best(at="best")
        point = ", ".join(f"{name} {value}" for name, value in best.point.items())
        rows.append(("best evaluation", f"member {best.index} ({point}): {format_metrics(metrics_of(best.best))}"))
    if summary["member_steps_per_second"]:
        rows.append(("throughput", f"{format_rate(summary['member_steps_per_second'])} member-steps/s in all"))
    rows.append(("time", format_split(summary["spent"])))
    if results.dir is not None:
        rows.append(("record", str(results.dir)))
        if (results.dir / "sweep.png").is_file():
            rows.append(("picture", str(results.dir / "sweep.png")))
        if results.status == "interrupted":
            rows.append(("to go on", f"--resume {results.dir}"))
    return rows
