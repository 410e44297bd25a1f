"""Which fields of a config may arrive as tracers, one value a member, and where one that may not is used."""

from __future__ import annotations

import dataclasses
import linecache
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.loop import make_init, make_step
from jaxnn.steps import make_evaluate_step
from jaxnn.sweeps.design.members import field_value, with_fields
from jaxnn.types import Array, Examples, Experiment, Source

# Where a traced value ends up is told by the user's own line, not by those of the libraries it calls.
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "chex", "numpy", "jaxnn")


class Untraceable(NamedTuple):
    """A field whose value decides what Python does, so that each value is a program of its own.

    Attributes:
        name: the field.
        place: ``file:line`` of the caller's code that needs the value.
        code: that line.
        error: what JAX said, in one line.
    """

    name: str
    place: str
    code: str
    error: str

    def __str__(self) -> str:
        return (
            f"the field {self.name!r} decides what Python does at {self.place} ({self.code!r}), so each of its values "
            "is compiled on its own: use jnp.where, jn.schedules or jn.nn.Dropout there to train them as one program."
        )


def traced_values(experiments: Sequence[Experiment[Any]], names: Iterable[str]) -> dict[str, jax.Array]:
    """For each field the values of all members, ``[members]``: seeds as uint32, floats as JAX treats Python's.

    A Python float takes the precision of what it meets; so does a weakly typed array, and none other.
    """
    return {name: jnp.stack([_scalar(name, field_value(one.config, name)) for one in experiments]) for name in names}


def with_values(experiment: Experiment[Any], values: Mapping[str, Any]) -> Experiment[Any]:
    """The experiment of one member: its traced fields set to ``values``."""
    # Nothing to replace is no reason to read all fields.
    return dataclasses.replace(experiment, config=with_fields(experiment.config, values)) if values else experiment


def is_traceable(name: str, values: Iterable[Any]) -> bool:
    """Whether a field with these values may be tried as a tracer: the seed, and floats."""
    return name == "seed" or all(isinstance(value, float) for value in values)


def find_untraceable(experiment: Experiment[Any], source: Source, names: Sequence[str]) -> list[Untraceable]:
    """Those of ``names`` that cannot be tracers in ``experiment``; none where it cannot be traced at all."""
    if _failure(experiment, source, names) is None or _failure(experiment, source, ()) is not None:
        return []
    alone = {name: _failure(experiment, source, (name,)) for name in names}
    found = [_locate(name, error) for name, error in alone.items() if error is not None]
    rest = [name for name in names if alone[name] is None]
    together = _failure(experiment, source, rest)
    return found + ([] if together is None else [_locate(name, together) for name in rest])


def check_traces(experiment: Experiment[Any], source: Source) -> set[str]:
    """Traces all that a run of ``experiment`` computes, with its fields as they are; raises what that raises.

    Returns:
        The top-level fields of the config that its task and optimizer read.
    """
    config, read = watched(experiment.config)
    _trace(dataclasses.replace(experiment, config=config), source, ())
    return read


def watched(config: Any) -> tuple[Any, set[str]]:
    """A config like this one, and the names of its fields that were read since; it grows as they are."""
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


def _failure(experiment: Experiment[Any], source: Source, names: Iterable[str]) -> Exception | None:
    try:
        _trace(experiment, source, names)
    # What a traced value breaks is up to the code that meets it: an if, a format, a library's own check.
    except Exception as error:
        return error
    return None


def _trace(experiment: Experiment[Any], source: Source, names: Iterable[str]) -> None:
    size = experiment.config.batch_size
    examples = source.read(np.arange(size))

    def everything(values: dict[str, jax.Array], examples: Examples) -> Any:
        member = with_values(experiment, values)
        state = make_init(member, source)(examples)
        batch = source.transform(source.as_batch(examples), state.key)
        state, metrics = make_step(member)(state, batch)
        return make_evaluate_step(member.task(member.config))(state, batch), metrics

    values = {name: _scalar(name, field_value(experiment.config, name)) for name in names}
    jax.eval_shape(everything, values, examples)


def _scalar(name: str, value: Any) -> Array:
    return jnp.asarray(value, jnp.uint32) if name == "seed" else jnp.asarray(value)


def _locate(name: str, error: Exception) -> Untraceable:
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    # The first frames are this file's own; the caller's last one is where the value was needed.
    file, line = next((place for place in reversed(frames) if not _is_library(place[0])), frames[-1])
    code = linecache.getline(file, line).strip()
    return Untraceable(name, f"{_short(file)}:{line}", code, (str(error).splitlines() or [""])[0])


def _is_library(file: str) -> bool:
    return any(name in LIBRARIES for name in Path(file).parts[:-1]) or file.startswith("<")


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
