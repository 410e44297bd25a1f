"""The ledger of decisions in a folder: what was decided, on what it was based, and what a session may still decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxnn._checked_json import AMOUNT, COUNT, FINITE, SEED, Span, parse
from jaxnn._disk import refusals
from jaxnn._json import json_line
from jaxnn._statistics import online_level
from jaxnn.types import RecordError

type Verdict = Literal["keep", "discard", "no difference", "undecided"]
KEEP: Verdict = "keep"
DISCARD: Verdict = "discard"
NO_DIFFERENCE: Verdict = "no difference"
UNDECIDED: Verdict = "undecided"
EXIT_CODES: dict[Verdict, int] = {KEEP: 0, DISCARD: 1, NO_DIFFERENCE: 2, UNDECIDED: 3}
FILE = "decisions.jsonl"
_SHARE = Span("a share above 0", 1e-300, 1, whole=False)
ENTRY = {
    **{"key": str, "time": str, "verdict": {*EXIT_CODES}, "why": str},
    **{"names": (str, str), "pairing": str, "measured": str, "better": {"min", "max"}, "lost": (COUNT, COUNT)},
    **{"metric?": str, "alpha": _SHARE, "level": _SHARE, "min_effect?": AMOUNT, "test": {"t", "ranks"}},
    **{"session?": str, "direction": {"auto", "min", "max"}, "pairs": [(SEED, FINITE, FINITE)]},
}


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Decisions in the order in which they were made, one a line of ``decisions.jsonl``."""

    file: Path
    entries: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        """Reads the ledger of ``folder``; a last line that a kill cut short does not count."""
        file, entries = folder / FILE, list[Mapping[str, Any]]()
        if file.is_file():
            with refusals(f"{file} cannot be read"):
                *lines, _ = file.read_bytes().split(b"\n")
            for number, line in enumerate(lines, 1):
                try:
                    entries.append(parse(line, ENTRY))
                except ValueError as error:
                    raise RecordError(f"line {number} of {file} is damaged ({error}): delete that line.") from None
        return cls(file, tuple(entries))

    def find(self, key: str) -> Mapping[str, Any] | None:
        """The last decision with this key."""
        return next((entry for entry in reversed(self.entries) if entry["key"] == key), None)

    def session(self, name: str | None) -> list[Mapping[str, Any]]:
        """Returns the decisions of session ``name``, or without a session for None, as `last` does."""
        return [entry for entry in self.last() if entry["session"] == name]

    def last(self) -> list[Mapping[str, Any]]:
        """Returns the last entry of each key, in the order in which the keys appeared."""
        return list({entry["key"]: entry for entry in self.entries}.values())

    def level(self, name: str | None, key: str, alpha: float) -> float:
        """The level of the decision ``key``: in a session by its place there, and by the discoveries before it."""
        if name is None:
            return alpha
        before = [entry for entry in self.session(name) if entry["key"] != key]
        if (known := self.find(key)) is not None and known["session"] == name:
            return float(known["level"])
        return online_level(alpha, len(before) + 1, sum(entry["verdict"] == KEEP for entry in before))

    def add(self, entry: Mapping[str, Any]) -> None:
        """Appends a decision; what a kill left of a line before it is removed."""
        with refusals(f"{self.file} cannot be written"):
            if self.file.is_file() and (content := self.file.read_bytes()) and not content.endswith(b"\n"):
                self.file.write_bytes(content[: content.rfind(b"\n") + 1])
            with self.file.open("a") as file:
                file.write(json_line(entry))
