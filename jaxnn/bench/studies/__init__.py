"""The studies, in the order of the page."""

from __future__ import annotations

from jaxnn.bench.studies import (
    activations,
    bandwidth,
    cats_vs_dogs,
    convolution,
    cost,
    inference,
    keras_scripts,
    latency,
    matmul,
    networks,
    pipeline,
    scaling,
    text,
    transfer,
)
from jaxnn.bench.study import Study
from jaxnn.types import ConfigError, suggest

STUDIES: tuple[Study, ...] = (
    activations.STUDY,
    convolution.STUDY,
    latency.STUDY,
    networks.STUDY,
    bandwidth.STUDY,
    matmul.STUDY,
    cats_vs_dogs.STUDY,
    pipeline.STUDY,
    keras_scripts.STUDY,
    scaling.STUDY,
    text.STUDY,
    transfer.STUDY,
    inference.STUDY,
    cost.STUDY,
)


def find_study(name: str) -> Study:
    """The study called ``name``.

    Raises:
        ConfigError: there is none.
    """
    found = {study.name: study for study in STUDIES}
    if name not in found:
        raise ConfigError(f"there is no study {name!r}: {suggest(name, found)}.")
    return found[name]
