"""Reads the record of a sweep: one directory, or the shards of several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxnn import record
from jaxnn.sweeps.results._members import Axis, Member
from jaxnn.sweeps.results._sweep import RunOpener, Sweep
from jaxnn.types import Experiment, RecordError

MEMBERS_FILE = "members.jsonl"
# What every sweep.json holds from the start, and every line of members.jsonl.
FACTS = ("status", "started", "config", "axes", "monitor", "higher_is_better")
MEMBER_FACTS = ("member", "point", "config", "status", "step", "final", "best")
# Members with these statuses need nothing more.
ENDED = ("finished", "stopped early", "diverged", "pruned", "failed")


def read_sweep(
    path: str | Path, experiment: Experiment[Any] | None = None, run_opener: RunOpener | None = None
) -> Sweep:
    """Returns the sweep that is recorded in ``path``, or those of its shards that started as one."""
    path = Path(path)
    if not record.is_sweep(path):
        raise RecordError(
            f"{path} holds no sweep (no {record.SWEEP_FILE} in it): give the directory of one sweep; `jaxnn runs` "
            "lists them."
        )
    whole = (path / record.SWEEP_FILE).is_file()
    folders = [path] if whole else [file.parent for file in sorted(path.glob(record.SHARDS))]
    parts = [record.read_facts(folder / record.SWEEP_FILE, FACTS) for folder in folders]
    facts, members, lines = parts[0], {} if whole else _waiting(parts[0]), []
    for folder, part in zip(folders, parts, strict=True):
        members |= {member.index: member for member in _read_members(folder, part)}
        lines += record.read_metrics(folder)
        if not all(isinstance(line.get("member"), int) for line in lines):
            raise RecordError(f"{folder / record.METRICS_FILE} holds a line without member: the record is damaged.")
    if members and all(member.status in ENDED for member in members.values()):
        status = "finished"
    else:
        status = "running" if any(part["status"] == "running" for part in parts) else "interrupted"
    return Sweep(
        members=tuple(members[index] for index in sorted(members)),
        axes=tuple(
            Axis(axis["name"], tuple(swept_value(value, axis["values"]) for value in axis["values"]), axis["scale"])
            for axis in facts["axes"]
        ),
        lines=tuple(lines),
        monitor=facts["monitor"],
        higher_is_better=facts["higher_is_better"],
        status=status,
        dir=path,
        summary=_merged_summary(parts),
        experiment=experiment,
        run_opener=run_opener,
    )


def _read_members(path: Path, facts: Mapping[str, Any]) -> list[Member]:
    file, killed = path / MEMBERS_FILE, facts["status"] == "interrupted"
    try:
        axes = {axis["name"]: axis["values"] for axis in facts["axes"]}
        return [
            _member(record.check_facts(line, MEMBER_FACTS), path, axes, killed=killed)
            for line in record.read_lines(file)
        ]
    except (ValueError, KeyError, TypeError) as error:
        culprit = file if isinstance(error, ValueError) else path / record.SWEEP_FILE
        raise RecordError(f"{culprit} cannot be read ({error}): the record is damaged.") from error


def _member(line: Mapping[str, Any], path: Path, axes: Mapping[str, list[Any]], *, killed: bool = False) -> Member:
    return Member(
        index=line["member"],
        point={name: swept_value(value, axes.get(name, [])) for name, value in line["point"].items()},
        config={name: _tuples(value) for name, value in line["config"].items()},
        status="interrupted" if killed and line["status"] == "running" else line["status"],
        step=line["step"],
        final=record.numbers(line["final"]),
        best=record.numbers(line["best"]),
        error=line.get("error"),
        dir=path / line["dir"] if line.get("dir") else None,
    )


def _waiting(facts: Mapping[str, Any]) -> dict[int, Member]:
    """All members of a sweep before any shard starts."""
    axes, members = {axis["name"]: axis["values"] for axis in facts["axes"]}, {}
    for index, point in enumerate(facts.get("points", ())):
        config = {name: point.get(name, value) for name, value in facts["config"].items()}
        line = {"member": index, "point": point, "config": config, "status": "waiting", "step": 0}
        members[index] = _member({**line, "final": {}, "best": {}}, Path(), axes)
    return members


def _merged_summary(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of the sweep, or those of the shards that ended, added up."""
    summaries = [part["summary"] for part in parts if part.get("summary")]
    if not summaries:
        return {}
    total = {name: sum(one[name] for one in summaries) for name in ("seconds", "member_steps", "num_compilations")}
    training = sum(one["spent"].get("train", 0.0) for one in summaries)
    return {**total, "member_steps_per_second": total["member_steps"] / training if training else None}


def swept_value(value: Any, among: Sequence[Any]) -> Any:
    """Returns a swept value as it was given: JSON has no tuples, and has names for infinities, which may be numbers."""
    if value in ("nan", "inf", "-inf") and any(isinstance(other, float) for other in among):
        return float(value)
    return _tuples(value)


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
