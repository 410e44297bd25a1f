"""The record of `gpu_day.py`: one JSON file, replaced after each row, and a page."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from harness import Row, markdown_table, ratios

from jaxnn._disk import write_bytes, write_json
from jaxnn.parallel import find_devices

# What must be equal for results to be of one part.
SAME = "label", "commit", "driver"


class Day(NamedTuple):
    """What the parts run on, and where they write."""

    out: Path
    small: bool
    kind: str

    @property
    def work(self) -> Path:
        """The folder of compiled programs, weights and logs."""
        return self.out / "needed"

    @property
    def device(self) -> jax.Device:
        """The first device of the kind; ConfigError if there is none."""
        return find_devices(self.kind)[0]


def read(folder: Path) -> dict[str, Any]:
    """Returns what the parts have so far, by name."""
    path = folder / "gpu_day.json"
    return json.loads(path.read_text()) if path.exists() else {}


def begin(record: dict[str, Any], name: str, day: Day, machine: Mapping[str, Any], *, again: bool) -> dict[str, Any]:
    """Returns a part's record. One of another machine or commit, or to measure ``again``, is kept in ``earlier``."""
    part = record.get(name)
    if part is None or again or any(part["machine"].get(key) != machine.get(key) for key in SAME):
        old = [] if part is None else [*part.pop("earlier", []), part]
        part = {"rows": [], "said": [], "complete": False, "seconds": 0.0, "stopped": "", "earlier": old}
    record[name] = part | {"run": [day.kind, day.small], "machine": dict(machine)}
    found: dict[str, Any] = record[name]
    return found


def keep(part: dict[str, Any], rows: Sequence[Row]) -> list[Row]:
    """Adds rows to a part, in place of those of the same cases, and returns those that it did not have."""
    new = [row for row in rows if row._asdict() not in part["rows"]]
    cases = [row.what for row in new]
    part["rows"] = [row for row in part["rows"] if row["what"] not in cases] + [row._asdict() for row in new]
    return new


def conclude(rows: Sequence[Row], expected: Sequence[Any], then: str) -> list[Row]:
    """Adds to the rows of a group how fast each is beside the first, and whether that was ``expected``, case by case.

    An expectation is a range of this ratio, or ``"equal bits"``.
    """
    found = []
    for row, wanted in zip(rows, expected, strict=True):
        first = rows[0]
        seen: dict[str, Any] = dict(row.observed)
        if row.time and "bound ms" in seen:
            seen["over bound"] = 1e3 * row.time.median / row.work / seen["bound ms"]
        if then and row is not first and row.time and first.time:
            per_unit = [[seconds / each.work for seconds in each.seconds] for each in (first, row)]
            seen["speed over first"] = ratio = ratios(*per_unit).median
            if isinstance(wanted, tuple):
                low, high = wanted
                answer = "less than" if ratio < low else "more than" if ratio > high else "as"
                seen |= {"expected": f"{low:g} to {high:g}", "answer": f"{answer} expected"}
        if row is not first and "bits" in seen and "bits" in first.observed and not isinstance(wanted, tuple):
            seen["answer"] = "equal bits" if seen["bits"] == first.observed["bits"] else "other bits"
            seen |= {"expected": wanted, "ok": seen["answer"] == wanted} if wanted else {}
        seen |= {"then": then} if {"speed over first", "answer"} & {*seen} else {}
        found.append(row._replace(observed=seen))
    return found


def figure(row: Row) -> str:
    """Returns the time of a call, or how much it did in a second; empty if the case was not timed."""
    if row.time is None:
        return ""
    return str(row.time.scaled(1 / row.work, "s") if row.unit == "call" else row.rate)


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def line(row: Row) -> str:
    """Returns a row as it is printed."""
    facts = [f"{key} {shown(value)}" for key, value in row.observed.items() if value not in (None, "")]
    return f"{', '.join(map(str, row.what.values()))}: {'; '.join(filter(None, [row.missing, figure(row), *facts]))}"


def report(day: Day, record: dict[str, Any]) -> bool:
    """Replaces ``gpu_day.json`` and ``gpu_day.md``; returns whether all is complete and nothing failed."""
    write_json(day.out / "gpu_day.json", record)
    overview, tables, good = [], list[str](), True
    for name, part in record.items():
        rows, machine = [Row(**row) for row in part["rows"]], part["machine"]
        failed = sum(row.observed.get("ok") is False for row in rows)
        counts = len(rows), failed, sum(bool(row.missing and row.observed.get("ok", True)) for row in rows)
        state = part["stopped"] or ("complete" if part["complete"] else "incomplete")
        where = [machine.get(key) or "" for key in ("label", "commit", "date", "driver")]
        overview.append((name, *map(str, counts), f"{part['seconds']:.0f}", state, *where))
        good = good and part["complete"] and not failed and not part["stopped"]
        what, seen = (list(dict.fromkeys(k for row in rows for k in getattr(row, of))) for of in ("what", "observed"))
        table = []
        for row in rows:
            values = [*(row.what.get(key) for key in what), *(row.observed.get(key) for key in seen)]
            table.append((*map(shown, values), figure(row), row.missing))
        tables += [f"## {name}", markdown_table(table, (*what, *seen, "time or rate", "not measured"))] if rows else []
    header = "part", "cases", "failed", "not measured", "seconds", "state", "device", "commit", "date", "driver"
    title = "# The first minutes on a GPU" + (": a trial with small sizes" if day.small else "")
    write_bytes(day.out / "gpu_day.md", "\n\n".join([title, markdown_table(overview, header), *tables, ""]).encode())
    return good


def write_measured(record: Mapping[str, Any], path: Path) -> int:
    """Adds measurements by which layers choose an implementation to those in ``path``; returns their number.

    A row of the file needs two or more implementations that were timed at one size on a GPU of NVIDIA's. It replaces
    one of the same operation, dtype, size and compute capability.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in record.values():
        machine = part["machine"]
        for row in (Row(**row) for row in part["rows"]):
            key = *(row.observed.get(name) for name in ("operation", "dtype", "size")), machine.get("capability")
            if row.time is not None and None not in key:
                facts = {"of": row.observed["of"], "capability": key[3], "device": machine["label"].partition(", ")[2]}
                facts |= {name: machine[name] for name in ("date", "commit")}
                new = dict(zip(("operation", "dtype", "size"), key, strict=False)) | {"microseconds": {}} | facts
                times = found.setdefault(key, new)["microseconds"]
                times[row.what["side"]] = round(1e6 * row.time.median / row.work)
    old = json.loads(path.read_text()) if path.exists() else []
    keys = {tuple(row[name] for name in ("operation", "dtype", "size", "capability")): row for row in old}
    new_rows = {key: row for key, row in found.items() if len(row["microseconds"]) > 1}
    rows = [row for _, row in sorted((keys | new_rows).items(), key=str)]
    if new_rows:
        write_json(path, rows)
    return len(new_rows)
