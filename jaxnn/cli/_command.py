"""The ``jaxnn`` command: lists devices and runs; shows, plots, compares, exports and explains runs; decides."""

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro

from jaxnn import sweeps
from jaxnn._disk import write_bytes
from jaxnn._figures import draw_curves
from jaxnn._json import final_metrics, json_line
from jaxnn._provenance import importing
from jaxnn._text import any_text, format_bytes, format_split, text_table
from jaxnn.cli._decide_command import apart_from_verdicts, decide_command
from jaxnn.cli._flags import given, only_compile
from jaxnn.cli._process import enable_compile_cache, exit_on_user_error
from jaxnn.cli._script import main
from jaxnn.decisions import Decision, has_decisions, read_decisions
from jaxnn.observe import describe_devices, known_faults, missing_gpu
from jaxnn.record import RecordReader
from jaxnn.run import open_run
from jaxnn.types import ConfigError, Experiment, JaxnnError, RecordError, named_object, printable


@any_text()
def run_command(argv: Sequence[str] | None = None) -> None:
    """Runs the ``jaxnn`` command with ``argv``, by default that of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with exit_on_user_error(owns_process=argv is None):
        if arguments[:1] in (["plan"], ["verify"], ["decide"]) and [*arguments, "-"][1][:1] != "-":
            if argv is None and arguments[0] == "plan":
                only_compile(arguments)  # before the script starts JAX
            words, decides = arguments[2:], arguments[0] == "decide"
            with apart_from_verdicts() if decides else contextlib.nullcontext():
                experiment, other = experiment_of(Path(arguments[1])), None
                if decides and words and not words[0].startswith("-"):
                    other = experiment_of(Path(words[0]))
            if other is not None:
                enable_compile_cache()
                decide_command(experiment, words[1:], None, other)
                return
            # The flags are the script's own.
            main(experiment, [arguments[0], *words])
            return
        if argv is None and arguments[:1] == ["plot"] and given(arguments, "--confusion") is None:
            jax.config.update("jax_platforms", "cpu")  # importances are computed: a GPU may be busy with the sweep
        functions = devices, runs, show, plot, compare, decide, diff, export, autopsy, plan, verify
        calls = {function.__name__: _deferred(function) for function in functions}
        arguments = arguments or ["--help"]
        tyro.extras.subcommand_cli_from_dict(calls, prog="jaxnn", description=__doc__, args=arguments)()


def _deferred(function: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """``function`` for the parser, which calls it: binds its arguments."""
    return functools.wraps(function)(lambda *arguments, **options: functools.partial(function, *arguments, **options))


def devices() -> None:
    """Prints backends, devices, memory and versions, and why a GPU is not used: jaxnn devices."""
    described = describe_devices()
    print(f"backend   {described['backend']}, {described['cpu_count']} CPU cores")
    for device in described["devices"]:
        limit = device["memory_limit_bytes"]
        memory = f", {format_bytes(limit)} memory" if limit else ""
        print(f"device    {device['platform']}:{device['id']} {device['kind']}{memory}")
    if described["native"]:
        print(f"native    {described['native']}")
    print("versions  " + ", ".join(f"{k} {v}" for k, v in described["versions"].items() if v))
    if reason := missing_gpu():
        print(f"warning   {reason}")
    for fault in known_faults(described["backend"]):
        print(f"fault     jaxlib computes wrong numbers for {fault.pattern}: {fault.way_round}")


def runs(directory: tyro.conf.Positional[Path] = Path("runs"), /) -> None:
    """Lists the runs and sweeps recorded at or below a directory, oldest first: jaxnn runs.

    Args:
        directory: where to look.
    """
    paths = RecordReader.below(directory)
    if not paths:
        raise RecordError(f"no runs below {directory}: run an experiment first, or name another directory.")
    # Members of decisions are many, and shown as one.
    parents = {path: path.parents[1] for path in paths if len(path.parents) > 1}
    decided = dict.fromkeys(folder for folder in parents.values() if has_decisions(folder))
    rows = [(str(folder), f"{len(read_decisions(folder))} decisions", "", "", "") for folder in decided]
    for path in (path for path in paths if parents.get(path) not in decided):
        try:
            rows.append((str(path), *_listed(path)))
        except (JaxnnError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Also of a part that no schema covers: one record does not end the list.
            why = str(error) if isinstance(error, JaxnnError) else f"the record is damaged ({error!r})"
            rows.append((str(path), "unreadable", "", "", why))
    print(printable(text_table(rows, ("run", "status", "step", "steps/s", "final metrics"))))


def _listed(path: Path) -> tuple[str, str, str, str]:
    """Returns status, step, steps per second and metrics of the run or sweep in ``path``."""
    record = RecordReader(path)
    if record.is_sweep:
        sweep = sweeps.open_sweep(path)
        status = f"{sweep.status}, sweep of {len(sweep.members)}: {sweeps.count_by_status(sweep.members)}"
        step = str(max((member.step for member in sweep.members), default=0))
        rate, shown = sweep.summary.get("member_steps_per_second"), ""
        with contextlib.suppress(ConfigError):  # no member is best
            shown = f"best {_metrics(sweep.best().final)}"
    else:
        facts, lines = (recorded := record.member()).facts, recorded.lines
        step = f"{lines[-1]['step'] if lines else 0}/{facts['config'].get('num_steps', '?')}"
        rate = ((facts.get("summary") or {}).get("throughput") or {}).get("steps_per_second")
        status, shown = _brief(facts["status"]), _metrics(final_metrics(lines))
    return status, step, f"{rate:,.0f}" if rate else "", shown


def show(run: tyro.conf.Positional[Path], /, *, member: int | None = None) -> None:
    """Shows a run's config, options, time and result, or a sweep's results: jaxnn show runs/digits_mlp/….

    Args:
        run: the directory of a run or a sweep, or a folder of decisions.
        member: the number of a member of the sweep, which is shown as a run.
    """
    if has_decisions(run):
        header = "verdict", "B against A", "metric", "difference", "interval", "level", "pairs", "session"
        print(printable(text_table(map(_decision_row, read_decisions(run)), header)))
        return
    record = RecordReader(run)
    if member is None and record.is_sweep:
        sweep = sweeps.open_sweep(run)
        # Without repeats a group is a member: show the best of them.
        results = sweep.group() if sweep.has_repeats else sweep.table()
        fixed = "config", _brief([{**one.fields, **dict.fromkeys(one.point)} for one in sweep.members[:1]])
        print(printable(f"{text_table([*sweep.rows(), fixed])}\n\n{results}"))
        return
    facts, group, about, lines, *_ = recorded = record.member(member)
    sections = ("name", "status", "started", "config", "options", "data", "fingerprint", "git")
    known, names = {**group, **facts, **about}, (*sections, "precision", "steps_per_call", "command", "resumed")
    shown = {name: known.get(name) for name in names}
    shown["devices"] = [device["kind"] for device in facts["devices"]["devices"]]
    shown["versions"] = facts["devices"]["versions"]
    seconds = (facts.get("summary") or {}).get("seconds") if recorded.row is None else None
    shown["time"] = f"{sum(seconds.values()):.2f} s ({format_split(seconds)})" if seconds else None
    shown["final"] = _metrics(final_metrics(lines))
    for name, value in shown.items():
        if value is not None:
            print(f"{name:<15} {_brief(value)}")


def _decision_row(found: Decision) -> tuple[str, ...]:
    (low, high), names = found.interval, f"{found.names[1]} against {found.names[0]}"
    numbers = f"{found.difference:+.4g}", f"{low:+.4g} to {high:+.4g}", f"{100 * (1 - found.level):.4g} %"
    return found.verdict, names, found.metric, *numbers, str(len(found.pairs)), found.session or ""


def plot(
    run: tyro.conf.Positional[Path],
    /,
    *,
    member: int | None = None,
    out: Path | None = None,
    confusion: str | None = None,
    script: Path | None = None,
) -> None:
    """Draws the curves of a run, or the results of a sweep, as PNG: jaxnn plot runs/digits_mlp/….

    Args:
        run: the directory of a run or a sweep.
        member: the number of a member of the sweep, which is drawn as a run.
        out: the picture; default: curves.png, sweep.png or confusion.png in that directory.
        confusion: a split, such as test, whose classes as a run predicts them are drawn instead.
        script: the file that defines ``experiment``, for --confusion.
    """
    if confusion is not None:
        if script is None:
            raise ConfigError("a confusion matrix needs the model: give the script that trained it, --script x.py.")
        opened = open_run(run, experiment_of(script), member=member)
        figure, name = opened.confusion_matrix(confusion).plot(), "confusion.png"
    elif member is None and RecordReader(run).is_sweep:
        figure, name = sweeps.open_sweep(run).plot(), "sweep.png"
    else:
        recorded = RecordReader(run).member(member)
        title = recorded.facts["name"], recorded.facts.get("data") or ""
        figure, name = draw_curves(recorded.lines, *title), "curves.png"
    path = out or run / name
    try:
        figure.savefig(drawn := io.BytesIO(), dpi=120, format=path.suffix[1:] or "png")
    except ValueError as error:
        raise RecordError(f"the picture {path} cannot be written ({error}): choose another --out.") from error
    write_bytes(path, drawn.getvalue())
    print(printable(path, lines=False))


def compare(
    a: tyro.conf.Positional[Path], b: tyro.conf.Positional[Path], metric: tyro.conf.Positional[tuple[str, ...]] = (), /
) -> None:
    """Compares B with A, runs or sweeps, paired by seeds: jaxnn compare runs/A runs/B test_accuracy.

    Args:
        a: the directory of a run or a sweep.
        b: the directory of the run or the sweep to compare with it.
        metric: such as test_accuracy, or several; default: the monitored metric of A.
    """
    left, right = (sweeps.open_sweep(path) if RecordReader(path).is_sweep else path for path in (a, b))
    several = len(metric) > 1
    found = sweeps.compare(left, right, metric) if several else sweeps.compare(left, right, *metric)
    print(printable(found))


def diff(
    a: tyro.conf.Positional[Path],
    b: tyro.conf.Positional[Path],
    /,
    *,
    member: tuple[int, ...] = (),
    script: tuple[Path, ...] = (),
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Says from which step two runs differ, in what, and the likeliest cause: jaxnn diff runs/A runs/B.

    Args:
        a: the directory of a run or a sweep.
        b: the directory of the run or the sweep to compare with it.
        member: the number of a member of each sweep; one number for both.
        script: the file that defines ``experiment``, or one for each: finds the exact step.
        json: print JSON.
    """
    from jaxnn.proof import diff  # most commands need no model

    if len(member) > 2 or len(script) > 2:
        raise ConfigError("jaxnn diff compares two runs: give at most two numbers as --member, two files as --script.")
    experiments = [experiment_of(one) for one in script]
    code: Any = tuple(experiments) if len(experiments) > 1 else next(iter(experiments), None)
    numbers: Any = member[0] if len(member) == 1 else member or None
    found = diff(a, b, code, member=numbers)
    print(json_line(found.as_json()).rstrip() if json else found)


def export(
    run: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path | None] = None,
    /,
    *,
    script: Path,
    member: int | None = None,
    batch: int | None = None,
    platforms: tuple[str, ...] = (),
    best: bool = False,
) -> None:
    """Writes the model of a run as a file that is used without jaxnn: jaxnn export RUN model.onnx --script x.py.

    Args:
        run: the directory of a run or a sweep.
        out: the file, *.stablehlo, *.onnx or *.safetensors; default: model.stablehlo in that directory.
        script: the file that defines ``experiment``.
        member: the number of the member of a sweep.
        batch: number of examples of the inputs; default: any.
        platforms: of a StableHLO program, such as cpu cuda tpu; default: the one here.
        best: the best checkpoint instead of the newest.
    """
    opened = open_run(run, experiment_of(script), member=member)
    state = opened.best_state() if best else None
    where = out or run / "model.stablehlo"
    written = opened.export(
        where, batch="symbolic" if batch is None else batch, platforms=platforms or None, state=state
    )
    print(printable(written, lines=False))


def autopsy(
    run: tyro.conf.Positional[Path],
    /,
    *,
    script: Path,
    member: int | None = None,
    step: int | None = None,
    out: Path | None = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Finds why a run diverged: operation, line, examples, and a script that shows it: jaxnn autopsy RUN --script x.py.

    Args:
        run: the directory of a run or a sweep.
        script: the file that defines ``experiment``.
        member: the number of the member of a sweep.
        step: the number of an update; default: the first with a number that is not finite.
        out: the folder for repro.py and repro.npz; default: autopsy in that directory.
        json: print JSON.
    """
    from jaxnn.proof import autopsy  # most commands need no model

    found = autopsy(run, experiment_of(script), member=member, step=step, folder=out)
    print(json_line(found.as_json()).rstrip() if json else printable(found))


def plan(script: tyro.conf.Positional[Path], /) -> None:
    """Compiles a script's experiment for a card that need not be here: jaxnn plan my_script.py --for h100.

    Other flags are the script's own: ``jaxnn plan my_script.py --help``.

    Args:
        script: a file that defines ``experiment``.
    """
    raise AssertionError(script)  # `run_command` passes it on


def verify(script: tyro.conf.Positional[Path], /) -> None:
    """Proves that a script's experiment computes the same each time: jaxnn verify my_script.py --steps 200.

    Other flags are the script's own: ``jaxnn verify my_script.py --help``.

    Args:
        script: a file that defines ``experiment``.
    """
    raise AssertionError(script)  # `run_command` passes it on


def decide(script: tyro.conf.Positional[Path], other: tyro.conf.Positional[Path | None] = None, /) -> None:
    """Decides which of two experiments is better, by pairs of seeds: jaxnn decide A.py B.py --metric test_accuracy.

    With one script B has other values of fields: ``jaxnn decide A.py --dropout 0.1``. Other flags are those of
    ``jaxnn decide A.py --help``.

    Args:
        script: a file that defines ``experiment``, the baseline.
        other: the file that defines the candidate.
    """
    raise AssertionError(script, other)  # `run_command` passes it on


def experiment_of(script: Path) -> Experiment[Any]:
    """Imports a script and returns its ``experiment``; ConfigError if it has none."""
    if not script.is_file():
        raise ConfigError(f"{script} is not a file: give the script that defines the experiment.")
    known = getattr(sys.modules.get(script.stem), "__file__", None)
    if known is not None and Path(known).resolve() != script.resolve():
        raise ConfigError(f"{script} has the name of the module {known}: rename one of the files.")
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with importing():
            found = named_object(f"{script.stem}:experiment", "the experiment")
    finally:
        sys.path.pop(0)
    if not isinstance(found, Experiment):
        raise ConfigError(f"{script} defines no variable `experiment`: assign it jn.Experiment(…) at its top level.")
    return found


def _metrics(metrics: Mapping[str, float]) -> str:
    return _brief({name: float(f"{value:.4g}") for name, value in metrics.items()})


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(k, lines=False)} {_brief(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return " ".join(map(_brief, value))
    return printable(value, lines=False)
