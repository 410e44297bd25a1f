"""A search in training: members enter lanes, pause, continue, copy each other and end, as its searcher says."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxnn import record as records
from jaxnn._disk import write_bytes
from jaxnn._json import json_line, reports_by_member
from jaxnn.engine import RUNNING, HostStates, Lanes, Trainer
from jaxnn.observe import nbytes
from jaxnn.search import Drop, Fork, Promote, Propose, Reached
from jaxnn.sweeps._groups import Group, PlannedMember, traced_values
from jaxnn.sweeps._members import COMPLETE
from jaxnn.sweeps._search_events import FILE, value_to_rank
from jaxnn.sweeps._sweep_record import search_stores
from jaxnn.sweeps._sweep_run import FAILURES, SweepRun, reason
from jaxnn.types import ConfigError, RecordError

WAITING, PAUSED, PRUNED = "waiting", "paused", "pruned"
SECONDS_BETWEEN_SAVES = 60.0
MOST_BYTES = 2**30  # that states of pruned members may take, with all others that are in no lane
ANY = range(2**31)  # member: also one that was proposed after the checkpoint


class SearchRun(SweepRun):
    """A running search: the lanes of each group, and the states of the members that are in none."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.plan.search is not None
        self.search = self.plan.search
        self.lanes: dict[int, Lanes] = {}  # by the number of a group
        self.queues = defaultdict[int, list[int]](list)  # of each group, the members that wait for a lane
        self.shelf: dict[int, HostStates] = {}  # a row each, of members that are paused, complete or wait for a lane
        self.places: dict[int, tuple[Group, int]] = {}  # of each member: its group and its row there
        self.reached: dict[int, int] = {}  # of each member: the number of shares that it has reported
        self.told: set[int] = set()  # the members that failed, as far as the searcher knows
        self.failed: dict[int, Exception] = {}  # by the number of a group: why it cannot be trained
        self.reported = None if self.record.directory is None else self.record.directory.digest()
        self.saved_step = 0  # of the newest checkpoint
        self.lane_windows = self.filled_windows = self._tenth = 0
        self._saved_at, self._since_saved = time.perf_counter(), 0
        self._elapsed_before, self._steps_before = 0.0, 0  # of earlier processes

    @property
    def _path(self) -> Path:
        assert self.record.directory is not None
        return self.record.directory.path

    @property
    def in_training(self) -> list[PlannedMember]:
        """The members that are in lanes or wait for one."""
        numbers = {number for queue in self.queues.values() for number in queue}
        return [member for member in self.plan.members if member.status == RUNNING or member.number in numbers]

    @property
    def unfinished(self) -> bool:
        """Whether the searcher may still propose something."""
        return not self.search.over

    def train(self) -> None:
        """Trains until the searcher proposes nothing more; the record has the status, after errors too."""
        # First: a record that names a search has what its searcher was asked and told.
        self._write_events()
        super().train()

    def _complete(self) -> None:
        if self.record.directory is not None:
            # Before the members: the record must never have fewer points than their file.
            self._set_facts()
            self.record.write()
        super()._complete()

    def _train_all(self) -> None:
        self._find_places()
        self._restore()
        self.record.write_members(self.plan)
        queued = {number for queue in self.queues.values() for number in queue}
        for member in self.plan.members:
            if member.status == WAITING and member.number not in queued:
                self.queues[self.places[member.number][0].number].append(member.number)
        while self.interruption.signum is None:
            self._tell([self._over(member) for member in self.plan.members if not self._is_told(member)])
            asked = self._ask()
            running = [(group, self.lanes[group.number]) for group in self._filled() if self.lanes[group.number].rows]
            if not running:
                self.search.over = not asked and all(map(self._is_told, self.plan.members))
                if self.search.over:
                    break
                continue
            reports = list[Reached]()
            for group, lanes in running:
                reports += self._train_window(group, lanes)
            self._tell(sorted(reports))
            self._since_saved += max(lanes.plan.num_steps for _, lanes in running)
            if self.interruption.signum is None and self._save_due():
                self._save()
        for member in self.plan.members if self.search.over else ():
            if member.status == PAUSED:
                self._end(member, PRUNED)
        self._save()

    # -- what the searcher says

    def _ask(self) -> bool:
        """Asks the searcher who is to train; returns whether it said anything."""
        plan, paused = self.plan, [member.number for member in self.plan.members if member.status == PAUSED]
        with plan.clock.span("search"):
            proposals = self.search.ask(plan.num_lanes - len(self.in_training), paused)
            new = iter(planned := plan.add())
        self._find_places()
        self.points |= {member.number: dict(member.point) for member in planned}
        for one in proposals:
            match one:
                case Propose():
                    self._enqueue(next(new))
                case Promote(number):
                    self._enqueue(plan.members[number])
                case Fork(donor, _):
                    member = next(new)
                    self._check_fork(donor, member)
                    self._enqueue(member, self._state_of(donor))
                case Drop(number):
                    self._end(plan.members[number], PRUNED)
        # Those that are not promoted at once leave their lanes.
        for number, lanes in self.lanes.items():
            members = plan.groups[number].members
            self._leave(number, [row for row in lanes.rows if members[row].status == PAUSED])
        return bool(proposals)

    def _tell(self, reports: Sequence[Reached]) -> None:
        """Tells the searcher what members reached, and does what it says."""
        if not reports:
            return
        with self.plan.clock.span("search"):
            verdicts = self.search.tell(reports)
        for report, verdict in zip(reports, verdicts, strict=True):
            member = self.plan.members[report.member]
            if report.over:
                group, row = self.places.get(member.number, (None, 0))
                if group is not None and member.status != "failed":
                    self._leave(group.number, [row])
            elif verdict == "pause":
                member.status = PAUSED
            elif verdict == "stop":
                self._end(member, PRUNED)

    def _is_told(self, member: PlannedMember) -> bool:
        """Whether the searcher knows that a member failed, if it did."""
        return member.status != "failed" or member.number in self.told

    def _over(self, member: PlannedMember) -> Reached:
        """The report of a member that could not be trained, or not any further."""
        self.told.add(member.number)
        share = self.search.searcher.shares[self.reached.setdefault(member.number, 0)]
        return Reached(member.number, share, float("inf"), over=True)

    # -- lanes

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
            self.shelf[member.number] = state
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
        self.reached[member.number] = sum(end <= step for end in self._ends(group))

    def _filled(self) -> list[Group]:
        """Gives free lanes to the members that wait; returns the groups that have lanes."""
        for group in self.plan.groups:
            queue = self.queues[group.number]
            if queue and (lanes := self._lanes_of(group)) is not None:
                self.queues[group.number] = queue[lanes.num_free :]
                self._enter(group, lanes, [self.plan.members[number] for number in queue[: lanes.num_free]])
        return [group for group in self.plan.groups if group.number in self.lanes]

    def _enter(
        self, group: Group, lanes: Lanes, members: Sequence[PlannedMember], numbers: Sequence[int] | None = None
    ) -> None:
        """Puts members into free lanes, or those of ``numbers``, from the shelf or from their start."""
        ordered = sorted(members, key=lambda member: member.number not in self.shelf)
        for few in (ordered[first : first + Lanes.AT_ONCE] for first in range(0, len(ordered), Lanes.AT_ONCE)):
            filled = [*few, *[few[-1]] * (Lanes.AT_ONCE - len(few))]
            values = traced_values([member.experiment for member in filled], group.traced)
            parts = [self.shelf.pop(member.number) for member in few if member.number in self.shelf]
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
                self._fail(group, error)
                return None
        return self.lanes[group.number]

    def _fail(self, group: Group, error: Exception) -> None:
        for member in group.members:
            if member.unfinished or member.status == PAUSED:
                member.fail(error)
                self.shelf.pop(member.number, None)
        self.queues[group.number] = []
        self.failed[group.number] = error
        self.lanes.pop(group.number, None)  # a call that failed took their states
        if group.number in self.plan.open:
            self._close(group.number)
        self.display.say(f"  group {group.number + 1} failed: {reason(error)}")

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

    def record_group(self, number: int, trainer: Trainer) -> list[str]:
        """Adds what is known of a group to the record; its states are saved with those of all."""
        if self.record.directory is None:
            return []
        self._set_facts()
        name = f"group {number + 1}"
        changed, damaged = self.record.open_group(number, trainer, trainer.facts(), name, stores=False)
        self.record.write()
        notes = [f"continues, not bit for bit, since these changed: {'; '.join(changed)}"] if changed else []
        return notes + damaged

    def _train_window(self, group: Group, lanes: Lanes) -> list[Reached]:
        """Trains the members in the lanes of a group by one window; returns what there is to tell."""
        rows = [row for row in lanes.rows if group.members[row].status == RUNNING]
        self.lane_windows, self.filled_windows = self.lane_windows + lanes.slots.size, self.filled_windows + len(rows)
        with self.plan.clock.span("train"):
            try:
                window = lanes.train_window()
            except FAILURES as error:
                if len(self.plan.groups) == 1:
                    raise
                self._fail(group, error)
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
                value = None if member.status == "diverged" else next(iter(member.values(self.monitored)[-1:]), None)
                rank = value_to_rank(value, higher_is_better=self.higher_is_better)
                reports.append(Reached(member.number, share, rank, over))
                self.reached[member.number] = passed
        return reports

    def _show_search(self, window: Any) -> None:
        started, most = len(self.plan.members), self.search.searcher.num or 0
        done, in_lanes = (
            sum(member.step for member in self.plan.members),
            sum(len(one.rows) for one in self.lanes.values()),
        )
        # As if the rest took as many steps as those so far, one by one.
        left = round(done * max(0, most - started) / started) + self.plan.num_left
        # A line for each tenth, as of a run.
        tenth, self._tenth = self._tenth, int(10 * done / max(1, done + left))
        title = f"{started} of {most} started" if most else f"{started} started"
        title += f", {in_lanes}/{self.plan.num_lanes} lanes"
        self._show(title, window, left, is_milestone=self._tenth > tenth)

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
                self.shelf[members[row].number] = jax.tree.map(lambda leaf, at=index: leaf[at : at + 1].copy(), host)
        lanes.leave(rows)

    def _end(self, member: PlannedMember, status: str) -> None:
        """Ends a member; its state is kept while there is room, so that it can be continued as a run."""
        member.status = status
        if member.number in self.places:
            group, row = self.places[member.number]
            self._leave(group.number, [row])

    # -- record

    def _restore(self) -> None:
        """Continues from the newest checkpoint: the states, reports and statuses of members, and their lanes."""
        plan = self.plan
        if plan.options.resume is None or self.record.directory is None:
            return
        stores = search_stores(self._path, self.record.facts)
        step, saved, damaged = records.Checkpoints.newest_of_all(stores)
        about = saved.get("search") or {"members": {}, "lanes": {}, "by_status": {}, "steps": {}}
        self._check_saved(about)
        where = "the checkpoint of the search"
        lines, self.reported, damage = self.record.directory.rewind(
            lambda line: about["steps"].get(str(line["member"]), 0), saved.get("log"), where, ANY
        )
        if damage is not None:
            self.display.say(f"  {damage}")
        known = (line.get("elapsed") for line in lines)
        self._elapsed_before = max((value for value in known if isinstance(value, int | float)), default=0.0)
        reports = reports_by_member(lines)
        for status, numbers in about["by_status"].items():
            for number in numbers:
                plan.members[number].status, plan.members[number].lines = status, reports[number]
                if status == WAITING:  # in the order in which they wait
                    self.queues[self.places[number][0].number].append(number)
        for event in self.search.events:
            for number, share, _, over in event.get("tell", ()):
                self.told |= {number} if over else set()
                self.reached[number] = self.search.searcher.shares.index(share) + 1
        # Before the record has the points of these members alone: it must never have fewer than this file.
        self.record.write_members(plan)
        like = {}
        for name, numbers in about["members"].items():
            lanes = self._lanes_of(plan.groups[int(name)])
            if lanes is not None:
                like[name] = HostStates.shapes(lanes.trainer.programs.shapes, len(numbers))
        notes = [stores[name].set_aside(at, what) for name, at, what in damaged]
        for store in stores.values():
            store.forget_after(step)
        if step is None:
            return
        self._steps_before = self.saved_step = step
        resumed = self.record.facts["resumed"][-1]
        resumed |= {"step": step, "damaged": [*resumed["damaged"], *notes]}
        for note in notes:
            self.display.say(f"  {note}")
        for name, shapes in like.items():
            host = stores[name].read(step, shapes)
            for index, number in enumerate(about["members"][name]):
                row: HostStates = jax.tree.map(lambda leaf, at=index: np.array(leaf[at : at + 1]), host)
                self.shelf[number] = row
                self._inherit(plan.members[number], int(row.states.step[0]))
            in_lanes = {lane: number for lane, number in enumerate(about["lanes"].get(name, ())) if number >= 0}
            members = [plan.members[number] for number in in_lanes.values()]
            paused = [member for member in members if member.status == PAUSED]
            self._enter(plan.groups[int(name)], self.lanes[int(name)], members, [*in_lanes])
            for member in paused:  # they may be promoted at once
                member.status = PAUSED

    def _check_saved(self, about: Mapping[str, Any]) -> None:
        """Raises RecordError unless what a checkpoint says of its members fits those that were proposed."""
        members, groups = range(len(self.plan.members)), {f"{group.number}" for group in self.plan.groups}
        lists = [*about["members"].values(), *about["by_status"].values()]
        lists += [[number for number in lanes if number >= 0] for lanes in about["lanes"].values()]
        known = all(number in members for numbers in lists for number in numbers)
        if (
            not known
            or any(len({*one}) < len(one) for one in lists)
            or not {*about["members"], *about["lanes"]} <= groups
        ):
            raise RecordError(
                f"the newest checkpoint of the search in {self._path} has other members than its {FILE}: the record is "
                "damaged."
            )

    def _write_events(self) -> None:
        if self.record.directory is not None:
            lines = [self.search.header(), *self.search.events]
            write_bytes(self._path / FILE, "".join(map(json_line, lines)).encode())

    def _set_facts(self) -> None:
        plan = self.plan
        known = {number: one for number, one in enumerate(self.record.facts["groups"])}
        groups = [
            {**known.get(group.number, {"static": dict(group.static), "traced": group.traced})}
            | {"members": [member.number for member in group.members]}
            for group in plan.groups
        ]
        self.record.facts |= {
            "groups": groups,
            "points": [dict(point) for point in plan.points],
            "axes": [vars(axis) for axis in plan.points.axes],
        }

    def _make_room(self) -> None:
        """Deletes states of pruned members, oldest first, if all take more than `MOST_BYTES`."""
        sizes = {number: nbytes(state) for number, state in self.shelf.items()}
        too_much = sum(sizes.values()) - MOST_BYTES
        for number, size in sizes.items():
            if too_much > 0 and self.plan.members[number].status == PRUNED:
                del self.shelf[number]
                too_much -= size

    def _save_due(self) -> bool:
        """Whether to save: by the steps that a lane made since, or by the clock."""
        if every := self.plan.options.checkpoint_every:
            return self._since_saved >= every
        return every is None and time.perf_counter() - self._saved_at > SECONDS_BETWEEN_SAVES

    def _save(self) -> None:
        """Saves all states, and what the searcher was asked and told."""
        if self.record.directory is None:
            return
        self._make_room()
        self._set_facts()
        self.record.write()
        self.record.write_members(self.plan)
        self._write_events()
        step = self.member_steps + self._steps_before
        if self.plan.options.checkpoint_every == 0 or step == self.saved_step:
            return
        with self.plan.clock.span("checkpoint"):
            self.writers.flush()
            by_status = defaultdict[str, list[int]](list)
            by_status[WAITING] = [number for queue in self.queues.values() for number in queue]
            for member in self.plan.members:
                if member.status != WAITING:
                    by_status[member.status].append(member.number)
            rows, lanes = dict[str, list[int]](), dict[str, list[int]]()
            for group in self.plan.groups:
                name, members = f"{group.number}", group.members
                slots = [*self.lanes[group.number].slots.flat] if group.number in self.lanes else []
                lanes[name] = [members[row].number if row >= 0 else -1 for row in slots]
                numbers = [number for number in lanes[name] if number >= 0]
                rows[name] = [*(one.number for one in members if one.number in self.shelf), *numbers]
            rows = {name: numbers for name, numbers in rows.items() if numbers}
            about = {"events": len(self.search.events), "members": rows, "lanes": lanes, "by_status": dict(by_status)}
            about["steps"] = {f"{member.number}": member.step for member in self.plan.members if member.lines}
            stores = search_stores(self._path, self.record.facts, max(2, self.plan.options.keep_last))
            for name, numbers in rows.items():
                parts = [self.shelf[number] for number in numbers if number in self.shelf]
                if in_lanes := [self.places[number][1] for number in lanes[name] if number >= 0]:
                    parts.append(self.lanes[int(name)].states(in_lanes))
                host = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
                stores[name].save(step, host, {}, self.reported, about)
            for store in stores.values():
                store.close()
        self.saved_step = step
        self._saved_at, self._since_saved = time.perf_counter(), 0
