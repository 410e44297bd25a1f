"""Reading the record of a sweep back: one directory, or the shards that several processes wrote of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn.record import (
    MEMBER,
    METRICS_FILE,
    SHARDS,
    SWEEP_FILE,
    check_facts,
    numbers,
    read_facts,
    read_lines,
    read_metrics,
)
from jaxnn.record import is_sweep as is_sweep
from jaxnn.sweeps.results.outcomes import Axis, Member
from jaxnn.sweeps.results.sweep import Sweep
from jaxnn.types import Experiment, RecordError

MEMBERS_FILE = "members.jsonl"
# What every sweep.json holds from the start, and what every line of members.jsonl does.
FACTS = ("status", "started", "config", "axes", "monitor", "higher_is_better")
MEMBER_FACTS = ("member", "point", "config", "status", "step", "final", "best")
# The members that nothing more is to be done for.
ENDED = ("finished", "stopped early", "diverged", "pruned", "failed")


class Part(NamedTuple):
    """A directory with a sweep.json: the whole sweep, or a shard of it."""

    facts: Mapping[str, Any]
    members: Mapping[int, Member]
    lines: Sequence[Mapping[str, Any]]


def open_sweep(path: str | Path, experiment: Experiment[Any] | None = None) -> Sweep:
    """The sweep that is recorded in ``path``, those of its shards that are there merged in.

    Members whose shard was not begun are waiting. Of a member in several parts that counts in which it is over, else
    the last: the top, then the shards by name. A sweep that says it is running while no process holds its directory
    was killed: it and its running members read ``interrupted``. The summary of shards adds up theirs: seconds of all
    processes together, and the member-steps a second of one of them.

    Args:
        path: the sweep's directory.
        experiment: what was swept, for :meth:`Sweep.run`.

    Raises:
        RecordError: there is no sweep, or its record is damaged.
    """
    path = Path(path)
    if not is_sweep(path):
        raise RecordError(
            f"{path} holds no sweep (no {SWEEP_FILE} in it): give the directory of one sweep; `jaxnn runs` lists them."
        )
    parts = [_read_part(folder) for folder in _folders(path)]
    facts = parts[0].facts
    whole = (path / SWEEP_FILE).is_file()
    members = {} if whole else _waiting(facts)
    for part in parts:
        members |= {index: new for index, new in part.members.items() if not _is_over(members.get(index), new)}
    return Sweep(
        members=tuple(members[index] for index in sorted(members)),
        axes=tuple(_axis(axis) for axis in facts["axes"]),
        lines=tuple(line for part in parts for line in part.lines),
        monitor=facts["monitor"],
        higher_is_better=facts["higher_is_better"],
        status=_status(parts, list(members.values()), whole=whole),
        dir=path,
        summary=(facts.get("summary") or {}) if whole else _added_up(parts),
        experiment=experiment,
    )


def _folders(path: Path) -> Iterator[Path]:
    if (path / SWEEP_FILE).is_file():
        yield path
    for file in sorted(path.glob(SHARDS)):
        yield file.parent


def _read_part(path: Path) -> Part:
    facts = read_facts(path / SWEEP_FILE, FACTS)
    file = path / MEMBERS_FILE
    lines = read_metrics(path)
    if not all(isinstance(line.get("member"), int) for line in lines):
        raise RecordError(f"{path / METRICS_FILE} holds a line without member or step: the record is damaged.")
    try:
        axes = {axis["name"]: axis["values"] for axis in facts["axes"]}
        members = [
            _member(check_facts(line, MEMBER, MEMBER_FACTS), path, axes, killed=facts["status"] == "interrupted")
            for line in read_lines(file)
        ]
    except ValueError as error:
        raise RecordError(f"{file} cannot be read ({error}): the record is damaged.") from error
    return Part(facts, {member.index: member for member in members}, lines)


def _member(line: Mapping[str, Any], path: Path, axes: Mapping[str, list[Any]], *, killed: bool) -> Member:
    index, point, config, status, step, final, best = (line[name] for name in MEMBER_FACTS)
    return Member(
        index,
        {name: swept_value(value, axes.get(name, [])) for name, value in point.items()},
        {name: _tuples(value) for name, value in config.items()},
        "interrupted" if killed and status == "running" else status,
        step,
        numbers(final),
        numbers(best),
        line.get("error"),
        path / line["dir"] if line.get("dir") else None,
    )


def _waiting(facts: Mapping[str, Any]) -> dict[int, Member]:
    """All members of a sweep as they are before any shard is begun."""
    axes = {axis["name"]: axis["values"] for axis in facts["axes"]}
    members = {}
    for index, point in enumerate(facts.get("points", ())):
        config = facts["config"]
        for name, value in point.items():
            config = _with_field(config, name, value)
        line = {"member": index, "point": point, "config": config, "status": "waiting", "step": 0}
        members[index] = _member({**line, "final": {}, "best": {}}, Path(), axes, killed=False)
    return members


def _with_field(config: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The config with another value for a field, whose name may be dotted."""
    head, _, rest = name.partition(".")
    return {**config, head: _with_field(config[head], rest, value) if rest else value}


def _is_over(known: Member | None, new: Member) -> bool:
    """Whether a member was over in one part, and is not in another, which so has nothing new of it."""
    return known is not None and known.status in ENDED and new.status not in ENDED


def _status(parts: Sequence[Part], members: Sequence[Member], *, whole: bool) -> str:
    """The status of the whole: of several parts it is over when every member is, and runs while one of them does."""
    status: str = parts[0].facts["status"]
    if whole and len(parts) == 1:
        return status
    if members and all(member.status in ENDED for member in members):
        return "finished"
    return "running" if any(part.facts["status"] == "running" for part in parts) else "interrupted"


def _added_up(parts: Sequence[Part]) -> dict[str, Any]:
    """What the shards that are over say at their end, together."""
    summaries = [part.facts["summary"] for part in parts if part.facts.get("summary")]
    if not summaries:
        return {}
    names = ("seconds", "member_steps", "num_compilations")
    total = {name: sum(summary[name] for summary in summaries) for name in names}
    training = sum(summary["spent"].get("train", 0.0) for summary in summaries)
    return {**total, "member_steps_per_second": total["member_steps"] / training if training else None}


def _axis(axis: Mapping[str, Any]) -> Axis:
    values = axis["values"]
    return Axis(axis["name"], tuple(swept_value(value, values) for value in values), axis["scale"])


def swept_value(value: Any, among: Sequence[Any]) -> Any:
    """A swept value as it was given: JSON has no tuples, and has names for infinities, which may be among numbers."""
    if value in ("nan", "inf", "-inf") and any(isinstance(other, float) for other in among):
        return float(value)
    return _tuples(value)


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
