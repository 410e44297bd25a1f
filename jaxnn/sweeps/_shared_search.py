"""A search that the workers of several shards share: one process keeps it, the others ask and tell that one."""

import _thread
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn.record import Record
from jaxnn.search import Drop, Fork, Promote, Propose, Reached, Searcher
from jaxnn.sweeps._search_events import FILE, SavedSearch, Search, recorded_events
from jaxnn.types import RecordError

SECONDS_BETWEEN_CALLS = 0.2  # of a worker that has nothing to train


class Answer(NamedTuple):
    """What a shard is to train: proposals with the number of each member, and the points that it did not know."""

    proposals: list[tuple[int, Any]]
    points: list[Mapping[str, Any]]
    lanes: int  # of the shard
    then: str  # what it does once it trains nothing: ``wait``, ``leave``, or it is ``over``


class SharedSearch:
    """A search and the shard of each member, continued from ``search.jsonl`` in the directory of the sweep.

    A member stays in the shard that has its state. Calls may be repeated: a worker that continues from a checkpoint
    gets the verdicts and proposals that were recorded since, so an event is decided once. Each event is on the disk
    before a worker knows it. Another process may therefore take over at any time.
    """

    def __init__(self, searcher: Searcher, path: Path, lanes: Mapping[str, int]) -> None:
        self.search, self.file = Search(searcher), path / FILE
        self.owners: list[str] = []  # of each member: its shard
        self.shares: dict[int, float] = {}  # of each member: the last that it reported
        self.verdicts: dict[tuple[int, float], str] = {}  # on a member at a share
        self.promoted: set[tuple[int, float]] = set()  # the members, with the share at which they paused
        self.copied: dict[int, tuple[int, float]] = {}  # of each copy: its donor, and the share where that paused
        self.training, self.paused, self.ended = set[int](), set[int](), set[int]()
        self.waiting = False  # for reports: the searcher proposed nothing since the last one
        self.leaves = False  # whether a worker that waits is to leave
        self._open = contextlib.ExitStack()  # until this process ends
        self._record = self._open.enter_context(Record.open(path))
        if self.file.exists():
            self.search.replay(recorded_events(path, self.search))
        self._noted = self._written = 0  # numbers of events
        self._note()
        if {*self.owners} - {*lanes}:
            raise RecordError(f"{self.file} has members of other shards than {[*lanes]}: the record is damaged.")
        self.search.write(path)
        self._written = self._noted
        # As many as the first call asked for: a resumed search has the lanes that it had.
        asked = [event for event in reversed(self.search.events) if "ask" in event]
        self.lanes: dict[str, int] = {event["shard"]: event["ask"] for event in asked}
        for shard, count in lanes.items():
            if shard not in self.owners:
                self.search.ask(self.lanes.setdefault(shard, count), (), shard)
                self._keep()

    def close(self) -> None:
        """Lets another process keep the search."""
        self._open.close()

    def ask(
        self, shard: str, known: Collection[int], paused: Mapping[int, float], count: int, num_points: int
    ) -> Answer:
        """Answers a shard that asks for at most ``count`` members, has ``known`` ones and ``num_points`` points.

        ``paused`` maps a member to the share at which it is.
        """
        self._keep()  # what the disk refused before
        found = self._owed(shard, known, paused, count)
        while (room := count - sum(not isinstance(one, Drop) for _, one in found)) > 0 and not self.waiting:
            self.waiting = not self.search.ask(room, self.paused, shard)
            self._keep()
            found = self._owed(shard, known, paused, count)
        then = "over" if self.waiting and not self.training else "leave" if self.leaves else "wait"
        return Answer(found, self.search.points[num_points:], self.lanes[shard], then)

    def tell(self, reports: Sequence[Reached]) -> list[str]:
        """Returns a verdict on each report: the recorded one if it was made before."""
        known = self.verdicts
        # Another device may let a member diverge that was paused before.
        new = [one for one in reports if one.over or (one.member, one.share) not in known]
        new = [one for one in new if one.member not in self.ended]
        if new:
            self.search.tell(new)
            self.waiting = False
            self._keep()
        return [known.get((one.member, one.share), "continue") for one in reports]

    def release(self, *, idle: bool) -> None:
        """Sets whether workers are to leave that wait for others: these have no place to run, or failed."""
        self.leaves = idle

    def _owed(
        self, shard: str, known: Collection[int], paused: Mapping[int, float], count: int
    ) -> list[tuple[int, Any]]:
        points, known = self.search.points, {*known}
        new = [number for number, owner in enumerate(self.owners) if owner == shard and number not in known]
        copies = {one: self.copied[one][0] for one in new if one in self.copied}
        # First the copies: what they are copied from must not train on before.
        found: list[tuple[int, Any]] = [
            (one, Fork(donor, points[one]))
            for one, donor in copies.items()
            if self.copied[one] == (donor, paused.get(donor))
        ]
        donors = {one.member for _, one in found}
        found += [(one, Promote(one)) for one, share in paused.items() if (one, share) in self.promoted]
        found += [(one, Propose(points[one])) for one in new if one not in copies]
        ended = [one for one in paused if one in self.ended - donors and (one, paused[one]) not in self.promoted]
        return [(one, Drop(one)) for one in ended] + found[:count]

    def _keep(self) -> None:
        """Notes what the new events decided, and writes them."""
        self._note()
        if lines := self.search.events[self._written :]:
            self._record.report(*lines, name=FILE)
            self._written = self._noted

    def _note(self) -> None:
        for event in self.search.events[self._noted :]:
            for proposal in event.get("proposals", ()):
                self._note_proposal(proposal, event.get("shard", ""))
            for (member, share, _, over), verdict in zip(event.get("tell", ()), event.get("verdicts", ()), strict=True):
                self.verdicts[member, share], self.shares[member] = verdict, share
                if over or verdict != "continue":
                    self.training.discard(member)
                    (self.paused if verdict == "pause" and not over else self.ended).add(member)
                if over:
                    self.paused.discard(member)
        self._noted = len(self.search.events)

    def _note_proposal(self, proposal: Mapping[str, Any], shard: str) -> None:
        if "point" in proposal:
            self.training.add(number := len(self.owners))
            donor = proposal.get("fork")
            self.owners.append(shard if donor is None else self.owners[donor])
            if donor is not None:
                self.copied[number] = donor, self.shares[donor]
                self.shares[number] = self.shares[donor]
        elif "promote" in proposal:
            self.promoted.add((member := proposal["promote"], self.shares[member]))
            self.paused.discard(member)
            self.training.add(member)
        else:
            self.paused.discard(proposal["drop"])
            self.ended.add(proposal["drop"])


@dataclasses.dataclass
class RemoteSearch(Search):
    """A search that another process keeps, as a worker sees it: the members of its shard, all points, no events."""

    shard: str = ""
    call: Callable[..., Any] = lambda *_: None  # calls a method of the `SharedSearch`, by its name
    then: str = "wait"  # what this worker does once it trains nothing

    def ask(self, count: int, paused: Any, shard: str | None = None) -> list[Any]:
        """Asks for at most ``count`` members of this shard to train; ``paused`` are members with their shares."""
        proposals, points, self.lanes, self.then = self.call(
            "ask", self.shard, self.numbers, dict(paused), count, len(self.points)
        )
        self.points += points
        self.numbers += [number for number, one in proposals if isinstance(one, Propose | Fork)]
        return [one for _, one in proposals]

    def tell(self, reports: Sequence[Reached]) -> list[Any]:
        """Tells what members reached; returns a verdict for each."""
        verdicts: list[Any] = self.call("tell", list(reports))
        return verdicts

    def waits(self) -> bool:
        """Waits a moment for other workers, or leaves if they cannot run; False at the end."""
        if self.then == "leave":
            _thread.interrupt_main()  # it saves and ends, as by Ctrl-C; Ray blocks that signal
        elif self.then == "wait":
            time.sleep(SECONDS_BETWEEN_CALLS)
        return self.then != "over"

    def begins(self) -> bool:
        """Waits for a first member of this shard; returns whether the search has one."""
        while True:
            found, _, self.lanes, self.then = self.call("ask", self.shard, (), {}, 1, 0)
            if found or not self.waits():
                return bool(found)

    def restore(self, saved: SavedSearch) -> None:
        """Continues from a checkpoint of this shard: with the members that it had then."""
        by_status = (saved.about.get("search") or {}).get("by_status", {})
        self.numbers = sorted(number for numbers in by_status.values() for number in numbers)
        self.ask(0, {})
        if self.numbers and self.numbers[-1] >= len(self.points):
            raise RecordError(f"{FILE} lacks events of the newest checkpoint of shard {self.shard}: restore the file.")

    def write(self, path: Path) -> None:
        """Writes nothing: the events are of all shards."""
