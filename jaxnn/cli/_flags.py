"""Flags of a script: each config field one of a single value for a run, or of many values for a sweep."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import itertools
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxnn.cli._process import ClusterOptions
from jaxnn.engine import RunOptions
from jaxnn.record import config_from_json, read_run
from jaxnn.types import USUAL_NAMES, ConfigError, Experiment


@dataclasses.dataclass(frozen=True)
class Design:
    """How the values of the flags make members."""

    combine: Literal["grid", "zipped"] = "grid"
    """Every combination of the values, or the first of each field, the second of each, and so on."""
    halving: int | None = None
    """Successive halving: one of this many members continues after each rung; default: all train to the end."""


def parse_run(
    experiment: Experiment[Any], arguments: Sequence[str], options: Any = None, about: str = ""
) -> tuple[Any, Any, ClusterOptions]:
    """Returns the config, the options and which process of several this is, with one value per flag.

    The defaults are the experiment's config, or that of the record after ``--resume``, and the ``options`` of the
    command (None: those of a run); ``about`` is a text for its help. Raises ConfigError as `parse_values`.
    """
    config, options = experiment.config, options or RunOptions()
    _flag_fields(arguments, config, type(options), ClusterOptions)
    if (directory := given(arguments, "--resume")) is not None:
        config = config_from_json(read_run(Path(directory))["config"], config)
    form = _parse({"config": config, "run": options, "cluster": ClusterOptions()}, arguments, about)
    return form.config, form.run, form.cluster


def parse_sweep(experiment: Experiment[Any], arguments: Sequence[str]) -> tuple[dict[str, list[Any]], Any, Any]:
    """Returns the values given for each field, the `Design` and the `SweepOptions`; raises as `parse_values`."""
    from jaxnn.sweeps import SweepOptions

    parts = {"design": Design(), "run": SweepOptions()}
    values, form = parse_values(experiment, arguments, "sweep", "Trains a member for every point, together.", parts)
    return values, form.design, form.run


def parse_values(
    experiment: Experiment[Any], arguments: Sequence[str], command: str, about: str, parts: Mapping[str, Any] = {}
) -> tuple[dict[str, list[Any]], Any]:
    """Returns the values given for each field, dotted, and the form with the options in ``parts``.

    ConfigError if two fields would be the same flag, a flag has another name, or a word is no value of its field.
    """
    flags = _flag_fields(arguments, experiment.config, *map(type, parts.values()))
    kinds = {flag: typing.get_type_hints(type(owner))[flag] for flag, (_, owner) in flags.items()}
    fields = [(flag, _many(kinds[flag], getattr(owner, flag)), ()) for flag, (_, owner) in flags.items()]
    axes: Any = dataclasses.make_dataclass("Axes", fields, frozen=True)
    form = _parse({"axes": axes(), **parts}, arguments, about, command)
    values = {}
    for flag, (name, _) in flags.items():
        if words := getattr(form.axes, flag):
            values[name] = [_value(name, kinds[flag], word) for word in words]
    return values, form


def given(arguments: Sequence[str], name: str) -> str | None:
    """The word after the flag ``name``, for what must be known before parsing."""
    for word, after in itertools.pairwise([*arguments, ""]):
        flag, equals, value = word.partition("=")
        if flag == name and (found := value if equals else after) not in ("", "None"):
            return found
    return None


def _parse(parts: Mapping[str, Any], arguments: Sequence[str], about: str, command: str = "") -> Any:
    """Parses the fields of several dataclasses, at their defaults, as one flat set of flags."""
    kinds = [(name, type(default)) for name, default in parts.items()]
    form: Any = dataclasses.make_dataclass("Arguments", kinds, frozen=True)
    if not arguments:  # a script that is started as it is does not wait for the parser
        return form(*parts.values())
    import tyro

    return tyro.cli(
        form,
        args=list(arguments),
        default=form(*parts.values()),
        prog=f"{Path(sys.argv[0]).name} {command}".rstrip(),
        description=f"{inspect.getdoc(sys.modules['__main__']) or ''}\n\n{about}",
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _leaf_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name of each field of a config and its nested dataclasses, with the dataclass that has it."""
    for field in (field for field in dataclasses.fields(config) if field.init):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _leaf_fields(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, config


def _flag_fields(arguments: Sequence[str], config: Any, *options: type) -> dict[str, tuple[str, Any]]:
    """By flag its field, as :func:`_leaf_fields`; raises ConfigError for usual names such as --lr, too."""
    taken = {field.name for form in options for field in dataclasses.fields(form)}
    flags: dict[str, tuple[str, Any]] = {}
    for name, owner in _leaf_fields(config):
        flag = name.rpartition(".")[2]
        if flag in taken or flag in flags:
            raise ConfigError(
                f"the config {type(config).__name__} has a field {flag!r}, which is an option's name or another "
                f"field's: rename it, since each is a flag --{flag.replace('_', '-')}."
            )
        flags[flag] = name, owner
    for word in arguments:  # the parser answers misspelt flags
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        usual = next((target for target in taken | set(flags) if name in USUAL_NAMES.get(target, ())), None)
        if flag.startswith("--") and name not in taken | set(flags) and usual is not None:
            steps = " (updates, not epochs)" if "epoch" in name else ""
            raise ConfigError(f"there is no flag {flag}: did you mean --{usual.replace('_', '-')}{steps}?")
    return flags


def _is_word(kind: Any) -> bool:
    """Whether tyro parses a value of this type from one word among others; else it has a word of its own."""
    return kind in (int, float, str, bool) or typing.get_origin(kind) is Literal


def _many(kind: Any, default: Any) -> Any:
    """Type of a flag with many values of a field, or words that `_value` parses, and its help."""
    import tyro

    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    note = "" if _is_word(kind) else ", each as one word, its parts apart by commas"
    values = tuple[kind, ...] if _is_word(kind) else tuple[str, ...]
    return typing.Annotated[
        values, tyro.conf.arg(help=f"Values to sweep{note}; default: {shown}", help_behavior_hint="")
    ]


def _value(name: str, kind: Any, word: Any) -> Any:
    """A word as a value of its field's type: ``64,64`` is ``(64, 64)`` for a tuple of integers."""
    if _is_word(kind):
        return word
    import tyro

    parts = [part for part in word.split(",") if part] if typing.get_origin(kind) is tuple else [word]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(kind, args=parts)
    except SystemExit:
        shown = getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind)
        raise ConfigError(f"--{name.replace('_', '-')} {word!r} is no value of {shown}.") from None
