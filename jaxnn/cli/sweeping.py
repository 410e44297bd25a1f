"""``python experiment.py sweep --learning-rate 1e-4 1e-3 --seed 0 1 2 3``: every config field a flag of many values."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxnn.record import is_sweep
from jaxnn.sweeps import (
    Halving,
    Points,
    Sweep,
    SweepOptions,
    field_names,
    field_value,
    grid,
    halving,
    override,
    recorded_points,
    sweep,
    with_fields,
    zipped,
)
from jaxnn.types import USUAL_NAMES, ConfigError, Experiment

# Types whose values are words of a command line each; those of all others are given as one word a value.
WORDS = (int, float, str, bool)


@dataclasses.dataclass(frozen=True)
class Design:
    """How the values given make members."""

    combine: Literal["grid", "zipped"] = "grid"
    """Every combination of the values, or the first of each field, the second of each, and so on."""
    halving: int | None = None
    """Successive halving: one of so many members goes on after each rung; default: all train to the end."""


def run_sweep(experiment: Experiment[Any], arguments: Sequence[str], points: Points | Halving | None = None) -> Sweep:
    """Runs the sweep that a command line asks for.

    Args:
        experiment: what is swept.
        arguments: the command line behind ``sweep``.
        points: those of the script; what is given for a field takes the place of its values in them.

    Raises:
        ConfigError: nothing to sweep, a value that is none of its field's, two fields that would be one flag.
    """
    values, design, options = parse(experiment, arguments)
    # A shard that was not begun is started with the flags or the points there are.
    recorded = options.resume is not None and (options.shard is None or is_sweep(options.resume))
    if options.resume is not None and recorded and not values:
        experiment, points = recorded_points(options.resume, experiment)
        return sweep(experiment, points, options)
    # A field with one value is set, not swept.
    single = {name: given[0] for name, given in values.items() if len(given) == 1}
    experiment = dataclasses.replace(experiment, config=with_fields(experiment.config, single))
    many = {name: given for name, given in values.items() if len(given) > 1}
    if points is not None:
        return sweep(experiment, _overridden(points, values, many, design), options)
    return sweep(experiment, _points(many, design), options)


def parse(experiment: Experiment[Any], arguments: Sequence[str]) -> tuple[dict[str, list[Any]], Design, SweepOptions]:
    """The values given for each field, how they are combined, and the sweep options."""
    told = "Trains a member for every point, together."
    values, parsed = _parse(experiment, arguments, "sweep", told, {"design": Design(), "run": SweepOptions()})
    return values, parsed.design, parsed.run


def parse_values(
    experiment: Experiment[Any], arguments: Sequence[str], command: str, told: str
) -> dict[str, list[Any]]:
    """The values that a command without options gives for each field.

    Args:
        experiment: whose fields they are.
        arguments: the command line behind the command.
        command: its word.
        told: what it does, for its help.
    """
    return _parse(experiment, arguments, command, told, {})[0]


def _parse(
    experiment: Experiment[Any], arguments: Sequence[str], command: str, told: str, options: Mapping[str, Any]
) -> tuple[dict[str, list[Any]], Any]:
    """The values given for each field, and the form that holds the options."""
    import tyro

    config = experiment.config
    flags = flag_fields(config, Design, SweepOptions)
    check_flags(arguments, config, *map(type, options.values()))
    fields = {name: _type_of(config, name) for name in flags.values()}
    axes: type = dataclasses.make_dataclass(
        "Axes",
        [(flag, _flag_type(fields[name], field_value(config, name)), ()) for flag, name in flags.items()],
        frozen=True,
    )
    kinds = [("axes", axes), *((name, type(default)) for name, default in options.items())]
    form: Any = dataclasses.make_dataclass("Arguments", kinds, frozen=True)
    parsed = tyro.cli(
        form,
        args=list(arguments),
        default=form(axes(), *options.values()),
        prog=f"{Path(sys.argv[0]).name} {command}",
        description=f"{inspect.getdoc(sys.modules['__main__']) or ''}\n\n{told}",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    given = {name: list(getattr(parsed.axes, flag)) for flag, name in flags.items()}
    values = {name: [_value(name, fields[name], word) for word in words] for name, words in given.items() if words}
    return values, parsed


def _points(values: Mapping[str, list[Any]], design: Design) -> Points | Halving:
    if not values:
        raise ConfigError("nothing to sweep: give a field several values, as in --seed 0 1 2 3.")
    points = (grid if design.combine == "grid" else zipped)(**values)
    return points if design.halving is None else halving(points, design.halving)


def _overridden(
    points: Points | Halving, values: Mapping[str, list[Any]], many: Mapping[str, list[Any]], design: Design
) -> Points | Halving:
    """A script's own points with what the command line says of their fields, and of others that it sweeps."""
    if design.combine != "grid":
        raise ConfigError("--combine is for fields that the command line alone sweeps, and this script has its points.")
    own, eta = (points.points, points.eta) if isinstance(points, Halving) else (points, None)
    axes = {name: given for name, given in values.items() if name in many or name in own.scales}
    own = override(own, axes) if axes else own
    eta = design.halving or eta
    return own if eta is None else halving(own, eta)


def _leaves(config: Any) -> list[str]:
    names = list(field_names(config))
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def flag_fields(config: Any, *forms: type) -> dict[str, str]:
    """Each flag's field, dotted; a nested field's flag is its own name.

    Args:
        config: whose fields become flags.
        forms: dataclasses whose fields become flags beside them.

    Raises:
        ConfigError: two would be one flag.
    """
    taken = {field.name for form in forms for field in dataclasses.fields(form)}
    flags: dict[str, str] = {}
    for name in _leaves(config):
        flag = name.rpartition(".")[2]
        if flag in taken or flag in flags:
            raise ConfigError(
                f"the config {type(config).__name__} has a field {flag!r}, which is an option's name or another "
                f"field's: rename it, since each is a flag --{flag.replace('_', '-')}."
            )
        flags[flag] = name
    return flags


def check_flags(arguments: Sequence[str], config: Any, *forms: type) -> None:
    """Refuses a flag that goes by another name here; those that are merely misspelt are answered by the parser.

    Args:
        arguments: the command line.
        config: whose fields are flags.
        forms: dataclasses whose fields are flags beside them.

    Raises:
        ConfigError: two fields would be one flag, or a flag is called otherwise.
    """
    known = {*flag_fields(config, *forms), *(field.name for form in forms for field in dataclasses.fields(form))}
    for word in arguments:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        usual = next((target for target in known if name in USUAL_NAMES.get(target, ())), None)
        if flag.startswith("--") and name not in known and usual is not None:
            steps = " (updates, not epochs)" if "epoch" in name else ""
            raise ConfigError(f"there is no flag {flag}: did you mean --{usual.replace('_', '-')}{steps}?")


def _type_of(config: Any, name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    return typing.get_type_hints(type(field_value(config, owner) if owner else config))[leaf]


def _flag_type(kind: Any, default: Any) -> Any:
    """A tuple of the field's values, or of words where a value is more than a word; with the help of the flag."""
    import tyro

    words = kind in WORDS or typing.get_origin(kind) is Literal
    shown = default if words else _as_word(default)
    note = "" if words else ", each as one word, its parts apart by commas"
    return typing.Annotated[
        tuple[kind, ...] if words else tuple[str, ...],
        tyro.conf.arg(help=f"Values to sweep{note}; default: {shown}", help_behavior_hint=""),
    ]


def _as_word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _value(name: str, kind: Any, word: Any) -> Any:
    """A word as a value of its field's type: ``64,64`` is ``(64, 64)`` for a tuple of integers."""
    if kind in WORDS or typing.get_origin(kind) is Literal:
        return word
    import tyro

    parts = [part for part in word.split(",") if part] if typing.get_origin(kind) is tuple else [word]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(kind, args=parts)
    except SystemExit:
        told = getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind)
        raise ConfigError(f"--{name.replace('_', '-')} {word!r} is no value of {told}.") from None
