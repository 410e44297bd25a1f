"""A15: text classification with and without a GPU, by a bag of words and by a bidirectional LSTM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from articles.studies.study_devices import overheads, speedups
from articles.studies.study_rows import distinct
from articles.studies.study_training import draw_rates, reached, run_finding, training_cases
from harness import Finding, Rows, Study

ARTICLE = "198.2 s without, 14.4 s with a GPU, 13.76×"


@dataclasses.dataclass(frozen=True)
class Settings:
    """``steps`` per call, None: as many as a run would choose; ``whole_runs`` also trains every network to its end."""

    networks: tuple[str, ...] = ("news_bag", "news_lstm")
    steps: int | None = None
    whole_runs: bool = True
    rounds: int = 5
    seconds: float = 0.5


QUICK = Settings(steps=2, whole_runs=False, rounds=2, seconds=0.1)


def _findings(rows: Rows) -> list[Finding]:
    found = []
    for name in map(str, distinct(rows, "network")):
        found += [
            run_finding(rows, name, "A15", ARTICLE),
            Finding("A15", f"{name}, test accuracy", reached(rows, name, "test_accuracy")),
        ]
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    hidden = [sentence for name in Settings().networks for sentence in overheads(columns, network=name)]
    return hidden + [
        f"{name}: {gpu} is {ratio} as fast as {cpu}; in the article, with another network, 13.76×."
        for name in Settings().networks
        for cpu, gpu, ratio in speedups(columns, network=name)
    ]


STUDY = Study(
    name="text",
    claims=("A15",),
    title="How long do text classifiers take with and without a GPU?",
    method=(
        "7,600 news in four classes, the first 64 words of each, batches of 32: the mean of embeddings of 64, and a "
        "bidirectional LSTM of 64. The time is that of all training steps of a run, extrapolated from some; "
        "compilation, reading data and evaluation are not counted, except in full runs. The article has another "
        "network and text: only the ratio is comparable. Float32, as JAX computes it by default, which some GPUs "
        "round to tf32."
    ),
    full=Settings(),
    quick=QUICK,
    cases=training_cases,
    findings=_findings,
    draw=draw_rates,
    conclude=_conclude,
)
