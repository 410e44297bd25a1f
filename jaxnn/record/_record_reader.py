"""Readers of records: a run, a sweep or a member of it, or all of them below a folder; every field is checked."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn._checked_json import parse
from jaxnn._disk import read_file
from jaxnn._fingerprints import text_fingerprint
from jaxnn._json import numbers, reports_by_member, with_tuples
from jaxnn.data import ArraySource
from jaxnn.parallel import SINGLE_DEVICE
from jaxnn.record._run_directory import METRICS_FILE, RECORD_FILE, Record, check_name, is_locked, read_bytes
from jaxnn.record._schemas import LINE, MEMBER, RECORD
from jaxnn.types import Examples, RecordError, Splits, check_int

MEMBERS_FILE = "members.jsonl"  # of a sweep
SEARCH_FILE = "search.jsonl"  # of a search
SHARDS = f"shards/*/{RECORD_FILE}"  # in the directory of a sweep without a `record.json` of its own


class Recorded(NamedTuple):
    """What is recorded of a run, or of a member of a sweep."""

    facts: dict[str, Any]  # the content of ``record.json``
    group: dict[str, Any]  # of these, its group
    about: dict[str, Any]  # its line in ``members.jsonl``; of a run its ``config`` and ``status``
    lines: list[dict[str, Any]]  # its reports, oldest first
    states: Path  # the folder of its checkpoints, or of those of its group
    listing: Path  # the file with the equations of its group, which older records lack
    row: int | None = None  # its place in the states of the group; None: a run
    first: dict[str, Any] | None = None  # the config of the group's first member, whose fingerprint the group has

    @property
    def code(self) -> Path:
        """The file with what was not committed, which older records lack."""
        return self.listing.with_name(Record.CODE)

    def facts_as_run(self) -> dict[str, Any]:
        """The content of the ``record.json`` of a run that continues this member of a sweep."""
        facts, group, about = self.facts, self.group, self.about
        prints, how = dict(group["fingerprint"]), f"{group['vmap']} {group['traced']}"
        if facts["options"].get("order") == "shared":  # a run has the order of its own seed
            prints["batches"] = text_fingerprint(f"{prints.get('batches')} shared")
        # The program of a population: a member that continues alone is equal to rounding, and the run reports so.
        prints["program"] = text_fingerprint(f"{prints.get('program')} {how}")
        prints.pop("start", None)  # of the first member
        alone = {"members": [0], "static": {}, "traced": [], "vmap": None, "layout": SINGLE_DEVICE.as_json()}
        return {
            **facts,
            **{"config": about["config"], "status": about["status"], "axes": [], "points": [], "search": None},
            **{"summary": None, "resumed": [], "groups": [{**group, **alone, "fingerprint": prints}]},
            "options": facts["options"] | {"devices": None, "strategy": "auto", "mesh": None},
            "origin": {"member": about["member"], "num_steps": facts["config"].get("num_steps")},
        }


class RecordReader:
    """What a directory records: a run, a sweep, or the shards of a sweep. RecordError for what is damaged.

    ``record.json`` is read once. The members of a sweep that ran when it was killed are ``interrupted``, as it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The content of ``record.json``, checked by `RECORD`; RecordError if there is none, or it is damaged."""
        path = self.path
        check_name(path)
        if not (path / RECORD_FILE).is_file():
            old = [name for name in ("run.json", "sweep.json") if (path / name).is_file()]
            if old:
                raise RecordError(f"{path} holds {old[0]}, a record of format 1: read it with the jaxnn that wrote it.")
            raise RecordError(f"{path} holds no record (no {RECORD_FILE} in it): `jaxnn runs` lists the directories.")
        return _read_facts(path / RECORD_FILE, RECORD)

    @property
    def is_locked(self) -> bool:
        """Whether a process writes the directory."""
        return is_locked(self.path)

    @property
    def is_sweep(self) -> bool:
        """Whether the directory holds a sweep, or shards of one; RecordError if its record is damaged."""
        try:
            if self.shards:
                return True
            return (self.path / RECORD_FILE).is_file() and bool(self.facts["points"])
        except OSError:  # such as a name that is too long
            return False

    @property
    def shards(self) -> list[Path]:
        """The directories of the shards that were started, by name."""
        return [file.parent for file in sorted(self.path.glob(SHARDS))]

    def parts(self) -> list[RecordReader]:
        """The shards of a sweep that started, or the sweep itself if one process runs it; RecordError if it is none."""
        check_name(self.path)
        if shards := self.shards:
            return [RecordReader(folder) for folder in shards]
        if not self.facts["points"]:
            what = f"{self.path} holds a run, not a sweep"
            raise RecordError(f"{what}: leave member out, resume it with jn.fit, or name the directory of a sweep.")
        return [self]

    def run_facts(self) -> dict[str, Any]:
        """The facts of a run; RecordError if it is a sweep."""
        path = self.path
        check_name(path)
        if self.shards or self.facts["points"]:
            raise RecordError(
                f"{path} holds a sweep, not a run: use jn.open_sweep, or name a member, by member=0 or --member 0."
            )
        if [group["members"] for group in self.facts["groups"]] != [[0]]:
            raise RecordError(f"{path / RECORD_FILE} has other members than a run: the record is damaged.")
        self.check_trained(self.facts["groups"][0])
        return self.facts

    def member(self, member: int | None = None) -> Recorded:
        """Reads the run, whose only member is 0, or a ``member`` of the sweep.

        RecordError if there is none of this number, or it was not trained; ConfigError if it is no whole number.
        """
        number = None if member is None else check_int("member", member, 0)
        if number is None or (number == 0 and not self.is_sweep):
            facts = self.run_facts()
            about = {"member": 0, "point": {}, "config": facts["config"], "status": facts["status"]}
            return Recorded(facts, facts["groups"][0], about, reports_by_member(self.lines())[0], *self._files(0))
        for part in self.parts():
            for index, group in enumerate(part.facts["groups"]):
                if number in group["members"]:
                    return part._member(number, index)
        raise RecordError(
            f"the sweep in {self.path} has no member {number} that was trained: `jaxnn show {self.path}` lists them."
        )

    def _member(self, number: int, index: int) -> Recorded:
        group = self.facts["groups"][index]
        members = {line["member"]: line for line in self.members()}
        self.check_trained(group)
        lines = reports_by_member(self.lines())[number]
        if lost := {number, group["members"][0]} - members.keys():
            raise RecordError(f"{self.path / MEMBERS_FILE} lacks member {min(lost)}: the record is damaged.")
        self.check_reported(members[number], lines)
        row, first = group["members"].index(number), members[group["members"][0]]["config"]
        return Recorded(self.facts, group, members[number], lines, *self._files(index), row, first)

    def members(self) -> list[dict[str, Any]]:
        """Reads ``members.jsonl`` of a sweep, checked by `MEMBER`."""
        lines, points = _read_lines(self.path / MEMBERS_FILE, MEMBER), self.facts["points"]
        for line in lines:
            if points and [line["point"]] != points[line["member"] : line["member"] + 1]:
                other = f"another point of member {line['member']} than {RECORD_FILE}"
                raise RecordError(f"{self.path / MEMBERS_FILE} has {other}: the record is damaged.")
            if self.facts["status"] == "interrupted" and line["status"] == "running":
                line["status"] = "interrupted"
            line |= {name: numbers(line[name]) for name in ("final", "best")}
        return lines

    def events(self) -> list[dict[str, Any]]:
        """Reads ``search.jsonl`` of a search: its searcher, and what that was asked and told."""
        return _read_lines(self.path / SEARCH_FILE, dict)

    def lines(self) -> list[dict[str, Any]]:
        """Reads ``metrics.jsonl``; a torn last line, left by a crash, is dropped."""
        return [numbers(line) for line in _read_lines(self.path / METRICS_FILE, LINE)]

    def states(self, number: int) -> Path:
        """The folder of the checkpoints of a group, by its number."""
        return Record.states(self.path.absolute(), self.facts, number)

    def _files(self, number: int) -> tuple[Path, Path]:
        return self.states(number), Record.listing(self.path.absolute(), self.facts, number)

    def data(self, group: Mapping[str, Any]) -> Splits | None:
        """Data of zeros, which take no memory, with the splits and shapes of a ``group``; None if it has none.

        RecordError if they are described in another form than `describe_data` returns.
        """
        described = group.get("examples")
        if described is None:
            return None

        def rows(count: int, text: str) -> np.ndarray:
            dtype, _, shape = text.removesuffix("]").partition("[")
            return np.broadcast_to(np.zeros((), jnp.dtype(dtype)), (count, *map(int, filter(None, shape.split(",")))))

        try:
            one = with_tuples({name: described[name] for name in Examples._fields})
            if not jax.tree.leaves(one["inputs"]):
                raise ValueError("there are no inputs")
            splits: Any = {
                split: ArraySource(Examples(**jax.tree.map(functools.partial(rows, count), one)))
                for split, count in described["splits"].items()
            }
            others = {name: splits.pop(name) for name in [*splits] if name not in Splits._fields}
            return Splits(**splits, others=others)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecordError(
                f"the shapes of the data in {self.path} cannot be read ({error!r}): it is damaged."
            ) from error

    @staticmethod
    def describe_data(splits: Splits, examples: Examples) -> dict[str, Any] | None:
        """Returns the number of examples of each split, and the dtype and shape of one of ``examples [batch, ...]``.

        ``{"splits": {"train": 1437}, "inputs": "float32[64]", "targets": "int32[]"}``; None if the source prepares
        batches in a way of its own, which a record does not hold.
        """
        if getattr(type(splits.train), "as_batch", None) is not ArraySource.as_batch:
            return None
        one = jax.tree.map(lambda rows: f"{rows.dtype}{list(rows.shape[1:])}", examples._asdict())
        return {"splits": {name: source.num_examples for name, source in splits.named().items()}, **one}

    def check_reported(self, member: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Raises RecordError if the sweep finished and a ``member``'s last report is not in its ``lines``."""
        if self.facts["status"] == "finished" and (lines[-1]["step"] if lines else 0) != (step := member["step"]):
            raise RecordError(
                f"{self.path / METRICS_FILE} lacks the report of member {member['member']} at step {step}: the record "
                "is damaged, restore the file from a copy."
            )

    def check_trained(self, group: Mapping[str, Any]) -> None:
        """Raises RecordError unless a ``group`` was opened."""
        needed = {"fingerprint", "steps_per_call", "layout"} | ({"vmap"} if self.facts["points"] else set())
        if lacking := {name for name in needed if group.get(name) is None}:
            raise RecordError(f"{self.path} lacks {min(lacking)!r} of a group: it was not trained, or is damaged.")
        if unknown := {*group["traced"]} - {axis["name"] for axis in self.facts["axes"]}:
            raise RecordError(f"a group of {self.path} traces {min(unknown)!r:.60}, which is no axis: it is damaged.")

    @staticmethod
    def below(folder: Path) -> list[Path]:
        """The directories at or below ``folder`` that hold a run, or a sweep with all of its shards; oldest first."""
        found = []
        for path, folders, files in folder.walk():
            has_shards = bool(RecordReader(path).shards)
            if has_shards or RECORD_FILE in files:
                found.append(path)
            if has_shards or MEMBERS_FILE in files:  # of a sweep: below are its shards and states
                folders.clear()
        return sorted(found, key=_age)


def _read_facts(file: Path, kind: Mapping[str, Any]) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = parse(read_file(file), kind)
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read ({error}): the record is damaged.") from error
    # The process was killed.
    if facts["status"] == "running" and not is_locked(file.parent):
        facts["status"] = "interrupted"
    return facts


def _read_lines(file: Path, kind: Any) -> list[dict[str, Any]]:
    """Reads a file of JSON mappings of a ``kind``, one per line, empty if absent; a torn last line is dropped."""
    content, lines = read_bytes(file), []
    for number, text in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            lines.append(parse(text, kind))
        except ValueError as error:
            raise RecordError(f"{file} is damaged in line {number} ({error}): delete that line.") from error
    return lines


def _age(path: Path) -> tuple[str, str]:
    """The start time of a record, empty if it cannot be read, and its name."""
    for file in (path / RECORD_FILE, *sorted(path.glob(SHARDS))):
        try:
            return str(_read_facts(file, {"status": str, "started": str})["started"]), path.name
        except RecordError:
            continue
    return "", path.name
