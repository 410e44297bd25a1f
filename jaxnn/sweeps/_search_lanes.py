"""The members of a search: in lanes, waiting for one, or on the shelf; how they enter, leave and are trained."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxnn.engine import RUNNING, HostStates, Lanes, Members, Trainer
from jaxnn.observe import nbytes
from jaxnn.search import Reached
from jaxnn.sweeps._groups import Group, PlannedMember
from jaxnn.sweeps._members import COMPLETE
from jaxnn.sweeps._search_events import value_to_rank
from jaxnn.sweeps._sweep_run import FAILURES, SweepRun
from jaxnn.types import ConfigError, RecordError

WAITING, PAUSED, PRUNED, STOPPED_EARLY = "waiting", "paused", "pruned", "stopped early"


class SearchLanes(SweepRun):
    """A running search: the lanes of each group, and the states of the members that are in none."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.plan.search is not None
        self.search = self.plan.search
        self.lanes: dict[int, Lanes] = {}  # by the number of a group
        self.queues = defaultdict[int, list[int]](list)  # of each group, the members that wait for a lane
        self.shelf: dict[int, HostStates] = {}  # a row each, of members that are paused, complete or wait for a lane
        self._shelf_bytes = 0  # that they take
        self.places: dict[int, tuple[Group, int]] = {}  # of each member: its group and its row there
        self.reached: dict[int, int] = {}  # of each member: the number of shares that it has reported
        self.told: set[int] = set()  # the members that failed, as far as the searcher knows
        self.failed: dict[int, Exception] = {}  # by the number of a group: why it cannot be trained
        self.reported = None if self.record.directory is None else self.record.directory.digest()
        self.saved_step = 0  # of the newest checkpoint
        self.lane_windows = self.filled_windows = self._tenth = 0
        self._saved_at, self._since_saved = time.perf_counter(), 0
        self._elapsed_before, self._steps_before = 0.0, 0  # of earlier processes
        self._show_at = 0.0  # when progress may be shown again
        self._chunk_seconds = 0.0  # that the latest window took, by chunk of members

    @property
    def _path(self) -> Path:
        assert self.record.directory is not None
        return self.record.directory.path

    @property
    def elapsed(self) -> float:
        """Seconds since the search started, without those between an interruption and its resume."""
        return self._elapsed_before + self.plan.clock.passed

    @property
    def in_training(self) -> list[PlannedMember]:
        """The members that are in lanes or wait for one."""
        groups = self.plan.groups
        in_lanes = [groups[number].members[row] for number, lanes in self.lanes.items() for row in lanes.rows]
        waiting = [self.plan.member(number) for queue in self.queues.values() for number in queue]
        return [*(member for member in in_lanes if member.status == RUNNING), *waiting]

    def _find_places(self) -> None:
        for group in self.plan.groups:
            for row in range(len(group.members) - 1, -1, -1):
                if group.members[row].number in self.places:
                    break
                self.places[group.members[row].number] = group, row

    def _enqueue(self, member: PlannedMember, state: HostStates | None = None) -> None:
        """Lets a member train: it stays in its lane if it has one, else it waits for one."""
        if member.status == "failed":
            return
        group, row = self.places[member.number]
        if group.number in self.failed:
            member.fail(self.failed[group.number])
            return
        lanes = self.lanes.get(group.number)
        if lanes is not None and row in lanes.rows:
            member.status = RUNNING
            return
        if state is not None:
            self._shelve(member.number, state)
            self._inherit(member, int(state.states.step[0]))
        member.status = WAITING
        self.queues[group.number].append(member.number)

    def _check_fork(self, donor: int, member: PlannedMember) -> None:
        """Raises ConfigError if a copy would need another program than the member it copies."""
        if member.status == "failed" or self.places[member.number][0] is self.places[donor][0]:
            return
        mine, theirs = self.places[member.number][0].static, self.places[donor][0].static
        differ = ", ".join(name for name in mine if repr(mine[name]) != repr(theirs[name]))
        raise ConfigError(
            f"the searcher {self.search.searcher.name} copies the state of member {donor} to another {differ}, "
            "which is another program: search floats and the seed alone."
        )

    def _inherit(self, member: PlannedMember, step: int) -> None:
        """Counts the shares that a copy has behind it."""
        group, _ = self.places[member.number]
        passed = sum(end <= step for end in self._ends(group))
        self.reached[member.number] = max(passed, self.reached.get(member.number, 0))

    def _filled(self) -> list[Group]:
        """Gives free lanes to the members that wait; returns the groups that have lanes."""
        for group in self.plan.groups:
            queue = self.queues[group.number]
            if queue and (lanes := self._lanes_of(group)) is not None:
                self.queues[group.number] = queue[lanes.num_free :]
                self._enter(group, lanes, [self.plan.member(number) for number in queue[: lanes.num_free]])
        return [group for group in self.plan.groups if group.number in self.lanes]

    def _enter(
        self, group: Group, lanes: Lanes, members: Sequence[PlannedMember], numbers: Sequence[int] | None = None
    ) -> None:
        """Puts members into free lanes, or those of ``numbers``, from the shelf or from their start."""
        ordered = sorted(members, key=lambda member: member.number not in self.shelf)
        for few in (ordered[first : first + Lanes.AT_ONCE] for first in range(0, len(ordered), Lanes.AT_ONCE)):
            filled = [*few, *[few[-1]] * (Lanes.AT_ONCE - len(few))]
            values = Members.traced_values([member.experiment for member in filled], group.traced)
            parts = [self._unshelve(member.number) for member in few if member.number in self.shelf]
            if len(parts) < len(few):
                with self.plan.clock.span("initialise"):
                    fresh = lanes.trainer.programs.fresh(values, Lanes.AT_ONCE)
                new = slice(len(parts), len(few))
                parts.append(jax.tree.map(lambda leaf, new=new: leaf[new], fresh))
            for member in few:
                member.status = RUNNING
                self.reached.setdefault(member.number, 0)
            with self.plan.clock.span("refill"):
                host = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
                rows = [self.places[member.number][1] for member in few]
                lanes.enter(rows, host, values, None if numbers is None else numbers[: len(few)])
            numbers = None if numbers is None else numbers[len(few) :]

    def _lanes_of(self, group: Group) -> Lanes | None:
        """The lanes of a group, opened if they were not yet; None if they cannot be: then its members have failed."""
        if group.number not in self.lanes:
            try:
                with self.interruption.finishing("the current compilation"):
                    self.lanes[group.number] = Lanes(self._open(group))
            except FAILURES as error:
                if isinstance(error, RecordError) or len(self.plan.groups) == 1:
                    raise
                self.fail_group(group, error)
                return None
        return self.lanes[group.number]

    def fail_group(self, group: Group, error: Exception) -> None:
        """Ends the members of a group, those that pause too, and all that are proposed later."""
        for member in group.members:
            if member.status == PAUSED:
                member.fail(error)
            if member.status not in COMPLETE and member.number in self.shelf:
                self._unshelve(member.number)
        self.queues[group.number] = []
        self.failed[group.number] = error
        self.lanes.pop(group.number, None)  # a call that failed took their states
        super().fail_group(group, error)

    def _open(self, group: Group) -> Trainer:
        trainer = self.open_group(group)
        trainer.elapsed_before = self._elapsed_before
        if self.record.directory is not None:
            # All groups write one log.
            assert self.reported is not None
            trainer.record, trainer.reported = self.record.directory, self.reported
        return trainer

    def more_summary(self) -> dict[str, Any]:
        """What else the summary of the record has."""
        return {"lanes_in_use": self.filled_windows / max(1, self.lane_windows)}

    def _train_window(self, group: Group, lanes: Lanes) -> list[Reached]:
        """Trains the members in the lanes of a group by one window; returns what there is to tell."""
        rows = [row for row in lanes.rows if group.members[row].status == RUNNING]
        # Chunks without a member are not computed.
        self.lane_windows += -(-len(rows) // lanes.shape.lanes) * lanes.shape.lanes
        self.filled_windows += len(rows)
        with self.plan.clock.span("train"):
            try:
                window = lanes.train_window()
            except FAILURES as error:
                if len(self.plan.groups) == 1:
                    raise
                self.fail_group(group, error)
                return []
        self.member_steps += window.num_steps * len(rows)
        self._show_search(window)
        reports, ends, shares = list[Reached](), self._ends(group), self.search.searcher.shares
        for row in window.lines:
            member = group.members[row]
            over, step = member.status != RUNNING, lanes.steps[row]
            number, passed = self.reached[member.number], sum(end <= step for end in ends)
            if over or passed > number:
                # The last that it passed; that it was on the way to, if it ended before.
                share = shares[passed - 1 if passed > number else number]
                value = None if member.status == "diverged" else member.latest(self.monitored)
                rank = value_to_rank(value, higher_is_better=self.higher_is_better)
                reports.append(Reached(member.number, share, rank, over))
                self.reached[member.number] = passed
        return reports

    def _show_search(self, window: Any) -> None:
        if (asked_at := time.perf_counter()) < self._show_at:
            return
        started, most = len(self.plan.members), self.search.searcher.num or 0
        done = sum(member.step for member in self.plan.members)
        in_lanes = sum(len(one.rows) for one in self.lanes.values())
        # As if the rest took as many steps as those so far, one by one.
        left = round(done * max(0, most - started) / started) + self.plan.num_left
        if (budget := self.plan.options.budget_seconds) < math.inf and not self.search.ended:
            left = min(left or done, round(done * max(0.0, budget / self.elapsed - 1)))
        # A line for each tenth, as of a run.
        tenth, self._tenth = self._tenth, int(10 * done / max(1, done + left))
        title = f"{started} of {most} started" if most else f"{started} started"
        title += f", {in_lanes}/{self.plan.num_lanes} lanes"
        self._show(title, window, left, is_milestone=self._tenth > tenth)
        # All members are looked at: a twentieth of the time at most.
        self._show_at = time.perf_counter() + 20 * (time.perf_counter() - asked_at)

    def _ends(self, group: Group) -> list[int]:
        return [self.plan.share_end(group, share) for share in self.search.searcher.shares]

    def _state_of(self, number: int) -> HostStates:
        """A copy of the state of a member that is paused."""
        group, row = self.places[number]
        if number in self.shelf:
            copied: HostStates = jax.tree.map(np.copy, self.shelf[number])
            return copied
        return self.lanes[group.number].states([row])

    def _leave(self, number: int, rows: Sequence[int]) -> None:
        """Takes members out of the lanes of a group; keeps the states of those that may be used again."""
        lanes, members = self.lanes.get(number), self.plan.groups[number].members
        rows = [row for row in rows if lanes is not None and row in lanes.rows]
        if lanes is None or not rows:
            return
        # Without a record there is nothing to open those from that ended.
        ended = (PRUNED, *COMPLETE) if self.record.directory is not None else ()
        kept = [row for row in rows if members[row].status in (PAUSED, *ended)]
        if kept:
            with self.plan.clock.span("refill"):
                host = lanes.states(kept)
            for index, row in enumerate(kept):
                row_state: HostStates = jax.tree.map(lambda leaf, at=index: leaf[at : at + 1].copy(), host)
                self._shelve(members[row].number, row_state)
            self._make_room()
        lanes.leave(rows)

    def _shelve(self, number: int, state: HostStates) -> None:
        self.shelf[number] = state
        self._shelf_bytes += nbytes(state)

    def _unshelve(self, number: int) -> HostStates:
        state = self.shelf.pop(number)
        self._shelf_bytes -= nbytes(state)
        return state

    def _make_room(self) -> None:
        """Drops states until they fit the option ``states_mib``: of pruned members, then of paused ones, worst first.

        A paused member without a state trains from its start if it is promoted.
        """
        most = self.plan.options.states_mib * 2**20
        if self._shelf_bytes <= most:
            return

        def order(number: int) -> tuple[bool, int, float]:
            member = self.plan.member(number)
            value = member.latest(self.monitored)
            rank = value_to_rank(value, higher_is_better=self.higher_is_better)
            return member.status == PAUSED, self.reached.get(number, 0), -rank

        droppable = (PRUNED,) if self.search.searcher.copies else (PRUNED, PAUSED)
        for number in sorted((one for one in self.shelf if self.plan.member(one).status in droppable), key=order):
            if self._shelf_bytes > most:
                self._unshelve(number)

    def _end(self, member: PlannedMember, status: str) -> None:
        """Ends a member; its state is kept while there is room, so that it can be continued as a run."""
        member.status = status
        if member.number in self.places:
            group, row = self.places[member.number]
            self._leave(group.number, [row])
