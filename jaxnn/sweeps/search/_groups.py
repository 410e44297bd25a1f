"""Members and groups: each point's config, and the members that one compiled program can train together."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxnn.data import check_batch_size
from jaxnn.engine import check_config, check_data, check_parts
from jaxnn.record import config_json
from jaxnn.sweeps.search._points import Points, field_names, field_value, with_fields
from jaxnn.sweeps.search._tracing import check_traces, find_untraceable, watched
from jaxnn.types import ConfigError, Experiment, JaxnnError, Splits, suggest


class Planned(NamedTuple):
    """A member before it runs.

    Attributes:
        number: its position in the sweep.
        point: the fields it sets.
        experiment: with its config; that of the sweep if the config could not be built.
        error: why it cannot run, or None.
    """

    number: int
    point: Mapping[str, Any]
    experiment: Experiment[Any]
    error: str | None = None


class Group(NamedTuple):
    """Members that share one program; they differ in traced fields only.

    Attributes:
        number: position among the groups.
        members: at least one.
        traced: the fields whose values differ between members inside the program.
        static: the swept fields that all members share, by name.
        unread: swept fields that nothing reads; members that differ only in these compute the same.
    """

    number: int
    members: tuple[Planned, ...]
    traced: tuple[str, ...]
    static: Mapping[str, Any]
    unread: tuple[str, ...] = ()


def plan_members(experiment: Experiment[Any], points: Points) -> list[Planned]:
    """Returns every point as a member; one whose config cannot be built keeps the reason and stops no other.

    Raises:
        ConfigError: a field that the config does not have, or that is a dataclass.
    """
    known = list(field_names(experiment.config))
    for name in points.scales:
        if name not in known:
            raise ConfigError(f"the config has no field {name!r} to sweep: {suggest(name, known)}.")
        inner = next((other for other in known if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise ConfigError(f"the field {name!r} is a dataclass: sweep its own fields, as in {inner!r}.")

    def plan(number: int, point: Mapping[str, Any]) -> Planned:
        try:
            point = {name: _as_default(value, field_value(experiment.config, name)) for name, value in point.items()}
            config = with_fields(experiment.config, point)
            config_json(config)
            check_config(config)
            member = dataclasses.replace(experiment, config=config)
            check_parts(member)
        # A user's function may raise anything; one point's error must not stop the others.
        except Exception as error:
            return Planned(number, point, experiment, reason(error))
        return Planned(number, point, member)

    return [plan(number, point) for number, point in enumerate(points)]


def _as_default(value: Any, default: Any) -> Any:
    """``value`` as the field's type: a float for ``1`` if the field holds a float, a tuple for a list."""
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def reason(error: Exception) -> str:
    """Returns one line for an exception, as records keep it."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MemoryError):
        return f"memory ran out ({text}): sweep fewer members at a time, as with shard='1/4'"
    return text if isinstance(error, JaxnnError) else f"{type(error).__name__}: {text}"


class Loader:
    """Loads the data of members, records which config fields they depend on, and keeps the latest data set."""

    def __init__(self) -> None:
        self._splits: Splits | None = None
        # What the data were made by and from, and the top-level fields that were read; tracing may add to these.
        self._make: Any = None
        self._config: Any = None
        self._read: set[str] = set()

    def __call__(self, member: Planned) -> tuple[Splits, set[str]]:
        """Returns the data of ``member`` and the top-level fields they were made from, a set that may grow.

        Augmentation reads its fields when it is traced.
        """
        config, make = member.experiment.config, member.experiment.data
        same = make is self._make and all(getattr(config, name) == getattr(self._config, name) for name in self._read)
        if self._splits is None or not same:
            twin, read = watched(config)
            # Not through a cache of the caller's: its lookup would read all fields.
            splits = inspect.unwrap(make)(twin)
            check_data(splits)
            self._splits, self._make, self._config, self._read = splits, make, config, read
        return self._splits, self._read


def plan_groups(members: Sequence[Planned], load: Loader) -> tuple[list[Group], list[Planned]]:
    """Returns the groups of all members that can run, in order of their first members, and the members that cannot."""
    runnable = [member for member in members if member.error is None]
    failed = [member for member in members if member.error is not None]
    names = list(dict.fromkeys(name for member in runnable for name in member.point))
    varying = [name for name in names if _varies(runnable, name)]
    # Floats and the seed are candidates for tracing.
    traced = [
        name for name in varying if name == "seed" or all(isinstance(one, float) for one in _values(runnable, name))
    ]
    found: list[tuple[list[Planned], list[str]]] = []
    # The training loop reads these.
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


def _checked(
    members: list[Planned], traced: Sequence[str], load: Loader, read: set[str]
) -> tuple[list[Planned], list[Planned]]:
    """Splits members into those whose data load and whose program traces, and the others with the reason.

    The top-level fields that they read are added to ``read``.
    """

    def error_of(member: Planned) -> str | None:
        try:
            splits, by_data = load(member)
            check_batch_size(splits.train, member.experiment.config.batch_size)
            read.update(check_traces(member.experiment, splits.train) | by_data)
        except Exception as error:
            return reason(error)
        return None

    first = {members[0].number: members[0]}
    for name in traced:
        if name != "seed":
            for end in (min, max):
                member = end(members, key=lambda one: field_value(one.experiment.config, name))
                first[member.number] = member
    errors = {number: error_of(member) for number, member in first.items()}
    if not any(errors.values()):
        # A float is invalid outside some range: if its least and largest values are valid, so are all.
        return members, []
    checked = [member._replace(error=errors.get(member.number) or error_of(member)) for member in members]
    return [one for one in checked if one.error is None], [one for one in checked if one.error is not None]


def _traceable_parts(
    members: list[Planned], traced: Sequence[str], load: Loader, all_read: set[str]
) -> Iterator[tuple[list[Planned], list[str]]]:
    """``members`` as they are, or split by those fields that Python or the data need; each part with its traced."""
    splits, read = load(members[0])
    all_read |= read
    varying = [name for name in traced if _varies(members, name)]
    unfit = find_untraceable(members[0].experiment, splits.train, varying)
    # Looked up after a trace: augmentation reads its fields only then.
    by_data = [name for name in varying if name.partition(".")[0] in read]
    static = unfit | {
        name: f"data(config) reads {name!r}, so each of its values has a program of its own." for name in by_data
    }
    for note in static.values():
        warnings.warn(note, stacklevel=2)
    for part in _split(members, list(static)):
        yield part, [name for name in varying if name not in static]


def _unread(members: Sequence[Planned], varying: Sequence[str], read: set[str]) -> tuple[str, ...]:
    """Those of ``varying`` that are not among the top-level fields that were ``read``; warns of them."""
    swept = {name.partition(".")[0] for name in varying}
    names = {field.name for field in dataclasses.fields(members[0].experiment.config)} - swept
    if any(_varies(members, name) for name in names):
        # A config that computes other fields from the swept ones reads them itself.
        return ()
    unread = tuple(name for name in varying if name.partition(".")[0] not in read)
    for name in unread:
        warnings.warn(
            f"nothing reads the swept field {name!r}, so members that differ in it alone are the same: use "
            f"config.{name} in data, task or optimizer, or do not sweep it.",
            stacklevel=2,
        )
    return unread


def _split(members: Sequence[Planned], names: Sequence[str]) -> list[list[Planned]]:
    """Members grouped by the values of ``names``, in order of appearance."""
    parts: dict[Any, list[Planned]] = {}
    for member in members:
        # Keyed by text: a nested config need not be hashable.
        key = tuple(repr(field_value(member.experiment.config, name)) for name in names)
        parts.setdefault(key, []).append(member)
    return list(parts.values())


def _values(members: Sequence[Planned], name: str) -> list[Any]:
    return [field_value(member.experiment.config, name) for member in members]


def _varies(members: Sequence[Planned], name: str) -> bool:
    return len(set(map(repr, _values(members, name)))) > 1
