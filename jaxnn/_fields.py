"""Fields of configs and options: their bounds and types, which functions check, and changes by name."""

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.typing import ArrayLike

from jaxnn.types import ConfigError, check_int, nearest, suggest

# Accepted values of a field of a simple type; NumPy's numbers are among them.
SIMPLE: dict[Any, type | tuple[type, ...]] = {
    int: numbers.Integral,
    float: numbers.Real,
    str: str,
    tuple: (tuple, list),
    types.NoneType: types.NoneType,
}


PURPOSES = {"init": "initial parameters", "order": "order of the data", "step": "dropout and augmentation"}
"""What random numbers are for, and what they decide; of a step, also sampling in evaluations."""
SEEDS = ("seed", *(f"{purpose}_seed" for purpose in PURPOSES))
"""The fields of a config that are seeds; all but the first are optional."""


def seed_field(config: Any, purpose: str, point: Mapping[str, Any] = types.MappingProxyType({})) -> str:
    """Returns the field that decides the random numbers of a ``purpose``: ``init_seed`` if it is set, else ``seed``.

    The fields of ``point`` replace those of ``config``.
    """
    own = f"{purpose}_seed"
    return "seed" if point.get(own, getattr(config, own, None)) is None else own


def seed_for(config: Any, purpose: str, point: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """Returns the seed of a ``purpose``, which may be a tracer; ``point`` is as of `seed_field`."""
    name = seed_field(config, purpose, point)
    return point[name] if name in point else getattr(config, name)


def check_range(where: str, name: str, value: Any, high: float = math.inf, *, positive: bool = False) -> None:
    """Raises ConfigError unless ``value`` is a number in 0…``high``, > 0 if ``positive``.

    Arrays of one number, and tracers of them, pass.
    """
    if isinstance(value, jax.Array | np.ndarray):
        is_inside = value.ndim == 0 and jax.dtypes.issubdtype(value.dtype, np.number)
    else:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        is_inside = is_number and 0 <= float(value) <= high and (float(value) > 0 or not positive)
    if not is_inside:
        allowed = "> 0" if positive else ">= 0"
        if high < math.inf:
            allowed = f"> 0 and <= {high:g}" if positive else f"in 0…{high:g}"
        raise ConfigError(f"{where}: {name} must be a number {allowed}, not {value!r}.")


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    least: int | None = None,
    most: float | None = None,
    positive: bool | None = None,
    choices: tuple[Any, ...] = (),
    **marks: Any,
) -> Any:
    """A field of a dataclass with the bounds that `check_fields` reads.

    Args:
        default: its value if none is given; a default of None is within all bounds.
        least: it is a whole number, and at least this.
        most: the largest number that it may be.
        positive: it is a number above 0; False: of at least 0.
        choices: the values that it may have.
        marks: further metadata.
    """
    bounds = {"least": least, "most": most, "positive": positive, "choices": choices}
    return dataclasses.field(default=default, metadata=bounds | marks)


def option(default: Any = None, *, kept: bool = False, decides: bool = False, **bounds: Any) -> Any:
    """A field of options with this ``default``, and ``bounds`` as in `bounded`.

    Args:
        default: its value if none is given.
        kept: a resumed run or sweep has the one of its record, unless it is given.
        decides: members that differ in it cannot be compared, so it is the same in all parts of a sweep.
        bounds: ``least``, ``most``, ``positive`` or ``choices``.
    """
    return bounded(default, kept=kept, decides=decides, **bounds)


def check_fields(values: Any, where: str = "") -> None:
    """Raises ConfigError for a field of a dataclass that is not within the bounds of its `bounded`.

    >>> options = dataclasses.make_dataclass("Options", [("size", int, bounded(1, least=1, most=9))])
    >>> check_fields(options(size=10), "mine")
    Traceback (most recent call last):
    jaxnn.types.ConfigError: mine: size must be an integer in 1…9, not 10.
    """
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        least, most, positive, choices = map(field.metadata.get, ("least", "most", "positive", "choices"))
        if value is None and field.default is None:
            continue
        name = f"{where}: {field.name}" if where else field.name
        if least is not None:
            check_int(name, value, least, most)
        if positive is not None:
            check_range(where or type(values).__name__, field.name, value, most or math.inf, positive=positive)
        if choices and value not in choices:
            raise ConfigError(f"{name} is {value!r}, and must be one of {', '.join(map(str, choices))}.")


def with_changes[Options](options: Options, changes: Mapping[str, Any], config: Any = None) -> Options:
    """The options with ``changes`` by name, their paths absolute.

    ConfigError suggests a known option, or the field of ``config`` that is meant.
    """
    if not dataclasses.is_dataclass(options) or isinstance(options, type):
        raise ConfigError(f"options is {options!r:.60}, and must be RunOptions(…): pass single options by name.")
    known = [field.name for field in dataclasses.fields(options)]
    fields = [field.name for field in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
    for name in (name for name in changes if name not in known):
        field = nearest(name, fields)
        if field is not None and nearest(name, [*known, *fields]) == field:
            no_option = "" if name == field else f"there is no run option {name!r}, and "
            updates = ", in updates, not epochs" if "epoch" in name else ""
            raise ConfigError(
                f"{no_option}{field!r} is a field of the config, not a run option: set it with "
                f"experiment.replace({field}=…){updates}."
            )
        raise ConfigError(f"there is no run option {name!r}: {suggest(name, known)}.")
    changed = dataclasses.replace(options, **changes)
    for name in ("run_dir", "resume"):
        if (path := getattr(changed, name, None)) is not None:
            object.__setattr__(changed, name, path.absolute())  # the working directory may change while it runs
    object.__setattr__(changed, "_given", getattr(options, "_given", frozenset()) | changes.keys())
    return changed


def check_config(config: Any) -> None:
    """Raises ConfigError for a field of a wrong type, a missing one that the loop reads, a negative learning rate."""
    _check_types(config)
    for name, least, bits in (("batch_size", 1, 31), ("num_steps", 1, 31), ("seed", 0, 32)):
        if not hasattr(config, name):
            raise ConfigError(
                f"the config {type(config).__name__} has no field {name!r}: the loop needs batch_size, num_steps "
                "and seed."
            )
        check_int(name, value := getattr(config, name), least)
        if value >= 2**bits:
            raise ConfigError(f"{name} is {value}, and must be below 2**{bits}.")
    for name in SEEDS[1:]:
        if (value := getattr(config, name, None)) is not None and check_int(name, value, 0) >= 2**32:
            raise ConfigError(f"{name} is {value}, and must be below 2**32.")


def _check_types(config: Any, prefix: str = "") -> None:
    """Checks the values of simple types in a dataclass and those in it, and that no learning rate is negative."""
    try:
        kinds = typing.get_type_hints(type(config))
    except (NameError, TypeError):  # of a class made in a function, or with names for type checkers alone
        kinds = {}
    for field in dataclasses.fields(config):
        value, name, kind = getattr(config, field.name), prefix + field.name, kinds.get(field.name)
        if not _fits(value, kind):
            wanted = getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind)
            raise ConfigError(
                f"{name} is {value!r}, of type {type(value).__name__}, and the config {type(config).__name__} needs "
                f"{wanted}: give it one."
            )
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            _check_types(value, f"{name}.")
        elif field.name == "learning_rate" and isinstance(value, numbers.Real) and not float(value) >= 0:
            # It would climb the loss, and no optimizer objects.
            raise ConfigError(f"{name} is {value!r}, and must be at least 0.")


def _fits(value: Any, kind: Any) -> bool:
    """Returns whether ``value`` is of ``kind``; True if ``kind`` is not a simple type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(kind))
    kind = typing.get_origin(kind) or kind
    if getattr(value, "ndim", None) == 0 and kind in (int, float, bool):  # an array of one number
        return True
    if isinstance(value, bool):
        return kind not in SIMPLE
    return isinstance(value, bool) if kind is bool else isinstance(value, SIMPLE.get(kind, object))


def positive_ints(name: str, values: Any, example: str, *, nonempty: bool = False) -> tuple[int, ...]:
    """Returns a sequence of integers >= 1, empty unless ``nonempty``, as a tuple; ``example`` is a valid value."""
    if not isinstance(values, Sequence) or not all(map(_is_count, values)):
        raise ConfigError(f"{name} must be a tuple of integers >= 1, as {example}, not {values!r}.")
    if nonempty and not values:
        raise ConfigError(f"{name} is empty: give at least one, as {example}.")
    return tuple(map(int, values))


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def check_rate(rate: ArrayLike) -> None:
    """Raises ConfigError if a dropout rate is a plain number outside 0…1 or NaN; JAX arrays and tracers pass."""
    if isinstance(rate, numbers.Real) and not 0 <= rate <= 1:
        raise ConfigError(f"a dropout rate must be a probability in 0…1, not {rate!r}.")


def with_fields(config: Any, point: Mapping[str, Any]) -> Any:
    """Returns the config with other values for some fields, by name; names may be dotted."""
    tree: dict[str, Any] = unflatten_dict(dict(point), sep=".")  # type: ignore[no-untyped-call]
    changes = {name: with_fields(getattr(config, name), x) if isinstance(x, dict) else x for name, x in tree.items()}
    # In one call: a config that checks its fields against each other must not see half of the changes.
    return dataclasses.replace(config, **changes)
