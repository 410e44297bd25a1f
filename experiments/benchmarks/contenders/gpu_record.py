"""What `gpu_day.py` runs on, and its record: a file for each part, one JSON file of all, and a page."""

import contextlib
import ctypes
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxnn.bench import Row
from jaxnn.observe import markdown_table
from jaxnn.parallel import find_devices
from jaxnn.record import write_bytes, write_json

FIELDS = "what", "observed"
# What must be equal for results to be of one part.
SAME = "label", "commit", "driver"


class Day(NamedTuple):
    """What the parts run on, and where they write."""

    out: Path
    small: bool
    kind: str

    @property
    def device(self) -> jax.Device:
        """The first device of the kind; ConfigError if there is none."""
        return find_devices(self.kind)[0]


def read(day: Day, name: str) -> dict[str, Any]:
    """Returns what a part has so far."""
    path = day.out / "parts" / f"{name}.json"
    empty: dict[str, Any] = {"rows": [], "running": None, "complete": False, "seconds": 0.0, "stopped": ""}
    empty |= {"run": [day.kind, day.small], "machine": {}, "hung": []}
    return empty | (json.loads(path.read_text()) if path.exists() else {})


def earlier(day: Day, name: str) -> list[Path]:
    """Returns the results of a part that were put aside, oldest first."""
    return sorted((day.out / "earlier").glob(f"{name}-*.json"))


def put_aside(day: Day, name: str) -> None:
    """Keeps what a part has so far in the folder ``earlier``, so that it starts anew."""
    path, kept = day.out / "parts" / f"{name}.json", day.out / "earlier" / f"{name}-{len(earlier(day, name)):03}.json"
    if path.exists() and read(day, name)["rows"]:
        kept.parent.mkdir(exist_ok=True)
        path.replace(kept)
    path.unlink(missing_ok=True)


def is_of(machine: dict[str, Any], part: dict[str, Any]) -> bool:
    """Whether a part has no results yet, or those of this ``machine`` and commit."""
    return not part["machine"] or all(part["machine"].get(key) == machine.get(key) for key in SAME)


def die_with_parent() -> None:
    """Has Linux end this process with the one that started it."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def write(day: Day, name: str, **changes: Any) -> None:
    write_json(day.out / "parts" / f"{name}.json", read(day, name) | changes)


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def report(day: Day, names: Sequence[str]) -> bool:
    """Replaces ``gpu_day.json`` and ``gpu_day.md``; returns whether all is complete and nothing failed."""
    parts = {name: read(day, name) for name in names}
    for name, part in parts.items():
        if not part["rows"] and (old := earlier(day, name)):  # until there are new ones
            parts[name] = json.loads(old[-1].read_text()) | {"stopped": f"{part['stopped']}; earlier results"}
    parts = {name: part for name, part in parts.items() if part["rows"] or part["stopped"] or part["machine"]}
    write_json(day.out / "gpu_day.json", parts)
    overview, tables, good = [], list[str](), True
    for name, part in parts.items():
        rows, machine = [Row(**row) for row in part["rows"]], part["machine"]
        failed = sum(row.observed.get("ok") is False for row in rows)
        counts = len(rows), failed, sum(bool(row.missing and row.observed.get("ok", True)) for row in rows)
        state = part["stopped"] or ("complete" if part["complete"] else "incomplete")
        where = [machine.get(key) or "" for key in ("label", "commit", "date", "driver")]
        overview.append((name, *map(str, counts), f"{part['seconds']:.0f}", state, *where))
        good = good and part["complete"] and not failed and not part["stopped"]
        what, observed = (list(dict.fromkeys(key for row in rows for key in getattr(row, of))) for of in FIELDS)
        table = []
        for row in rows:
            values = [*(row.what.get(key) for key in what), *(row.observed.get(key) for key in observed)]
            table.append((*map(shown, values), str(row.time or ""), row.missing))
        tables += [f"## {name}", markdown_table(table, (*what, *observed, "time", "not measured"))] if rows else []
    header = "part", "cases", "failed", "not measured", "seconds", "state", "device", "commit", "date", "driver"
    title = "# The first minutes on a GPU" + (": a trial with small sizes" if day.small else "")
    write_bytes(day.out / "gpu_day.md", "\n\n".join([title, markdown_table(overview, header), *tables, ""]).encode())
    return good
