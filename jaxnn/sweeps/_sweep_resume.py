"""What an earlier process left of a sweep, and the directories of its shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxnn import record
from jaxnn.engine import Trainer, Trial, VmapPlan
from jaxnn.run import KEPT_OPTIONS as RUN_OPTIONS
from jaxnn.run import check_same_config, recorded_setup
from jaxnn.sweeps._plan import SweepPlan
from jaxnn.sweeps._sweep_options import SweepOptions, parse_shard
from jaxnn.sweeps._sweep_record import SweepRecord, design_facts
from jaxnn.sweeps.results import ENDED, read_sweep, swept_value
from jaxnn.sweeps.search import Halving, Points
from jaxnn.types import ConfigError, Experiment, RecordError

# Options that shape what a sweep leaves behind: a resumed one takes them from the record unless they are given.
KEPT_OPTIONS = (*RUN_OPTIONS, "order", "shard", "member_runs", "vmap_size", "steps_per_call")


def read_before(path: Path) -> dict[str, Any]:
    """The content of ``sweep.json`` in ``path``."""
    if (path / record.RUN_FILE).is_file():
        raise RecordError(f"{path} holds a run, not a sweep: resume it with jn.fit, or name the directory of a sweep.")
    if record.is_sweep(path) and not (path / record.SWEEP_FILE).is_file():
        raise RecordError(f"{path} holds the shards of a sweep: resume each of them with --resume {path} --shard I/N.")
    if not record.is_sweep(path):
        raise RecordError(f"{path} holds no sweep (no {record.SWEEP_FILE} in it): `jaxnn runs` lists those there are.")
    facts = record.read_facts(
        path / record.SWEEP_FILE, ("config", "axes", "points", "halving", "options", "groups", "started")
    )
    swept = {axis["name"] for axis in facts["axes"]}
    if any(set(point) - swept for point in facts["points"]):
        raise RecordError(f"{path / record.SWEEP_FILE} has points that do not fit its axes: the record is damaged.")
    if lacking := {*KEPT_OPTIONS, "devices", "strategy", "mesh"} - facts["options"].keys():
        raise RecordError(f"{path / record.SWEEP_FILE} lacks the option {min(lacking)!r}: the record is damaged.")
    return facts


def recorded_points(path: Path, experiment: Experiment[Any]) -> tuple[Experiment[Any], Points | Halving]:
    """The experiment and the points that the sweep in ``path``, or any shard of it, was started with.

    Raises:
        RecordError, ConfigError: there is none, or it is one of another experiment.
    """
    shards = shard_folders(path)
    before = read_before(path if (path / record.SWEEP_FILE).is_file() or not shards else shards[0])
    config = record.config_from_json(before["config"], experiment.config)
    values = {axis["name"]: axis["values"] for axis in before["axes"]}
    made = ({name: swept_value(value, values[name]) for name, value in point.items()} for point in before["points"])
    points = Points(tuple(made), {axis["name"]: axis["scale"] for axis in before["axes"]})
    design, experiment = before["halving"], dataclasses.replace(experiment, config=config)
    return experiment, points if design is None else Halving(points, design["eta"], design["min_fraction"])


def continued_options(options: SweepOptions, before: Mapping[str, Any]) -> SweepOptions:
    """The options to resume with: the record's, if the caller leaves them at their defaults."""
    if not options.record:
        raise ConfigError("a resumed sweep continues its record: leave record at its default.")
    kept = {name: before["options"][name] for name in KEPT_OPTIONS}
    explicit = options.explicit()
    for name in ("order", "shard"):
        if explicit.get(name, kept[name]) != kept[name]:
            raise ConfigError(
                f"the sweep in {options.resume} has {name}={kept[name]!r}, which decides what is computed: leave "
                f"{name} at its default, or start a new sweep."
            )
    # A sweep that is over is loaded, on any devices.
    if before["status"] != "finished":
        kept |= recorded_setup(before["options"], explicit, options.device, f"the sweep in {options.resume}")
    return dataclasses.replace(options, **kept | explicit)


def check_same(plan: SweepPlan, before: Mapping[str, Any], where: Path) -> None:
    """Confirms that ``plan`` is the sweep of the ``sweep.json`` in ``where``, or of another shard of it."""
    now = design_facts(plan)
    check_same_config(before["config"], plan.experiment.config, "sweep", where)
    for name in ("points", "halving"):
        if record.jsonable(now[name]) != before[name]:
            raise ConfigError(
                f"the {name} of the sweep in {where} are not these: resume it with those it was started with, or start "
                "a new sweep."
            )


def recall(plan: SweepPlan, before: Mapping[str, Any], path: Path) -> None:
    """Puts into ``plan`` what became of the members that are over, and the vmap sizes of their groups."""
    if [[m.number for m in group.members] for group in plan.groups] != [g["members"] for g in before["groups"]]:
        raise ConfigError(
            f"the members of the sweep in {path} form other groups than when it was started: undo what was changed in "
            "the experiment since, or start a new sweep."
        )
    lines: dict[int, list[dict[str, Any]]] = {}
    for line in record.read_metrics(path):
        lines.setdefault(line["member"], []).append({name: value for name, value in line.items() if name != "member"})
    closed = {n for g in before["groups"] for n in g["members"] if g.get("closed") or before["status"] == "finished"}
    for member in read_sweep(path).members:
        log = plan.logs.get(member.index)
        # Those that failed are tried again, if they can be built; others are as their group's checkpoint says.
        over = member.status == "pruned" or (member.status in ENDED and member.index in closed)
        if log is not None and over and member.status != "failed":
            log.status, log.lines = member.status, lines.get(member.index, [])
    options = before["options"]
    if any(options[name] != getattr(plan.options, name) for name in ("vmap_size", "steps_per_call")):
        return
    for group, facts in zip(plan.groups, before["groups"], strict=True):
        if (chosen := facts.get("vmap")) is not None:
            try:
                trials = tuple(Trial(**trial) for trial in chosen["trials"])
                plan.vmapped[group.number] = VmapPlan(**{**chosen, "trials": trials})
            except TypeError as error:
                raise RecordError(f"{path / record.SWEEP_FILE} has a vmap size that is none ({error}).") from error


def restore_group(number: int, trainer: Trainer, sweep: SweepRecord) -> list[str]:
    """Continues a group from its newest whole checkpoint; returns notes on what changed and what is damaged."""
    facts = sweep.facts["groups"][number]
    before, notes = facts.get("fingerprint"), []
    if before is None:  # it was not started
        return []
    if before["data"] != trainer.fingerprint["data"]:
        raise RecordError(
            f"the data are not those that the sweep in {trainer.options.resume} was started with: restore the data, or "
            "start a new sweep."
        )
    if changed := record.changed_parts(before, trainer.fingerprint):
        facts["changed"] = [*facts.get("changed", []), *changed]
        notes.append(f"continues, not bit for bit, since these changed: {'; '.join(changed)}")
    _, damaged = trainer.restore(f"group {number + 1}")
    if damaged:
        sweep.describe(damaged=[*sweep.facts.get("damaged", []), *damaged])
    return notes + damaged


def located(options: SweepOptions) -> SweepOptions:
    """The options of a shard with a directory of its own in that of the sweep; it is resumed if it is there."""
    if options.shard is None or options.plan_only or not options.record:
        return options
    shared = options.resume or options.run_dir
    if shared is None:
        raise ConfigError("the shards of a sweep share a directory: give all of them the same run_dir.")
    if options.resume is not None and (shared / record.SWEEP_FILE).is_file():
        # The directory of the shard itself; that of a whole sweep is refused with the options.
        return options
    whole = parse_shard(options.shard)[1]
    if (shared / record.SWEEP_FILE).is_file():
        raise ConfigError(f"{shared} holds a sweep that was not divided into shards: choose another run_dir.")
    # A sweep divided in two ways would train members twice.
    for folder in shard_folders(shared):
        if not folder.name.endswith(f"-of-{whole}"):
            raise ConfigError(
                f"{shared} holds the shard {folder.name.replace('-of-', '/')}, so the sweep is not divided into "
                f"{whole}: resume with as many shards as before, or choose another run_dir."
            )
    own = shard_folder(shared, options.shard)
    if options.resume is not None and record.is_sweep(own):
        return dataclasses.replace(options, run_dir=None, resume=own)
    return dataclasses.replace(options, run_dir=own, resume=None)


def check_siblings(plan: SweepPlan) -> None:
    """Confirms that a new shard is one of the sweep that the shards beside it are of."""
    own = plan.options.run_dir
    if plan.options.shard is not None and own is not None:
        for folder in shard_folders(own.parent.parent)[:1]:
            check_same(plan, read_before(folder), own.parent.parent)


def shard_folder(path: Path, shard: str) -> Path:
    """The directory of the shard ``I/N`` of the sweep in ``path``."""
    return path / "shards" / shard.replace("/", "-of-")


def shard_folders(path: Path) -> list[Path]:
    """The directories of the parts of the sweep in ``path`` that were started, by name."""
    return [file.parent for file in sorted(path.glob(record.SHARDS))]
