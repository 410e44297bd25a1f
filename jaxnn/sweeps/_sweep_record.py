"""The directory of a sweep: what it holds, how a sweep is resumed from it, and the directories of its shards."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxnn import record
from jaxnn._disk import write_bytes
from jaxnn._fields import with_changes
from jaxnn._json import (
    check_same_config,
    config_from_json,
    config_json,
    json_line,
    jsonable,
    reports_by_member,
    with_tuples,
)
from jaxnn._provenance import file_name_of, script
from jaxnn.engine import MemberLog, PopulationRecord, Trainer, VmapPlan
from jaxnn.run import continued_options
from jaxnn.search import Points, Searcher, rebuilt
from jaxnn.sweeps import _stored
from jaxnn.sweeps._members import Member, show_point
from jaxnn.sweeps._plan import SweepOptions, SweepPlan, parse_shard
from jaxnn.sweeps._search_events import FILE, SavedSearch, Search, read_events, recorded_events
from jaxnn.sweeps._sweep import Sweep
from jaxnn.types import ConfigError, Experiment, RecordError

# What reading a searcher's description may raise.
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclasses.dataclass
class SweepRecord(PopulationRecord):
    """The open directory of a sweep, or None, and the content of ``record.json``; with ``members.jsonl``."""

    _members_written: bytes = b""

    def write_members(self, plan: SweepPlan) -> None:
        """Replaces ``members.jsonl``, unless it has this content already."""
        if self.directory is None:
            return
        lines = []
        for member in self._members(plan):
            facts = {name: value for name, value in vars(member).items() if name != "index"}
            lines.append(json_line({"member": member.index, **facts}))
        if (content := "".join(lines).encode()) != self._members_written:
            write_bytes(self.directory.path / record.MEMBERS_FILE, content)
            self._members_written = content

    def _members(self, plan: SweepPlan) -> Iterator[Member]:
        for planned in plan.members:
            config = config_json(planned.experiment.config)
            if planned.status == "failed":  # its experiment may be without its point
                config |= {name: value for name, value in planned.point.items() if name in config}
            yield Member(
                index=planned.number,
                point=dict(planned.point),
                config=config,
                status=planned.status,
                step=planned.step,
                final=planned.final,
                best=_best_of(planned, self.facts["monitored"], higher_is_better=self.facts["higher_is_better"]),
                error=planned.error if planned.status == "failed" else None,
            )

    def results(self, plan: SweepPlan) -> Sweep:
        """The sweep as it is now."""
        return Sweep(
            members=tuple(self._members(plan)),
            axes=plan.points.axes,
            lines=tuple({"member": member.number, **line} for member in plan.members for line in member.lines),
            monitor=self.facts["monitored"],
            higher_is_better=self.facts["higher_is_better"],
            directions=self.facts["directions"],
            status=self.facts["status"],
            dir=None if self.directory is None else self.directory.path,
            summary=self.facts["summary"] or {},
            experiment=plan.experiment,
            name=self.facts["options"].get("name"),
        )

    def open(self, number: int, trainer: Trainer) -> list[str]:
        """Opens a group and writes what is known of it; returns notes on changes and damage."""
        if self.directory is None:
            return []
        changed, damaged = self.open_group(number, trainer, trainer.facts(), f"group {number + 1}")
        self.write()
        notes = [f"continues, not bit for bit, since these changed: {'; '.join(changed)}"] if changed else []
        return notes + damaged


def new_sweep_dir(name: str) -> Path:
    """``runs/<name>/sweep-<time>-<four hex digits>``: an unused path, not created."""
    path = record.Record.unused_path(name)
    return path.with_name(f"sweep-{path.name}")


def origin_of(experiment: Experiment[Any]) -> dict[str, Any]:
    """The ``script`` of a process, its command and git state, and its ``name``, which is None in a notebook."""
    return {"script": script(), "name": file_name_of(experiment)}


def new_record(plan: SweepPlan, first: Trainer, origin: Mapping[str, Any]) -> SweepRecord:
    """The record, without its directory, of a sweep that starts; ``first`` trains the first group."""
    name = plan.options.name or origin["name"] or first.splits.name
    groups = [
        {"static": dict(group.static), "traced": group.traced, "members": [m.number for m in group.members]}
        for group in plan.groups
    ]
    axes: Any = {"axes": [vars(axis) for axis in plan.points.axes], "unread": list(plan.unread)}
    return SweepRecord.start(
        plan.experiment, plan.options, first, groups, name, origin["script"], **axes, **design_facts(plan)
    )


def design_facts(plan: SweepPlan) -> dict[str, Any]:
    """What identifies a sweep besides its config; the searcher itself is described in ``search.jsonl``."""
    search = plan.search and {"name": plan.search.searcher.name}
    return {"points": [dict(point) for point in plan.points], "search": search}


def _best_of(log: MemberLog, monitored: str, *, higher_is_better: bool) -> dict[str, float]:
    """The evaluation of a member that was best by the monitored metric, and its ``step``; empty before the first."""
    lines = [line for line in log.lines if monitored in line]
    since = log.evaluations_since_best(monitored, higher_is_better=higher_is_better)
    best, split = lines[: len(lines) - since][-1:], monitored.partition("_")[0]
    return {name: value for line in best for name, value in line.items() if name == "step" or name.startswith(split)}


def read_before(path: Path) -> dict[str, Any]:
    """The content of ``record.json`` of the sweep in ``path``."""
    reader = record.RecordReader(path)
    if reader.parts() != [reader]:
        of_search = (path / FILE).exists()
        how = (
            f"it with --resume {path} --executor ray" if of_search else f"each of them with --resume {path} --shard I/N"
        )
        raise RecordError(f"{path} holds the shards of a sweep: resume {how}.")
    facts = {"search": None, **reader.facts}
    swept = {axis["name"] for axis in facts["axes"]}
    if any(set(point) - swept for point in facts["points"]):
        raise RecordError(f"{path / record.RECORD_FILE} has points that do not fit its axes: the record is damaged.")
    return facts


def recorded_points(path: Path, experiment: Experiment[Any]) -> tuple[Experiment[Any], Points | Searcher]:
    """The experiment and the points or the searcher that the sweep in ``path`` was started with, or any shard of it."""
    before = read_before(record.RecordReader(path).parts()[0].path)
    config = config_from_json(before["config"], experiment.config)
    experiment = dataclasses.replace(experiment, config=config)
    if before["search"] is not None:
        described, _ = read_events(path)
        try:
            return experiment, rebuilt(with_tuples(described))
        except ConfigError:
            raise
        except DAMAGE as error:
            raise RecordError(f"{path / FILE} describes no searcher ({error}): the record is damaged.") from error
    made = tuple(_stored.read_point(point, before) for point in before["points"])
    return experiment, Points(made, {axis["name"]: axis["scale"] for axis in before["axes"]})


def search_stores(path: Path, facts: Mapping[str, Any], keep_last: int = 2) -> dict[str, record.Checkpoints]:
    """The checkpoints of each group of a search, by its number."""
    numbers = range(len(facts["groups"]))
    return {f"{one}": record.Checkpoints(record.Record.states(path, facts, one), keep_last, 0) for one in numbers}


def saved_search(path: Path | None, before: Mapping[str, Any] | None, searcher: Any) -> SavedSearch:
    """What the search in ``path`` is resumed from; ConfigError if its searcher was another one."""
    if path is None or before is None or before["search"] is None or not isinstance(searcher, Searcher | Search):
        return SavedSearch()
    # The events of a search that several processes share are not this one's.
    events = recorded_events(path, Search(searcher)) if isinstance(searcher, Searcher) else []
    if before["status"] == "finished":
        return SavedSearch(events)
    step, about, damaged = record.Checkpoints.newest_of_all(search_stores(path, before))
    count = (about.get("search") or {"events": 0})["events"]
    if len(events) < count:
        raise RecordError(f"{path / FILE} lacks events of the newest checkpoint: restore the file from a copy.")
    return SavedSearch(events[:count], step, about, damaged)


def options_of_record(options: SweepOptions, before: Mapping[str, Any] | None) -> SweepOptions:
    """The ``options``, with those recorded ``before`` where none are given: of a resumed sweep.

    A new shard has the options of another shard of its sweep, if one was started. ConfigError if one that is given and
    differs decides results.
    """
    fixed = {"shard", *SweepOptions.marked("decides")}
    if before is not None:
        assert options.resume is not None
        # Members that failed are tried again.
        failed = ((before.get("summary") or {}).get("members") or {}).get("failed")
        trains = before["status"] != "finished" or bool(failed)
        return continued_options(options, before["options"], options.resume, "sweep", trains=trains, fixed=fixed)
    if options.shard is not None and options.run_dir is not None:
        path = options.run_dir.parent.parent
        for folder in record.RecordReader(path).shards[:1]:
            recorded = {**read_before(folder)["options"], "shard": options.shard}
            return continued_options(options, recorded, path, "sweep", trains=True, fixed=fixed)
    return options


def restore_plan(plan: SweepPlan, before: Mapping[str, Any] | None) -> None:
    """Restores members that ended, and vmap sizes, from the record ``before``; ConfigError if it is another sweep's."""
    run_dir, path = plan.options.run_dir, plan.options.resume
    if before is None or path is None:
        if plan.options.shard is not None and run_dir is not None:
            for folder in record.RecordReader(run_dir.parent.parent).shards[:1]:
                _check_same(plan, read_before(folder), run_dir.parent.parent)
        return
    _check_same(plan, before, path)
    planned = [[member.number for member in group.members] for group in plan.groups]
    if plan.search is None and planned != [group["members"] for group in before["groups"]]:
        raise ConfigError(
            f"the members of the sweep in {path} form other groups than when it was started: undo what was changed in "
            "the experiment since, or start a new sweep."
        )
    recorded = _stored.open_sweep(path)
    reports = reports_by_member(recorded.lines)
    closed = {n for g in before["groups"] for n in g["members"] if g.get("closed") or before["status"] == "finished"}
    by_number = {member.number: member for member in plan.members}
    for member in recorded.members:
        # Failed members are tried again, if they can be built; the rest is restored from their group's checkpoint.
        done = member.index in closed and member.status in _stored.ENDED and member.status != "failed"
        if member.index in by_number and done:
            log = by_number[member.index]
            log.status, log.lines = member.status, reports[member.index]
    options = before["options"]
    if any(options[name] != getattr(plan.options, name) for name in ("vmap_size", "steps_per_call")):
        return
    for group, facts in zip(plan.groups, before["groups"], strict=plan.search is None):
        if (chosen := facts.get("vmap")) is not None:
            found = VmapPlan.of_json(chosen)
            # Larger ones would take memory for members that do not exist.
            count = len(group.members) if plan.search is None else plan.num_lanes
            if max(found.size, *(trial.size for trial in found.trials), 1) > max(count, options["vmap_size"] or 1):
                raise RecordError(f"{path / record.RECORD_FILE} has a vmap size of more members than a group has.")
            plan.vmapped[group.number] = found


def _check_same(plan: SweepPlan, before: Mapping[str, Any], where: Path) -> None:
    """Confirms that ``plan`` is the sweep of the ``record.json`` in ``where``, or of another shard of it."""
    check_same_config(before["config"], plan.experiment.config, "sweep", where)
    now, what = jsonable(design_facts(plan)), None
    if now["search"] != before["search"]:
        names = [one["search"]["name"] if one["search"] else "a list of points" for one in (before, now)]
        what = f"the searcher of the sweep in {where} is not this one ({names[0]}, not {names[1]}"
    elif plan.search is None and now["points"] != before["points"]:
        what = f"the points of the sweep in {where} are not these ({_difference(before['points'], now['points'])}"
    if what is not None:
        raise ConfigError(f"{what}): --resume {where} without points continues what it has; or start a new sweep.")


def _difference(before: Sequence[Any], now: Sequence[Any]) -> str:
    if len(now) == len(before) and all(point in now for point in before):
        return "they are in another order"
    number = next(n for n in range(len(before) + 1) if before[n : n + 1] != now[n : n + 1])
    old, new = (show_point(points[number]) if number < len(points) else "none" for points in (before, now))
    return f"member {number} is {old} there, {new} here"


def with_shard_dir(options: SweepOptions) -> SweepOptions:
    """The options of a shard with its directory within that of the sweep; it is resumed if it exists."""
    if options.shard is None or options.plan_only or not options.record:
        return options
    shared = options.resume or options.run_dir
    if shared is None:
        raise ConfigError("the shards of a sweep share a directory: give all of them the same run_dir.")
    if (shared / record.RECORD_FILE).is_file():
        if options.resume is not None:
            # The directory of the shard itself; that of a sweep without shards is refused with the options.
            return options
        raise ConfigError(f"{shared} holds a sweep that was not divided into shards: choose another run_dir.")
    num_shards = parse_shard(options.shard)[1]
    # A sweep divided in two ways would train members twice.
    for folder in record.RecordReader(shared).shards:
        if not folder.name.endswith(f"-of-{num_shards}"):
            raise ConfigError(
                f"{shared} holds the shard {folder.name.replace('-of-', '/')}, so the sweep is not divided into "
                f"{num_shards}: resume with as many shards as before, or choose another run_dir."
            )
    folder = shard_folder(shared, options.shard)
    if options.resume is not None and record.RecordReader(folder).is_sweep:
        return with_changes(options, {"run_dir": None, "resume": folder})
    return with_changes(options, {"run_dir": folder, "resume": None})


def shard_folder(path: Path, shard: str) -> Path:
    """The directory of the shard ``I/N`` of the sweep in ``path``."""
    return path / "shards" / shard.replace("/", "-of-")
