"""Readers of records: a run, a sweep or a member of it, or all of them below a folder; every field is checked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn._disk import read_file
from jaxnn._fingerprints import text_fingerprint
from jaxnn._json import numbers
from jaxnn._report_lines import reports_by_member
from jaxnn.parallel import SINGLE_DEVICE
from jaxnn.record._run_directory import FOLDER, METRICS_FILE, RECORD_FILE, check_name, is_locked
from jaxnn.record._schemas import LINE, MEMBER, RECORD, parse
from jaxnn.types import RecordError, check_int

MEMBERS_FILE = "members.jsonl"  # of a sweep
GROUPS = "groups"  # the folder of the checkpoints of a sweep, by group
SHARDS = f"shards/*/{RECORD_FILE}"  # in the directory of a sweep without a `record.json` of its own


def read_record(path: Path) -> dict[str, Any]:
    """Reads ``record.json`` in ``path``, checked by `RECORD`; RecordError if there is none, or it is damaged."""
    check_name(path)
    if not (path / RECORD_FILE).is_file():
        old = [name for name in ("run.json", "sweep.json") if (path / name).is_file()]
        if old:
            raise RecordError(f"{path} holds {old[0]}, a record of format 1: read it with the jaxnn that wrote it.")
        raise RecordError(f"{path} holds no record (no {RECORD_FILE} in it): `jaxnn runs` lists the directories.")
    return _read_facts(path / RECORD_FILE, RECORD)


def read_run(path: Path) -> dict[str, Any]:
    """Reads the facts of a run, as `read_record`; RecordError if it is a sweep."""
    check_name(path)
    facts = read_record(path) if not shard_folders(path) else None
    if facts is None or facts["points"]:
        raise RecordError(f"{path} holds a sweep, not a run: name one of its members, by member=0 or --member 0.")
    if [group["members"] for group in facts["groups"]] != [[0]]:
        raise RecordError(f"{path / RECORD_FILE} has other members than a run: the record is damaged.")
    check_trained(path, facts, facts["groups"][0])
    return facts


def states_folder(path: Path, facts: Mapping[str, Any], number: int) -> Path:
    """The folder of the checkpoints of a group, by its number, of the record in ``path`` with these ``facts``."""
    return path / GROUPS / f"{number}" if facts["points"] else path / FOLDER


class Recorded(NamedTuple):
    """What is recorded of a run, or of a member of a sweep."""

    facts: dict[str, Any]  # the content of ``record.json``
    group: dict[str, Any]  # of these, its group
    about: dict[str, Any]  # its line in ``members.jsonl``; of a run its ``config`` and ``status``
    lines: list[dict[str, Any]]  # its reports, oldest first
    states: Path  # the folder of its checkpoints, or of those of its group
    row: int | None = None  # its place in the states of the group; None: a run
    first: dict[str, Any] | None = None  # the config of the group's first member, whose fingerprint the group has


def read_recorded(path: Path, member: int | None = None) -> Recorded:
    """Reads the run in ``path``, whose only member is 0, or a ``member`` of the sweep there.

    RecordError if there is none of this number, or it was not trained; ConfigError if it is no whole number.
    """
    number = None if member is None else check_int("member", member, 0)
    if number is None or (number == 0 and not is_sweep(path)):
        facts = read_run(path)
        about = {"member": 0, "point": {}, "config": facts["config"], "status": facts["status"]}
        lines = reports_by_member(read_metrics(path))[0]
        return Recorded(facts, facts["groups"][0], about, lines, states_folder(path.absolute(), facts, 0))
    for folder in sweep_folders(path):
        facts = read_record(folder)
        for index, group in enumerate(facts["groups"]):
            if number in group["members"]:
                members = {line["member"]: line for line in read_members(folder, facts)}
                check_trained(folder, facts, group)
                lines = reports_by_member(read_metrics(folder))[number]
                if lost := {number, group["members"][0]} - members.keys():
                    raise RecordError(f"{folder / MEMBERS_FILE} lacks member {min(lost)}: the record is damaged.")
                check_reported(folder, facts, members[number], lines)
                states, row = states_folder(folder.absolute(), facts, index), group["members"].index(number)
                first = members[group["members"][0]]["config"]
                return Recorded(facts, group, members[number], lines, states, row, first)
    raise RecordError(f"the sweep in {path} has no member {number} that was trained: `jaxnn show {path}` lists them.")


def read_members(folder: Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Reads ``members.jsonl`` of the sweep in ``folder`` with these ``facts``, checked by `MEMBER`.

    Members that ran when the sweep was killed are ``interrupted``.
    """
    lines, points = read_lines(folder / MEMBERS_FILE, MEMBER), facts["points"]
    for line in lines:
        if points and [line["point"]] != points[line["member"] : line["member"] + 1]:
            other = f"another point of member {line['member']} than {RECORD_FILE}"
            raise RecordError(f"{folder / MEMBERS_FILE} has {other}: the record is damaged.")
        if facts["status"] == "interrupted" and line["status"] == "running":
            line["status"] = "interrupted"
        line |= {name: numbers(line[name]) for name in ("final", "best")}
    return lines


def check_reported(
    folder: Path, facts: Mapping[str, Any], member: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> None:
    """Raises RecordError if the sweep in ``folder`` finished and a ``member``'s last report is not in its ``lines``."""
    if facts["status"] == "finished" and (lines[-1]["step"] if lines else 0) != (step := member["step"]):
        raise RecordError(
            f"{folder / METRICS_FILE} lacks the report of member {member['member']} at step {step}: the record is "
            "damaged, restore the file from a copy."
        )


def check_trained(folder: Path, facts: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raises RecordError unless a ``group`` of the record in ``folder`` with these ``facts`` was opened."""
    needed = {"fingerprint", "steps_per_call", "layout"} | ({"vmap"} if facts["points"] else set())
    if lacking := {name for name in needed if group.get(name) is None}:
        raise RecordError(f"{folder} lacks {min(lacking)!r} of a group: it was not trained, or is damaged.")
    if unknown := {*group["traced"]} - {axis["name"] for axis in facts["axes"]}:
        raise RecordError(f"a group of {folder} traces {min(unknown)!r:.60}, which is no axis: it is damaged.")


def facts_as_run(recorded: Recorded) -> dict[str, Any]:
    """The content of the ``record.json`` of a run that continues a member of a sweep."""
    facts, group, about = recorded.facts, recorded.group, recorded.about
    prints, how = dict(group["fingerprint"]), f"{group['vmap']} {group['traced']}"
    if facts["options"].get("order") == "shared":  # a run has the order of its own seed
        prints["batches"] = text_fingerprint(f"{prints.get('batches')} shared")
    # The program of a population: a member that continues alone is equal to rounding, and the run reports so.
    prints["program"] = text_fingerprint(f"{prints.get('program')} {how}")
    alone = {"members": [0], "static": {}, "traced": [], "vmap": None, "layout": SINGLE_DEVICE.as_json()}
    return {
        **facts,
        **{"config": about["config"], "status": about["status"], "axes": [], "points": [], "halving": None},
        **{"summary": None, "resumed": [], "groups": [{**group, **alone, "fingerprint": prints}]},
        "options": facts["options"] | {"devices": None, "strategy": "auto", "mesh": None},
        "origin": {"member": about["member"], "num_steps": facts["config"].get("num_steps")},
    }


def _read_facts(file: Path, kind: Mapping[str, Any]) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = parse(read_file(file), kind)
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read ({error}): the record is damaged.") from error
    # The process was killed.
    if facts["status"] == "running" and not is_locked(file.parent):
        facts["status"] = "interrupted"
    return facts


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads ``metrics.jsonl`` in ``path``; a torn last line, left by a crash, is dropped; RecordError for others."""
    return [numbers(line) for line in read_lines(path / METRICS_FILE, LINE)]


def read_bytes(file: Path) -> bytes:
    """Reads a file of the record, empty if absent; RecordError if the system refuses."""
    try:
        return read_file(file)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RecordError(f"{file} cannot be read ({error.strerror or error}): the record is damaged.") from error


def read_lines(file: Path, kind: Any) -> list[dict[str, Any]]:
    """Reads a file of JSON mappings of a ``kind``, one per line, empty if absent; a torn last line is dropped."""
    content, lines = read_bytes(file), []
    for number, text in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            lines.append(parse(text, kind))
        except ValueError as error:
            raise RecordError(f"{file} is damaged in line {number} ({error}): delete that line.") from error
    return lines


def find_records(folder: Path) -> list[Path]:
    """The directories at or below ``folder`` that hold a run, or a sweep with all of its shards; oldest first."""
    found = []
    for path, folders, files in folder.walk():
        has_shards = bool(shard_folders(path))
        if has_shards or RECORD_FILE in files:
            found.append(path)
        if has_shards or MEMBERS_FILE in files:  # of a sweep: below are its shards and states
            folders.clear()
    return sorted(found, key=_age)


def is_sweep(path: Path) -> bool:
    """Whether the directory ``path`` holds a sweep, or shards of one; RecordError if its record is damaged."""
    try:
        if shard_folders(path):
            return True
        return (path / RECORD_FILE).is_file() and bool(read_record(path)["points"])
    except OSError:  # such as a name that is too long
        return False


def sweep_folders(path: Path) -> list[Path]:
    """``path`` if it is the record of a sweep in one process, else its shards that started; RecordError for neither."""
    check_name(path)
    if folders := shard_folders(path):
        return folders
    if not read_record(path)["points"]:
        raise RecordError(f"{path} holds a run, not a sweep: resume it with jn.fit, or name the directory of a sweep.")
    return [path]


def shard_folders(path: Path) -> list[Path]:
    """The directories of the shards of the sweep in ``path`` that were started, by name."""
    return [file.parent for file in sorted(path.glob(SHARDS))]


def _age(path: Path) -> tuple[str, str]:
    """The start time of a record, empty if it cannot be read, and its name."""
    for file in (path / RECORD_FILE, *sorted(path.glob(SHARDS))):
        try:
            return str(_read_facts(file, {"status": str, "started": str})["started"]), path.name
        except RecordError:
            continue
    return "", path.name
