"""``jn.main(experiment)``: every config field a flag, every run option another, and commands for more than one run."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxnn.advise import Advice, AdviseOptions, BatchSizePlan, advise, plan_batch_size
from jaxnn.cli.cache import enable_compile_cache
from jaxnn.cli.cluster import ClusterOptions, check_alone, processes
from jaxnn.cli.cores import use_all_cores
from jaxnn.cli.errors import INTERRUPTED, RESUMABLE, check_text, sentences
from jaxnn.cli.sweeping import check_flags, parse_values, run_sweep
from jaxnn.engine import RunOptions
from jaxnn.record import config_from_json, is_sweep, read_run
from jaxnn.run import Run, fit
from jaxnn.sweeps import Halving, Points, Sweep, with_fields
from jaxnn.types import ConfigError, Experiment

# What may be asked of a script, by its first word, and what --help says of all but the first.
COMMANDS = ("run", "sweep", "plan", "advise")
MORE = (
    "`sweep` as the first word trains many runs together, `plan` measures batch sizes, `advise` says which device to "
    "use: see `sweep --help`."
)


def main(
    experiment: Experiment[Any],
    argv: Sequence[str] | None = None,
    *,
    points: Points | Halving | None = None,
) -> Run | Sweep | BatchSizePlan | Advice:
    """Runs ``experiment`` as a script: flags change its config and how it is run.

    With ``--resume DIR`` the flags' defaults are the config recorded in DIR. The persistent compile cache is on.

    | first word | |
    |---|---|
    | ``run``, or none | one run |
    | ``sweep`` | many: each field's flag takes several values, ``--learning-rate 1e-4 1e-3 --seed 0 1 2 3`` |
    | ``plan`` | how fast it would train at several batch sizes: ``--batch-size 32 64``; default: doubling |
    | ``advise`` | which kind of device it should train on, and what would fill it: ``--devices cpu gpu`` |

    Args:
        experiment: what the script defines; its config's defaults are the flags' defaults.
        argv: the command line without the program's name; default: the process's.
        points: for a script whose claim is about many runs: it sweeps these where no command says otherwise.

    Raises:
        SystemExit: 2 after a mistake on the command line, in the config or in the data, 1 after training failed, each
            with one sentence on standard error; 75 after an interruption that can be resumed, 130 after another.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    with sentences(_resumed(arguments), owns_process=argv is None):
        check_text(arguments)
        command, arguments = _command(arguments, "run" if points is None else "sweep")
        if command != "run":
            check_alone(arguments, command)
        if command == "sweep":
            return _sweep(experiment, arguments, points)
        if command == "plan":
            return _plan(experiment, arguments)
        if command == "advise":
            return _advise(experiment, arguments)
        config, options, cluster = parse(experiment, arguments, RunOptions(), MORE)
        enable_compile_cache()
        with processes(cluster, options.device):
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
    with processes(ClusterOptions(), _given(arguments, "--device")):
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


def _advise(experiment: Experiment[Any], arguments: Sequence[str]) -> Advice:
    told = "Measures one step, batch sizes and sweeps on each kind of device, and says which to use; it trains nothing."
    config, options, cluster = parse(experiment, arguments, AdviseOptions(), told)
    enable_compile_cache()
    with processes(cluster):
        advice = advise(dataclasses.replace(experiment, config=config), options)
    print(advice)
    return advice


def parse(
    experiment: Experiment[Any], arguments: Sequence[str], options: Any, more: str
) -> tuple[Any, Any, ClusterOptions]:
    """The config, the options and the place among processes that the command line asks for.

    Args:
        experiment: whose config it is.
        arguments: the command line behind the command.
        options: those of the command, at their defaults.
        more: what the help says below the script's own words.

    Raises:
        ConfigError: two fields would be the same flag.
    """
    import tyro

    default = experiment.config
    check_flags(arguments, default, type(options), ClusterOptions)
    if (directory := _resumed(arguments)) is not None:
        default = config_from_json(read_run(directory)["config"], default)
    # Made here because the config's type is only known here.
    parts = [("config", type(default)), ("run", type(options)), ("cluster", ClusterOptions)]
    form = dataclasses.make_dataclass("Arguments", parts, frozen=True)
    main_module = sys.modules["__main__"]
    parsed = tyro.cli(
        form,
        args=list(arguments),
        default=form(default, options, ClusterOptions()),
        prog=Path(sys.argv[0]).name,
        description=f"{main_module.__doc__ or ''}\n\n{more}",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return parsed.config, parsed.run, parsed.cluster


def _resumed(arguments: Sequence[str]) -> Path | None:
    """The directory after ``--resume``, looked for before parsing because it decides the defaults."""
    value = _given(arguments, "--resume")
    return None if value is None else Path(value)


def _given(arguments: Sequence[str], name: str) -> str | None:
    """The word after the flag ``name``, for what must be known before parsing."""
    for word, after in itertools.pairwise([*arguments, ""]):
        flag, equals, value = word.partition("=")
        if flag == name and (found := value if equals else after) not in ("", "None"):
            return found
    return None
