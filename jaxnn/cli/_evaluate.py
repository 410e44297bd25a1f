"""``python script.py evaluate RUN``: the metrics of a recorded run, or of each member of a sweep, over a split."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from jaxnn._json import jsonable
from jaxnn._text import Table
from jaxnn.record import RecordReader
from jaxnn.run import Run, open_run
from jaxnn.sweeps import Sweep, open_sweep, show_field
from jaxnn.types import Experiment


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """Evaluates a recorded run, or the complete members of a sweep, and prints a table; trains nothing."""

    run: tyro.conf.Positional[Path]
    """The directory of the run or the sweep."""
    split: str = "test"
    """train, validation or test."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON: a mapping of a run, a list of mappings of a sweep."""


def evaluate(experiment: Experiment[Any], arguments: Sequence[str]) -> Run | Sweep:
    """Prints what ``arguments`` ask for, and returns the run or the sweep."""
    options = tyro.cli(EvaluateOptions, args=list(arguments), prog=f"{Path(sys.argv[0]).name} evaluate")
    found: Run | Sweep
    if RecordReader(options.run).is_sweep:
        found = open_sweep(options.run, experiment)
        metrics: dict[str, Any] = dict(found.evaluate(options.split))
        rows: list[dict[str, Any]] = [{"member": member.index, **member.point} for member in found.members]
    else:
        found = open_run(options.run, experiment)
        metrics = {name: [value] for name, value in found.evaluate(options.split).items()}
        rows = [{"step": int(found.state.step)}]
    for name, values in metrics.items():
        for row, value in zip(rows, values, strict=True):
            row[f"{options.split}_{name}"] = float(value)
    if options.json:
        print(json.dumps(jsonable(rows if isinstance(found, Sweep) else rows[0])))
    else:
        print(Table([*rows[0]], [[show_field(value) for value in row.values()] for row in rows]))
    return found
