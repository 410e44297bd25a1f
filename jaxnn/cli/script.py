"""``jn.main(experiment)``: every config field a flag, every run option another, and commands for more than one run."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxnn.cli.cache import enable_compile_cache
from jaxnn.cli.cores import use_all_cores
from jaxnn.cli.errors import INTERRUPTED, sentences
from jaxnn.cli.sweeping import parse_values, run_sweep
from jaxnn.loop import Run, RunOptions, fit
from jaxnn.record import config_from_json, is_sweep, read_run
from jaxnn.sweeps import BatchSizePlan, Halving, Points, Sweep, plan_batch_size
from jaxnn.sweeps.design.members import with_fields
from jaxnn.types import ConfigError, Experiment

# sysexits' EX_TEMPFAIL, "try again later": the run was interrupted, is saved, and can be resumed.
RESUMABLE = 75
# What may be asked of a script, by its first word, and what --help says of the last two.
COMMANDS = ("run", "sweep", "plan")
MORE = "`sweep` as the first word trains many runs together, `plan` measures batch sizes: see `sweep --help`."


def main(
    experiment: Experiment[Any], argv: Sequence[str] | None = None, *, points: Points | Halving | None = None
) -> Run | Sweep | BatchSizePlan:
    """Runs ``experiment`` as a script: flags change its config and how it is run.

    With ``--resume DIR`` the flags' defaults are the config recorded in DIR. The persistent compile cache is on.

    | first word | |
    |---|---|
    | ``run``, or none | one run |
    | ``sweep`` | many: each field's flag takes several values, ``--learning-rate 1e-4 1e-3 --seed 0 1 2 3`` |
    | ``plan`` | how fast it would train at several batch sizes: ``--batch-size 32 64``; default: doubling |

    Args:
        experiment: what the script defines; its config's defaults are the flags' defaults.
        argv: the command line without the program's name; default: the process's.
        points: for a script whose claim is about many runs: it sweeps these where no command says otherwise.

    Raises:
        SystemExit: 2 after a mistake on the command line, in the config or in the data, 1 after training failed, each
            with one sentence on standard error; 75 after an interruption that can be resumed, 130 after another.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    with sentences():
        command, arguments = _command(arguments, "run" if points is None else "sweep")
        if command == "sweep":
            return _sweep(experiment, arguments, points)
        if command == "plan":
            return _plan(experiment, arguments)
        config, options = parse(experiment, arguments)
        enable_compile_cache()
        run = fit(dataclasses.replace(experiment, config=config), options)
    if run.summary.status == "interrupted":
        raise SystemExit(RESUMABLE if run.resumable else INTERRUPTED)
    return run


def _command(arguments: list[str], default: str) -> tuple[str, list[str]]:
    """The command and what is behind it; the directory of a sweep is resumed as one without the word."""
    if arguments and arguments[0] in COMMANDS:
        return arguments[0], arguments[1:]
    directory = _resumed(arguments)
    return "sweep" if directory is not None and is_sweep(directory) else default, arguments


def _sweep(experiment: Experiment[Any], arguments: Sequence[str], points: Points | Halving | None) -> Sweep:
    enable_compile_cache()
    use_all_cores()
    found = run_sweep(experiment, arguments, points)
    if found.status == "interrupted":
        raise SystemExit(RESUMABLE if found.dir is not None else INTERRUPTED)
    return found


def _plan(experiment: Experiment[Any], arguments: Sequence[str]) -> BatchSizePlan:
    enable_compile_cache()
    told = "Measures how fast it would train at several batch sizes; trains and writes nothing."
    values = parse_values(experiment, arguments, "plan", told)
    many = [name for name in values if name != "batch_size" and len(values[name]) > 1]
    if many:
        raise ConfigError(f"plan takes several values for --batch-size alone, not for --{many[0].replace('_', '-')}.")
    single = {name: given[0] for name, given in values.items() if name != "batch_size"}
    planned = dataclasses.replace(experiment, config=with_fields(experiment.config, single))
    plan = plan_batch_size(planned, values.get("batch_size"))
    print(plan)
    return plan


def parse(experiment: Experiment[Any], arguments: Sequence[str]) -> tuple[Any, RunOptions]:
    """The config and the run options that the command line asks for.

    Raises:
        ConfigError: two fields would be the same flag.
    """
    import tyro

    default = experiment.config
    _check_flags(default)
    if (directory := _resumed(arguments)) is not None:
        default = config_from_json(read_run(directory)["config"], default)
    # Made here because the config's type is only known here.
    form = dataclasses.make_dataclass("Arguments", [("config", type(default)), ("run", RunOptions)], frozen=True)
    main_module = sys.modules["__main__"]
    parsed = tyro.cli(
        form,
        args=list(arguments),
        default=form(default, RunOptions()),
        prog=Path(sys.argv[0]).name,
        description=f"{main_module.__doc__ or ''}\n\n{MORE}",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return parsed.config, parsed.run


def _check_flags(config: Any) -> None:
    names = [field.name for field in dataclasses.fields(RunOptions)]
    for name in _flags(config):
        if name in names:
            raise ConfigError(
                f"the config {type(config).__name__} has a field {name!r}, which is a run option's name or another "
                f"field's: rename it, since each is a flag --{name.replace('_', '-')}."
            )
        names.append(name)


def _flags(config: Any) -> Iterator[str]:
    """The names of a config's fields, those of a nested dataclass in its place."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        yield from _flags(value) if nested else [field.name]


def _resumed(arguments: Sequence[str]) -> Path | None:
    """The directory after ``--resume``, looked for before parsing because it decides the defaults."""
    for flag, value in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if flag == "--resume" and value not in ("", "None"):
            return Path(value)
        if flag.startswith("--resume="):
            return Path(flag.removeprefix("--resume="))
    return None
