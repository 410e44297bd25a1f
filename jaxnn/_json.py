"""Configs, the lines that runs report and other values in JSON's types, and back."""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxnn.types import ConfigError

NAMES = ("nan", "inf", "-inf")  # of floats that JSON lacks
# The keys of a line that are no metrics; those have the name of their split, or of a probe, in front.
NO_METRICS = ("step", "member", "seconds", "steps_per_second", "examples_per_second", "elapsed", "digest")


def json_line(content: Mapping[str, Any]) -> str:
    """Formats one line of ``metrics.jsonl``."""
    return json.dumps(jsonable(content), allow_nan=False) + "\n"


def jsonable(value: Any) -> Any:
    """Converts ``value`` to JSON's types; NaN and infinities, which JSON lacks, become their names."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | str | None):
        return value
    if not isinstance(value, float):  # numbers are most of what there is
        if isinstance(value, Mapping):
            return {str(key): jsonable(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [jsonable(item) for item in value]
        if isinstance(value, Path):
            return str(value)
        if dataclasses.is_dataclass(value):  # a swept field's
            return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    number = float(value)
    return number if math.isfinite(number) else str(number)


def numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the names of NaN and infinities to floats."""
    return {key: float(value) if value in NAMES else value for key, value in line.items()}


def leaf_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name of each field of a config and its nested dataclasses, with the dataclass that has it."""
    for field in (field for field in dataclasses.fields(config) if field.init):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from leaf_fields(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, config


def config_json(config: Any) -> dict[str, Any]:
    """Converts the fields of a config dataclass to JSON's types; ConfigError names one that is not plain data."""
    return {field.name: _plain(getattr(config, field.name), field.name) for field in dataclasses.fields(config)}


def _plain(value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return config_json(value)
    if isinstance(value, tuple | list):
        return [_plain(item, name) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bool | int | float | str | None):
        return value
    raise ConfigError(
        f"config field {name!r} holds {value!r}, which a record cannot store: use numbers, strings, booleans, "
        "None, tuples of these, or another dataclass, and build the object in task(config)."
    )


def config_from_json(content: dict[str, Any], default: Any) -> Any:
    """The inverse of :func:`config_json`, with the types of ``default``; ConfigError if a field does not fit it."""
    known = {field.name: field.init for field in dataclasses.fields(default)}
    if unknown := sorted(content.keys() - known.keys()):
        raise ConfigError(f"the record's config has {unknown[0]!r}, which this experiment lacks.")
    fields = {name: _shaped(content[name], getattr(default, name), name) for name in content if known[name]}
    return dataclasses.replace(default, **fields)


def _shaped(value: Any, default: Any, name: str) -> Any:
    if isinstance(value, dict):
        if not dataclasses.is_dataclass(default):
            raise ConfigError(
                f"the record's config has a dataclass in {name!r}, this experiment {default!r}: use a dataclass of the "
                "same class there."
            )
        return config_from_json(value, default)
    if isinstance(value, list):
        return tuple(_shaped(item, (), name) if isinstance(item, list) else item for item in value)
    # JSON has no NaN and no infinities: the record holds their names.
    return float(value) if value in ("nan", "inf", "-inf") and not isinstance(default, str) else value


def with_tuples(tree: Any) -> Any:
    """``tree`` of JSON, which has no tuples, with tuples for its lists: data sets and configs have no lists."""
    if isinstance(tree, Mapping):
        return {name: with_tuples(part) for name, part in tree.items()}
    return tuple(map(with_tuples, tree)) if isinstance(tree, list) else tree


def check_same_config(recorded: dict[str, Any], config: Any, kind: str, path: Path, but: str | None = None) -> None:
    """Raises ConfigError unless ``config`` is that of the run or sweep in ``path``, except for the field ``but``."""
    now = config_json(config)
    for name, value in config_json(config_from_json(recorded, config)).items():
        # In JSON's types NaN is equal to itself.
        if jsonable(now[name]) != jsonable(value) and name != but:
            raise ConfigError(
                f"the {kind} in {path} has {name} = {value!r}, this experiment {now[name]!r}: resume it with "
                f"experiment.replace({name}={value!r}), or start a new {kind}."
            )


def final_metrics(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of each metric in the lines of ``metrics.jsonl``, oldest first."""
    return {name: value for line in lines for name, value in metrics_of(line).items()}


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a line of ``metrics.jsonl``."""
    return {name: value for name, value in line.items() if name not in NO_METRICS}


def elapsed_of(lines: Iterable[Mapping[str, Any]]) -> float:
    """The seconds from the start to the last of the ``lines`` of ``metrics.jsonl``; 0 if none has them."""
    known = (line.get("elapsed") for line in lines)
    return max((value for value in known if isinstance(value, int | float)), default=0.0)


def reports_by_member(lines: Iterable[Mapping[str, Any]]) -> defaultdict[int, list[dict[str, Any]]]:
    """The ``lines`` of ``metrics.jsonl`` by their column ``member``, and without it; none for other members."""
    reports = defaultdict[int, list[dict[str, Any]]](list)
    for line in lines:
        reports[line["member"]].append({name: line[name] for name in line if name != "member"})
    return reports
