"""A12: Max Woolf's seven Keras scripts of 2017, with their optimizers and batch sizes, on the real data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from articles.studies.study_rows import distinct
from articles.studies.study_training import draw_rates, reached, run_finding, training_cases
from harness import Finding, Rows, Study


class Published(NamedTuple):
    """The published values of a script.

    Attributes:
        seconds: of a full run on a K80, a P100, 16 and 32 virtual CPUs; None: not published.
        result: the final metric.
    """

    seconds: tuple[float, float, float, float] | None
    result: str


SCRIPTS: Mapping[str, Published] = {
    "mnist_mlp": Published((64.5, 55.3, 79.2, 66.0), "accuracy 0.982"),
    "mnist_cnn": Published((129.9, 65.4, 562.5, 345.1), "accuracy 0.991"),
    "cifar10_cnn": Published((775.0, 562.0, 1555.0, 1054.0), "accuracy 0.751"),
    "imdb_lstm": Published((173.4, 111.0, 319.0, 310.0), "accuracy 0.8335"),
    "imdb_fasttext": Published((287.0, 100.7, 1015.0, 933.0), "accuracy 0.9068"),
    "lstm_text_generation": Published((252.7, 193.3, 842.0, 744.0), "training loss 1.41, on another text"),
    "text_generator": Published(None, ""),
}
# No accuracy is published for these: the loss is reported.
GENERATORS = ("lstm_text_generation", "text_generator")


@dataclasses.dataclass(frozen=True)
class Settings:
    """``steps`` per call, None: as many as a run would choose; ``whole_runs`` also trains every network to its end."""

    networks: tuple[str, ...] = tuple(SCRIPTS)
    steps: int | None = None
    whole_runs: bool = True
    rounds: int = 5
    seconds: float = 1.0


QUICK = Settings(steps=2, whole_runs=False, rounds=2, seconds=0.1)


def _findings(rows: Rows) -> list[Finding]:
    return [finding for name in distinct(rows, "network") for finding in _of_script(rows, str(name))]


def _of_script(rows: Rows, name: str) -> list[Finding]:
    published = SCRIPTS[name]
    article = ""
    if published.seconds is not None:
        k80, p100, few, many = published.seconds
        article = f"K80 {k80:g} s, P100 {p100:g} s, 16 CPUs {few:g} s, 32 CPUs {many:g} s"
    results = (
        {"train_loss": published.result, "test_loss": ""} if name in GENERATORS else {"test_accuracy": published.result}
    )
    return [
        run_finding(rows, name, "A12", article),
        *(
            Finding("A12", f"{name}, final {metric.replace('_', ' ')}", reached(rows, name, metric), published_result)
            for metric, published_result in results.items()
        ),
    ]


STUDY = Study(
    name="keras_scripts",
    claims=("A12",),
    title="How long do Max Woolf's seven Keras scripts take, and which metrics do they reach?",
    method=(
        "The scripts' networks, optimizers, batch sizes and epochs on the real data; text generators on tiny "
        "Shakespeare instead of their own texts. The time is that of all training steps of a run, extrapolated from "
        "some; compilation, reading data and evaluation are not counted; the article and full runs include them. The "
        "article's LSTMs ran in cuDNN on GPUs. Float32, as JAX computes it by default, which some GPUs round to tf32."
    ),
    full=Settings(),
    quick=QUICK,
    cases=training_cases,
    findings=_findings,
    draw=draw_rates,
)
