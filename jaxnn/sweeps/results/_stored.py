"""Reads the record of a sweep: one directory, or the shards of several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn.record import (
    METRICS_FILE,
    SHARDS,
    SWEEP_FILE,
    check_facts,
    is_sweep,
    numbers,
    read_facts,
    read_lines,
    read_metrics,
)
from jaxnn.sweeps.results._outcomes import Axis, Member
from jaxnn.sweeps.results._sweep import RunOpener, Sweep
from jaxnn.types import Experiment, RecordError

MEMBERS_FILE = "members.jsonl"
# What every sweep.json holds from the start, and every line of members.jsonl.
FACTS = ("status", "started", "config", "axes", "monitor", "higher_is_better")
MEMBER_FACTS = ("member", "point", "config", "status", "step", "final", "best")
# Members with these statuses need nothing more.
ENDED = ("finished", "stopped early", "diverged", "pruned", "failed")


class Part(NamedTuple):
    """A directory with a sweep.json: the whole sweep, or a shard of it."""

    facts: Mapping[str, Any]
    members: Mapping[int, Member]
    lines: Sequence[Mapping[str, Any]]


def read_sweep(
    path: str | Path, experiment: Experiment[Any] | None = None, run_opener: RunOpener | None = None
) -> Sweep:
    """Returns the sweep that is recorded in ``path``, with those of its shards that are there merged in.

    Members whose shard did not start are waiting. If several parts hold a member, the part in which it ended counts,
    else the last: the top, then the shards by name. A sweep whose record says ``running`` while no process holds its
    directory was killed: it and its running members read ``interrupted``. The summary of shards adds up theirs:
    seconds of all processes together, and the member-steps a second of one of them.

    Args:
        path: the sweep's directory.
        experiment: what was swept, for :meth:`Sweep.run`.
        run_opener: opens members as runs, for the same.

    Raises:
        RecordError: there is no sweep, or its record is damaged.
    """
    path = Path(path)
    if not is_sweep(path):
        raise RecordError(
            f"{path} holds no sweep (no {SWEEP_FILE} in it): give the directory of one sweep; `jaxnn runs` lists them."
        )
    whole = (path / SWEEP_FILE).is_file()
    folders = [path] * whole + [file.parent for file in sorted(path.glob(SHARDS))]
    parts = [_read_part(folder) for folder in folders]
    facts = parts[0].facts
    members = {} if whole else _waiting(facts)
    for part in parts:
        for index, new in part.members.items():
            # A part in which the member did not end has nothing new of it.
            if index not in members or members[index].status not in ENDED or new.status in ENDED:
                members[index] = new
    return Sweep(
        members=tuple(members[index] for index in sorted(members)),
        axes=tuple(
            Axis(axis["name"], tuple(swept_value(value, axis["values"]) for value in axis["values"]), axis["scale"])
            for axis in facts["axes"]
        ),
        lines=tuple(line for part in parts for line in part.lines),
        monitor=facts["monitor"],
        higher_is_better=facts["higher_is_better"],
        status=facts["status"] if whole and len(parts) == 1 else _merged_status(parts, list(members.values())),
        dir=path,
        summary=(facts.get("summary") or {}) if whole else _merged_summary(parts),
        experiment=experiment,
        run_opener=run_opener,
    )


def _read_part(path: Path) -> Part:
    facts = read_facts(path / SWEEP_FILE, FACTS)
    file = path / MEMBERS_FILE
    lines = read_metrics(path)
    if not all(isinstance(line.get("member"), int) for line in lines):
        raise RecordError(f"{path / METRICS_FILE} holds a line without member or step: the record is damaged.")
    try:
        axes = {axis["name"]: axis["values"] for axis in facts["axes"]}
        members = [
            _member(check_facts(line, MEMBER_FACTS), path, axes, killed=facts["status"] == "interrupted")
            for line in read_lines(file)
        ]
    except (ValueError, KeyError, TypeError) as error:
        culprit = file if isinstance(error, ValueError) else path / SWEEP_FILE
        raise RecordError(f"{culprit} cannot be read ({error}): the record is damaged.") from error
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
    """All members of a sweep before any shard starts."""

    def with_field(config: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
        head, _, rest = name.partition(".")
        return {**config, head: with_field(config[head], rest, value) if rest else value}

    axes = {axis["name"]: axis["values"] for axis in facts["axes"]}
    members = {}
    for index, point in enumerate(facts.get("points", ())):
        config = facts["config"]
        for name, value in point.items():
            config = with_field(config, name, value)
        line = {"member": index, "point": point, "config": config, "status": "waiting", "step": 0}
        members[index] = _member({**line, "final": {}, "best": {}}, Path(), axes, killed=False)
    return members


def _merged_status(parts: Sequence[Part], members: Sequence[Member]) -> str:
    """Of several parts: finished when every member ended, running while one of them runs."""
    if members and all(member.status in ENDED for member in members):
        return "finished"
    return "running" if any(part.facts["status"] == "running" for part in parts) else "interrupted"


def _merged_summary(parts: Sequence[Part]) -> dict[str, Any]:
    """The summaries of the shards that ended, added up."""
    summaries = [part.facts["summary"] for part in parts if part.facts.get("summary")]
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
