"""Readers of records: one run, its metrics, or all runs and sweeps below a folder; every field is checked."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn.record._run_directory import METRICS_FILE, RUN_FILE, SWEEP_FILE, check_name, is_locked
from jaxnn.types import RecordError

SHARDS = f"shards/*/{SWEEP_FILE}"  # in the directory of a sweep without a `sweep.json` of its own
# The keys of a line that are no metrics; those have the name of their split, or of a probe, in front.
NO_METRICS = ("step", "member", "seconds", "steps_per_second", "examples_per_second", "elapsed")


class Span(NamedTuple):
    """A number of a record: how errors call it, and its range."""

    what: str
    least: float
    most: float
    whole: bool = True
    names: tuple[str, ...] = ()  # words that are allowed too

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is such a number."""
        if isinstance(value, str):
            return value in self.names
        return type(value) in ((int,) if self.whole else (int, float)) and self.least <= value <= self.most


NAMES = ("nan", "inf", "-inf")
MOST = sys.float_info.max
MOST_DIGITS = sys.float_info.max_10_exp  # a whole number with as many digits is within the range of floats
COUNT, POSITIVE = Span("a whole number from 0", 0, 2**31 - 1), Span("a whole number from 1", 1, 2**31 - 1)
AMOUNT = Span("a number from 0", 0, MOST, whole=False)
METRIC = Span("a number", -MOST, MOST, whole=False, names=NAMES)

# What a file holds, as data. A mapping has the fields that are named, and others that are not looked at; `name?` may be
# absent or null, and `*` are all fields. A list of one kind has any number of it, a tuple one item of each kind, and a
# set has the allowed words.
DIRECTIONS = {"*": {"min", "max"}}
DEVICES = {"backend": str, "devices": [{"platform": str, "kind": str}], "versions": dict}
OPTIONS = {"device?": str, "strategy?": str, "mesh?": str, "stop?": str, "writers?": [str], "probes?": [str]}
OPTIONS |= {"monitor?": str, "order?": str, "shard?": str, "checkpoint_every?": COUNT}
OPTIONS["devices?"] = Span("a whole number from 1, or all", 1, 2**31 - 1, names=("all",))
FINGERPRINT = {"data?": str, "program?": str, "batches?": str, "evaluation?": str}
STALLS = [{"where": str, "step": COUNT, "seconds": AMOUNT}]
# Of a run, or of a group of a sweep once it is opened.
OPENED = {"examples?": dict, "implementations?": {"*": [str]}, "precision?": dict}
RUN = {
    **{"name": str, "status": str, "started": str, "config": dict, "options": OPTIONS, "steps_per_call": POSITIVE},
    **{"seconds_per_step_measured": dict, "fingerprint": FINGERPRINT, "devices": DEVICES, "jax_flags": dict},
    **{"layout": {"strategy": str, "mesh?": {"*": POSITIVE}}, "monitored?": str, "higher_is_better?": bool},
    **{"directions?": DIRECTIONS, "data?": str, "command?": [str], "git?": dict, "checkpoints?": [COUNT], **OPENED},
    "resumed?": [{"step": COUNT}],
    "summary?": {
        **{"throughput?": {"steps_per_second": AMOUNT, "spread": AMOUNT, "num_windows": COUNT}, "stalls?": STALLS},
        **{"seconds?": {"*": AMOUNT}, "first_step_seconds?": {"*": AMOUNT}, "examples_per_second?": AMOUNT},
        **{"compilations?": {"*": AMOUNT}, "peak_bytes?": (AMOUNT, str), "compiler?": [str]},
    },
}
GROUP = {
    **{"members": [COUNT], "static?": dict, "traced?": [str], "steps_per_call?": POSITIVE, "fingerprint?": FINGERPRINT},
    "vmap?": {
        **{"size": POSITIVE, "steps_per_call": POSITIVE, "block": POSITIVE, "note?": str},
        "trials": [{"size": POSITIVE, "seconds": AMOUNT, "per_second": AMOUNT, "temporary_bytes": AMOUNT}],
    },
    **OPENED,
}
SWEEP = {
    **{"status": str, "started": str, "config": dict, "points": [dict], "options": OPTIONS, "groups": [GROUP]},
    **{"axes": [{"name": str, "values": list, "scale": {"log", "linear", "nominal"}}], "monitor": str},
    **{"higher_is_better": bool, "directions": DIRECTIONS, "name?": str, "data?": str, "damaged?": [str]},
    **{"devices?": DEVICES, "jax_flags?": dict, "command?": [str], "git?": dict},
    "halving?": {"eta": POSITIVE, "min_fraction": AMOUNT},
    "summary?": {
        **{"seconds": AMOUNT, "spent": {"*": AMOUNT}, "member_steps": AMOUNT, "num_compilations": COUNT},
        **{"member_steps_per_second?": AMOUNT, "members?": {"*": COUNT}},
    },
}
MEMBER = {
    **{"member": COUNT, "point": dict, "config": dict, "status": str, "step": COUNT, "final": {"*": METRIC}},
    **{"best": {"*": METRIC}, "error?": str, "dir?": str},
}
LINE = {"step": COUNT, "member?": COUNT, "*": METRIC}
SHOWN: Mapping[Any, str] = {str: "text", bool: "true or false", dict: "a mapping", list: "a list"}


def check(value: Any, kind: Any, name: str = "") -> None:
    """Raises ValueError unless ``value``, the field ``name`` of a file, is of ``kind``: a type, `Span` or table."""
    base: Any = next((one for one in (list, dict, tuple) if type(kind) is one), kind)
    if base is tuple:
        right, shown = isinstance(value, list) and len(value) == len(kind), f"a list of {len(kind)}"
    elif isinstance(base, Span):
        right, shown = base.holds(value), base.what
    elif isinstance(base, set):
        right, shown = isinstance(value, str) and value in base, " or ".join(sorted(base))
    else:
        right, shown = type(value) is base, SHOWN[base]
    if not right:
        raise ValueError(f"{f'its {name}' if name else 'it'} is {value!r:.60} and must be {shown}")
    if base in (list, tuple) and kind is not base:
        for number, item in enumerate(value):
            check(item, kind[0 if base is list else number], f"{name}[{number}]")
    for key, part in kind.items() if isinstance(kind, dict) else ():
        field = key.removesuffix("?")
        if key == "*":
            for field in value if not (isinstance(part, Span) and all(map(part.holds, value.values()))) else ():
                check(value[field], part, f"{name}.{field}".lstrip("."))
        elif field in value and not (value[field] is None and key != field):
            check(value[field], part, f"{name}.{field}".lstrip("."))
        elif key == field:
            raise ValueError(f"it lacks {f'{name}.{field}'.lstrip('.')!r}")


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def read_run(path: Path) -> dict[str, Any]:
    """Reads ``run.json`` in ``path``, checked by `RUN`; RecordError if there is no record, or it is damaged."""
    check_name(path)
    file = path / RUN_FILE
    if not file.is_file():
        raise RecordError(f"{path} holds no run (no {RUN_FILE} in it): `jaxnn runs` lists the directories of runs.")
    return _read_facts(file, RUN)


def read_sweep(path: Path) -> dict[str, Any]:
    """Reads ``sweep.json`` in ``path``, checked by `SWEEP`; RecordError if it is damaged."""
    return _read_facts(path / SWEEP_FILE, SWEEP)


def _read_facts(file: Path, kind: Mapping[str, Any]) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(file.read_bytes(), parse_int=_whole)
        check(facts, kind)
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{file} cannot be read ({error}): the record is damaged.") from error
    # The process was killed.
    if facts["status"] == "running" and not is_locked(file.parent):
        facts["status"] = "interrupted"
    return facts


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads ``metrics.jsonl`` in ``path``; a torn last line, left by a crash, is dropped; RecordError for others."""
    return [numbers(line) for line in read_lines(path / METRICS_FILE, LINE)]


def read_bytes(file: Path) -> bytes:
    """Reads a file of the record, empty if absent; RecordError if the system refuses."""
    try:
        return file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise RecordError(f"{file} cannot be read ({error.strerror or error}): the record is damaged.") from error


def read_lines(file: Path, kind: Any) -> list[dict[str, Any]]:
    """Reads a file of JSON mappings of a ``kind``, one per line, empty if absent; a torn last line is dropped."""
    content, lines = read_bytes(file), []
    for number, text in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            lines.append(json.loads(text, parse_int=_whole))
            check(lines[-1], kind)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{file} is damaged in line {number} ({error}): delete that line.") from error
    return lines


def find_records(folder: Path) -> list[Path]:
    """The directories at or below ``folder`` that hold a sweep, or a run outside of sweeps; oldest first."""
    found = []
    for path, folders, _ in folder.walk():
        if is_sweep(path):
            found.append(path)
            folders.clear()
        elif (path / RUN_FILE).is_file():
            found.append(path)
    return sorted(found, key=_age)


def is_sweep(path: Path) -> bool:
    """Whether the directory ``path`` holds a sweep, or shards of one."""
    try:
        return (path / SWEEP_FILE).is_file() or any(path.glob(SHARDS))
    except OSError:  # such as a name that is too long
        return False


def sweep_folders(path: Path) -> list[Path]:
    """``path`` if it is the record of a sweep in one process, else its shards that started; RecordError for neither."""
    if (path / RUN_FILE).is_file():
        raise RecordError(f"{path} holds a run, not a sweep: resume it with jn.fit, or name the directory of a sweep.")
    if not is_sweep(path):
        raise RecordError(
            f"{path} holds no sweep (no {SWEEP_FILE} in it): give the directory of one sweep; `jaxnn runs` lists them."
        )
    return [path] if (path / SWEEP_FILE).is_file() else shard_folders(path)


def shard_folders(path: Path) -> list[Path]:
    """The directories of the shards of the sweep in ``path`` that were started, by name."""
    return [file.parent for file in sorted(path.glob(SHARDS))]


def _age(path: Path) -> tuple[str, str]:
    """The start time of a record, empty if it cannot be read, and its name."""
    for file in (path / RUN_FILE, path / SWEEP_FILE, *sorted(path.glob(SHARDS))):
        try:
            return str(_read_facts(file, {"status": str, "started": str})["started"]), path.name
        except RecordError:
            continue
    return "", path.name


def numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the names of NaN and infinities to floats."""
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in line.items()}


def final_metrics(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of each metric in the lines of ``metrics.jsonl``, oldest first."""
    return {name: value for line in lines for name, value in metrics_of(line).items()}


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a line of ``metrics.jsonl``."""
    return {name: value for name, value in line.items() if name not in NO_METRICS}


def without_member(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a sweep's ``metrics.jsonl`` without the column of the member."""
    return {name: value for name, value in line.items() if name != "member"}
