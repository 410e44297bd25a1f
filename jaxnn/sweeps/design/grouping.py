"""Members that one compiled program can train: those that differ in traced fields alone."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxnn.data import check_batch_size
from jaxnn.loop import check_data
from jaxnn.sweeps.design.members import Planned, field_value, reason
from jaxnn.sweeps.design.tracing import check_traces, find_untraceable, is_traceable, watched
from jaxnn.types import Splits


class Group(NamedTuple):
    """Members of one program.

    Attributes:
        number: its place.
        members: who is in it; at least one.
        traced: the fields of which each member has its own value inside the program.
        static: the swept fields that all members share, by name.
        unread: those swept fields that nothing reads, so that members which differ in them alone are the same.
    """

    number: int
    members: tuple[Planned, ...]
    traced: tuple[str, ...]
    static: Mapping[str, Any]
    unread: tuple[str, ...] = ()


class Loaded(NamedTuple):
    """Data, and what they were made from.

    Attributes:
        splits: the data.
        make: the experiment's ``data``.
        config: what that was called with.
        read: the top-level fields it reads; augmentation may read more when it is traced, and adds them.
    """

    splits: Splits
    make: Any
    config: Any
    read: set[str]

    def fits(self, member: Planned) -> bool:
        """Whether they are the data of ``member``, as far as was read."""
        config = member.experiment.config
        same = (getattr(config, name) == getattr(self.config, name) for name in self.read)
        return self.make is member.experiment.data and all(same)


class Loader:
    """Loads data sets, and notes which config fields that depends on; keeps the latest."""

    def __init__(self) -> None:
        self._latest: Loaded | None = None

    def __call__(self, member: Planned) -> tuple[Splits, set[str]]:
        """The data of ``member``, and the names of the top-level fields they were made from, a set that may grow."""
        if self._latest is None or not self._latest.fits(member):
            config, make = member.experiment.config, member.experiment.data
            twin, read = watched(config)
            # Not through a cache of the caller's: that reads all fields to find its entry, and knows no other member's.
            splits = inspect.unwrap(make)(twin)
            check_data(splits)
            self._latest = Loaded(splits, make, config, read)
        return self._latest.splits, self._latest.read


def plan_groups(members: Sequence[Planned], load: Loader) -> tuple[list[Group], list[Planned]]:
    """The groups of all members that can be run, in order of their first members, and the members that cannot."""
    runnable = [member for member in members if member.error is None]
    failed = [member for member in members if member.error is not None]
    names = list(dict.fromkeys(name for member in runnable for name in member.point))
    varying = [name for name in names if _varies(runnable, name)]
    traced = [name for name in varying if is_traceable(name, _values(runnable, name))]
    found: list[tuple[list[Planned], list[str]]] = []
    # What the loop reads itself.
    read = {"batch_size", "num_steps", "seed"}
    for together in _split(runnable, [name for name in names if name not in traced]):
        sound, broken = _checked(together, traced, load, read)
        failed += broken
        if sound:
            found += _traceable_parts(sound, traced, load, read)
    unread = _unread(runnable, varying, read) if found else ()
    groups = []
    for number, (part, own) in enumerate(sorted(found, key=lambda pair: pair[0][0].number)):
        static = {name: field_value(part[0].experiment.config, name) for name in names if name not in own}
        groups.append(Group(number, tuple(part), tuple(own), static, unread))
    return groups, sorted(failed)


def _unread(members: Sequence[Planned], varying: Sequence[str], read: set[str]) -> tuple[str, ...]:
    """Those of ``varying`` that are not among the top-level fields that were ``read``; warns of them."""
    swept = {name.partition(".")[0] for name in varying}
    names = {field.name for field in dataclasses.fields(members[0].experiment.config)} - swept
    if any(_varies(members, name) for name in names):
        # A config that computes other fields from those that are swept reads them itself.
        return ()
    unread = tuple(name for name in varying if name.partition(".")[0] not in read)
    for name in unread:
        warnings.warn(
            f"nothing reads the swept field {name!r}, so members that differ in it alone are the same: use "
            f"config.{name} in data, task or optimizer, or do not sweep it.",
            stacklevel=2,
        )
    return unread


def _checked(
    members: list[Planned], traced: Sequence[str], load: Loader, read: set[str]
) -> tuple[list[Planned], list[Planned]]:
    """The members whose data load and whose program can be traced, and the others with the reason.

    ``read`` gets the top-level fields that they read.
    """
    floats = [name for name in traced if name != "seed"]
    ends = [
        end(members, key=lambda one: field_value(one.experiment.config, name)) for name in floats for end in (min, max)
    ]
    first = {member.number: member for member in [members[0], *ends]}
    errors = {number: _error(member, load, read) for number, member in first.items()}
    if not any(errors.values()):
        # A float that is wrong is out of a range, as a rule: with its least and largest value all are sound.
        return members, []
    told = [member._replace(error=errors.get(member.number) or _error(member, load, read)) for member in members]
    return [member for member in told if member.error is None], [member for member in told if member.error is not None]


def _error(member: Planned, load: Loader, read: set[str]) -> str | None:
    try:
        splits, by_data = load(member)
        check_batch_size(splits.train, member.experiment.config.batch_size)
        read |= check_traces(member.experiment, splits.train) | by_data
    except Exception as error:
        return reason(error)
    return None


def _traceable_parts(
    members: list[Planned], traced: Sequence[str], load: Loader, all_read: set[str]
) -> Iterator[tuple[list[Planned], list[str]]]:
    """``members`` as they are, or split by those fields that turn out to be needed in Python or by the data."""
    splits, read = load(members[0])
    all_read |= read
    varying = [name for name in traced if _varies(members, name)]
    unfit = find_untraceable(members[0].experiment, splits.train, varying)
    # Looked up after a trace: augmentation reads its fields only then.
    by_data = [name for name in varying if name.partition(".")[0] in read]
    for name in by_data:
        warnings.warn(f"data(config) reads {name!r}, so each of its values has a program of its own.", stacklevel=2)
    by_python = [found for found in unfit if found.name not in by_data]
    for found in by_python:
        warnings.warn(str(found), stacklevel=2)
    static = [*by_data, *(found.name for found in by_python)]
    for part in _split(members, static):
        yield part, [name for name in varying if name not in static]


def _split(members: Sequence[Planned], names: Sequence[str]) -> list[list[Planned]]:
    """Members apart by the values of ``names``, in order of appearance."""
    parts: dict[Any, list[Planned]] = {}
    for member in members:
        # By their text, since a nested config need not be hashable.
        key = tuple(repr(field_value(member.experiment.config, name)) for name in names)
        parts.setdefault(key, []).append(member)
    return list(parts.values())


def _values(members: Sequence[Planned], name: str) -> list[Any]:
    return [field_value(member.experiment.config, name) for member in members]


def _varies(members: Sequence[Planned], name: str) -> bool:
    return len(set(map(repr, _values(members, name)))) > 1
