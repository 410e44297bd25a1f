"""Reading records: one run, its metrics, or all runs and sweeps below a folder; every fact is checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from jaxnn.record._run_directory import METRICS_FILE, RUN_FILE, SWEEP_FILE, check_name, is_locked
from jaxnn.types import RecordError

# Shards with this file make a directory that of a sweep, as the file itself does.
SHARDS = f"shards/*/{SWEEP_FILE}"
# Metrics are the keys of a line that begin with the split they were measured on.
METRIC_PREFIXES = ("train_", "validation_", "test_")
# What every run.json holds from the start, and readers rely on.
FACTS = (
    *("name", "status", "started", "config", "options", "steps_per_call", "seconds_per_step_measured"),
    *("fingerprint", "layout", "devices", "jax_flags"),
)


# --- what a record holds ---


class Fact(NamedTuple):
    """What a key holds.

    Attributes:
        types: the JSON types that it may have.
        least: the least that a number may be.
        most: the most that a number may be.
        needed: whether it must be there if what contains it is; ``needed`` of a file's reader lists the file's own.
    """

    types: tuple[type, ...]
    least: float | None = None
    most: float = 2**31 - 1
    needed: bool = True


MISSING = object()
TEXT, MAPPING, LIST = Fact((str,)), Fact((dict,)), Fact((list,))
MAYBE_TEXT, MAYBE_MAPPING = Fact((str, NoneType), needed=False), Fact((dict, NoneType))
OPTION_TEXT, OPTION_MAPPING = Fact((str,), needed=False), Fact((dict,), needed=False)
STEP, COUNT = Fact((int,), least=0), Fact((int,), least=1)
DEVICES = Fact((int, str, NoneType), least=1, needed=False)
NUMBER = Fact((int, float, NoneType), least=0, most=float("inf"), needed=False)
# NaN and infinities have names.
METRIC = Fact((int, float))


def _schema(*groups: tuple[Fact, str]) -> dict[str, Fact]:
    """The facts by key, what contains others first; in keys ``[]`` is each value of a list or a mapping."""
    facts = {key: fact for fact, keys in groups for key in keys.split()}
    return dict(sorted(facts.items(), key=lambda item: item[0].count(".")))


RUN = _schema(
    (TEXT, "name status started options.monitor options.monitor_mode fingerprint.program fingerprint.data"),
    (TEXT, "layout.strategy devices.devices.[].kind"),
    (OPTION_TEXT, "devices.backend devices.devices.[].platform"),
    (MAYBE_TEXT, "options.mesh options.device"),
    (MAPPING, "config options seconds_per_step_measured fingerprint layout devices devices.devices.[]"),
    (MAPPING, "devices.versions jax_flags resumed.[]"),
    (MAYBE_MAPPING, "layout.mesh summary"),
    (Fact((dict, NoneType), needed=False), "summary.throughput"),
    (LIST, "devices.devices resumed checkpoints"),
    (STEP, "resumed.[].step checkpoints.[]"),
    (COUNT, "steps_per_call"),
    (DEVICES, "options.devices"),
    (NUMBER, "summary.throughput.steps_per_second"),
)
SWEEP = _schema(
    (TEXT, "name status started axes.[].name axes.[].scale groups.[].fingerprint.data groups.[].log.sha256 monitor"),
    (OPTION_TEXT, "options.monitor"),
    (MAYBE_TEXT, "options.shard options.mesh"),
    (MAPPING, "config options axes.[] points.[] groups.[] groups.[].width.trials.[]"),
    (OPTION_MAPPING, "groups.[].fingerprint groups.[].log summary.spent"),
    (MAYBE_MAPPING, "halving summary"),
    (Fact((dict, NoneType), needed=False), "groups.[].width"),
    (LIST, "axes axes.[].values points groups groups.[].members groups.[].width.trials damaged"),
    (Fact((list, NoneType)), "numbers"),
    (STEP, "numbers.[] groups.[].members.[] groups.[].log.lines"),
    (COUNT, "groups.[].width.width"),
    (DEVICES, "options.devices"),
    (Fact((int,), least=2), "halving.eta"),
    (Fact((int, float), least=0, most=1), "halving.min_fraction"),
    (Fact((bool,)), "higher_is_better"),
    (NUMBER, "summary.member_steps_per_second summary.member_steps summary.seconds summary.num_compilations"),
    (NUMBER, "summary.spent.train"),
)
MEMBER = _schema(
    (STEP, "member step"),
    (TEXT, "status"),
    (MAPPING, "point config final best"),
    (METRIC, "final.[] best.[]"),
    (MAYBE_TEXT, "error dir"),
)
WORDS = {str: "text", dict: "a mapping", list: "a list", int: "a whole number", float: "a number", NoneType: "null"}


def check_facts(facts: Any, schema: Mapping[str, Fact], needed: tuple[str, ...]) -> dict[str, Any]:
    """The same facts, once all that is needed is there and what is there is of its type.

    Args:
        facts: what was read of JSON.
        schema: the types.
        needed: the keys of ``facts`` itself that must be there.

    Raises:
        ValueError: a fact is missing or wrong; it is named with what it is and must be.
    """
    if not isinstance(facts, dict):
        raise ValueError(f"it is {_brief(facts)} and must be a mapping")
    for key, fact in schema.items():
        head, *rest = key.split(".")
        for where, value in _found(facts, [head, *rest], ""):
            if value is MISSING:
                if head in needed if not rest else fact.needed and head in facts:
                    raise ValueError(f"it lacks {where!r}")
            elif not _fits(value, fact):
                words = " or ".join(WORDS.get(kind, kind.__name__) for kind in fact.types)
                bounds = f", {fact.least} to {fact.most}" if fact.least is not None else ""
                raise ValueError(f"its {where} is {_brief(value)} and must be {words}{bounds}")
    return facts


def _found(value: Any, keys: list[str], where: str) -> Iterator[tuple[str, Any]]:
    """Each value at ``keys``, with its place; none below null, which holds nothing."""
    if not keys:
        yield where, value
        return
    head, *rest = keys
    if head == "[]":
        for index, item in value.items() if isinstance(value, dict) else enumerate(value or ()):
            yield from _found(item, rest, f"{where}[{index}]")
    elif value is not None:
        place = f"{where}.{head}" if where else head
        if head in value:
            yield from _found(value[head], rest, place)
        elif not rest:
            yield place, MISSING


def _fits(value: Any, fact: Fact) -> bool:
    if fact is METRIC and value in ("nan", "inf", "-inf"):
        return True
    if not isinstance(value, fact.types) or (isinstance(value, bool) and bool not in fact.types):
        return False
    counts = isinstance(value, int | float) and fact.least is not None
    return not counts or fact.least <= value <= fact.most  # type: ignore[operator]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


# --- reading ---


def read_run(path: Path) -> dict[str, Any]:
    """What ``run.json`` in ``path`` says.

    A run that says it is running while no process holds its directory was killed: its status reads ``interrupted``.

    Raises:
        RecordError: there is no record, or it is damaged.
    """
    check_name(path)
    file = path / RUN_FILE
    if not file.is_file():
        raise RecordError(
            f"{path} holds no run (no {RUN_FILE} in it): give the directory of one run; `jaxnn runs` lists them."
        )
    return read_facts(file, FACTS)


def read_facts(file: Path, needed: tuple[str, ...]) -> dict[str, Any]:
    """What ``run.json`` or ``sweep.json`` says; ``running`` reads ``interrupted`` where no process holds its directory.

    Raises:
        RecordError: it is damaged: not JSON, without one of ``needed``, or with a value that cannot be.
    """
    schema = RUN if file.name == RUN_FILE else SWEEP
    try:
        facts = check_facts(parse_json(file.read_bytes()), schema, needed)
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read ({error}): the record is damaged.") from error
    if facts["status"] == "running" and not is_locked(file.parent):
        facts["status"] = "interrupted"
    return facts


def parse_json(text: bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: it is not JSON, or holds NaN or infinities, which have names in records.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` in ``path``, oldest first; a torn last line, left by a crash, is dropped.

    Raises:
        RecordError: a line is no mapping of names to numbers with a step.
    """
    lines = [numbers(line) for line in read_lines(path / METRICS_FILE)]
    for line in lines:
        values = [line.get("step"), *metrics_of(line).values()]
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
            raise RecordError(
                f"{path / METRICS_FILE} holds {str(line)[:60]!r}, which is no step with its metrics: delete that line."
            )
    return lines


def read_bytes(file: Path) -> bytes:
    """What a file of the record holds; nothing if there is none.

    Raises:
        RecordError: the system refuses to read it.
    """
    try:
        return file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise RecordError(f"{file} cannot be read ({error.strerror or error}): the record is damaged.") from error


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The mappings in a file of JSON lines, oldest first; a torn last line is dropped, and no file holds none.

    Raises:
        RecordError: a line is no mapping.
    """
    lines = read_bytes(file).splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    try:
        return [_mapping(parse_json(line)) for line in lines]
    except ValueError as error:
        raise RecordError(f"{file} holds a line that is not JSON ({error}): delete that line.") from error


def find_runs(folder: Path) -> Iterator[Path]:
    """The directories at or below ``folder`` that hold a run, oldest first and those that are damaged before all.

    The members of a sweep are not among them: the sweep stands for them, see :func:`find_sweeps`.
    """
    return iter(sorted((path for path in _outside_sweeps(folder) if (path / RUN_FILE).is_file()), key=age))


def find_sweeps(folder: Path) -> Iterator[Path]:
    """The directories at or below ``folder`` that hold a sweep, in the same order."""
    return iter(sorted((path for path in _outside_sweeps(folder) if is_sweep(path)), key=age))


def is_sweep(path: Path) -> bool:
    """Whether the directory ``path`` holds a sweep, or shards of one."""
    try:
        return (path / SWEEP_FILE).is_file() or any(path.glob(SHARDS))
    except OSError:  # a name that is too long, say
        return False


def _outside_sweeps(folder: Path) -> Iterator[Path]:
    """The directories at or below ``folder``, those of sweeps among them but nothing that is in one."""
    for path, folders, _ in folder.walk():
        yield path
        if is_sweep(path):
            folders.clear()


def age(path: Path) -> tuple[str, str]:
    """What records are sorted by: when they began, or their name where that is the same or unknown."""
    for file in (path / RUN_FILE, path / SWEEP_FILE, *sorted(path.glob(SHARDS))):
        try:
            return str(read_facts(file, ("status", "started"))["started"]), path.name
        except RecordError:
            continue
    return "", path.name


def _mapping(line: Any) -> dict[str, Any]:
    if not isinstance(line, dict):
        raise ValueError(f"{line!r} is no mapping")
    return line


def numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes the names that stand for NaN and infinities."""
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in line.items()}


def final_metrics(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of each metric in the lines of ``metrics.jsonl``, oldest first."""
    final: dict[str, float] = {}
    for line in lines:
        final |= metrics_of(line)
    return final


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics among what a line of ``metrics.jsonl`` holds."""
    return {name: value for name, value in line.items() if name.startswith(METRIC_PREFIXES)}
