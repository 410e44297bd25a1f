"""``jn.main(experiment)``: an experiment as a script, its commands, and a flag for each field of its config."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxnn._fields import with_fields
from jaxnn._json import jsonable
from jaxnn._provenance import check_not_imported
from jaxnn._signals import INTERRUPTED, RESUMABLE
from jaxnn._text import any_text, drop_output, is_of_output
from jaxnn.cli import _process
from jaxnn.cli._flags import BOTH_GIVEN, given, only_compile, parse_run, parse_sweep
from jaxnn.engine import RunOptions
from jaxnn.record import RecordReader
from jaxnn.run import ModelSummary, Run, fit, model_summary, open_run
from jaxnn.types import ConfigError, Experiment, suggest

if TYPE_CHECKING:
    from jaxnn.advice import Advice
    from jaxnn.decisions import Decision
    from jaxnn.plans import StepPlan
    from jaxnn.proof import Verification
    from jaxnn.search import Points, Searcher
    from jaxnn.sweeps import Sweep

COMMANDS = ("run", "sweep", "evaluate", "plan", "advise", "summary", "verify", "decide")
_ABOUT_RUN = (
    "First words: `sweep` trains many runs together, `evaluate` measures a recorded run, `plan` compiles for a card, "
    "`advise` compares devices, `summary` shows the model's layers, `verify` proves that runs are equal, "
    "`decide` tells whether other values of fields are better; see `sweep --help`."
)
_ABOUT = {
    "plan": "Compiles one step for a card that need not be here, `--for h100`: memory, work, bounds; trains nothing.",
    "advise": "Measures one step, batch sizes and sweeps per kind of device and shows which to use; trains nothing.",
    "summary": "Shows the model's layers: output shapes, parameters, operations; trains nothing. Takes a run's flags.",
    "verify": "Proves in fresh processes that the experiment computes the same each time, and names what differs.",
}


@any_text()
def main(
    experiment: Experiment[Any],
    argv: Sequence[str] | None = None,
    *,
    points: Points | Searcher | Mapping[str, Mapping[str, Any] | Points] | None = None,
    options: RunOptions | None = None,
    commands: Mapping[str, Callable[..., Any]] = {},
    at_end: str | None = None,
) -> Run | Sweep | StepPlan | Advice | ModelSummary | Verification | Decision | None:
    """Runs ``experiment`` as a script: flags change its config, whose values are their defaults, and how it is run.

    With ``--resume DIR`` the flags' defaults are the config recorded in DIR. The persistent compile cache is on.

    | first word | |
    |---|---|
    | ``run``, or none | one run |
    | ``sweep`` | many: each field's flag takes several values, ``--learning-rate 1e-4 1e-3 --seed 0 1 2 3`` |
    | ``evaluate`` | metrics of a recorded run or sweep: ``evaluate runs/… --split test --json`` |
    | ``plan`` | what it needs and can reach on a graphics card, compiled and not run: ``--for h100`` |
    | ``advise`` | which kind of device it should train on, and what would fill it: ``--devices cpu gpu`` |
    | ``summary`` | the model's layers: output shapes, parameters, operations; with a run's flags |
    | ``decide`` | whether other values are better, by pairs of seeds: ``--dropout 0.1 --metric test_accuracy`` |
    | ``verify`` | whether runs, resumed runs and members of sweeps are equal on this machine: ``--steps 200 --json`` |

    >>> jn.main(experiment, ["--learning-rate", "0.5", "--no-record"])  # doctest: +SKIP
    finished  step 20 ...

    Args:
        experiment: what the script defines.
        argv: the command line without the program's name; default: the process's.
        points: the script sweeps these, as `sweep` takes them, unless the first word is another command.
        options: the script's own run options, the defaults of their flags in runs and sweeps. With ``--resume`` those
            that the record has come from there.
        commands: functions of the script by first word: ``NAME RUN`` calls ``function(run)`` with the run recorded in
            the directory RUN, or with a member of a sweep, ``NAME RUN --member 3``, and each further parameter, which
            needs an annotation and a default, is a flag. `main` then returns None.
        at_end: the one of ``commands`` that is called with a finished run too, unless it had several processes.

    Raises:
        SystemExit: 2 after wrong input, 1 after training failed, each with one line on standard error; 75 after an
            interruption that can be resumed, 130 after another; 1 after a verification with a failure; 1 to 3 after a
            decision that is not keep, and 4 after one that could not be made.
    """
    if argv is None:
        # Imports leave over 100,000 objects: the garbage collector would walk them again and again, and at the end.
        gc.freeze()
        _process.count_from_start()
    arguments = list(sys.argv[1:] if argv is None else argv)
    check_not_imported()
    resumed = None if (directory := given(arguments, "--resume")) is None else Path(directory)
    with _process.exit_on_user_error(resumed, owns_process=argv is None):
        for word in arguments:
            if any("\ud800" <= character <= "\udfff" for character in word):  # bytes that Python could not decode
                raise ConfigError(f"{word} is not UTF-8: use another name.")
        if arguments and arguments[0] in commands:
            _process.enable_compile_cache()
            _call_with_run(experiment, commands[arguments[0]], arguments)
            return None
        if arguments and arguments[0] in COMMANDS:
            command, *arguments = arguments
        elif arguments and not arguments[0].startswith("-"):
            raise ConfigError(f"there is no command {arguments[0]!r}: {suggest(arguments[0], [*COMMANDS, *commands])}.")
        else:  # the directory of a sweep is resumed as one without the word
            is_swept = points is not None or (resumed is not None and RecordReader(resumed).is_sweep)
            command = "sweep" if is_swept and given(arguments, "--member") is None else "run"
        if command != "run":
            _process.check_alone(arguments, command)
        _process.enable_compile_cache()
        if command == "sweep":
            return _sweep(experiment, arguments, points, options)
        if command == "evaluate":
            from jaxnn.cli._evaluate import evaluate

            return evaluate(experiment, arguments)
        if command == "summary":
            config, *_ = parse_run(experiment, arguments, options, _ABOUT[command], command=command)
            print(layers := model_summary(dataclasses.replace(experiment, config=config)))
            return layers
        if command == "decide":
            from jaxnn.cli._decide_command import decide_command

            return decide_command(experiment, arguments, options)
        if command == "verify":
            return _verify(experiment, arguments, options)
        if command in ("plan", "advise"):
            from jaxnn import advice, plans

            call: Any = advice.advise
            defaults: Any = advice.AdviseOptions()
            if command == "plan":
                call, defaults = plans.plan, plans.PlanOptions()
                if argv is None:
                    only_compile(arguments)
                arguments = [re.sub("^--for(?==|$)", "--device", word) for word in arguments]
            about = _ABOUT[command]
            config, given_options, cluster = parse_run(experiment, arguments, defaults, about, command=command)
            with _process.processes(cluster):
                answer: StepPlan | Advice = call(dataclasses.replace(experiment, config=config), given_options)
            print(answer)
            return answer
        config, options, cluster = parse_run(experiment, arguments, options, about=_ABOUT_RUN)
        with _process.processes(cluster, options.device):
            run = fit(dataclasses.replace(experiment, config=config), options)
    if run.summary.status == "interrupted":
        raise SystemExit(RESUMABLE if run.resumable else INTERRUPTED)
    if at_end is not None and run.summary.status == "finished" and jax.process_count() == 1:
        try:
            commands[at_end](run)
        except OSError as error:
            if not is_of_output(error):
                raise
            drop_output()  # the run is finished and saved
    return run


def _verify(experiment: Experiment[Any], arguments: Sequence[str], options: RunOptions | None) -> Verification:
    """Prints whether the experiment computes the same each time; exits with 1 if a check failed."""
    from jaxnn import proof

    defaults = proof.VerifyOptions(monitor="loss" if options is None else options.monitor)
    config, given_options, _ = parse_run(experiment, arguments, defaults, _ABOUT["verify"], command="verify")
    found = proof.verify(dataclasses.replace(experiment, config=config), given_options)
    print(json.dumps(jsonable(found.as_json())) if given_options.json else found)
    if found.failed:
        raise SystemExit(_process.FAILED)
    return found


def _call_with_run(experiment: Experiment[Any], command: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Calls a ``command`` of the script with the run in the directory that is named, and values from its flags."""
    import tyro

    name, *words = arguments
    _, *parameters = inspect.signature(command, eval_str=True).parameters.values()
    fields: list[Any] = [("run", tyro.conf.Positional[Path])]
    fields += [(parameter.name, parameter.annotation, parameter.default) for parameter in parameters]
    of_sweep = "member" not in {field[0] for field in fields}
    fields += [("member", int | None, None)] if of_sweep else []
    form: Any = dataclasses.make_dataclass("Arguments", fields, frozen=True)
    prog = f"{Path(sys.argv[0]).name} {name}"
    values = vars(tyro.cli(form, args=words, prog=prog, description=inspect.getdoc(command)))
    member = values.pop("member") if of_sweep else None
    command(open_run(values.pop("run"), experiment, member=member), **values)


def _sweep(
    experiment: Experiment[Any],
    arguments: Sequence[str],
    script: Points | Searcher | Mapping[str, Mapping[str, Any] | Points] | None,
    defaults: RunOptions | None,
) -> Sweep:
    """Sweeps the points of the flags, or those of the ``script`` with the values that the flags replace."""
    from jaxnn import search
    from jaxnn.sweeps import recorded_points, sweep

    _process.use_all_cores()
    with _process.processes(_process.ClusterOptions(), given(arguments, "--device")):
        values, space, design, options = parse_sweep(experiment, arguments, defaults)
        many = {name: words for name, words in values.items() if len(words) > 1}  # a field with one value is set
        if script is not None and design.combine != "grid":
            raise ConfigError("--combine is for fields that the command line alone sweeps; the script has points.")
        # A shard that was not started is started with the flags or the points that are given.
        if options.resume is not None and (options.shard is None or RecordReader(options.resume).is_sweep):
            experiment, recorded = recorded_points(options.resume, experiment)
            script = script if many else recorded
            if isinstance(script, search.Searcher) and not space and (design.search or design.propose or design.key):
                raise ConfigError(
                    f"the search continues with its {script.name}: leave --search, --propose and --key out, or repeat "
                    "its whole command."
                )
        script = search.Points.named(script, experiment.config) if isinstance(script, Mapping) else script
        single = {name: words[0] for name, words in values.items() if name not in many}
        points: Any = {**many, **space} if space else script
        if isinstance(points, search.Searcher) and many:
            raise ConfigError("the script has a searcher: give each field one value, or a --space and a --search.")
        if points is None:
            if not many:
                raise ConfigError(
                    "nothing to sweep: give a field several values, as in --seed 0 1 2 3, or a --space to search."
                )
            points = (search.grid if design.combine == "grid" else search.zip)(**many)
        elif isinstance(points, search.Points):
            swept = {name: words for name, words in values.items() if name in many or name in points.scales}
            points = points.override(swept) if swept else points
        experiment = dataclasses.replace(experiment, config=with_fields(experiment.config, single))
        points = design.searched(points, options.budget)
        if (
            options.budget is not None
            and "num_steps" in single
            and isinstance(points, search.Points)
            and not options.lanes
        ):
            raise ConfigError(BOTH_GIVEN)
        found = sweep(experiment, points, options)
        if design.confirm is not None and found.status == "finished":
            # What decides results is in the record, if there is one.
            kept = {"progress", "device", "devices", "stop"} & options.explicit().keys()
            how = {name: getattr(options, name) for name in kept}
            alone = dataclasses.replace(options, run_dir=None, resume=None, lanes=None, budget=None, writers=())
            print(found.confirm(design.confirm, None, alone if found.dir is None else None, **how))
    if found.status == "interrupted":
        raise SystemExit(RESUMABLE if found.dir is not None else INTERRUPTED)
    return found
