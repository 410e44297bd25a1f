"""Fields of a config by name: which may be tracers, one value per member, and which line needs a Python value."""

from __future__ import annotations

import dataclasses
import operator
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.engine import make_init, make_step
from jaxnn.steps import make_evaluate_step
from jaxnn.types import Array, Examples, Experiment, Source

# An untraceable field is reported with the user's own line, not with one of the libraries it calls.
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "chex", "numpy", "jaxnn")


def field_names(config: Any, prefix: str = "") -> Iterator[str]:
    """Yields the names of a config's fields; those of nested dataclasses are dotted and follow their owner's."""
    for field in (field for field in dataclasses.fields(config) if field.init):
        value = getattr(config, field.name)
        yield prefix + field.name
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from field_names(value, f"{prefix}{field.name}.")


def with_fields(config: Any, point: Mapping[str, Any]) -> Any:
    """Returns the config with other values for some fields, by name; names may be dotted."""
    changes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in point.items():
        head, _, rest = name.partition(".")
        (nested.setdefault(head, {}) if rest else changes)[rest or head] = value
    changes |= {head: with_fields(getattr(config, head), inner) for head, inner in nested.items()}
    # In one call: a config that checks its fields against each other must not see half of the changes.
    return dataclasses.replace(config, **changes)


def traced_values(experiments: Sequence[Experiment[Any]], names: Iterable[str]) -> dict[str, jax.Array]:
    """Returns the values of all members for each field, ``[members]``: seeds as uint32, floats weakly typed.

    Like a Python float, a weakly typed array takes the precision of the arrays it is combined with.
    """
    return {name: jnp.stack([_traceable(one.config, name) for one in experiments]) for name in names}


def with_values(experiment: Experiment[Any], values: Mapping[str, Any]) -> Experiment[Any]:
    """Returns the experiment of one member: its traced fields set to ``values``."""
    # Replacing nothing would still read all fields.
    return dataclasses.replace(experiment, config=with_fields(experiment.config, values)) if values else experiment


def find_untraceable(experiment: Experiment[Any], source: Source, names: Sequence[str]) -> dict[str, str]:
    """Returns those of ``names`` that cannot be tracers, each with a message that names the line that forbids it."""
    if _failure(experiment, source, names) is None or _failure(experiment, source, ()) is not None:
        return {}
    errors = {name: _failure(experiment, source, (name,)) for name in names}
    # Fields that fail only together.
    rest = [name for name, error in errors.items() if error is None]
    errors |= dict.fromkeys(rest, _failure(experiment, source, rest))
    return {name: _explain(name, error) for name, error in errors.items() if error is not None}


def check_traces(experiment: Experiment[Any], source: Source) -> set[str]:
    """Traces all that a run computes, raising what that raises; returns the top-level config fields that it reads."""
    config, read = watched(experiment.config)
    _trace(dataclasses.replace(experiment, config=config), source, ())
    return read


def watched(config: Any) -> tuple[Any, set[str]]:
    """Returns a copy of ``config`` and the set of its fields that were read from the copy, which grows with reads."""
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
    # The error depends on the code that meets a tracer: an if, a format, a library's check.
    except Exception as error:
        return error
    return None


def _trace(experiment: Experiment[Any], source: Source, names: Iterable[str]) -> None:
    """Traces init, a training step and an evaluation step with tracers for the fields ``names``."""

    def everything(values: dict[str, jax.Array], examples: Examples) -> Any:
        member = with_values(experiment, values)
        state = make_init(member, source)(examples)
        batch = source.transform(source.as_batch(examples), state.key)
        state, metrics = make_step(member)(state, batch)
        return make_evaluate_step(member.task(member.config))(state, batch), metrics

    values = {name: _traceable(experiment.config, name) for name in names}
    jax.eval_shape(everything, values, source.read(np.arange(experiment.config.batch_size)))


def _traceable(config: Any, name: str) -> Array:
    return jnp.asarray(operator.attrgetter(name)(config), jnp.uint32 if name == "seed" else None)


def _explain(name: str, error: Exception) -> str:
    """The message for a field that cannot be a tracer, with the innermost of the user's own lines in the traceback."""

    def is_library(file: str) -> bool:
        return any(part in LIBRARIES for part in Path(file).parts[:-1]) or file.startswith("<")

    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not is_library(frame.filename)), frames[-1])
    path = Path(frame.filename)
    short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    place = f"{short}:{frame.lineno} ({frame.line!r})"
    return (
        f"the field {name!r} decides what Python does at {place}, so each of its values is compiled separately: use "
        "jnp.where, jn.schedules or jn.nn.Dropout there to train them as one program."
    )
