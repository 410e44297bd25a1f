"""Members and groups: each point's config, which of its fields may be tracers, and what one program can train."""

import dataclasses
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnn._fields import PURPOSES, SEEDS, check_config, seed_field, with_fields
from jaxnn._json import config_json, leaf_fields
from jaxnn.data import steps_per_epoch, without_data
from jaxnn.engine import MemberLog, Members, check_data, check_parts, make_init, make_step
from jaxnn.search import Points
from jaxnn.steps import make_evaluate_step
from jaxnn.sweeps._members import show_point
from jaxnn.types import ConfigError, Examples, Experiment, JaxnnError, Splits, suggest, warn

# An untraceable field is reported with the user's line, not with one of the libraries it calls.
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "jaxnn")


def watched(config: Any) -> tuple[Any, set[str]]:
    """Returns a copy of ``config``, and the set of the fields that are read from the copy, which grows."""
    names = {field.name for field in dataclasses.fields(config)}
    read: set[str] = set()

    def look(self: Any, name: str) -> Any:
        if name == "__dict__":
            read.update(names)
        elif name in names:
            read.add(name)
        return object.__getattribute__(self, name)

    kind = type(config)
    twin: Any = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": look, "__module__": kind.__module__}))
    for name in names:
        object.__setattr__(twin, name, getattr(config, name))
    return twin, read


@dataclasses.dataclass(kw_only=True)
class PlannedMember(MemberLog):
    """A member in training, with the fields it sets and its experiment."""

    point: Mapping[str, Any]
    experiment: Experiment[Any]

    def fail(self, error: Exception) -> None:
        """Records why it cannot be run."""
        self.status, self.error = "failed", reason(error)

    def __str__(self) -> str:
        return f"member {self.number} ({show_point(self.point)}): {self.error or self.status}"


class Group(NamedTuple):
    """Members that share one program; they differ in traced fields only."""

    number: int
    members: list[PlannedMember]
    traced: tuple[str, ...]  # fields whose values differ between members inside the program
    static: Mapping[str, Any]  # the swept fields that all members share


def plan_members(
    experiment: Experiment[Any], points: Points, numbers: Sequence[int] | None = None
) -> list[PlannedMember]:
    """Returns every point as a member, numbered by ``numbers`` or from 0; one whose config is invalid has failed."""
    known = [name for name, _ in leaf_fields(experiment.config)]
    for name in points.scales:
        if inner := [other for other in known if other.startswith(f"{name}.")]:
            raise ConfigError(f"the field {name!r} is a dataclass: sweep its fields, as in {inner[0]!r}.")
        if name not in (*known, Points.NAME):
            raise ConfigError(f"the config has no field {name!r} to sweep: {suggest(name, known)}.")
    members = []
    for number, point in zip(range(len(points)) if numbers is None else numbers, points, strict=True):
        member = PlannedMember(number=number, point=point, experiment=experiment)
        members.append(member)
        try:
            fields = {
                name: _typed(value, operator.attrgetter(name)(experiment.config))
                for name, value in point.items()
                if name in known
            }
            member.point = {**point, **fields}
            config = with_fields(experiment.config, fields)
            config_json(config)
            check_config(config)
            member.experiment = dataclasses.replace(experiment, config=config)
            check_parts(member.experiment)
        # A user's function may raise anything; one point's error must not stop the others.
        except Exception as error:
            member.fail(error)
    return members


def _typed(value: Any, default: Any) -> Any:
    """``value`` as its field has it: a float where the default is one, and no list."""
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def reason(error: Exception) -> str:
    """Returns one line for an exception, as records keep it."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MemoryError):
        return f"memory ran out ({text}): sweep fewer members at a time, as with shard='1/4'"
    return text if isinstance(error, JaxnnError) else f"{type(error).__name__}: {text}"


def traces(name: str, value: Any) -> bool:
    """Whether a program may trace this value of a field: a float, or a seed that is set."""
    return isinstance(value, float) or (name in SEEDS and value is not None)


class Loader:
    """Loads the data of members; keeps the latest, with what made them, from which config and which of its fields."""

    _latest: tuple[Any, Any, Splits, set[str]] | None = None

    def __call__(self, member: PlannedMember) -> tuple[Splits, set[str]]:
        """Returns the data and the top-level fields they were made from, which grow when augmentation is traced."""
        config, make = member.experiment.config, member.experiment.data or without_data
        if self._latest is not None:
            made_by, made_from, splits, read = self._latest
            if make is made_by and all(getattr(config, name) == getattr(made_from, name) for name in read):
                return splits, read
        twin, read = watched(config)
        # Not through a cache of the caller's: its lookup would read all fields.
        splits = inspect.unwrap(make)(twin)
        check_data(splits)
        if member.experiment.params is not None:
            member.experiment.params(twin)  # members that start from other parameters are other programs
        self._latest = make, config, splits, read
        return splits, read


def plan_groups(
    members: Sequence[PlannedMember], load: Loader, *, searched: bool = False, first: int = 0
) -> tuple[list[Group], tuple[str, ...]]:
    """Returns the groups of members whose data load and whose program traces, others fail; and fields nothing reads.

    If the members are ``searched``, any field may differ in later members. Groups are numbered from ``first``.
    """
    runnable = [member for member in members if member.unfinished]
    names = list(dict.fromkeys(name for member in runnable for name in member.point))
    names = [name for name in names if name != Points.NAME or hasattr(runnable[0].experiment.config, name)]
    varying = [name for name in names if searched or _varies(runnable, name)]
    # Floats and seeds are candidates for tracing.
    traced = [name for name in varying if all(traces(name, member.point[name]) for member in runnable)]
    found: list[tuple[list[PlannedMember], list[str]]] = []
    # The training loop reads these.
    configs = [member.experiment.config for member in runnable]
    read = {"batch_size", "num_steps", *(seed_field(config, purpose) for config in configs for purpose in PURPOSES)}
    for together in _split(runnable, [name for name in names if name not in traced]):
        _check(together, traced, load, read)
        if valid := [member for member in together if member.unfinished]:
            candidates = [name for name in traced if searched or _varies(valid, name)]
            static = _untraceable(valid[0], candidates, load, read)
            traceable = [name for name in candidates if name not in static]
            found += [(part, traceable) for part in _split(valid, static)]
    groups = []
    for number, (part, traceable) in enumerate(sorted(found, key=lambda one: one[0][0].number), first):
        shared = {name: operator.attrgetter(name)(part[0].experiment.config) for name in names if name not in traceable}
        groups.append(Group(number, part, tuple(traceable), shared))
    return groups, _unread(runnable, varying, read) if groups else ()


def _check(members: Sequence[PlannedMember], traced: Sequence[str], load: Loader, read: set[str]) -> None:
    """Fails members whose data do not load or whose program does not trace; ``read`` grows."""

    def passes(member: PlannedMember, *, forward: bool = False) -> bool:
        try:
            splits, by_data = load(member)
            steps_per_epoch(splits.train.num_examples, member.experiment.config.batch_size)
            config, by_program = watched(member.experiment.config)
            failure = _failure(dataclasses.replace(member.experiment, config=config), splits, (), forward=forward)
            if failure is not None:
                raise failure
            read.update(by_program | by_data)
        except Exception as error:
            member.fail(error)
        return member.unfinished

    def value(member: PlannedMember, name: str) -> Any:
        return operator.attrgetter(name)(member.experiment.config)

    found = {name: [value(member, name) for member in members] for name in traced if name not in SEEDS}
    ends = {(name, end) for name, values in found.items() for end in (min(values), max(values))}
    first, chosen = {members[0].number: members[0]}, members[0]
    for _ in tuple(ends):  # a member may be at the ends of several fields
        ends = {(name, end) for name, end in ends if value(chosen, name) != end}
        chosen = max(members, key=lambda member: sum(value(member, name) == end for name, end in ends))
        first[chosen.number] = chosen
    # A float is invalid outside some range: if its least and largest values are valid, so are all.
    # Gradients check no values: the first member's are enough.
    if not all([passes(member, forward=number > 0) for number, member in enumerate(first.values())]):
        for member in members:
            if member.number not in first:
                passes(member)


def _untraceable(member: PlannedMember, names: Sequence[str], load: Loader, all_read: set[str]) -> list[str]:
    """Those of ``names`` that Python or the data need, with a warning each; ``all_read`` grows."""
    experiment, (splits, read) = member.experiment, load(member)
    all_read |= read
    errors: dict[str, Exception | None] = {}
    if _failure(experiment, splits, names) is not None and _failure(experiment, splits, ()) is None:
        errors = {name: _failure(experiment, splits, (name,)) for name in names}
        # Fields that fail only together.
        rest = [name for name, error in errors.items() if error is None]
        errors |= dict.fromkeys(rest, _failure(experiment, splits, rest))
    notes = {name: _explain(name, error) for name, error in errors.items() if error is not None}
    for name in names:
        # Looked up after a trace: augmentation reads its fields only then.
        if name.partition(".")[0] in read:
            notes[name] = (
                f"data(config) or params(config) reads {name!r}, so each of its values is compiled separately."
            )
    for note in notes.values():
        warn(note)
    return list(notes)


def _failure(
    experiment: Experiment[Any], splits: Splits, names: Iterable[str], *, forward: bool = False
) -> Exception | None:
    """The error of tracing init, a training and an evaluation step with tracers for the fields ``names``, or None.

    A step that is traced ``forward`` alone has no gradients; parameters stand in their place.
    """
    source = splits.train

    def value_alone(loss: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return lambda params, *others: (loss(params, *others), params)

    def everything(values: dict[str, jax.Array], examples: Examples) -> Any:
        member = Members.with_values(experiment, {name: value[0] for name, value in values.items()})
        state = make_init(member, source)(examples)
        batch = source.transform(source.as_batch(examples), state.key)
        state, metrics = make_step(member, value_and_grad=value_alone if forward else None)(state, batch)
        sums = make_evaluate_step(member.task(member.config))(state, batch) if splits.evaluated else {}
        return sums, metrics

    try:
        jax.eval_shape(
            everything, Members.traced_values([experiment], names), source.read(np.arange(experiment.config.batch_size))
        )
    # The error depends on the code that meets a tracer: an if, a format, a library's check.
    except Exception as error:
        return error
    return None


def _explain(name: str, error: Exception) -> str:
    """The message for a field that cannot be a tracer, with the innermost of the user's lines in the traceback."""
    # By their folders: a user's own may have such a name, as a clone of this project has.
    folders = [Path(str(sys.modules[name].__file__)).parent for name in LIBRARIES if name in sys.modules]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not (frame.filename.startswith("<") or any(map(path.is_relative_to, folders))):
            break
    short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    place = f"{short}:{frame.lineno} ({frame.line!r})"
    return (
        f"the field {name!r} decides what Python does at {place}, so each of its values is compiled separately: use "
        "jnp.where, jn.schedules or jn.nn.Dropout there to train them as one program."
    )


def _unread(members: Sequence[PlannedMember], varying: Sequence[str], read: set[str]) -> tuple[str, ...]:
    """Those of ``varying`` that are not among the top-level fields that were ``read``; warns of them."""
    swept = {name.partition(".")[0] for name in varying}
    names = {field.name for field in dataclasses.fields(members[0].experiment.config)} - swept
    if any(_varies(members, name) for name in names):
        # A config that computes other fields from the swept ones reads them itself.
        return ()
    unread = tuple(name for name in varying if name.partition(".")[0] not in read)
    for name in unread:
        warn(
            f"nothing reads the swept field {name!r}, so members that differ in it alone are the same: use "
            f"config.{name} in data, task, optimizer or step, or do not sweep it."
        )
    return unread


def _split(members: Sequence[PlannedMember], names: Sequence[str]) -> list[list[PlannedMember]]:
    """Members grouped by the values of ``names``, in order of appearance."""
    parts: dict[Any, list[PlannedMember]] = {}
    for member in members:
        # Keyed by text: a nested config need not be hashable.
        key = tuple(repr(operator.attrgetter(name)(member.experiment.config)) for name in names)
        parts.setdefault(key, []).append(member)
    return list(parts.values())


def _varies(members: Sequence[PlannedMember], name: str) -> bool:
    return len(_split(members, [name])) > 1
