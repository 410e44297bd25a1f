"""The flags of a script: one for each field of its config and each option, read from the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import itertools
import sys
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jaxnn._fields import with_changes
from jaxnn._json import check_same_config, config_from_json, leaf_fields
from jaxnn.cli import _process
from jaxnn.cli._search_flags import Design
from jaxnn.engine import RunOptions
from jaxnn.record import RecordReader
from jaxnn.run import continued_names
from jaxnn.types import USUAL_NAMES, ConfigError, Experiment

BOTH_GIVEN = "--budget chooses the number of steps, and --num-steps gives it: leave one of them out."
_DESIGN = {field.name for field in dataclasses.fields(Design)}


def parse_run(
    experiment: Experiment[Any],
    arguments: Sequence[str],
    options: Any = None,
    about: str = "",
    kind: type[RunOptions] = RunOptions,
    command: str = "",
) -> tuple[Any, Any, _process.ClusterOptions]:
    """Returns the config, the options and which process of several this is, with one value per flag.

    The defaults are the experiment's config, or that of the record after ``--resume``, and the ``options`` of the
    command (None: those of a run, or of ``kind``). Raises ConfigError as `parse_sweep`.
    """
    config, objects, number = experiment.config, dict[str, Any](), given(arguments, "--member")
    if options is None or isinstance(options, RunOptions):
        options, objects = _script_options(kind, options, arguments)
    _flag_fields(arguments, config, type(options), _process.ClusterOptions)
    if (directory := given(arguments, "--resume")) is not None:
        path = Path(directory)
        if number is not None and not number.isdecimal():
            raise ConfigError(f"--member is {number!r}, and must be the number of a member, from 0.")
        record = RecordReader(path)
        facts = record.run_facts() if number is None else record.member(int(number)).about
        config = config_from_json(facts["config"], config)
    form = _parse({"config": config, "run": options, "cluster": _process.ClusterOptions()}, arguments, about, command)
    if directory is not None and number is not None:  # `fit` takes the swept fields of a member from the record
        check_same_config(facts["config"], form.config, "sweep", path, but="num_steps")
    return form.config, _with_given(form.run, arguments, objects), form.cluster


def parse_sweep(
    experiment: Experiment[Any], arguments: Sequence[str], defaults: RunOptions | None = None
) -> tuple[dict[str, list[Any]], dict[str, Any], Any, Any]:
    """Returns the values and the distributions given for fields, dotted, the `Design` and the `SweepOptions`.

    ConfigError if two fields would be the same flag, a flag has another name, a word is no value of its field, or a
    field has values and a distribution.
    """
    import tyro

    from jaxnn.sweeps import SweepOptions

    words = Counter(word.partition("=")[0] for word in arguments if word.startswith("--"))
    if twice := [flag for flag, count in words.items() if count > 1]:
        raise ConfigError(f"{twice[0]} is given twice: give it once, with all its values.")
    options, objects = _script_options(SweepOptions, defaults, arguments)
    flags = _flag_fields(arguments, experiment.config, Design, SweepOptions)
    kinds = {flag: typing.get_type_hints(type(owner))[flag] for flag, (_, owner) in flags.items()}
    fields: list[Any] = []
    for flag, (_, owner) in flags.items():
        default, is_word = getattr(owner, flag), _is_word(kinds[flag])
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        note = "" if is_word else ", each as one word with commas between its parts"
        about_values = tyro.conf.arg(help=f"Values to sweep{note}; default: {shown}", help_behavior_hint="")
        # Words of other types are parsed by `field_value`.
        kind: Any = kinds[flag] if is_word else str
        fields.append((flag, typing.Annotated[tuple[kind, ...], about_values], ()))
    axes: Any = dataclasses.make_dataclass("Axes", fields, frozen=True)
    parts = {"config": axes(), "design": Design(), "run": options}
    form = _parse(parts, arguments, "Trains a member for every point, together.", "sweep")
    values = {}
    bare = {word.replace("_", "-") for word in arguments}
    for flag, (name, _) in flags.items():
        if words := getattr(form.config, flag):
            values[name] = [field_value(name, kinds[flag], word) for word in words]
        elif (written := f"--{flag.replace('_', '-')}") in bare:
            raise ConfigError(f"{written} has no value: give one or more after it.")
    named = {flag: name for flag, (name, _) in flags.items()}
    space = form.design.axes(named, lambda flag, word: field_value(flag, kinds[flag], word))
    if both := [name for name in space if name in values]:
        raise ConfigError(f"{both[0]} has values and is drawn from the --space: give one of them.")
    return values, space, form.design, _with_given(form.run, arguments, objects)


def only_compile(arguments: Sequence[str]) -> None:
    """Keeps JAX on the CPU, for this process, if a plan is for a card: JAX's plugin for GPUs then only compiles."""
    if given(arguments, "--for") or given(arguments, "--device"):
        jax.config.update("jax_platforms", "cpu")


def given(arguments: Sequence[str], name: str) -> str | None:
    """The word after the flag ``name``, for what must be known before parsing."""
    for word, after in itertools.pairwise([*arguments, ""]):
        flag, equals, value = word.partition("=")
        if flag == name and (found := value if equals else after) not in ("", "None"):
            return found
    return None


def _script_options(kind: Any, defaults: RunOptions | None, arguments: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The options of a script as defaults of flags; by name those that are objects, which no flag can show.

    On resume, those that the record has, and its directory, are not the script's; code is always the script's.
    """
    if defaults is not None and not isinstance(defaults, RunOptions):
        raise ConfigError(f"options is {defaults!r:.60}, and must be RunOptions(…).")
    values = {} if defaults is None else defaults.explicit()
    if kind is not RunOptions:
        values.pop("probes", None)  # they watch one run
    objects = {name: value for name, value in values.items() if not _is_shown(value)}
    directory = given(arguments, "--resume")
    # The first shard of a sweep is started by `--resume` too, and has no record yet.
    resumes = directory is not None and (kind is RunOptions or RecordReader(Path(directory)).is_sweep)
    if resumes:
        named = {name: values[name] for name in ("strategy", "stop", "writers", "probes") if name in values}
        objects |= {name: value for name, value in named.items() if ":" in str(value)}
    left_out = {*objects, *(values.keys() - {field.name for field in dataclasses.fields(kind)})}
    if directory is not None:
        left_out.add("run_dir")
    if resumes:
        left_out |= continued_names(kind) - {"shard"}
    return kind(**{name: value for name, value in values.items() if name not in left_out}), objects


def _is_shown(value: Any) -> bool:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return all(map(_is_shown, value))
    return value is None or isinstance(value, str | int | float | Path)


def _with_given(options: Any, arguments: Sequence[str], objects: Mapping[str, Any] = {}) -> Any:
    """Notes the options that flags give: on resume they replace those of the record, also at their defaults.

    ``objects`` are options of the script that no flag could show; flags replace them too.
    """
    flags = {word.partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    if "__num_steps" in flags and type(options) is RunOptions:
        if "__budget" in flags:
            raise ConfigError(BOTH_GIVEN)
        objects = {**objects, "budget": None}  # a resumed run has this number of steps
    names = {flag.removeprefix("__").removeprefix("no_") for flag in flags}
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return with_changes(options, {**objects, **{name: value for name, value in values.items() if name in names}})


def _parse(parts: Mapping[str, Any], arguments: Sequence[str], about: str, command: str = "") -> Any:
    """Parses the fields of several dataclasses, at their defaults, as one flat set of flags.

    ``--help`` describes the flags of the experiment and names the others, ``--help-all`` describes all.
    """
    lines = [*(inspect.getdoc(sys.modules["__main__"]) or "").splitlines(), about]
    if "--help-all" in arguments:
        arguments = ["--help"]
    elif {"-h", "--help"} & {*arguments}:
        lines.append("More flags, which --help-all describes:")
        # The options of plan and advise are few.
        brief = {name: part for name, part in parts.items() if isinstance(part, RunOptions | _process.ClusterOptions)}
        for name, part in brief.items():
            flags = (f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(part))
            lines.append(f"{name}: {' '.join(flags)}")
        parts = {name: part for name, part in parts.items() if name not in brief}
        arguments = ["--help"]
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
        # The parser joins a line to the one before unless it is indented.
        description="\n ".join(filter(None, lines)),
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _flag_fields(arguments: Sequence[str], config: Any, *options: type) -> dict[str, tuple[str, Any]]:
    """By flag its field, as :func:`leaf_fields`; raises ConfigError for usual names such as --lr, too."""
    taken = {field.name for form in options for field in dataclasses.fields(form)}
    flags: dict[str, tuple[str, Any]] = {}
    for name, owner in leaf_fields(config):
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
        if flag.startswith("--") and name not in taken | set(flags) and name in _DESIGN:
            raise ConfigError(f"{flag} is a flag of sweep: write that word first, as in `sweep {flag} …`.")
        if flag.startswith("--") and name not in taken | set(flags) and usual is not None:
            steps = " (updates, not epochs)" if "epoch" in name else ""
            raise ConfigError(f"there is no flag {flag}: did you mean --{usual.replace('_', '-')}{steps}?")
    return flags


def _is_word(kind: Any) -> bool:
    """Whether tyro parses a value of this type from one word of several."""
    return kind in (int, float, str, bool) or typing.get_origin(kind) is Literal


def field_value(name: str, kind: Any, word: Any) -> Any:
    """A word as a value of its field's type: ``64,64`` is ``(64, 64)`` for a tuple of integers; values stay."""
    if not isinstance(word, str) or kind is str:
        return word
    import tyro

    parts = [part for part in word.split(",") if part] if typing.get_origin(kind) is tuple else [word]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(kind, args=parts)
    except SystemExit:
        shown = getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind)
        raise ConfigError(f"--{name.replace('_', '-')} {word!r} is no value of {shown}.") from None
