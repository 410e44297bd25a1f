"""The lines that a run reports: its metrics at a step, beside its speed."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

# The keys of a line that are no metrics; those have the name of their split, or of a probe, in front.
NO_METRICS = ("step", "member", "seconds", "steps_per_second", "examples_per_second", "elapsed")


def final_metrics(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of each metric in the lines of ``metrics.jsonl``, oldest first."""
    return {name: value for line in lines for name, value in metrics_of(line).items()}


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a line of ``metrics.jsonl``."""
    return {name: value for name, value in line.items() if name not in NO_METRICS}


def reports_by_member(lines: Iterable[Mapping[str, Any]]) -> defaultdict[int, list[dict[str, Any]]]:
    """The ``lines`` of ``metrics.jsonl`` by their column ``member``, and without it; none for other members."""
    reports = defaultdict[int, list[dict[str, Any]]](list)
    for line in lines:
        reports[line["member"]].append({name: line[name] for name in line if name != "member"})
    return reports
