"""A7: a CNN with two million parameters on 2,000 images, the article's first comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from articles.studies.study_devices import overheads, speedups
from articles.studies.study_training import draw_rates, reached, run_finding, step_time, timed, training_cases
from harness import Finding, Rows, Study

NETWORK = "cats_and_dogs"
ARTICLE_RATIO = 28


@dataclasses.dataclass(frozen=True)
class Settings:
    """``steps`` per call, None: as many as a run would choose; ``whole_runs`` also trains every network to its end."""

    networks: tuple[str, ...] = (NETWORK,)
    steps: int | None = None
    whole_runs: bool = True
    rounds: int = 5
    seconds: float = 1.0


QUICK = Settings(steps=1, whole_runs=False, rounds=2, seconds=0.1)


def _findings(rows: Rows) -> list[Finding]:
    batch = timed(rows, NETWORK)
    return [
        Finding("A7", "a batch of 150", step_time(batch), "CPU > 2 s, GPU 61 ms"),
        run_finding(rows, NETWORK, "A7", "CPU 5 min 40 s, GPU 13.04 s"),
        Finding("A7", "validation accuracy", reached(rows, NETWORK, "validation_accuracy"), "0.714"),
    ]


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    return overheads(columns, network=NETWORK) + [
        f"{gpu} is {ratio} as fast as {cpu}; in the article an RTX 3070 was {ARTICLE_RATIO}× as fast as a Ryzen 5600X."
        for cpu, gpu, ratio in speedups(columns, network=NETWORK)
    ]


STUDY = Study(
    name="cats_vs_dogs",
    claims=("A7",),
    title="How long does a small CNN take to train on 2,000 images of cats and dogs?",
    method=(
        "A CNN with 1,994,305 parameters on images of 150×150 pixels that are decoded on the device, batches of 150, "
        "20 epochs. The time of a batch is that of a training step; the time of the epochs is that of their steps: "
        "compilation, decoding and evaluation are not counted, except in full runs. The accuracy is that of a full "
        "run. Float32, as JAX computes it by default, which some GPUs round to tf32."
    ),
    full=Settings(),
    quick=QUICK,
    cases=training_cases,
    findings=_findings,
    draw=draw_rates,
    conclude=_conclude,
)
