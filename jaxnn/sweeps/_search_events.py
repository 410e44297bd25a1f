"""A search in progress: what its searcher was asked and told, kept so that a resumed search repeats it."""

import dataclasses
import json
import math
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn._disk import write_bytes
from jaxnn._json import json_line, jsonable
from jaxnn.record import RecordReader
from jaxnn.search import Drop, Fork, Promote, Propose, Reached, Searcher
from jaxnn.types import ConfigError, JaxnnError, RecordError, error_line

FILE = "search.jsonl"


class SavedSearch(NamedTuple):
    """What a search can be resumed from: its newest checkpoint, and the events until then."""

    events: Sequence[Mapping[str, Any]] = ()
    step: int | None = None  # None: there is no checkpoint
    about: Mapping[str, Any] = {}  # what its files say of it
    damaged: Sequence[tuple[str, int, str]] = ()  # of newer ones the group, the step and the damage


@dataclasses.dataclass
class Search:
    """A searcher, its state, and the events that led to it, as JSON."""

    searcher: Searcher
    state: Any = None
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    points: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)  # of each member that was proposed
    numbers: list[int] = dataclasses.field(default_factory=list)  # the members that this process trains
    lanes: int | None = None  # in this process; None: as the options say
    over: bool = False  # whether it has nothing more to propose
    ended: bool = False  # whether it is neither asked nor told any more, since its budget is used up

    def __post_init__(self) -> None:
        self.searcher.check()
        self.state = self._called("init")

    def ask(self, count: int, paused: Collection[int], shard: str | None = None) -> list[Any]:
        """Asks for at most ``count`` members to train; ConfigError if it proposes what it may not.

        New members are of a ``shard`` if there are several, and copies of the shard of their donor.
        """
        if self.ended:
            return []
        self.state, proposals = self._called("ask", self.state, count)
        proposals = self.searcher.check_proposals(proposals, count, paused)
        event = {"ask": count, "proposals": list(map(_as_json, proposals))} | ({"shard": shard} if shard else {})
        if proposals or self.events[-1:] != [event]:  # a search that was over is asked once more when it is resumed
            self.events.append(event)
        self.points += [one.point for one in proposals if isinstance(one, Propose | Fork)]
        self.numbers += range(len(self.numbers), len(self.points))
        return proposals

    def tell(self, reports: Sequence[Reached]) -> list[Any]:
        """Tells what members reached; returns a verdict for each."""
        if self.ended:
            return ["continue"] * len(reports)
        self.state, verdicts = self._called("tell", self.state, reports)
        verdicts = self.searcher.check_verdicts(verdicts, reports)
        told = [[one.member, float(one.share), float(one.value), one.over] for one in reports]
        self.events.append({"tell": jsonable(told), "verdicts": verdicts})
        return verdicts

    def end(self) -> None:
        """Ends it before its searcher has proposed all."""
        self.ended = True
        self.events.append({"end": "budget"})

    def _called(self, function: str, *arguments: Any) -> Any:
        """What a function of the searcher returns; ConfigError, with the line, if it raises an error."""
        try:
            found = getattr(self.searcher, function)(*arguments)
            if function != "init":
                state, answers = found
                return state, list(answers)
            return found
        except JaxnnError:
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"{function} of the searcher {self.searcher.name} raised {error_line(error)}, at "
                f"{place.filename}:{place.lineno}."
            ) from error

    def waits(self) -> bool:
        """Waits a moment for other processes; returns whether they may yet give this one something to train."""
        return False

    def restore(self, saved: SavedSearch) -> None:
        """Continues from a checkpoint: with the members that were known then."""
        self.replay(saved.events)

    def replay(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Asks and tells the same again; ConfigError if the searcher answers otherwise."""
        for number, event in enumerate(events):
            if self.ended:
                raise RecordError(f"line {number + 2} of {FILE} is after the end of the search: the record is damaged.")
            if "end" in event:
                self.end()
            elif "ask" in event:
                self.ask(event["ask"], range(len(self.points)), event.get("shard"))
            else:
                told = [(member, share, float(value), over) for member, share, value, over in event["tell"]]
                known = (member < len(self.points) and share in self.searcher.shares for member, share, _, _ in told)
                if not all(known):
                    raise RecordError(
                        f"line {number + 2} of {FILE} reports what was not asked for: the record is damaged."
                    )
                self.tell([Reached(*one) for one in told])
            if _as_read(self.events[-1]) != event:
                raise ConfigError(
                    f"the searcher {self.searcher.name} answers otherwise than when the search was started, from "
                    f"line {number + 2} of its {FILE} on: its space is another, or it is no function of its state."
                )

    def write(self, path: Path) -> None:
        """Writes the events of this process to the record in ``path``."""
        write_bytes(path / FILE, "".join(map(json_line, [self.header(), *self.events])).encode())

    def header(self) -> dict[str, Any]:
        """The first line of the file: what identifies the searcher."""
        return _as_read({"searcher": self.searcher.description})


def recorded_events(path: Any, search: Search) -> list[dict[str, Any]]:
    """The events in ``search.jsonl`` of the sweep in ``path``; ConfigError if ``search`` has another searcher."""
    described, events = read_events(path)
    if search.header()["searcher"] != described:
        raise ConfigError(
            f"the searcher of the sweep in {path} is not this one ({described.get('name')} with other settings): "
            f"--resume {path} without points continues with what it has; or start a new sweep."
        )
    return events


def read_events(path: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The searcher's description and the events in ``search.jsonl`` of the sweep in ``path``."""
    lines = RecordReader(path).events()
    if not lines or not isinstance(lines[0].get("searcher"), dict):
        raise RecordError(f"{path / FILE} does not start with a searcher: the record is damaged.")
    for number, event in enumerate(lines[1:], 2):
        if not _is_event(event):
            raise RecordError(f"{path / FILE} is damaged in line {number}: restore the file from a copy.")
    return lines[0]["searcher"], lines[1:]


def _as_read(content: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` as it is after it was written to a file and read."""
    return json.loads(json.dumps(jsonable(content)))  # type: ignore[no-any-return]


def _is_event(event: Mapping[str, Any]) -> bool:
    if "end" in event:
        return event == {"end": "budget"}
    if "ask" in event:
        typed = type(event["ask"]) is int and isinstance(event.get("shard", ""), str)
        return typed and isinstance(event.get("proposals"), list)

    def is_report(told: Any) -> bool:
        if not (isinstance(told, list) and len(told) == 4):
            return False
        member, share, value, over = told
        numbers = type(share) is float and (type(value) is float or value in ("inf", "nan", "-inf"))
        return type(member) is int and numbers and type(over) is bool

    return isinstance(event.get("tell"), list) and all(map(is_report, event["tell"]))


def _as_json(proposal: Any) -> dict[str, Any]:
    match proposal:
        case Propose(point):
            return {"point": dict(point)}
        case Promote(member):
            return {"promote": member}
        case Fork(member, point):
            return {"fork": member, "point": dict(point)}
        case Drop(member):
            return {"drop": member}
    raise AssertionError(proposal)


def value_to_rank(value: float | None, *, higher_is_better: bool) -> float:
    """A metric's value as searchers rank it: the lower the better, infinite if there is none."""
    if value is None or not math.isfinite(value):
        return math.inf
    return -value if higher_is_better else value
