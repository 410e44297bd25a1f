"""What an earlier process left of a sweep: who is over, and where the others go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxnn.loop import recorded_layout
from jaxnn.record import (
    RUN_FILE,
    SHARDS,
    SWEEP_FILE,
    changed_parts,
    check_metrics,
    config_from_json,
    config_json,
    is_sweep,
    jsonable,
    read_facts,
    read_metrics,
    rewind_metrics,
)
from jaxnn.sweeps.engine.group_run import GroupRun
from jaxnn.sweeps.engine.logs import Log
from jaxnn.sweeps.engine.plan import SweepPlan
from jaxnn.sweeps.engine.probing import Trial
from jaxnn.sweeps.engine.store import Store, sweep_plan_facts
from jaxnn.sweeps.engine.training import status_of
from jaxnn.sweeps.engine.width import WidthPlan
from jaxnn.sweeps.options import SweepOptions
from jaxnn.sweeps.results import ENDED, open_sweep, swept_value
from jaxnn.sweeps.search import Halving, Points
from jaxnn.types import ConfigError, Experiment, RecordError

# Options that shape what a sweep leaves behind: a resumed one takes them from the record unless told otherwise.
KEPT_OPTIONS = (
    "order",
    "shard",
    "member_runs",
    "width",
    "steps_per_call",
    "report_every",
    "eval_every",
    "eval_batch_size",
    "checkpoint_every",
    "monitor",
    "monitor_mode",
    "patience",
)


def read_before(path: Path) -> dict[str, Any]:
    """What ``sweep.json`` in ``path`` says.

    Raises:
        RecordError: there is no sweep to go on with.
    """
    if (path / RUN_FILE).is_file():
        raise RecordError(f"{path} holds a run, not a sweep: resume it with jn.fit, or name the directory of a sweep.")
    if is_sweep(path) and not (path / SWEEP_FILE).is_file():
        raise RecordError(f"{path} holds the shards of a sweep: resume each of them with --resume {path} --shard I/N.")
    if not is_sweep(path):
        raise RecordError(f"{path} holds no sweep (no {SWEEP_FILE} in it): `jaxnn runs` lists those there are.")
    needed = ("config", "axes", "points", "halving", "numbers", "options", "groups", "started")
    facts = read_facts(path / SWEEP_FILE, needed)
    swept, count = {axis["name"] for axis in facts["axes"]}, len(facts["points"])
    if any(set(point) - swept for point in facts["points"]) or any(n >= count for n in facts["numbers"] or ()):
        raise RecordError(f"{path / SWEEP_FILE} has points that do not fit its axes or numbers: the record is damaged.")
    if lacking := {*KEPT_OPTIONS, "engine", "devices", "strategy", "mesh"} - facts["options"].keys():
        raise RecordError(f"{path / SWEEP_FILE} lacks the option {min(lacking)!r}: the record is damaged.")
    return facts


def recorded_points(path: Path, experiment: Experiment[Any]) -> tuple[Experiment[Any], Points | Halving]:
    """The experiment and the points that the sweep in ``path``, or any shard of it, was started with.

    Raises:
        RecordError, ConfigError: there is none, or it is one of another experiment.
    """
    shards = sorted(path.glob(SHARDS))
    before = read_before(path if (path / SWEEP_FILE).is_file() or not shards else shards[0].parent)
    config = config_from_json(before["config"], experiment.config)
    scales = {axis["name"]: axis["scale"] for axis in before["axes"]}
    values = {axis["name"]: axis["values"] for axis in before["axes"]}
    told = ({name: swept_value(value, values[name]) for name, value in point.items()} for point in before["points"])
    points = Points(tuple(told), scales)
    if before["halving"] is not None:
        design = before["halving"]
        return dataclasses.replace(experiment, config=config), Halving(points, design["eta"], design["min_fraction"])
    return dataclasses.replace(experiment, config=config), points


def continued_options(options: SweepOptions, before: Mapping[str, Any]) -> SweepOptions:
    """The options to go on with: the record's, where the caller leaves them at their defaults."""
    if not options.record:
        raise ConfigError("a resumed sweep goes on with its record: leave record at its default.")
    kept = {name: before["options"][name] for name in KEPT_OPTIONS}
    explicit = options.explicit()
    for name in ("order", "shard"):
        if explicit.get(name, kept[name]) != kept[name]:
            raise ConfigError(
                f"the sweep in {options.resume} has {name}={kept[name]!r}, which decides what is computed: leave "
                f"{name} at its default, or start a new sweep."
            )
    if before["options"]["engine"] != options.engine:
        raise ConfigError(
            f"the sweep in {options.resume} was run with engine={before['options']['engine']!r}: go on with that."
        )
    # Ray's workers have a device each; a sweep that is over is loaded, wherever that is.
    if options.engine == "local" and before["status"] != "finished":
        kept |= recorded_layout(before["options"], explicit, options.device, f"the sweep in {options.resume}")
    return dataclasses.replace(options, **kept | explicit)


def check_same(plan: SweepPlan, before: Mapping[str, Any], where: Path) -> None:
    """Confirms that ``plan`` is the sweep of the record, or of another shard of it.

    Args:
        plan: what is to be run.
        before: what the record's ``sweep.json`` says.
        where: the sweep's directory, for messages.

    Raises:
        ConfigError: another config, other points or another halving.
    """
    now = sweep_plan_facts(plan)
    config = jsonable(config_json(plan.experiment.config))
    for name, value in before["config"].items():
        if config.get(name) != value:
            raise ConfigError(
                f"the sweep in {where} has {name} = {value!r}, this experiment {config.get(name)!r}: resume it with "
                f"experiment.replace({name}={value!r}), or start a new sweep."
            )
    for name in ("points", "halving"):
        if jsonable(now[name]) != before[name]:
            raise ConfigError(
                f"the {name} of the sweep in {where} are not these: resume it with those it was started with, or start "
                "a new sweep."
            )


def recall(plan: SweepPlan, before: dict[str, Any]) -> list[str]:
    """Puts into ``plan`` what became of the members that are over, and how wide their groups were.

    Returns:
        What to tell the user of damage to what they reported, which is noted in ``before``.

    Raises:
        ConfigError: the experiment's code, or its data, make other groups of them than they did.
    """
    assert plan.options.resume is not None
    if [[m.number for m in group.members] for group in plan.groups] != [g["members"] for g in before["groups"]]:
        raise ConfigError(
            f"the members of the sweep in {plan.options.resume} form other groups than when it was started: undo what "
            "was changed in the experiment since, or start a new sweep."
        )
    sweep = open_sweep(plan.options.resume)
    lines = _lines_by_member(plan.options.resume)
    for member in sweep.members:
        # Those that failed are tried again, if they can be built.
        if member.status in ENDED and member.status != "failed" and member.index in plan.logs:
            told = str(member.dir.relative_to(plan.options.resume)) if member.dir else None
            plan.logs[member.index] = Log(member.status, lines.get(member.index, []), member.error, told)
    now = plan.options
    planned_anew = any(before["options"][name] != getattr(now, name) for name in ("width", "steps_per_call"))
    for group, facts in zip(plan.groups, before["groups"] if not planned_anew else [], strict=not planned_anew):
        if (width := facts.get("width")) is not None:
            try:
                trials = tuple(Trial(**trial) for trial in width["trials"])
                plan.widths[group.number] = WidthPlan(**{**width, "trials": trials})
            except TypeError as error:
                raise RecordError(f"{plan.options.resume / SWEEP_FILE} has a width that is none ({error}).") from error
    over = [(number, facts) for number, facts in enumerate(before["groups"], 1) if "log" in facts]
    checks = (check_metrics(plan.options.resume, f["log"], f"group {n}", f["members"]) for n, f in over)
    if damaged := [told for told in checks if told is not None]:
        before["damaged"] = [*before.get("damaged", []), *damaged]
    return damaged


def changes_of(run: GroupRun, store: Store) -> list[str]:
    """What to tell the user of a group whose programs are others than when it was begun; ``sweep.json`` keeps it.

    Raises:
        RecordError: its data are others; nothing of it was changed.
    """
    facts = store.facts["groups"][run.group.number]
    before = facts.get("fingerprint")
    if before is None:  # it was not begun
        return []
    if before["data"] != run.fingerprint["data"]:
        raise RecordError(
            f"the data are not those that the sweep in {run.options.resume} was begun with: restore the data, or start "
            "a new sweep."
        )
    changed = changed_parts(before, run.fingerprint)
    facts["changed"] = [*facts.get("changed", []), *changed]
    return [f"goes on, not bit for bit, since these changed: {'; '.join(changed)}"] if changed else []


def restore_group(run: GroupRun, store: Store) -> list[str]:
    """Puts the members of a group where its newest whole checkpoint left them, and their reports with them.

    Returns:
        What to tell the user of damaged checkpoints and metrics.
    """
    assert store.record is not None
    run.host, noted, damaged = store.restore(run)
    before = _lines_by_member(store.record.path)
    ends = {}
    for row, member in enumerate(run.group.members):
        if run.host is None:
            # Nothing was saved: whatever it reported will be reported again.
            run.logs[row].status, ends[member.number] = "waiting", 0
            continue
        step, bad_step = int(run.host.states.step[row]), int(run.host.bad_step[row])
        if bad_step >= 0:
            # Its state is that before the call that went wrong; its last report tells of that.
            reported = (line["step"] for line in before.get(member.number, []))
            step = min((reported_at for reported_at in reported if reported_at >= bad_step), default=step)
        ends[member.number] = step
    where = f"group {run.group.number + 1}" if run.host is None else f"the checkpoint of group {run.group.number + 1}"
    path, numbers = store.record.path, list(ends)
    lines, digest, told = rewind_metrics(path, lambda line: ends[line["member"]], noted, where, numbers)
    store.reported[run.group.number] = digest
    kept = _by_member(lines)
    for row, (member, log) in enumerate(zip(run.group.members, run.logs, strict=True)):
        log.lines = kept.get(member.number, [])
        if run.host is not None and log.status != "pruned":
            log.status = status_of(run, row, diverged=int(run.host.bad_step[row]) >= 0)
    damaged += [told] if told is not None else []
    store.tell_damage(damaged)
    return damaged


def _lines_by_member(path: Path) -> dict[int, list[dict[str, Any]]]:
    return _by_member(read_metrics(path))


def _by_member(reported: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    lines: dict[int, list[dict[str, Any]]] = {}
    for line in reported:
        lines.setdefault(line["member"], []).append({name: value for name, value in line.items() if name != "member"})
    return lines
