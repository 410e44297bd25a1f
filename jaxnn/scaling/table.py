"""A study of scaling as text: where, what was measured, what the model says, and what not to believe."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from jaxnn.observe import format_bytes
from jaxnn.scaling.cases import Kind
from jaxnn.scaling.collectives import Collective
from jaxnn.scaling.measurements import Measurements
from jaxnn.scaling.points import Point, Prediction

HEADER = (
    ("devices", "each", "ms a step", "least–most", "examples/s", "speed-up", "efficiency", "in collectives"),
    ("ms a step", "error", "speed-up", "in collectives"),
)


def tell_study(study: Measurements) -> str:
    """All of it, in lines."""
    config = study.sizes
    strong = f"strong scaling: a batch of {config.batch_size:,} shared by all devices"
    weak = f"weak scaling: {config.batch_per_device:,} examples on each device"
    return "\n".join(
        [
            f"{study.name}, strategy {study.strategy}: {study.machine}",
            *_cautions(study),
            "",
            strong,
            *_table(study, "strong"),
            "",
            weak,
            *_table(study, "weak"),
            "",
            *_model(study),
        ]
    )


def _cautions(study: Measurements) -> list[str]:
    machine, told = study.machine, []
    if (cores := machine.shared_cores) is not None:
        told += [
            f"These devices are simulated: all share {cores} CPU core{'s' if cores > 1 else ''}, and more of them than "
            "that cannot be faster.",
            f"One by itself keeps {study.busy_cores('strong'):.1f} cores busy with {study.sizes.batch_size:,} examples"
            f", {study.busy_cores('weak'):.1f} with {study.sizes.batch_per_device:,}.",
            "All figures and predictions are of this machine, not of a cluster: for one, predict(n, link=Link(…)).",
        ]
    if machine.is_busy:
        told += [
            f"The machine was busy, with a load of {machine.load:.1f} on {machine.cores} cores before the study: "
            "do not trust these figures."
        ]
    return told


def _table(study: Measurements, kind: Kind) -> list[str]:
    rows = [_measured(point) + _predicted(point.predicted, point.error) for point in study.points(kind)]
    none = ["–"] * (len(HEADER[0]) - 2)
    rows += [[str(one.num_devices), f"{one.rows:,}", *none] + _predicted(one) for one in study.predictions(kind)]
    left = len(HEADER[0])
    lines = _columns([[*HEADER[0], *HEADER[1]], *rows])
    # Where the columns of the predictions start.
    start = len("  ".join(lines[0][:left]))
    over = f"{'':<{start}}  predicted"
    return [over, *("  ".join(line).rstrip() for line in lines)]


def _measured(point: Point) -> list[str]:
    return [
        str(point.num_devices),
        f"{point.rows:,}",
        _milliseconds(point.seconds),
        f"{_milliseconds(point.least)}–{_milliseconds(point.most)}",
        f"{point.examples_per_second:,.0f}",
        f"{point.speedup:.2f}",
        f"{point.efficiency:.0%}",
        "–" if point.share is None else f"{point.share:.0%}",
    ]


def _predicted(one: Prediction | None, error: float | None = None) -> list[str]:
    if one is None:
        return ["–"] * len(HEADER[1])
    told = "–" if error is None else f"{error:+.0%}"
    return [_milliseconds(one.seconds), told, f"{one.speedup:.2f}", f"{one.share:.0%}"]


def _columns(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The cells of a table, set right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)] for row in rows]


def _model(study: Measurements) -> list[str]:
    """What the predictions rest on."""
    if study.link is None:
        return ["one device: there is nothing to tell of collectives."]
    most = max(study.sizes.devices)
    found = study.collectives[study.sizes.case("strong", most)]
    errors = [abs(error) for error in study.link_errors()]
    return [
        f"collectives of a step on {most} devices: {_listed(found)}; parameters: {format_bytes(study.parameter_bytes)}",
        f"link: {study.link}, fitted to {len(errors)} all-reduces; off by {median(errors):.0%} (median), "
        f"{max(errors):.0%} at most",
        "predicted: the step of one device with as many examples, and then its collectives over a ring, unhidden",
    ]


def _listed(collectives: Sequence[Collective]) -> str:
    told = (
        f"{one.runs:.3g} {one.kind}{'s' if one.runs != 1 else ''} of {format_bytes(one.num_bytes)} in all"
        for one in collectives
    )
    return ", ".join(told) or "none"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
