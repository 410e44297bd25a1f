"""A13: how much faster is data-parallel training on several devices?"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
from articles.studies.study_scaling import Settings, make_study

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class PictureSettings(Settings):
    """Settings of a CNN on random images of ``size`` by ``size`` pixels; 384 is divisible by 3, as published."""

    blocks: tuple[tuple[int, ...], ...] = ((32, 32), (64, 64))
    dense: tuple[int, ...] = (512,)
    size: int = 32


@dataclasses.dataclass(frozen=True)
class PictureConfig:
    batch_size: int
    num_steps: int
    seed: int = 0


def picture_cnn(settings: Any) -> jn.Experiment[PictureConfig]:
    """Returns the CNN of ``settings`` on random images."""

    def data(config: PictureConfig) -> jn.Splits:
        most = max(len(jax.local_devices(backend=kind)) for kind in {"cpu", jax.default_backend()})
        count = max(settings.batch_size, most * settings.batch_per_device)
        random = np.random.default_rng(0)
        pictures = random.integers(0, 256, (count, settings.size, settings.size, 3), np.uint8)
        return jn.data.arrays(train=(pictures, random.integers(0, 10, count, np.int32)), name="random images")

    model = jn.models.CNN(10, blocks=settings.blocks, dense=settings.dense)
    return jn.Experiment(
        PictureConfig(settings.batch_size, settings.steps),
        data,
        task=lambda config: jn.tasks.classification(model),
        optimizer=lambda config: optax.adam(1e-3),
    )


STUDY = make_study(
    picture_cnn,
    full=PictureSettings(),
    quick=PictureSettings(96, 32, (), 2, 2, 3, 0.1, blocks=((16,), (32,)), dense=(64,), size=16),
    claims=("A13",),
)
