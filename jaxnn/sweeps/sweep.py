"""Many runs of an experiment as one program: ``jn.sweep(experiment, jn.grid(learning_rate=[…], seed=range(8)))``."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxnn.loop.allocating import keep_from_the_start
from jaxnn.loop.options import with_changes
from jaxnn.loop.progress import Display, open_display, say_rows
from jaxnn.loop.report import format_metrics, format_rate, format_split
from jaxnn.loop.signals import Interruption, interruptible
from jaxnn.record import Record, check_vacant, create_run_dir, is_sweep, metrics_of, new_run_dir, open_record
from jaxnn.sweeps.halving import Halving
from jaxnn.sweeps.introduction import group_rows, introduction
from jaxnn.sweeps.leader import Leader
from jaxnn.sweeps.logs import RUNNING
from jaxnn.sweeps.options import SweepOptions, parse_shard
from jaxnn.sweeps.outcomes import Axis, Member
from jaxnn.sweeps.plan import SweepPlan, plan_sweep
from jaxnn.sweeps.points import Points
from jaxnn.sweeps.report import count_statuses
from jaxnn.sweeps.results import Sweep
from jaxnn.sweeps.resuming import check_same, continued_options, read_before, recall
from jaxnn.sweeps.running import Running, let_go, opened_group, train_sweep
from jaxnn.sweeps.store import Store, axes, member_lines, sweep_facts
from jaxnn.types import ConfigError, Experiment


def sweep(
    experiment: Experiment[Any], points: Points | Halving, options: SweepOptions | None = None, **changes: Any
) -> Sweep:
    """Trains a member for every point: those that differ in floats and the seed as one program.

    A member computes what its solo run does, to rounding. SIGINT and SIGTERM end the sweep after the window under way,
    saved and ready to resume.

    Args:
        experiment: what is run; its config holds the fields that ``points`` do not set.
        points: what `grid`, `zipped`, `random` make, a sum of these, or a `halving` of it.
        options: how to run it.
        **changes: single sweep options, such as ``width=16`` or ``resume="runs/mnist/sweep-…"``.

    Raises:
        ConfigError, DataError, RecordError: the sweep cannot start; nothing was written. A point that cannot be run is
            no such error: its member has the status ``failed`` and says why.
    """
    options = _located(with_changes(options or SweepOptions(), changes))
    with interruptible() as interruption, contextlib.ExitStack() as stack:
        keep_from_the_start(options.allocator, stack)
        before = None if options.resume is None else read_before(options.resume)
        if before is not None:
            options = continued_options(options, before)
        elif options.run_dir is not None:
            check_vacant(options.run_dir)
        plan = plan_sweep(experiment, points, options)
        if before is not None:
            check_same(plan, before)
            recall(plan, before)
        lines = "none" if options.progress == "none" else "plain"
        words = stack.enter_context(open_display(lines, plan.num_member_steps))
        say_rows(words, introduction(plan))
        if options.plan_only:
            return _plan_only(plan, words)
        return _run(plan, before, interruption, words)


def _located(options: SweepOptions) -> SweepOptions:
    """The options of a shard with a directory of its own in that of the sweep; it is resumed if it is there.

    Raises:
        ConfigError: no directory is given that the shards could share.
    """
    if options.shard is None or options.plan_only:
        return options
    shared = options.resume or options.run_dir
    if shared is None:
        raise ConfigError("the shards of a sweep share a directory: give all of them the same run_dir.")
    part, whole = parse_shard(options.shard)
    own = shared / "shards" / f"{part}-of-{whole}"
    if options.resume is not None and is_sweep(own):
        return dataclasses.replace(options, resume=own)
    return dataclasses.replace(options, run_dir=own, resume=None)


def _plan_only(plan: SweepPlan, words: Display) -> Sweep:
    """Says how the sweep would be run."""
    facts: dict[str, Any] = {}
    for group in plan.groups:
        run = opened_group(plan, group)
        say_rows(words, group_rows(run, len(plan.groups)))
        facts = sweep_facts(plan, run)
        del plan.open[group.number]
    return _results(plan, facts, None)


def _run(plan: SweepPlan, before: dict[str, Any] | None, interruption: Interruption, words: Display) -> Sweep:
    # Before anything is written: what is wrong with the options is found when a group is opened.
    facts = before or sweep_facts(plan, opened_group(plan, plan.groups[0]))
    with _open_store(plan, facts) as store:
        leader = Leader(facts["monitor"], higher_is_better=facts["higher_is_better"])
        running = Running(plan, store, interruption, words, leader)
        with _described(running), open_display(plan.options.progress, plan.num_member_steps) as display:
            for report in train_sweep(running):
                display.report(report)
        results = _results(plan, store.facts, store.record)
        if store.record is not None:
            results.plot().savefig(store.record.path / "sweep.png", dpi=120)
    say_rows(words, _closing(results))
    return results


@contextlib.contextmanager
def _open_store(plan: SweepPlan, facts: dict[str, Any]) -> Iterator[Store]:
    options = plan.options
    if not options.record:
        yield Store(None, facts)
        return
    path = options.resume or create_run_dir(options.run_dir or _new_directory(facts["name"]))
    with open_record(path) as record:
        yield Store(record, facts)


def _new_directory(name: str) -> Path:
    path = new_run_dir(name)
    return path.with_name(f"sweep-{path.name}")


@contextlib.contextmanager
def _described(running: Running) -> Iterator[None]:
    """Keeps ``sweep.json`` true: running, then how it ended, come what may."""
    plan, store = running.plan, running.store
    store.describe(status="running", command=store.facts["command"])
    store.tell_members(plan)
    started = time.perf_counter()
    try:
        yield
    finally:
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
        store.describe(status=status, summary=_summary(running, time.perf_counter() - started))


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


def _closing(results: Sweep) -> list[tuple[str, str]]:
    """Rows of what and value for the end."""
    summary = results.summary
    told = ", ".join(f"{count} {status}" for status, count in summary["members"].items())
    rows = [(results.status, told)]
    if any(member.best for member in results.members):
        best = results.best(at="best")
        point = ", ".join(f"{name} {value}" for name, value in best.point.items())
        rows.append(("best", f"member {best.index} ({point}): {format_metrics(metrics_of(best.best))}"))
    if summary["member_steps_per_second"]:
        rows.append(("throughput", f"{format_rate(summary['member_steps_per_second'])} member-steps/s in all"))
    rows.append(("time", format_split(summary["spent"])))
    if results.dir is not None:
        rows.append(("record", str(results.dir)))
        rows.append(("picture", str(results.dir / "sweep.png")))
        if results.status == "interrupted":
            rows.append(("to go on", f"--resume {results.dir}"))
    return rows
