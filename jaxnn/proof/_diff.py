"""What differs between two recorded runs, from which step their numbers part, and the likeliest cause."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn import engine, record
from jaxnn._disk import read_file
from jaxnn._fingerprints import CUT, PARTS, SOURCE, STATE_PARTS, Difference, differing_parts
from jaxnn._json import jsonable, metrics_of
from jaxnn._text import short_path, text_table
from jaxnn.proof._parting import Parting, find_parting
from jaxnn.proof._replay import located
from jaxnn.run import Run
from jaxnn.types import ConfigError, Experiment, JaxnnError, printable

type Source = Run | str | Path
_MOST_CAUSES = 3  # that the first line names
_MOST_SHOWN = 70  # characters of an equation


class MetricDifference(NamedTuple):
    """A metric that differs at a step that both runs reported."""

    name: str
    first: int  # the first such step
    largest: float  # the largest absolute difference
    at: int  # the step of it
    final: tuple[float, float]  # the last values that both have, of A and B


@dataclasses.dataclass(frozen=True, repr=False)
class Diff:
    """Differences of a recorded run B from a run A, as `diff` returns them; printed, its first line says it all.

    Attributes:
        names: what A and B are.
        differences: what differs of the experiment and how it ran, the likeliest cause of other numbers first.
        equal_until: the last step that both reported with equal digests of their states; 0: there is none.
        parted: the first step that both reported with other digests; None: there is none.
        parts: the parts of the state that differ there, such as ``params``.
        metrics: the metrics that differ.
        not_recorded: what a comparison needed, and a record lacks.
        parting: the first step that differs, found by a replay; None: none was asked for, or possible.
    """

    names: tuple[str, str]
    differences: tuple[Difference, ...]
    equal_until: int
    parted: int | None
    parts: tuple[str, ...]
    metrics: tuple[MetricDifference, ...]
    not_recorded: tuple[str, ...]
    has_digests: bool  # whether both have them, at a step that both reported
    steps: tuple[int, int]  # the last reports of A and B
    parting: Parting | None = None
    why_no_parting: str = ""  # why a replay that was asked for did not find the step

    @property
    def causes(self) -> tuple[Difference, ...]:
        """The differences that can explain other numbers, the likeliest first; empty: none is recorded."""
        if self.parted is None and self.has_digests:  # then only evaluations differ
            return tuple(one for one in self.differences if not one.decides) if self.metrics else ()
        return tuple(one for one in self.differences if one.decides)

    @property
    def headline(self) -> str:
        """Returns until which step the runs are equal, what differs then, and the cause."""
        until = f"{self.equal_until:,}"
        if not self.has_digests and not self.metrics:
            if max(self.steps) == 0 or not any("digests" in one for one in self.not_recorded):
                return "A and B have no report of the same step, so that their numbers cannot be compared."
            return f"The metrics are equal up to step {min(self.steps):,}; digests of the states are not recorded."
        if self.parted is None and not self.metrics:
            if not self.differences:
                return f"Nothing differs up to step {until} (digests)."
            kinds = _listed([*dict.fromkeys(one.part for one in self.differences)])
            last = "the last step that both reported"
            return f"No number differs up to step {until}, {last} (digests), although there are differences of {kinds}."
        if (parting := self.parting) is not None:
            return f"{parting.headline()}; {self._explained()}"
        if self.parted is None:
            first = min(self.metrics, key=lambda one: one.first)
            names = _listed([one.name for one in self.metrics if one.first == first.first])
            states = f"The states are equal up to step {until} (digests)" if self.has_digests else "No digests"
            what = f"{states}; {names} differ from step {first.first:,}"
        else:
            where = _listed([STATE_PARTS[part] for part in self.parts])
            what = f"Equal until step {until} (digests); by step {self.parted:,} {where} differ"
            if self.equal_until == 0:
                what = f"Different at the first report, step {self.parted:,}: {where} differ"
        return f"{what}; {self._explained()}"

    def _explained(self) -> str:
        if not (causes := self.causes):
            return (
                "nothing that is recorded explains it: check with jn.verify(experiment) whether the experiment is "
                "deterministic."
            )
        texts = [f"{one.text} ({one.part})" for one in causes[:_MOST_CAUSES]]
        more = f"; and {len(causes) - _MOST_CAUSES} more" if len(causes) > _MOST_CAUSES else ""
        also = f"; also {'; '.join(texts[1:])}{more}" if texts[1:] else ""
        # Such as of a function that a program calls back.
        hidden = " (program and data are equal: jn.verify(experiment) tells whether the experiment is deterministic)"
        return f"cause: {texts[0]}{also}{hidden if all(one.part == 'code' for one in causes) else ''}."

    def as_json(self) -> dict[str, Any]:
        """Returns all of it in JSON's types."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        content["differences"] = [one._asdict() for one in self.differences]
        content["metrics"] = [one._asdict() for one in self.metrics]
        content["parting"] = self.parting and dataclasses.asdict(self.parting)
        found: dict[str, Any] = jsonable({"headline": self.headline, **content})
        return found

    def __repr__(self) -> str:
        rows = [("A", self.names[0]), ("B", self.names[1])]
        rows += [(one.part, str(one)) for one in self.differences]
        if self.has_digests:
            reports = f"equal up to step {self.equal_until:,}" if self.equal_until else "never equal"
            parted = f", other {_listed(self.parts)} by step {self.parted:,}" if self.parted is not None else ""
            rows.append(("digests", reports + parted))
        rows += [("replay", line) for line in (self.parting.lines() if self.parting else [])]
        rows += [("replay", self.why_no_parting)] if self.why_no_parting else []
        rows += [("not recorded", one) for one in self.not_recorded]
        shown = [self.headline, "", text_table(rows)]
        if self.metrics:
            table = [
                (one.name, f"{one.first:,}", f"{one.largest:.4g} at {one.at:,}", *(f"{x:.6g}" for x in one.final))
                for one in self.metrics
            ]
            shown += ["", text_table(table, ("metric", "differs from step", "by at most", "final A", "final B"))]
        return printable("\n".join(shown))


class _Side(NamedTuple):
    name: str
    path: Path
    recorded: record.Recorded

    def text(self, file: Path) -> str:
        """The content of a text file of the record, empty if there is none."""
        try:
            return read_file(file).decode(errors="replace")
        except OSError:
            return ""


def diff(
    a: Source,
    b: Source,
    experiment: Experiment[Any] | tuple[Experiment[Any], Experiment[Any]] | None = None,
    *,
    member: int | tuple[int | None, int | None] | None = None,
) -> Diff:
    """Returns what differs between two recorded runs or members of sweeps, from which step, and the likeliest cause.

    Config, data, program, code, options, versions and devices are compared, then the digests of the states and the
    metrics at the steps that both reported. With ``experiment``, the window in which the digests part is trained again
    on both sides, which finds the exact step, and whether its batch or its update differs.

    >>> a, b = (jn.fit(experiment.replace(seed=seed), run_dir=f"runs/{seed}", progress="none") for seed in (1, 2))
    >>> print(jn.diff(a, b).headline)
    Different at the first report, step ...: the parameters differ; cause: seed 1 → 2 (config)...

    Args:
        a: the directory of a record, or a run.
        b: another one.
        experiment: the code of both, or a pair if it is not the same; each is set to the config of its record.
        member: of sweeps in ``a`` and ``b``, the number of a member; one number for each that is a sweep.

    Raises:
        RecordError: there is no such run or member, or its record is damaged.
        ConfigError: a run without a record.
    """
    for name, given in (("experiment", experiment), ("member", member)):
        if isinstance(given, tuple | list) and len(given) != 2:
            raise ConfigError(f"{name} has {len(given)} items, and must have one for each of the two records.")
    pair = tuple(member) if isinstance(member, tuple | list) else (member, member)
    left, right = (_open(one, number, member) for one, number in zip((a, b), pair, strict=True))
    equal_until, parted, parts, compared = _compare_digests(left, right)
    found = _with_resumes(engine.PopulationRecord.differences(left.recorded, right.recorded), left, right, parted)
    found = [_with_details(one, left, right) for one in found]
    parting, why = None, ""
    if experiment is not None and parted is not None:
        codes = experiment if isinstance(experiment, tuple | list) else (experiment, experiment)
        runs = [(side.path, _number(side), one) for side, one in zip((left, right), codes, strict=True)]
        try:
            parting = find_parting(runs[0], runs[1], equal_until + 1, parted)
        except JaxnnError as error:
            why = f"the step is not found: {error}"
    lines = [side.recorded.lines for side in (left, right)]
    return Diff(
        names=(left.name, right.name),
        differences=tuple(found),
        equal_until=equal_until,
        parted=parted,
        parts=parts,
        metrics=tuple(_metric_differences(*lines)),
        not_recorded=tuple(_lacking(left, right, found)),
        has_digests=compared,
        steps=(_last(lines[0]), _last(lines[1])),
        parting=parting,
        why_no_parting=why,
    )


def _open(source: Source, member: int | None, given: Any) -> _Side:
    """Opens a run or a member; a number that was ``given`` alone is not for a run."""
    path, member = located(source, None if isinstance(source, Run) else member)
    reader = record.RecordReader(path)
    recorded = reader.member(
        member if isinstance(given, tuple | list) or isinstance(source, Run) or reader.is_sweep else None
    )
    name = short_path(path.absolute()) + (f", member {recorded.about['member']}" if recorded.row is not None else "")
    return _Side(name, path, recorded)


def _number(side: _Side) -> int | None:
    return None if side.recorded.row is None else int(side.recorded.about["member"])


def _last(lines: Sequence[Mapping[str, Any]]) -> int:
    return int(lines[-1]["step"]) if lines else 0


def _compare_digests(left: _Side, right: _Side) -> tuple[int, int | None, tuple[str, ...], bool]:
    """The last common step with equal digests, the first with others, what differs there, and whether any is common."""
    digests: list[dict[int, str]] = []
    for side in (left, right):
        known = {line["step"]: line["digest"] for line in side.recorded.lines if line.get("digest")}
        digests.append({step: text for step, text in known.items() if text.count("-") == len(STATE_PARTS) - 1})
    equal, common = 0, sorted(digests[0].keys() & digests[1].keys())
    for step in common:
        if digests[0][step] != digests[1][step]:
            return equal, step, tuple(differing_parts(digests[0][step], digests[1][step])), True
        equal = step
    return equal, None, (), bool(common)


def _metric_differences(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> Iterator[MetricDifference]:
    of_b = {line["step"]: line for line in b}
    pairs = [(line["step"], metrics_of(line), metrics_of(of_b[line["step"]])) for line in a if line["step"] in of_b]
    for name in dict.fromkeys(name for _, one, other in pairs for name in one if name in other):
        values = [(step, one[name], other[name]) for step, one, other in pairs if name in one and name in other]
        found = [(step, x, y) for step, x, y in values if x != y and not (math.isnan(x) and math.isnan(y))]
        if found:
            sizes = [(math.inf if math.isnan(x - y) else abs(x - y), step) for step, x, y in found]
            largest, at = max(sizes, key=lambda one: one[0])
            yield MetricDifference(name, found[0][0], largest, at, values[-1][1:])


def _with_resumes(found: Sequence[Difference], left: _Side, right: _Side, parted: int | None) -> Sequence[Difference]:
    """The differences with what changed when a run was resumed, which can explain what parts later."""
    resumes = []
    for letter, side in zip("AB", (left, right), strict=True):
        for resumed in side.recorded.facts.get("resumed") or ():
            if resumed["changed"]:
                text = f"{letter} was resumed after step {resumed['step']:,} with {'; '.join(resumed['changed'])}"
                # The record has the config of the last process: the steps before had another number of steps.
                always = parted is None or any(change.startswith("num_steps") for change in resumed["changed"])
                resumes.append(Difference("resume", text, decides=always or parted > resumed["step"]))
    late = [one for one in found if one.part in ("versions", "flags", "devices", "calls")]
    early = [one for one in found if one not in late]
    # What changed at a resume is not named twice.
    return [*early, *resumes, *(one for one in late if not any(one.text in resume.text for resume in resumes))]


def _with_details(one: Difference, left: _Side, right: _Side) -> Difference:
    """A difference with what the files beside ``record.json`` say of it."""
    if one.part == "program" and one.text in PARTS.values():
        programs = [side.text(side.recorded.listing) for side in (left, right)]
        if all(programs):
            return one._replace(detail=_first_equation(one.text, *programs))
    if one.part == "code" and not one.text.startswith("commit "):
        patches = [_by_file(side.text(side.recorded.code)) for side in (left, right)]
        names = [name for name in patches[0] | patches[1] if patches[0].get(name) != patches[1].get(name)]
        return one._replace(detail=", ".join(names) or "beyond what the records keep")
    return one


def _first_equation(part: str, before: str, now: str) -> str:
    """The first line of a part of two listings that differs, with its line in the source."""
    sections = [_section(text, part) for text in (before, now)]
    for number in range(max(map(len, sections))):
        lines = [section[number] if number < len(section) else "nothing" for section in sections]
        (old, _), (new, place) = ((text.strip(), place) for text, _, place in (one.partition(SOURCE) for one in lines))
        if CUT in (old, new):
            return "after what the records list"
        if old != new:
            where = place or lines[0].partition(SOURCE)[2]
            return f"{_around(old, new)} → {_around(new, old)}" + (f", at {where}" if where else "")
    return "in what a listing does not show"


def _section(text: str, part: str) -> list[str]:
    """The lines under a part's name; to the end if that is where it was cut."""
    lines = text.splitlines()
    first = lines.index(f"# {part}") + 1 if f"# {part}" in lines else len(lines)
    ends = (n for n in range(first, len(lines)) if lines[n].startswith("# ") and lines[n] != CUT)
    return lines[first : next(ends, len(lines))]


def _around(text: str, other: str) -> str:
    """An equation, shortened around the first character that differs from another."""
    if len(text) <= _MOST_SHOWN:
        return text
    same = next((n for n, (x, y) in enumerate(zip(text, other, strict=False)) if x != y), len(other))
    first = max(0, min(same - _MOST_SHOWN // 2, len(text) - _MOST_SHOWN))
    last = first + _MOST_SHOWN
    return f"{'…' * (first > 0)}{text[first:last]}{'…' * (last < len(text))}"


def _by_file(patch: str) -> dict[str, str]:
    """The changes of each file in a patch."""
    files: dict[str, str] = {}
    name, before = "", ""
    for line in patch.splitlines():
        if line.startswith("+++ ") and before.startswith("--- "):
            name = (line if line != "+++ /dev/null" else before)[4:].removeprefix("a/").removeprefix("b/")
        elif name and not line.startswith(("diff ", "index ", "--- ")):
            files[name] = files.get(name, "") + line + "\n"
        before = line
    return files


def _lacking(left: _Side, right: _Side, found: Sequence[Difference]) -> Iterator[str]:
    """What the comparison needed, and a record lacks."""
    kinds = {one.part for one in found}
    for letter, side in zip("AB", (left, right), strict=True):
        recorded = side.recorded
        group, lines = recorded.group, recorded.lines
        lacks = {
            "digests of the states": bool(lines) and not any(line.get("digest") for line in lines),
            "what is not committed": "code" not in recorded.facts,
            "the program of the initial values": "start" not in group["fingerprint"],
            "the digests of rows": "data" in kinds and not group.get("arrays"),
            "the equations": "program" in kinds and not recorded.listing.is_file(),
        }
        if names := [name for name, is_lacking in lacks.items() if is_lacking]:
            yield f"{_listed(names)}, by {letter}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
