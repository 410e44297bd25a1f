"""A member of a sweep computes what its own run does: for every kind of network, on one device and on two."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen

import jaxnn as jn
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

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
    return jn.data.with_augmentation(tiny.splits(), lambda key, inputs: inputs + jax.random.normal(key, inputs.shape))


def images() -> jn.Splits:
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 256, (size, 8, 8, 1), np.uint8), rng.integers(0, 3, size)) for size in (29, 11)]
    return jn.data.with_augmentation(
        jn.data.arrays(train=pairs[0], test=pairs[1]), jn.data.random_flip(), jn.data.random_shift(1)
    )


def texts(*, successors: bool = False) -> jn.Splits:
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 7, (size, 7)) for size in (29, 11)]
    pairs = [(tokens[:, :-1], tokens[:, 1:] if successors else tokens[:, -1] % 3) for tokens in rows]
    return jn.data.arrays(train=pairs[0], test=pairs[1])


TEXT: dict[str, Any] = {"vocabulary_size": 7, "embedding_features": 4, "features": 5}
MODELS: dict[str, tuple[Callable[[], jn.Splits], Callable[[Any], Any]]] = {
    "small": (noisy_points, Small),
    "MLP": (tiny.splits, lambda rate: jn.models.MLP((8, 3), dropout=rate)),
    "CNN": (images, lambda rate: jn.models.CNN(3, blocks=((3,), (4,)), dense=(5,), dropout=rate, batch_norm=True)),
    "ResNet": (images, lambda rate: jn.models.ResNet(3, num_blocks=(1, 1), features=4)),
    "LSTM": (texts, lambda rate: jn.models.RecurrentClassifier(3, dropout=rate, **TEXT)),
    "GRU": (
        texts,
        lambda rate: jn.models.RecurrentClassifier(3, layer=jn.nn.GRU, bidirectional=True, pad_id=0, **TEXT),
    ),
    "GPT": (
        functools.partial(texts, successors=True),
        lambda rate: jn.models.GPT(7, num_layers=1, features=8, num_heads=2, max_length=6, dropout=rate),
    ),
}


def experiment(name: str, policy: jn.nn.Policy | None = None) -> jn.Experiment[Config]:
    """A small network of one kind, all of whose floats may be swept."""
    splits, model = MODELS[name]

    def task(config: Config) -> jn.Task:
        if name == "GPT":
            return jn.tasks.next_token(model(config.dropout), policy=policy)
        return jn.tasks.classification(model(config.dropout), label_smoothing=config.label_smoothing, policy=policy)

    def optimizer(config: Config) -> optax.GradientTransformation:
        rate = jn.schedules.cosine(config.learning_rate, config.num_steps, warmup_steps=2)
        return jn.optim.with_ema(
            jn.optim.with_clipping(optax.adamw(rate, weight_decay=config.weight_decay), 1.0), decay=0.9
        )

    return jn.Experiment(Config(), lambda config: splits(), task, optimizer)


POINTS = jn.search.zip(
    learning_rate=[0.01, 0.002, 0.03], dropout=[0.0, 0.3, 0.5], label_smoothing=[0.0, 0.1, 0.2], seed=[0, 3, 2**32 - 1]
)


@functools.cache
def alone(name: str, index: int) -> jn.Run:
    """The solo run of a member."""
    return jn.fit(experiment(name).replace(**POINTS.points[index]), record=False, **HOW)


SLOW = [("MLP", 1), ("CNN", 1), ("LSTM", 1), ("ResNet", 1), ("GRU", 1), ("GPT", 1), ("CNN", 2)]
# On one device a full chunk and one with an unused lane; on two all lanes of one chunk, one of them unused.
CASES = [("small", 1), ("small", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


# The language model smooths no labels.
@pytest.mark.filterwarnings("ignore:nothing reads the swept field 'label_smoothing'")
@pytest.mark.parametrize(("name", "devices"), CASES)
def test_members_equal_their_solo_runs(name: str, devices: int) -> None:
    sweep = jn.sweep(experiment(name), POINTS, record=False, vmap_size=2, devices=devices, **HOW)
    assert [member.status for member in sweep.members] == ["finished"] * 3
    # Else a sweep that trains one member over and over would pass.
    assert len(set(sweep.values("test_loss"))) == len(POINTS)
    for index in (2,) if name == "small" else (0, 2):
        lines = [line for line in sweep.lines if line["member"] == index]
        assert [line["step"] for line in lines] == [3, 6, 9, 12]
        for metric, values in alone(name, index).metrics.items():
            if metric.endswith(("loss", "accuracy", "bits")):
                mine = [line.get(metric, np.nan) for line in lines]
                np.testing.assert_allclose(mine, values, rtol=2e-5, atol=2e-5, err_msg=f"{name} {metric}")


@pytest.mark.slow
def test_member_in_bfloat16_is_computed_in_bfloat16() -> None:
    # A traced float must take the precision of what it meets, as Python's do, and not lift it to float32.
    narrow = experiment("MLP", jn.nn.Policy(compute="bfloat16"))
    sweep = jn.sweep(narrow, POINTS, record=False, vmap_size=3, devices=1, **HOW)
    run = jn.fit(narrow.replace(**POINTS.points[2]), record=False, **HOW)
    assert sweep.values("test_loss")[2] == pytest.approx(run.final["test_loss"], rel=2e-3)
    # Float32 differs from both by more than they from each other.
    assert sweep.values("test_loss")[2] != pytest.approx(alone("MLP", 2).final["test_loss"], rel=1e-5)


def test_data_order_is_that_of_each_seed_or_shared(tmp_path: Path) -> None:
    seeds, how = jn.grid(seed=[0, 1]), {**HOW, "record": False, "vmap_size": 2, "devices": 1}
    short = tiny.experiment(num_steps=12)
    shared = jn.sweep(short, seeds, order="shared", **how).values("test_loss")
    own = jn.sweep(short, seeds, **how).values("test_loss")
    # The order is that of the first, so that its run is the same; the other starts elsewhere and sees other batches.
    assert shared[0] == pytest.approx(own[0], rel=1e-6)
    assert shared[1] != pytest.approx(own[1], rel=1e-4) and shared[0] != shared[1]
    part = jn.sweep(short, seeds, order="shared", run_dir=tmp_path, shard="2/2", **{**how, "record": True})
    np.testing.assert_allclose(part.values("test_loss"), shared[1:], rtol=1e-6)
    # Data that are not on the device are sent in one order.
    host = jn.sweep(short, seeds, order="shared", resident=False, **how).values("test_loss")
    np.testing.assert_allclose(host, shared, rtol=1e-6)


@pytest.mark.slow
def test_nested_fields_are_swept_by_their_dotted_names() -> None:
    @dataclasses.dataclass(frozen=True)
    class Model:
        features: tuple[int, ...] = (4,)
        dropout: float = 0.1

    @dataclasses.dataclass(frozen=True)
    class Nested(tiny.Config):
        num_steps: int = 12
        model: Model = Model()

    nested = jn.Experiment(
        Nested(),
        lambda config: tiny.splits(),
        lambda config: jn.tasks.classification(
            jn.models.MLP((*config.model.features, 3), dropout=config.model.dropout)
        ),
        lambda config: optax.sgd(config.learning_rate),
    )
    points = jn.grid(**{"model.features": [(4,), [5, 6]], "model.dropout": [0.0, 0.5]}, batch_size=[4])
    sweep = jn.sweep(nested, points, record=False, **HOW)
    for member in sweep.members[::3]:
        model = Model(tuple(member.point["model.features"]), member.point["model.dropout"])
        run = jn.fit(nested.replace(model=model, batch_size=4), record=False, **HOW)
        assert member.final["test_loss"] == pytest.approx(run.final["test_loss"], rel=1e-5)
    # Two widths of network are two programs; the rates of dropout share each.
    assert sweep.summary["num_compilations"] == 2 * len(("initialise", "train", "evaluate"))


def test_group_compiles_three_programs_for_any_number_of_members(caplog: pytest.LogCaptureFixture) -> None:
    short, counts = tiny.experiment(num_steps=12), []
    # What JAX compiles once per process, such as the stacking of values, is compiled by the first.
    for num_seeds in (3, 5):
        caplog.clear()
        with jax.log_compiles():
            sweep = jn.sweep(short, jn.grid(seed=range(num_seeds)), record=False, vmap_size=2, devices=1, **HOW)
        counts.append(sweep.summary["num_compilations"])
    messages = [record.getMessage() for record in caplog.records]
    names = [line.split()[4] for line in messages if line.startswith("Finished XLA compilation of")]
    assert counts == [3, 3] and {"jit(evaluate)", "jit(init)", "jit(train)"} <= {*names}
