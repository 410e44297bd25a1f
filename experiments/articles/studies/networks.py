"""A5: the four networks that Shi et al. benchmarked in 2017, on each device with each of their batch sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from articles.studies.study_rows import fastest, measured, rate_finding
from articles.studies.study_training import draw_rates, step_time, training_group
from harness import Bench, Case, Finding, Rows, Study

# As published, except for ResNet-56; smallest first.
BATCH_SIZES: Mapping[str, tuple[int, ...]] = {
    "fcn5": (342, 512, 1024, 2048, 4096),
    "alexnet_r": (128, 256, 512, 1024, 2048),
    "resnet56": (16, 32, 64, 128),
    "ptb_lstm": (32, 64, 128, 256, 512, 1024),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The first ``batch_sizes`` of each network, with ``steps`` per call; None: as many as a run would choose."""

    batch_sizes: int = 6
    steps: int | None = None
    rounds: int = 3
    seconds: float = 1.0


QUICK = Settings(1, 1, 2, 0.1)


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    for name, sizes in BATCH_SIZES.items():
        for size in sizes[: settings.batch_sizes]:
            yield training_group(bench, name, size)


def _findings(rows: Rows) -> list[Finding]:
    found = []
    for name in BATCH_SIZES:
        of_network = measured(rows.where(network=name))
        if (best := fastest(of_network)) is None:
            continue
        first = of_network[0]
        found.append(Finding("A5", f"{name}, step time at batch size {first.what['batch_size']}", step_time(first)))
        if len(of_network) > 1:
            note = f"batch {best.what['batch_size']}"
            found.append(rate_finding("A5", f"{name}, best throughput", of_network, "batch_size", note=note))
    return found


STUDY = Study(
    name="networks",
    claims=("A5",),
    title="How fast do the four networks of Shi et al. (2017) train?",
    method=(
        "FCN-5 on MNIST, AlexNet-R and ResNet-56 on CIFAR-10, a two-layer LSTM on the Penn Treebank, at their batch "
        "sizes. A training step with its update, on data that are on the device, several steps per call; compilation, "
        "reading data and evaluation are not timed. Float32, as JAX computes it by default, which some GPUs round to "
        "tf32."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=draw_rates,
)
