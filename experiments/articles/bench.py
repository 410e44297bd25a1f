"""Measures the articles' claims on the devices here: studies of this folder, or a file of yours that defines a STUDY.

Command   python experiments/articles/bench.py                                   lists the studies
          python experiments/articles/bench.py matmul transfer --devices cpu,gpu --quick
          python experiments/articles/bench.py all --out DIR
          python experiments/articles/bench.py path/to/study.py
          python experiments/articles/bench.py merge laptop/ server/ --out both/
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from jaxnn._text import any_text, say_error
from jaxnn.cli import exit_on_user_error
from jaxnn.observe import text_table
from jaxnn.types import ConfigError, printable

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import harness  # noqa: E402

OUT = Path("runs/bench")


def run(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    devices: str | None = None,
    quick: bool = False,
    out: Path = OUT,
) -> None:
    """Measures studies on the devices here, or lists them if none is named.

    Args:
        names: studies, or ``all``, or paths of files that define a STUDY; or ``merge`` and the folders of several
            machines' results.
        devices: kinds to measure, such as ``cpu,gpu``; default: all available.
        quick: small sizes and few rounds, minutes for all studies.
        out: the folder that gets results.json, results.md and pictures; other figures there are kept.
    """
    known = harness.find_studies()
    if not names:
        rows = [(study.name, ", ".join(study.claims), study.title) for study in known.values()]
        print(text_table(rows, ("study", "claims", "question")))
        return
    if names[0] == "merge":
        if out == OUT:
            raise ConfigError("merge needs another folder for the page: give --out DIR.")
        results = harness.merge(names[1:], out)
    else:
        studies = list(known.values()) if names == ("all",) else [harness.load_study(name, known) for name in names]
        kinds = None if devices is None else [kind.strip() for kind in devices.split(",") if kind.strip()]
        try:
            say = functools.partial(print, file=sys.stderr, flush=True)
            results = harness.bench(*studies, devices=kinds, quick=quick, out=out, say=say)
        except KeyboardInterrupt:
            say_error(f"interrupted; the figures of the studies before are in {out}")
            raise SystemExit(130) from None
        known |= {study.name: study for study in studies}
    for name in filter(known.__contains__, results):
        table = text_table(*harness.findings_table(known[name], results))
        print(printable("\n".join([name, table, *results[name].conclusions(known[name])])))
    print(printable(f"page: {out / 'results.md'}", lines=False))


@any_text()
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the script with ``argv``, by default that of the process."""
    with exit_on_user_error(owns_process=argv is None):
        tyro.cli(run, args=argv)


if __name__ == "__main__":
    main()
