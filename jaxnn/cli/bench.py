"""``jaxnn bench``: lists the studies of the articles' claims, measures some, merges the results of machines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from jaxnn.bench import STUDIES
from jaxnn.bench.measuring import bench as run_bench
from jaxnn.bench.measuring import merge
from jaxnn.bench.page import columns_of, findings_table
from jaxnn.bench.results import FILE, Results
from jaxnn.cli.errors import INTERRUPTED
from jaxnn.cli.tables import print_table
from jaxnn.types import ConfigError

MERGE = "merge"
OUT = Path("runs/bench")


def bench(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    devices: str | None = None,
    quick: bool = False,
    out: Path = OUT,
    data_dir: Path | None = None,
    prices: str | None = None,
) -> None:
    """Measures what the articles claim of CPUs and GPUs, on the devices that are here; without a name: what there is.

    Args:
        names: studies, or ``all``; or ``merge`` and the folders of several machines' results.
        devices: kinds to measure, such as ``cpu,gpu``; default: all that there are.
        quick: small sizes and few rounds, minutes for all.
        out: the folder that gets results.json, results.md, results.html and pictures; what it has stays.
        data_dir: where the data sets lie; default: JAXNN_DATA, else the user's cache.
        prices: dollars an hour by kind, such as ``cpu=0.12,gpu=2.5``; default: those that the study cost tells.
    """
    if not names:
        rows = ((study.name, ", ".join(study.claims), study.title) for study in STUDIES)
        print_table(("study", "claims", "what it asks"), rows)
        return
    if names[0] == MERGE:
        _merge(names[1:], out)
        return
    kinds = None if devices is None else [kind.strip() for kind in devices.split(",") if kind.strip()]
    given = _read_prices(prices or "")
    try:
        results = run_bench(names, devices=kinds, quick=quick, out=out, data_dir=data_dir, prices=given, say=_say)
    except KeyboardInterrupt:
        kept = f"; what is kept is in {out / FILE}" if (out / FILE).exists() else ""
        _say(f"interrupted{kept}")
        raise SystemExit(INTERRUPTED) from None
    _show_results(results)
    print(f"page: {out / 'results.md'}")


def _read_prices(text: str) -> dict[str, float]:
    """``cpu=0.12,gpu=2.5`` as a table."""
    found = {}
    for part in filter(None, text.split(",")):
        kind, _, dollars = part.partition("=")
        try:
            found[kind.strip()] = float(dollars)
        except ValueError as error:
            raise ConfigError(f"prices has {part!r}: give dollars an hour by kind, as in cpu=0.12,gpu=2.5.") from error
    return found


def _merge(sources: Sequence[str], out: Path) -> None:
    if out == OUT:
        raise ConfigError("merge needs a folder of its own for the page: give --out DIR.")
    _show_results(merge(sources, out))
    print(f"page: {out / 'results.md'}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show_results(results: Results) -> None:
    columns = columns_of(results)
    for study in STUDIES:
        if study.name in results:
            rows = results[study.name].rows
            print_table(*findings_table(study, rows, columns), title=study.name)
            for sentence in study.conclude(rows):
                print(sentence)
