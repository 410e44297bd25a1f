"""How much faster is data-parallel training on several devices?

``STUDY = make_study(experiment)`` in a file, then ``bench.py FILE``. Each step is timed together with the same step
without collectives, and with all-reduces alone. A step on more devices than are available is predicted as the step of
one device with the same number of examples plus its collectives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from articles.studies.study_collectives import Collective, Link, Reduction, fit_link
from articles.studies.study_pictures import draw_lines, panels
from articles.studies.study_rows import OVERHEAD, measured, relative
from articles.studies.study_steps import REDUCTIONS, Step, make_reduction, make_step
from harness import Bench, Case, Finding, NotMeasured, Plain, Quantity, Row, Rows, Study

import jaxnn as jn
from jaxnn.engine import load_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARTICLE = "3 GPUs 804 % faster than 5 CPU nodes (inference)"


@dataclasses.dataclass(frozen=True)
class Settings:
    """``batch_size`` examples sharded over all devices (strong scaling), ``batch_per_device`` on each (weak scaling).

    One call trains for ``steps``; ``predict`` are larger numbers of devices; all-reduces have ``messages`` sizes.
    """

    batch_size: int = 384
    batch_per_device: int = 128
    predict: tuple[int, ...] = (16, 64, 256, 1024)
    messages: int = 4
    steps: int = 4
    rounds: int = 5
    seconds: float = 0.5


def counts_of(most: int) -> list[int]:
    """Returns 1, 2, 4, … up to and including ``most``."""
    return sorted({*(2**power for power in range(int(math.log2(most)) + 1)), most})


def make_study(
    experiment: jn.Experiment[Any] | Callable[[Settings], jn.Experiment[Any]],
    *,
    name: str = "scaling",
    full: Settings = Settings(),  # noqa: B008
    quick: Settings | None = None,
    claims: tuple[str, ...] = (),
) -> Study:
    """Returns a study of data-parallel training on increasing numbers of devices.

    Args:
        experiment: what to train, or a function from the settings to it.
        name: of the study.
        full: sizes; by default a batch of 384.
        quick: smaller sizes.
        claims: the published claims it tests.
    """

    return Study(
        name=name,
        claims=claims,
        title="How much faster is data-parallel training on several devices?",
        method=(
            "Data-parallel training on 1, 2, 4 … devices of a kind: with one batch for all (strong scaling), or a "
            "batch per device (weak scaling). Data are on the devices; compilation is not timed, averaging gradients "
            "over the devices is. Efficiency is the rate relative to one device in the same round, over the number of "
            "devices; the share in collectives is the part of a step that is missing when every device trains alone."
        ),
        full=full,
        quick=quick or dataclasses.replace(full, rounds=3, seconds=0.1),
        cases=functools.partial(_cases, experiment),
        findings=functools.partial(_findings, article=ARTICLE if claims else ""),
        draw=_draw,
        conclude=_conclude,
    )


def _cases(
    experiment: jn.Experiment[Any] | Callable[[Settings], jn.Experiment[Any]], bench: Bench
) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    made = experiment(settings) if callable(experiment) else experiment
    splits = functools.cache(lambda: load_data(made))
    for kind in bench.devices:
        devices = jax.local_devices(backend=kind)
        counts = counts_of(len(devices))

        def case(batch: str, count: int, rows: int, alone: bool = False, *, kind: Any = kind) -> Case:
            found = functools.cache(
                lambda: make_step(made, splits(), jax.local_devices(backend=kind)[:count], rows, settings.steps, alone)
            )
            what: dict[str, Plain] = {"batch": batch, "devices": count, "rows": rows, "alone": alone}
            work = count * rows * settings.steps
            return Case(kind, what, lambda: found().call, work, "examples", lambda: _observe(found(), kind))

        batch, each = settings.batch_size, settings.batch_per_device
        yield [
            case("shared", count, batch // count, alone)
            for count in counts
            for alone in ((False, True) if count > 1 else (False,))
            if batch % count == 0
        ]
        yield [case("each", count, each) for count in counts]
        if len(devices) == 1:
            yield [case("shared", 2, batch // 2)._replace(begin=functools.partial(_refuse, kind))]
            continue
        rows = {batch // count for count in (*counts, *settings.predict) if batch % count == 0}
        yield [case("one", 1, each) for each in sorted(rows)]
        sizes = np.geomspace(2**12, 2**22, settings.messages).astype(int) // 4 * 4
        yield [
            Case(
                kind,
                {"message": int(size), "devices": count},
                functools.partial(make_reduction, devices[:count], int(size)),
                REDUCTIONS * int(size),
                "B",
            )
            for count in counts[1:]
            for size in sizes
        ]


def _refuse(kind: str) -> Any:
    message = f"JAX has one {kind.upper()} device"
    if kind == "cpu":
        message += "; set JAX_NUM_CPU_DEVICES=4 to simulate four that share its cores"
    raise NotMeasured(message)


def _observe(step: Step, kind: str) -> dict[str, Plain]:
    simulated = kind == "cpu" and len(jax.local_devices(backend=kind)) > 1
    shared = {"shared_cores": jn.observe.cpu_count() or 1, "busy_cores": step.cores} if simulated else {}
    found = {f"{one.kind} {name}": getattr(one, name) for one in step.collectives for name in ("runs", "num_bytes")}
    return {"loss": float(step.losses.mean()), "trained": step.digest, **shared, **found}


def efficiency(rows: Rows, row: Row) -> Quantity | None:
    """Returns the rate relative to one device in the same round, over the number of devices; None for one device."""
    count = float(row.what["devices"] or 1)
    alone = rows.one(batch=row.what["batch"], devices=1)
    found = None if count == 1 else relative(row, alone)
    return None if found is None else found.scaled(1 / count, "")


def in_collectives(rows: Rows, row: Row) -> float | None:
    """Returns the share of a step that is missing when each device trains alone: median over rounds."""
    alone = rows.one(batch=row.what["batch"], devices=row.what["devices"], alone=True).seconds
    shares = [1 - mine / step for step, mine in zip(row.seconds, alone, strict=True)] if alone and row.seconds else []
    return median(shares) if shares else None


def link_of(rows: Rows) -> tuple[Link, list[float]] | None:
    """Returns α and β fitted to the all-reduces, and the relative error of each; None if there are none."""
    cores = next((row.observed["shared_cores"] for row in rows if "shared_cores" in row.observed), None)
    reductions = [
        Reduction(count, int(row.what["message"] or 0), row.time.median / REDUCTIONS, _turns(count, cores))
        for row in rows
        if "message" in row.what and row.time is not None
        for count in (int(row.what["devices"] or 1),)
    ]
    link = fit_link(reductions)
    return None if link is None else (link, [one.predicted(link) / one.seconds - 1 for one in reductions])


def _turns(devices: int, cores: Plain) -> float:
    return 1.0 if cores is None else max(1.0, devices / float(cores))


def predict(rows: Rows, devices: int, link: Link | None = None) -> float | None:
    """Predicts the seconds per call with strong scaling: one device with its share of the batch, plus collectives.

    Devices that share cores do their work one after another.

    Args:
        rows: the measurements.
        devices: number of devices.
        link: between devices with their own cores; None: the measured link.
    """
    known = {int(row.what["rows"] or 0): row for row in measured(rows.where(batch="one"))}
    shared = [row for row in measured(rows.where(batch="shared", alone=False)) if row.what["devices"] != 1]
    fitted = link_of(rows)
    if not known or not shared or fitted is None:
        return None
    batch = max(known)
    one = known.get(batch // devices) if batch % devices == 0 else None
    if one is None or one.time is None:
        return None
    most = shared[-1].observed
    cores = None if link is not None else one.observed.get("shared_cores")
    collectives = [
        Collective(kind, float(most[f"{kind} runs"] or 0), float(most[f"{kind} num_bytes"] or 0))
        for kind in sorted({name.partition(" ")[0] for name in most if name.endswith(" runs")})
    ]
    steps = shared[-1].work / batch
    compute = one.time.median
    if cores is not None:
        compute = max(compute, devices * compute * float(one.observed["busy_cores"] or 1) / float(cores))
    return compute + steps * (link or fitted[0]).seconds(collectives, devices, _turns(devices, cores))


def _findings(rows: Rows, article: str) -> list[Finding]:
    found = []
    for row in scaled_rows(rows):
        what, notes = describe(rows, row)
        published = article if row.what["devices"] == 3 else ""
        found.append(Finding("A13", what, row.rate, published, notes))
    return found


def describe(rows: Rows, row: Row) -> tuple[str, str]:
    """Returns what was timed, and notes on its efficiency, its collectives and the error of the prediction."""
    count = int(row.what["devices"] or 1)
    what = f"{count} device{'s' if count > 1 else ''}, " + (
        "strong scaling" if row.what["batch"] == "shared" else "weak scaling"
    )
    notes = []
    if (share := efficiency(rows, row)) is not None:
        notes.append(f"efficiency {share.median:.0%}")
    if (lost := in_collectives(rows, row)) is not None:
        notes.append(f"{lost:.0%} in collectives")
    if row.what["batch"] == "shared" and count > 1 and row.time and (expected := predict(rows, count)) is not None:
        notes.append(f"predicted time {expected / row.time.median - 1:+.0%}")
    if (cores := row.observed.get("shared_cores")) is not None:
        notes.append(f"simulated on {cores} cores")
    return what, ", ".join(notes)


def scaled_rows(rows: Rows) -> Iterator[Row]:
    """Yields the rows of strong and weak scaling, without those of devices that train alone."""
    return (row for row in rows if row.what.get("batch") in ("shared", "each") and not row.what.get("alone"))


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    return [f"{label}: {sentence}" for label, rows in columns.items() for sentence in _of_a_column(rows)]


def _of_a_column(rows: Rows) -> Iterator[str]:
    shared = [row for row in measured(rows.where(batch="shared", alone=False)) if "loss" in row.observed]
    if len(shared) < 2:
        return
    first, last = shared[0], shared[-1]
    off = max(abs(float(row.observed["loss"] or 0) / float(first.observed["loss"] or 1) - 1) for row in shared)
    yield f"the loss of the first steps on several devices differs from one device by at most {off:.1e} (relative)."
    kinds = [name.partition(" ")[0] for name in last.observed if name.endswith(" runs")]
    listed = ", ".join(
        f"{float(last.observed[f'{kind} runs'] or 0):.3g} {kind} of "
        f"{float(last.observed[f'{kind} num_bytes'] or 0) / 2**20:.3g} MiB in total"
        for kind in kinds
    )
    yield f"a step on {last.what['devices']} devices has {listed or 'no collectives'}."
    if (fitted := link_of(rows)) is not None:
        link, errors = fitted
        yield f"link: {link}, fitted to {len(errors)} all-reduces, median error {median(map(abs, errors)):.0%}."
        ahead = sorted(int(first.what["rows"] or 0) // int(row.what["rows"] or 1) for row in rows.where(batch="one"))
        speed = {count: predict(rows, count) for count in ahead if count > int(last.what["devices"] or 1)}
        alone = first.time.median if first.time is not None else math.nan
        speedups = ", ".join(f"{count}: {alone / seconds:.2f}" for count, seconds in speed.items() if seconds)
        if rows.mostly_overhead(first, "rows"):
            yield f"{OVERHEAD}: steps on one device; nothing is concluded from it."
        elif speedups:
            yield f"predicted speed-up with strong scaling, by number of devices: {speedups}."
    if "shared_cores" in last.observed:
        yield (
            f"these devices are simulated on {last.observed['shared_cores']} shared cores, of which one device keeps "
            f"{float(first.observed['busy_cores'] or 0):.1f} busy: they test correctness, not speed."
        )


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    steps = {label: Rows(row for row in rows if row.what.get("alone") is False) for label, rows in columns.items()}
    steps = {label: Rows(row for row in rows if row.what["batch"] != "one") for label, rows in steps.items()}
    rate, share = panels(figure, ("training", "efficiency"))
    draw_lines(rate, steps, across="devices", lines="batch")
    found = {id(row): efficiency(rows, row) for rows in steps.values() for row in rows}
    draw_lines(share, steps, across="devices", lines="batch", quantity=lambda row: found[id(row)])
    rate.set_ylabel("examples/s")
    share.set_ylabel("speed-up / number of devices")
    share.set_yscale("linear")
    share.set_ylim(0, 1.2)
    share.axhline(1.0, color="black", lw=0.8, ls=":")
    for axes in (rate, share):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("devices")
