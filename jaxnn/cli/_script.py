"""``jn.main(experiment)``: an experiment as a script, with commands to run it, sweep it, plan and advise."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxnn.cli._flags import given, parse_run, parse_sweep, parse_values
from jaxnn.cli._process import (
    INTERRUPTED,
    RESUMABLE,
    ClusterOptions,
    check_alone,
    enable_compile_cache,
    exit_on_user_error,
    processes,
    use_all_cores,
)
from jaxnn.record import is_sweep
from jaxnn.run import Run, fit
from jaxnn.types import ConfigError, Experiment

if TYPE_CHECKING:
    from jaxnn.advice import Advice, BatchSizePlan
    from jaxnn.search import Halving, Points
    from jaxnn.sweeps import Sweep

COMMANDS = ("run", "sweep", "plan", "advise")
_ABOUT_RUN = (
    "`sweep` as the first word trains many runs together, `plan` measures batch sizes, `advise` says which device to "
    "use: see `sweep --help`."
)
_ABOUT_PLAN = "Measures how fast it would train at several batch sizes; trains and writes nothing."
_ABOUT_ADVISE = "Measures one step, batch sizes and sweeps per kind of device and says which to use; trains nothing."


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
        points: for a script whose claim is about many runs: it sweeps these unless a command says otherwise.

    Raises:
        SystemExit: 2 after a mistake on the command line, in the config or in the data, 1 after training failed, each
            with one line on standard error; 75 after an interruption that can be resumed, 130 after another.
    """
    if argv is None:
        # Imports leave over 100,000 objects: the garbage collector would walk them again and again, and at the end.
        gc.freeze()
    arguments = list(sys.argv[1:] if argv is None else argv)
    resumed = None if (directory := given(arguments, "--resume")) is None else Path(directory)
    with exit_on_user_error(resumed, owns_process=argv is None):
        for word in arguments:
            if any("\ud800" <= character <= "\udfff" for character in word):  # bytes that Python could not decode
                raise ConfigError(f"{word} is not UTF-8: use another name.")
        if arguments and arguments[0] in COMMANDS:
            command, *arguments = arguments
        else:  # the directory of a sweep is resumed as one without the word
            command = "sweep" if points is not None or (resumed is not None and is_sweep(resumed)) else "run"
        if command != "run":
            check_alone(arguments, command)
        enable_compile_cache()
        if command == "sweep":
            return _sweep(experiment, arguments, points)
        if command == "plan":
            return _plan(experiment, arguments)
        if command == "advise":
            from jaxnn.advice import AdviseOptions, advise

            config, options, cluster = parse_run(experiment, arguments, AdviseOptions(), _ABOUT_ADVISE)
            with processes(cluster):
                advice = advise(dataclasses.replace(experiment, config=config), options)
            print(advice)
            return advice
        config, options, cluster = parse_run(experiment, arguments, about=_ABOUT_RUN)
        with processes(cluster, options.device):
            run = fit(dataclasses.replace(experiment, config=config), options)
    if run.summary.status == "interrupted":
        raise SystemExit(RESUMABLE if run.resumable else INTERRUPTED)
    return run


def _plan(experiment: Experiment[Any], arguments: Sequence[str]) -> BatchSizePlan:
    """Measures batch sizes; ``arguments`` may set other fields."""
    from jaxnn.advice import plan_batch_size

    values, _ = parse_values(experiment, arguments, "plan", _ABOUT_PLAN)
    sizes = values.pop("batch_size", None)
    if many := [name for name, words in values.items() if len(words) > 1]:
        raise ConfigError(f"plan takes several values for --batch-size alone, not for --{many[0].replace('_', '-')}.")
    plan = plan_batch_size(_with_values(experiment, values), sizes)
    print(plan)
    return plan


def _sweep(experiment: Experiment[Any], arguments: Sequence[str], own: Points | Halving | None) -> Sweep:
    """Sweeps the points of the flags, or the script's ``own`` with what the flags give for their fields and others."""
    from jaxnn.search import Halving, grid, halving, override, zipped
    from jaxnn.sweeps import recorded_points, sweep

    use_all_cores()
    with processes(ClusterOptions(), given(arguments, "--device")):
        values, design, options = parse_sweep(experiment, arguments)
        # A field with one value is set, not swept.
        many = {name: words for name, words in values.items() if len(words) > 1}
        points, eta = (own.points, own.eta) if isinstance(own, Halving) else (own, None)
        # A shard that was not started is started with the flags or the points that are given.
        recorded = options.resume is not None and (options.shard is None or is_sweep(options.resume))
        if recorded and not values:
            experiment, swept = recorded_points(options.resume, experiment)
        else:
            if points is not None and design.combine != "grid":
                raise ConfigError("--combine is for fields that the command line alone sweeps; the script has points.")
            if points is None and not many:
                raise ConfigError("nothing to sweep: give a field several values, as in --seed 0 1 2 3.")
            experiment = _with_values(experiment, {name: words for name, words in values.items() if name not in many})
            if points is None:
                points = (grid if design.combine == "grid" else zipped)(**many)
            elif axes := {name: words for name, words in values.items() if name in many or name in points.scales}:
                points = override(points, axes)
            eta = eta if design.halving is None else design.halving
            swept = points if eta is None else halving(points, eta)
        found = sweep(experiment, swept, options)
    if found.status == "interrupted":
        raise SystemExit(RESUMABLE if found.dir is not None else INTERRUPTED)
    return found


def _with_values(experiment: Experiment[Any], values: Mapping[str, list[Any]]) -> Experiment[Any]:
    """The experiment with the first value of each field."""
    from jaxnn.sweeps import with_fields

    single = {name: words[0] for name, words in values.items()}
    return dataclasses.replace(experiment, config=with_fields(experiment.config, single))
