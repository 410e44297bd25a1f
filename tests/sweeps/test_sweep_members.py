"""A member of a sweep computes what its own run does: for several kinds of networks, on one device and on two."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen

import jaxnn as jn
from tests import tiny

HOW: dict[str, Any] = {"report_every": 3, "eval_every": 6, "steps_per_call": 3, "progress": "none"}


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 0.01
    dropout: float = 0.2
    label_smoothing: float = 0.1
    weight_decay: float = 0.1
    batch_size: int = 8
    num_steps: int = 12
    seed: int = 0


class Small(linen.Module):
    """A linear classifier with dropout and statistics that it keeps."""

    rate: Any

    @linen.compact
    def __call__(self, inputs: jax.Array, train: bool = False) -> jax.Array:
        normalized = jn.nn.BatchNorm(use_running_average=not train)(inputs)
        return linen.Dense(3)(jn.nn.Dropout(self.rate)(normalized, train=train))


def noisy_points() -> jn.Splits:
    def noisy(key, batch):
        return batch._replace(inputs=batch.inputs + jax.random.normal(key, batch.inputs.shape))

    return jn.data.with_augmentation(tiny.splits(), noisy)


def images() -> jn.Splits:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (40, 8, 8, 1), np.uint8), rng.integers(0, 3, 40)
    splits = jn.data.arrays(train=(pixels[:29], labels[:29]), test=(pixels[29:], labels[29:]))
    return jn.data.with_augmentation(splits, jn.data.random_flip(), jn.data.random_shift(1))


def texts(*, successors: bool = False) -> jn.Splits:
    rows = np.random.default_rng(1).integers(0, 7, (40, 7))
    targets = rows[:, 1:] if successors else rows[:, -1] % 3
    return jn.data.arrays(train=(rows[:29, :-1], targets[:29]), test=(rows[29:, :-1], targets[29:]))


TEXT: dict[str, Any] = {"vocabulary_size": 7, "embedding_features": 4, "features": 5}
MODELS: dict[str, tuple[Callable[[], jn.Splits], Callable[[Any], Any]]] = {
    "small": (noisy_points, Small),
    "CNN": (images, lambda rate: jn.models.CNN(3, blocks=((3,), (4,)), dense=(5,), dropout=rate, batch_norm=True)),
    "LSTM": (texts, lambda rate: jn.models.RecurrentClassifier(3, dropout=rate, **TEXT)),
    "GPT": (
        functools.partial(texts, successors=True),
        lambda rate: jn.models.GPT(7, num_layers=1, features=8, num_heads=2, max_length=6, dropout=rate),
    ),
}


def experiment(name: str) -> jn.Experiment[Config]:
    """A small network of one kind, all of whose floats may be swept."""
    splits, model = MODELS[name]

    def task(config: Config) -> jn.Task:
        if name == "GPT":
            return jn.tasks.next_token(model(config.dropout))
        return jn.tasks.classification(model(config.dropout), label_smoothing=config.label_smoothing)

    def optimizer(config: Config) -> optax.GradientTransformation:
        rate = jn.schedules.cosine(config.learning_rate, config.num_steps, warmup_steps=2)
        clipped = jn.optim.with_clipping(optax.adamw(rate, weight_decay=config.weight_decay), 1.0)
        return jn.optim.with_ema(clipped, decay=0.9)

    return jn.Experiment(Config(), lambda config: splits(), task, optimizer)


POINTS = jn.search.zip(
    learning_rate=[0.01, 0.002, 0.03, 0.02, 0.005],
    dropout=[0.0, 0.3, 0.5, 0.1, 0.4],
    label_smoothing=[0.0, 0.1, 0.2, 0.0, 0.1],
    seed=[0, 3, 2**32 - 1, 1, 2],
)


# On two devices a full chunk of four lanes and one of which three lanes are unused.
SLOW = [("CNN", 2), ("LSTM", 1), ("GPT", 1)]
CASES = [("small", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


# The language model smooths no labels.
@pytest.mark.filterwarnings("ignore:nothing reads the swept field 'label_smoothing'")
@pytest.mark.parametrize(("name", "devices"), CASES)
def test_members_equal_their_solo_runs(name, devices):
    sweep = jn.sweep(experiment(name), POINTS, record=False, vmap_size=2, devices=devices, **HOW)
    assert [member.status for member in sweep.members] == ["finished"] * 5
    # Else a sweep that trains one member over and over would pass.
    assert len(set(sweep.values("test_loss"))) == len(POINTS)
    # Three programs for any number of members.
    assert sweep.summary["num_compilations"] == len(("initialise", "train", "evaluate"))
    lines = [line for line in sweep.lines if line["member"] == 2]
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    alone = jn.fit(experiment(name).replace(**POINTS.points[2]), record=False, **HOW)
    for metric, values in alone.metrics.items():
        if metric.endswith(("loss", "accuracy", "bits")):
            mine = [line.get(metric, np.nan) for line in lines]
            np.testing.assert_allclose(mine, values, rtol=2e-5, atol=2e-5, err_msg=f"{name} {metric}")


def test_data_order_is_that_of_each_seed_or_shared(tmp_path):
    seeds, how = jn.grid(seed=[0, 1, 2]), {**HOW, "vmap_size": 2, "devices": 1}
    short = tiny.experiment(num_steps=12)
    shared = jn.sweep(short, seeds, order="shared", record=False, **how).values("test_loss")
    own = jn.sweep(short, seeds, record=False, **how).values("test_loss")
    # The order is that of the first, so that its run is the same; others start elsewhere and see other batches.
    assert shared[0] == pytest.approx(own[0], rel=1e-6)
    assert shared[1] != pytest.approx(own[1], rel=1e-4) and len({*shared}) == 3
    # A shard has the order of the first of all members; data that are not on the device are sent in one order.
    part = jn.sweep(short, seeds, order="shared", run_dir=tmp_path, shard="2/2", resident=False, **how)
    np.testing.assert_allclose(part.values("test_loss"), shared[1:], rtol=1e-6)
