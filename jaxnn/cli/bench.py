"""``jaxnn bench``: lists the studies of a checkout, measures some, merges the results of several machines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import tyro

from jaxnn.bench import FILE, Results, Study, find_studies, findings_table, load_study, machines_of
from jaxnn.bench import bench as measure
from jaxnn.bench import merge as merge_pages
from jaxnn.cli.errors import INTERRUPTED
from jaxnn.cli.tables import print_table
from jaxnn.types import ConfigError

OUT = Path("runs/bench")


def bench(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    devices: str | None = None,
    quick: bool = False,
    out: Path = OUT,
    prices: str | None = None,
) -> None:
    """Measures studies on the devices at hand; without a name, lists the studies of this checkout.

    Args:
        names: studies, or ``all``, or paths of files that define a STUDY; or ``merge`` and the folders of several
            machines' results.
        devices: kinds to measure, such as ``cpu,gpu``; default: all available.
        quick: small sizes and few rounds, minutes for all studies.
        out: the folder that gets results.json, results.md and pictures; other figures there are kept.
        prices: dollars per hour by kind, such as ``cpu=0.12,gpu=2.5``; default: those of the study ``cost``.
    """
    known = find_studies()
    if not names:
        if not known:
            raise ConfigError("no studies here: run in a checkout of jaxnn, or give the path of a file with a STUDY.")
        rows = ((study.name, ", ".join(study.claims), study.title) for study in known.values())
        print_table(("study", "claims", "question"), rows)
        return
    if names[0] == "merge":
        if out == OUT:
            raise ConfigError("merge needs a folder of its own for the page: give --out DIR.")
        _show(merge_pages(names[1:], out), known, out)
        return
    studies = list(known.values()) if names == ("all",) else [load_study(name, known) for name in names]
    kinds = None if devices is None else [kind.strip() for kind in devices.split(",") if kind.strip()]
    given = _read_prices(prices or "")
    try:
        results = measure(*studies, devices=kinds, quick=quick, out=out, prices=given, say=_say)
    except KeyboardInterrupt:
        _say("interrupted" + (f"; what was measured is in {out / FILE}" if (out / FILE).exists() else ""))
        raise SystemExit(INTERRUPTED) from None
    _show(results, {study.name: study for study in studies}, out)


def _read_prices(text: str) -> dict[str, float]:
    """``cpu=0.12,gpu=2.5`` as a dict."""
    found = {}
    for part in filter(None, text.split(",")):
        kind, _, dollars = part.partition("=")
        try:
            found[kind.strip()] = float(dollars)
        except ValueError as error:
            raise ConfigError(f"prices has {part!r}: give dollars per hour by kind, as in cpu=0.12,gpu=2.5.") from error
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(results: Results, studies: Mapping[str, Study], out: Path) -> None:
    machines = machines_of(results)
    for name, measured in results.items():
        if name in studies:
            header, rows = findings_table(studies[name], measured.rows, machines)
            print_table(header, rows, title=name)
            for sentence in studies[name].conclude(measured.rows):
                print(sentence)
    print(f"page: {out / 'results.md'}")
