"""The ``jaxnn`` command: what machine this is, which runs there are, and what one of them did."""

from __future__ import annotations

import ast
import json as json_format
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from jaxnn.cli.bench import bench
from jaxnn.cli.errors import sentences
from jaxnn.cli.tables import print_table
from jaxnn.observe import describe_devices, format_bytes, missing_gpu, printable
from jaxnn.record import age, final_metrics, find_runs, find_sweeps, is_sweep, read_metrics, read_run
from jaxnn.sweeps import Sweep, best_label, count_by_status, open_sweep
from jaxnn.sweeps import compare as compare_sides
from jaxnn.types import ConfigError, JaxnnError, RecordError, suggest


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the ``jaxnn`` command.

    Raises:
        SystemExit: 2 after a mistake, with one sentence on standard error.
    """
    commands: dict[str, Callable[..., Any]] = {
        "devices": devices,
        "runs": runs,
        "show": show,
        "compare": compare,
        "bench": bench,
    }
    with sentences(owns_process=argv is None):
        tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="jaxnn",
            description=__doc__,
            args=None if argv is None else list(argv),
        )


def devices(*, json: bool = False) -> None:
    """Backends, devices, memory and versions; and why a GPU that is there is not used.

    Args:
        json: print JSON instead of a table.
    """
    described = {**describe_devices(), "missing_gpu": missing_gpu()}
    if json:
        _print_json(described)
        return
    print(f"backend   {described['backend']}, {described['cpu_count']} CPU cores")
    for device in described["devices"]:
        limit = device["memory_limit_bytes"]
        memory = f", {format_bytes(limit)} memory" if limit else ""
        print(f"device    {device['platform']}:{device['id']} {device['kind']}{memory}")
    print("versions  " + ", ".join(f"{k} {v}" for k, v in described["versions"].items() if v))
    if described["missing_gpu"]:
        print(f"warning   {described['missing_gpu']}")


def runs(directory: tyro.conf.Positional[Path] = Path("runs"), /) -> None:
    """A table of the runs and sweeps recorded at or below a directory, oldest first.

    Args:
        directory: where to look.
    """
    paths = sorted([*find_runs(directory), *find_sweeps(directory)], key=age)
    rows = [_sweep_row(path) if is_sweep(path) else _row(path) for path in paths]
    if not rows:
        raise RecordError(f"no runs below {directory}: run an experiment first, or name another directory.")
    print_table(("run", "status", "step", "steps/s", "final metrics"), rows)


def show(run: tyro.conf.Positional[Path], /) -> None:
    """What one run computed, how, where, and what came of it; of a sweep, how its members did.

    Args:
        run: the directory of a run or a sweep.
    """
    if is_sweep(run):
        sweep = open_sweep(run)
        groups = sweep.group()
        # Without repeats a group is a member, and the best of many are what one looks for.
        alone = all(len(row.members) == 1 for row in groups.rows)
        print(printable(f"{sweep}\n\n{sweep.table() if alone else groups}"))
        return
    facts = read_run(run)
    sections = ("name", "status", "started", "config", "options", "data", "fingerprint", "git")
    for name in (*sections, "precision", "steps_per_call", "command", "resumed"):
        if facts.get(name) is not None:
            print(f"{name:<15} {_brief(facts[name])}")
    print(f"{'devices':<15} {_brief([d['kind'] for d in facts['devices']['devices']])}")
    print(f"{'versions':<15} {_brief(facts['devices']['versions'])}")
    print(f"{'final':<15} {_brief(_rounded(final_metrics(read_metrics(run))))}")
    if (run / "curves.png").exists():
        print(f"{'curves':<15} {_brief(run / 'curves.png')}")


def compare(
    a: tyro.conf.Positional[Path],
    b: tyro.conf.Positional[Path],
    /,
    *,
    metric: str | None = None,
    select: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
) -> None:
    """Whether B is better than A: runs or sweeps, paired by their seeds.

    Args:
        a: the directory of a run or a sweep.
        b: that of what is compared with it.
        metric: by which, such as test_accuracy; default: the one A monitored.
        select: FIELD=VALUE, only the members with that value of a swept field; may be given several times.
    """
    sides = [open_sweep(path) if is_sweep(path) else path for path in (a, b)]
    for choice in select:
        sides = _selected(sides, *_field_and_value(choice))
    print(printable(compare_sides(sides[0], sides[1], metric)))


def _field_and_value(choice: str) -> tuple[str, Any]:
    name, equals, text = choice.partition("=")
    if not equals:
        raise ConfigError(f"--select is {choice!r}, and must be FIELD=VALUE, as in learning_rate=0.001.")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text


def _selected(sides: Sequence[Sweep | Path], name: str, value: Any) -> list[Sweep | Path]:
    """The sides with one value of a swept field; one that does not sweep it stays as it is.

    Raises:
        ConfigError: neither sweeps it, or one that does has no such value.
    """
    swept = [{axis.name for axis in side.axes} if isinstance(side, Sweep) else set() for side in sides]
    if name not in (known := swept[0] | swept[1]):
        raise ConfigError(f"neither side sweeps a field {name!r} to select by: {suggest(name, known)}.")
    return [
        side.select(**{name: value}) if isinstance(side, Sweep) and name in names else side
        for side, names in zip(sides, swept, strict=True)
    ]


def _row(path: Path) -> tuple[str, ...]:
    try:
        facts, lines = read_run(path), read_metrics(path)
    except JaxnnError as error:
        return (str(path), "unreadable", "", "", str(error))
    step = lines[-1]["step"] if lines else 0
    throughput = (facts.get("summary") or {}).get("throughput") or {}
    rate = throughput.get("steps_per_second")
    of = f"{step}/{facts['config'].get('num_steps', '?')}"
    return (
        str(path),
        _brief(facts["status"]),
        of,
        f"{rate:,.0f}" if rate else "",
        _brief(_rounded(final_metrics(lines))),
    )


def _sweep_row(path: Path) -> tuple[str, ...]:
    try:
        sweep = open_sweep(path)
    except JaxnnError as error:
        return (str(path), "unreadable", "", "", str(error))
    rate = sweep.summary.get("member_steps_per_second")
    step = max((member.step for member in sweep.members), default=0)
    try:
        best = sweep.best()
        told_best = f"{best_label(best)} {_brief(_rounded(best.metrics()))}"
    except ConfigError:
        told_best = ""
    counts = count_by_status(sweep.members)
    told = f"{sweep.status}, sweep of {len(sweep.members)}: {counts}"
    return (str(path), told, str(step), f"{rate:,.0f}" if rate else "", told_best)


def _rounded(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in metrics.items()}


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(k, lines=False)} {_brief(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return " ".join(map(_brief, value))
    return printable(value, lines=False)


def _print_json(content: Any) -> None:
    print(json_format.dumps(content, indent=2))
