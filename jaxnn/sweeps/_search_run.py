"""A search in training: its searcher is asked and told, and what that was is kept, with the members' states."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxnn._json import elapsed_of, reports_by_member
from jaxnn.engine import RUNNING, HostStates, Lanes, Trainer
from jaxnn.search import Drop, Fork, Promote, Propose, Reached
from jaxnn.sweeps._groups import Group, PlannedMember
from jaxnn.sweeps._members import COMPLETE, LOST
from jaxnn.sweeps._plan import search_window
from jaxnn.sweeps._search_events import FILE, value_to_rank
from jaxnn.sweeps._search_lanes import PAUSED, PRUNED, STOPPED_EARLY, WAITING, SearchLanes
from jaxnn.sweeps._sweep_record import search_stores
from jaxnn.types import RecordError

ENDING, BYTES_PER_SECOND = 1e-3, 2e8  # seconds for each member, and bytes of states saved, once a search is over
ANY = range(2**31)  # member: also one that was proposed after the checkpoint


class SearchRun(SearchLanes):
    """A running search: its members are in lanes, and its searcher says which."""

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
            if self._is_time_to_end():
                self._end_in_time()
            asked = self._ask()
            running = [(group, self.lanes[group.number]) for group in self._filled() if self.lanes[group.number].rows]
            if not running:
                told = all(map(self._is_told, self.plan.members))
                self.search.over = not asked and told and not self.search.waits()
                if self.search.over:
                    break
                continue
            self._train_windows(running)
            self._since_saved += max(lanes.plan.num_steps for _, lanes in running)
            if self.interruption.signum is None and self._save_due():
                self._save()
        for member in self.plan.members if self.search.over else ():
            if member.status == PAUSED:
                self._end(member, PRUNED)
        self._save(ending=True)

    def _train_windows(self, running: Sequence[tuple[Group, Lanes]]) -> None:
        """Trains the members in all lanes by a window, and tells the searcher what they reached."""
        before, reports = self._seconds, list[Reached]()
        chunks = sum(-(-len(lanes.rows) // lanes.shape.lanes) for _, lanes in running)
        for group, lanes in running:
            reports += self._train_window(group, lanes)
        self._tell(sorted(reports))
        self._chunk_seconds = (self._seconds - before) / chunks

    @property
    def _seconds(self) -> float:
        """Seconds spent on training so far, without compilations."""
        return sum(passed for name, passed in self.plan.clock.seconds.items() if name not in ("compile", "trace"))

    def _leader(self) -> PlannedMember | None:
        """The member of the best value so far, None before the first value."""
        values = {
            member.number: value_to_rank(value, higher_is_better=self.higher_is_better)
            for member in self.plan.members
            if member.status not in (*LOST, PRUNED) and (value := member.latest(self.monitored)) is not None
        }
        return self.plan.member(min(values, key=values.__getitem__)) if values else None

    def _is_time_to_end(self) -> bool:
        """Whether the budget leaves time for no more than that the best member is trained to its end."""
        options = self.plan.options
        ending = ENDING * len(self.plan.members) + self._shelf_bytes / BYTES_PER_SECOND

        def is_short_for(left: int, num_steps: int) -> bool:
            # With the window that would be trained before the next look.
            windows = 1 + -(-left // search_window(num_steps, self.search.searcher.shares[0], options))
            return self.elapsed + windows * self._chunk_seconds + ending > options.budget_seconds

        lengths = [group.members[0].experiment.config.num_steps for group in self.plan.groups]
        if self.search.ended or not any(is_short_for(length, length) for length in lengths):
            return False
        if (leader := self._leader()) is None:
            return False
        num_steps = leader.experiment.config.num_steps
        return is_short_for(0 if leader.status in COMPLETE else num_steps - leader.step, num_steps)

    def _end_in_time(self) -> None:
        """Ends all members but the best; its searcher is not asked any more."""
        leader = self._leader()
        self.search.end()
        self.queues.clear()
        for member in self.plan.members:
            if member is not leader and member.status in (WAITING, RUNNING, PAUSED):
                self._end(member, PRUNED)
        if leader is not None and leader.status in (WAITING, PAUSED):
            self._enqueue(leader)
        self.display.say(f"  budget: no time for more members; the best of {len(self.plan.members)} trains to its end")

    def _ask(self) -> bool:
        """Asks the searcher who is to train; returns whether it said anything."""
        plan, shares = self.plan, self.search.searcher.shares
        held = [member.number for member in plan.members if member.status == PAUSED]
        paused = {number: shares[self.reached[number] - 1] for number in held}
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
                    self._enqueue(plan.member(number))
                case Fork(donor, _):
                    member = next(new)
                    self._check_fork(donor, member)
                    self._enqueue(member, self._state_of(donor))
                case Drop(number):
                    self._end(plan.member(number), PRUNED)
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
            member = self.plan.member(report.member)
            if report.over:
                group, row = self.places.get(member.number, (None, 0))
                if group is not None and member.status != "failed":
                    self._leave(group.number, [row])
            elif verdict == "pause":
                member.status = PAUSED
            elif verdict != "continue":
                self._end(member, PRUNED if verdict == "stop" else STOPPED_EARLY)

    def _is_told(self, member: PlannedMember) -> bool:
        """Whether the searcher knows that a member failed, if it did."""
        return member.status != "failed" or member.number in self.told

    def _over(self, member: PlannedMember) -> Reached:
        """The report of a member that could not be trained, or not any further."""
        self.told.add(member.number)
        share = self.search.searcher.shares[self.reached.setdefault(member.number, 0)]
        return Reached(member.number, share, float("inf"), over=True)

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

    def _restore(self) -> None:
        """Continues from the newest checkpoint: the states, reports and statuses of members, and their lanes."""
        plan = self.plan
        if plan.options.resume is None or self.record.directory is None:
            return
        stores, found = search_stores(self._path, self.record.facts), plan.saved
        about = found.about.get("search") or {"members": {}, "lanes": {}, "by_status": {}, "steps": {}}
        self._check_saved(about)
        where = "the checkpoint of the search"
        lines, self.reported, damage = self.record.directory.rewind(
            lambda line: about["steps"].get(str(line["member"]), 0), found.about.get("log"), where, ANY
        )
        if damage is not None:
            self.display.say(f"  {damage}")
        self._elapsed_before = elapsed_of(lines)
        reports = reports_by_member(lines)
        for status, numbers in about["by_status"].items():
            for number in numbers:
                plan.member(number).status, plan.member(number).lines = status, reports[number]
                if status == WAITING:  # in the order in which they wait
                    self.queues[self.places[number][0].number].append(number)
                if status == PAUSED:  # also one whose state was dropped
                    self._inherit(plan.member(number), plan.member(number).step)
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
        notes = [stores[name].set_aside(at, what) for name, at, what in found.damaged]
        for store in stores.values():
            store.forget_after(found.step)
        if (step := found.step) is None:
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
                self._shelve(number, row)
                self._inherit(plan.member(number), int(row.states.step[0]))
            in_lanes = {lane: number for lane, number in enumerate(about["lanes"].get(name, ())) if number >= 0}
            members = [plan.member(number) for number in in_lanes.values()]
            paused = [member for member in members if member.status == PAUSED]
            self._enter(plan.groups[int(name)], self.lanes[int(name)], members, [*in_lanes])
            for member in paused:  # they may be promoted at once
                member.status = PAUSED

    def _check_saved(self, about: Mapping[str, Any]) -> None:
        """Raises RecordError unless what a checkpoint says of its members fits those that were proposed."""
        members, groups = {*self.search.numbers}, {f"{group.number}" for group in self.plan.groups}
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
            self.search.write(self._path)

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

    def _save_due(self) -> bool:
        """Whether to save: by the steps that a lane made since, or by the clock."""
        if every := self.plan.options.checkpoint_every:
            return self._since_saved >= every
        return every is None and time.perf_counter() - self._saved_at > Trainer.SECONDS_BETWEEN_SAVES

    def _save(self, *, ending: bool = False) -> None:
        """Saves all states, and what the searcher was asked and told; at the end members are written later, once."""
        if self.record.directory is None:
            return
        self._set_facts()
        self.record.write()
        if not ending:
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
