"""A sweep's member is the run alone: for every kind of network, at any width, on one device and on two."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

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


# On one device a full chunk and one with a lane to spare; on two all lanes of one chunk, one of them to spare.
CASES = [("MLP", 1), ("CNN", 1), ("MLP", 2)]
SLOW = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (("LSTM", 1), ("ResNet", 1), ("GRU", 1), ("GPT", 1), ("CNN", 2))
]


# The language model smooths no labels.
@pytest.mark.filterwarnings("ignore:nothing reads the swept field 'label_smoothing'")
@pytest.mark.parametrize(("name", "devices"), [*CASES, *SLOW])
def test_members_equal_their_solo_runs(name: str, devices: int) -> None:
    sweep = jn.sweep(experiment(name), POINTS, record=False, vmap_size=2, devices=devices, **HOW)
    assert [member.status for member in sweep.members] == ["finished"] * 3
    for index in (0, 2):
        lines = [line for line in sweep.lines if line["member"] == index]
        assert [line["step"] for line in lines] == [3, 6, 9, 12]
        for metric, values in alone(name, index).metrics.items():
            if metric.endswith(("loss", "accuracy", "bits")):
                mine = [line.get(metric, np.nan) for line in lines]
                np.testing.assert_allclose(mine, values, rtol=2e-5, atol=2e-5, err_msg=f"{name} {metric}")


def test_members_differ_from_each_other_and_share_the_batches_of_a_seed() -> None:
    # Else the test above would pass for a sweep that trains one member over and over.
    sweep = jn.sweep(experiment("MLP"), POINTS, record=False, vmap_size=3, **HOW)
    assert len(set(sweep.values("test_loss"))) == len(POINTS)
    own = experiment("MLP").replace(dropout=0.0, label_smoothing=0.0)
    sweep = jn.sweep(own, jn.grid(learning_rate=[0.02, 0.01]), record=False, vmap_size=2, devices=1, **HOW)
    assert sweep.values("test_loss")[1] == pytest.approx(alone("MLP", 0).final["test_loss"], rel=2e-5)


@pytest.mark.slow
def test_a_member_in_bfloat16_is_computed_in_bfloat16() -> None:
    # A traced float must take the precision of what it meets, as Python's do, and not lift it to float32.
    narrow = experiment("MLP", jn.nn.Policy(compute="bfloat16"))
    sweep = jn.sweep(narrow, POINTS, record=False, vmap_size=3, devices=1, **HOW)
    run = jn.fit(narrow.replace(**POINTS.points[2]), record=False, **HOW)
    assert sweep.values("test_loss")[2] == pytest.approx(run.final["test_loss"], rel=2e-3)
    # Float32 differs from both by more than they from each other.
    assert sweep.values("test_loss")[2] != pytest.approx(alone("MLP", 2).final["test_loss"], rel=1e-5)


def test_in_shared_order_seeds_decide_everything_but_the_order() -> None:
    shared = jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), record=False, order="shared", **HOW)
    own = jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), record=False, **HOW)
    # The order is that of the first, so that its run is the same; the other starts elsewhere and sees other batches.
    assert shared.values("test_loss")[0] == pytest.approx(own.values("test_loss")[0], rel=1e-6)
    assert shared.values("test_loss")[1] != pytest.approx(own.values("test_loss")[1], rel=1e-4)
    assert len(set(shared.values("test_loss"))) == 2


def test_data_that_do_not_lie_on_the_device_are_sent_in_shared_order() -> None:
    points = jn.grid(learning_rate=[0.01, 0.1])
    sent, lying = (jn.sweep(tiny.experiment(), points, record=False, resident=r, **HOW) for r in (False, True))
    np.testing.assert_allclose(sent.values("test_loss"), lying.values("test_loss"), rtol=1e-6)
    with pytest.raises(jn.ConfigError, match="choose order='shared'"):
        jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), record=False, resident=False, **HOW)


@pytest.mark.slow
def test_any_field_may_be_swept_and_nested_ones_by_their_dotted_names() -> None:
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
        alone = jn.fit(nested.replace(model=model, batch_size=4), record=False, **HOW)
        assert member.final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-5)
    # Two widths of network are two programs; the rates of dropout share each.
    assert sweep.summary["num_compilations"] == 2 * len(("initialise", "train", "evaluate"))


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [2, 7])
def test_a_sweep_compiles_once_a_group_whatever_the_number_of_members(num_seeds: int, tmp_path: Any) -> None:
    points = jn.grid(batch_size=[4, 8], learning_rate=[0.1, 0.2, 0.3], seed=range(num_seeds))
    sweep = jn.sweep(tiny.experiment(num_steps=12), points, run_dir=tmp_path / "sweep", vmap_size=4, devices=1, **HOW)
    programs = [entry["name"].split()[0] for entry in tiny.read(sweep.dir, "compiles.json")]
    assert sorted(programs) == ["evaluate"] * 2 + ["initialise"] * 2 + ["train"] * 2
    assert {member.status for member in sweep.members} == {"finished"}


def test_nothing_compiles_behind_the_ledgers_back(caplog: pytest.LogCaptureFixture) -> None:
    short = tiny.experiment(num_steps=12)
    # What JAX compiles once a process, such as the stacking of values, is compiled by the first.
    jn.sweep(short, jn.grid(seed=range(3)), record=False, vmap_size=2, devices=1, **HOW)
    with jax.log_compiles():
        jn.sweep(short, jn.grid(seed=range(3)), record=False, vmap_size=2, devices=1, **HOW)
    told = [record.getMessage() for record in caplog.records]
    names = [line.split()[4] for line in told if line.startswith("Finished XLA compilation of")]
    assert sorted(names) == ["jit(evaluate)", "jit(init)", "jit(train)"]
