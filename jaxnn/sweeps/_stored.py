"""Reads a sweep from its directory, or from the directories of its shards."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxnn import record
from jaxnn._json import reports_by_member, with_tuples
from jaxnn.search import Axis
from jaxnn.sweeps._members import Member
from jaxnn.sweeps._plan import SweepOptions
from jaxnn.sweeps._sweep import Sweep
from jaxnn.types import Experiment, RecordError

ENDED = ("finished", "stopped early", "diverged", "pruned", "failed")  # the statuses of members that need nothing more


def open_sweep(path: str | Path, experiment: Experiment[Any] | None = None) -> Sweep:
    """Returns the sweep that is recorded in ``path``, or those of its shards that started as one.

    Members whose shard did not start are ``waiting``. A sweep that was killed, and its running members, read
    ``interrupted``. The summary of shards adds up theirs: seconds of all processes together, and the member-steps per
    second of one of them. ``experiment`` is what was swept, for `Sweep.run`. RecordError if there is no sweep, its
    record is damaged, or its shards were trained by different rules, such as another ``patience``: open each alone.

    >>> jn.open_sweep("runs/digits/sweep-…", experiment).best()  # doctest: +SKIP
    Member(index=18, point={'learning_rate': 0.01, 'seed': 2}, ...)
    """
    path = Path(path).absolute()
    records = record.RecordReader(path).parts()
    _check_agreement(records)
    parts = [part.facts for part in records]
    facts = max(parts, key=lambda part: len(part["points"]))
    members, lines = dict[int, Member](), list[dict[str, Any]]()
    for index, point in enumerate(facts["points"] if records[0].path != path else ()):
        config = {name: with_tuples(point.get(name, value)) for name, value in facts["config"].items()}
        members[index] = Member(index, read_point(point, facts), config, "waiting", 0, {}, {})
    for one in records:
        found, reports = _read_part(one)
        members |= found
        lines += reports
    if members and all(member.status in ENDED for member in members.values()):
        status = "finished"
    else:
        status = "running" if any(part["status"] == "running" for part in parts) else "interrupted"
    summary: dict[str, Any] = {}
    if ended := [part["summary"] for part in parts if part.get("summary")]:
        summary = {name: sum(one.get(name, 0) for one in ended) for name in ("member_steps", "num_compilations")}
        summary["seconds"] = dict(sum((Counter(one.get("seconds")) for one in ended), Counter()))
        used = [one["lanes_in_use"] for one in ended if "lanes_in_use" in one]  # in a search
        summary |= {"lanes_in_use": sum(used) / len(used)} if used else {}
        training = summary["seconds"].get("train")
        summary["member_steps_per_second"] = summary["member_steps"] / training if training else None
    return Sweep(
        members=tuple(members[index] for index in sorted(members)),
        axes=tuple(
            Axis(axis["name"], tuple(_swept_value(value, axis["values"]) for value in axis["values"]), axis["scale"])
            for axis in facts["axes"]
        ),
        lines=tuple(lines),
        monitor=facts["monitored"],
        higher_is_better=facts["higher_is_better"],
        directions=facts["directions"],
        status=status,
        dir=path,
        summary=summary,
        experiment=experiment,
        name=facts["options"].get("name"),
    )


def _check_agreement(shards: Sequence[record.RecordReader]) -> None:
    """Raises RecordError unless the ``shards`` are of one sweep, trained by the same rules."""

    def rules(facts: Mapping[str, Any]) -> dict[str, Any]:
        # Of a search each shard has the points that were proposed until its own last.
        names = ("monitored",) if facts.get("search") else ("axes", "points", "monitored")
        sweep = {name: facts[name] for name in names}
        return {**sweep, **facts["config"], **SweepOptions.deciding(facts["options"])}

    first = rules(shards[0].facts)
    for shard in shards[1:]:
        for name, value in rules(shard.facts).items():
            # A field that the config got since is no difference.
            if value != first.get(name, value):
                raise RecordError(
                    f"{shards[0].path} and {shard.path} were not trained by the same rules ({name}: "
                    f"{first[name]!r:.60} and {value!r:.60}), so they are no one sweep: open each alone, or train one "
                    "of them again."
                )


def _read_part(part: record.RecordReader) -> tuple[dict[int, Member], list[dict[str, Any]]]:
    """The members and the reports of a sweep or a shard; RecordError if the record of one that finished lacks any."""
    facts, file = part.facts, part.path / record.MEMBERS_FILE
    found = {line["member"]: line for line in part.members()}
    started = {number for group in facts["groups"] for number in group["members"]}
    # The first shard has the members that cannot be run.
    started |= set() if facts["options"].get("shard") else {*range(len(facts["points"]))}
    reports = reports_by_member(lines := part.lines())
    for number in sorted(started | found.keys()) if facts["status"] == "finished" else ():
        if number not in found:
            raise RecordError(f"{file} lacks member {number}: the record is damaged, restore the file from a copy.")
        part.check_reported(found[number], reports[number])
    return {number: _member(line, facts) for number, line in found.items()}, lines


def _member(line: Mapping[str, Any], facts: Mapping[str, Any]) -> Member:
    return Member(
        index=line["member"],
        point=read_point(line["point"], facts),
        config={name: with_tuples(value) for name, value in line["config"].items()},
        status=line["status"],
        step=line["step"],
        final=line["final"],
        best=line["best"],
        error=line.get("error"),
    )


def read_point(point: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a point of ``record.json``, whose content is ``facts``, with its values as they were given."""
    values = {axis["name"]: axis["values"] for axis in facts["axes"]}
    return {name: _swept_value(value, values.get(name, ())) for name, value in point.items()}


def _swept_value(value: Any, among: Sequence[Any]) -> Any:
    """A swept value as it was given: JSON has no tuples, and has names for infinities, which may be text."""
    if value in ("nan", "inf", "-inf") and any(isinstance(other, float) for other in among):
        return float(value)
    return with_tuples(value)
