"""A member of a sweep computes what its own run does, its floats traced; fields that cannot be are found and named."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen

import jaxnn as jn
from jaxnn.sweeps import SweepOptions, plan_sweep
from tests import tiny
from tests.sweeps.test_sweep_points import Config as Nested
from tests.sweeps.test_sweep_points import Model

HOW: dict[str, Any] = {"report_every": 3, "eval_every": 6, "steps_per_call": 3, "progress": "none"}


@dataclasses.dataclass(frozen=True)
class Floats(tiny.Config):
    dropout: float = 0.2
    label_smoothing: float = 0.1
    num_steps: int = 12


class Small(linen.Module):
    """A linear classifier with dropout and statistics that it keeps."""

    rate: Any

    @linen.compact
    def __call__(self, inputs: jax.Array, train: bool = False) -> jax.Array:
        normalized = jn.nn.BatchNorm(use_running_average=not train)(inputs)
        return linen.Dense(3)(jn.nn.Dropout(self.rate)(normalized, train=train))


def noisy(key: jax.Array, batch: jn.Batch) -> jn.Batch:
    return batch._replace(inputs=batch.inputs + jax.random.normal(key, batch.inputs.shape))


def network() -> jn.Experiment[Floats]:
    """A small network all of whose floats may be swept."""

    def task(config: Floats) -> jn.Task:
        return jn.tasks.classification(Small(config.dropout), label_smoothing=config.label_smoothing)

    def optimizer(config: Floats) -> optax.GradientTransformation:
        rate = jn.schedules.cosine(config.learning_rate, config.num_steps, warmup_steps=2)
        clipped = jn.optim.with_clipping(optax.adamw(rate, weight_decay=0.1), 1.0)
        return jn.optim.with_ema(clipped, decay=0.9)

    return jn.Experiment(Floats(), lambda config: jn.data.with_augmentation(tiny.splits(), noisy), task, optimizer)


POINTS = jn.search.zip(
    learning_rate=[0.01, 0.002, 0.03, 0.02, 0.005],
    dropout=[0.0, 0.3, 0.5, 0.1, 0.4],
    label_smoothing=[0.0, 0.1, 0.2, 0.0, 0.1],
    seed=[0, 3, 2**32 - 1, 1, 2],
)


@pytest.mark.several_devices
def test_members_equal_their_solo_runs():
    # On two devices a full chunk of four lanes and one of which three lanes are unused.
    sweep = jn.sweep(network(), POINTS, record=False, vmap_size=2, devices=2, **HOW)
    assert [member.status for member in sweep.members] == ["finished"] * 5
    # Else a sweep that trains one member over and over would pass.
    assert len(set(sweep.values("test_loss"))) == len(POINTS)
    # Three programs for any number of members.
    assert sweep.summary["num_compilations"] == len(("initialise", "train", "evaluate"))
    lines = [line for line in sweep.lines if line["member"] == 2]
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    alone = jn.fit(network().replace(**POINTS.points[2]), record=False, **HOW)
    for metric, values in alone.metrics.items():
        if metric.endswith(("loss", "accuracy")):
            mine = [line.get(metric, np.nan) for line in lines]
            np.testing.assert_allclose(mine, values, rtol=2e-5, atol=2e-5, err_msg=metric)


@pytest.mark.slow
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


@dataclasses.dataclass(frozen=True)
class Scaled(tiny.Config):
    scale: float = 1.0
    num_steps: int = 4


def scaled(**parts: Any) -> jn.Experiment[Scaled]:
    """Points whose logits are scaled by a field that a sweep traces."""

    def task(config: Scaled) -> jn.Task:
        return jn.tasks.classification((tiny.init, lambda params, inputs: config.scale * tiny.apply(params, inputs)))

    return dataclasses.replace(tiny.experiment(task=task), config=Scaled(), **parts)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> jn.Sweep:
    """Two groups by batch size of three members each, of which one diverges."""
    points = jn.grid(batch_size=[4, 8], scale=[0.5, 2.0, 1e38])
    how = {"run_dir": tmp_path_factory.mktemp("predict") / "sweep", "progress": "none", "steps_per_call": 2}
    return jn.sweep(scaled(), points, eval_every=4, vmap_size=2, **how)


def load(config: Scaled) -> Any:
    raise FileNotFoundError("the data")


@pytest.mark.several_devices
def test_members_predict_together_without_the_data(sweep, monkeypatch):
    assert [member.status for member in sweep.members] == ["finished", "finished", "diverged"] * 2
    opened, inputs = jn.open_sweep(sweep.dir, scaled(data=load)), tiny.points(7)[0]
    outputs = opened.predict(inputs, batch_size=3)
    assert outputs.shape == (6, 7, 3) and outputs.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(outputs).all((1, 2)), [False, False, True] * 2)
    np.testing.assert_array_equal(np.isnan(outputs).any((1, 2)), [False, False, True] * 2)
    for member in (0, 4):
        alone = opened.run(member)
        np.testing.assert_allclose(outputs[member], alone.predict(inputs), rtol=1e-5)
        with pytest.raises(FileNotFoundError):
            alone.evaluate()
    np.testing.assert_array_equal(opened.select(batch_size=8, scale=2.0).predict(inputs, batch_size=3), outputs[4:5])
    # On as many devices as there are members of a group, and on one, in two lanes.
    np.testing.assert_allclose(opened.predict(inputs, batch_size=3, devices=1), outputs, rtol=1e-5)
    with pytest.raises(jn.ConfigError, match="requested 5 devices, but only 4"):
        opened.predict(inputs, devices=5)


@pytest.mark.several_devices
def test_members_are_evaluated_as_in_training(sweep):
    found = jn.open_sweep(sweep.dir, scaled()).evaluate(devices=2)
    for name, values in found.items():
        np.testing.assert_allclose(values, sweep.scores(f"test_{name}"), rtol=1e-6)
    assert set(found) == {"loss", "accuracy"}


def test_what_members_cannot_be_restored_from_is_named(sweep):
    inputs = tiny.points(2)[0]
    others = jn.open_sweep(sweep.dir, scaled(data=lambda config: jn.data.arrays(tiny.points(9), tiny.points(9))))
    wrong: list[tuple[jn.Sweep, str]] = [
        (jn.open_sweep(sweep.dir), r"it has no experiment: open_sweep\(path, experiment\)"),
        (dataclasses.replace(sweep, dir=None), "it has no record: sweep with one"),
        (sweep.select(scale=1e38), r"it has no complete member \(2 diverged\)"),
    ]
    for one, words in wrong:
        with pytest.raises(jn.JaxnnError, match=words):
            one.predict(inputs)
    with pytest.raises(jn.ConfigError, match="no split 'validation' to evaluate: the data have train, test"):
        sweep.evaluate("validation")
    with pytest.raises(jn.RecordError, match="the data are not those that the sweep in .* was trained on"):
        others.evaluate()


@dataclasses.dataclass(frozen=True)
class Config(tiny.Config):
    decay: float = 0.0
    share: float = 0.5


def if_decayed(config: Config) -> optax.GradientTransformation:
    if config.decay > 0:  # here
        return optax.adamw(config.learning_rate, weight_decay=config.decay)
    return optax.adam(config.learning_rate)


def by_optax(config: Config) -> optax.GradientTransformation:
    return optax.sgd(optax.warmup_cosine_decay_schedule(0.0, config.decay, 2, 20))  # here


def formatted(config: Config) -> optax.GradientTransformation:
    assert f"{config.decay:.3f}"  # here
    return optax.sgd(config.learning_rate)


def decayed(config: Config) -> optax.GradientTransformation:
    return optax.adamw(config.learning_rate, weight_decay=config.decay)


def experiment(**parts: Any) -> jn.Experiment[Config]:
    return dataclasses.replace(tiny.experiment(), config=Config(), **{"optimizer": decayed} | parts)


def groups_of(swept: jn.Experiment[Config], points: jn.search.Points) -> list[tuple[tuple[str, ...], list[int]]]:
    plan = plan_sweep(swept, points, SweepOptions())
    assert not [member for member in plan.members if member.error is not None]
    return [(group.traced, [member.number for member in group.members]) for group in plan.groups]


def test_floats_and_the_seed_are_traced_and_other_fields_form_groups():
    points = jn.grid(batch_size=[4, 8], decay=[0.0, 0.1], seed=[0, 1])
    assert groups_of(experiment(), points) == [(("decay", "seed"), [0, 1, 2, 3]), (("decay", "seed"), [4, 5, 6, 7])]
    # A field that is the same in a group stays a Python number.
    points = jn.search.zip(batch_size=[4, 4, 8], decay=[0.1, 0.2, 0.3])
    assert groups_of(experiment(), points) == [(("decay",), [0, 1]), ((), [2])]


def test_nested_fields_are_set_by_their_dotted_names():
    def task(config: Nested) -> jn.Task:
        return jn.tasks.classification(jn.models.MLP((*config.model.features, 3), dropout=config.model.dropout))

    nested = dataclasses.replace(tiny.experiment(task=task), config=Nested())
    points = jn.grid(**{"model.features": [(4,), [5, 6]], "model.dropout": [0, 0.5]}, batch_size=[4])
    # Two widths of network are two programs; the rates of dropout share each.
    assert groups_of(nested, points) == [(("model.dropout",), [0, 1]), (("model.dropout",), [2, 3])]
    members = [member.experiment.config for member in plan_sweep(nested, points, SweepOptions()).members]
    models = [Model((4,), 0.0), Model((4,), 0.5), Model((5, 6), 0.0), Model((5, 6), 0.5)]
    assert members == [Nested(batch_size=4, model=model) for model in models]


@pytest.mark.parametrize("optimizer", [if_decayed, by_optax, formatted])
def test_float_that_python_needs_is_reported_with_its_line(optimizer):
    points = jn.grid(decay=[0.1, 0.2], learning_rate=[0.1, 0.2])
    with pytest.warns(UserWarning) as caught:
        found = groups_of(experiment(optimizer=optimizer), points)
    assert found == [(("learning_rate",), [0, 1]), (("learning_rate",), [2, 3])]
    # One of them does not read the learning rate, which is another warning.
    (message,) = [text for one in caught if "nothing reads" not in (text := str(one.message))]
    assert "the field 'decay' decides what Python does at" in message
    file, line = message.partition(" at ")[2].partition(" (")[0].rsplit(":", 1)
    first = optimizer.__code__.co_firstlineno
    assert file.endswith("test_sweep_members.py") and "# here" in message and first < int(line) <= first + 2


def test_members_with_values_that_the_model_refuses_fail_alone():
    dropped = experiment(task=lambda config: jn.tasks.classification(jn.models.MLP((4, 3), dropout=config.share)))
    # Beside the first, the least and the greatest value are tried, and all if one of these is refused.
    for wrong in (-0.5, 1.5):
        plan = plan_sweep(dropped, jn.grid(share=[0.1, 0.2, wrong, 0.3]), SweepOptions())
        assert [member.status == "failed" for member in plan.members] == [False, False, True, False]
        assert [(group.traced, len(group.members)) for group in plan.groups] == [(("share",), 3)]


def test_floats_that_cannot_be_tracers_together_are_grouped_by():
    def optimizer(config: Config) -> optax.GradientTransformation:
        assert not (isinstance(config.decay, jax.core.Tracer) and isinstance(config.share, jax.core.Tracer))
        return decayed(config)

    with pytest.warns(UserWarning):
        found = groups_of(experiment(optimizer=optimizer), jn.grid(decay=[0.1, 0.2], share=[0.1, 0.2]))
    assert found == [((), [index]) for index in range(4)]


def test_data_that_depend_on_nothing_swept_are_loaded_once():
    loads = list[int]()

    def data(config: Config) -> jn.Splits:
        loads.append(config.batch_size and config.num_steps)
        return tiny.splits()

    options = {**tiny.HOW, "record": False, "vmap_size": 4, "plan_only": True}
    jn.sweep(experiment(data=data), jn.grid(decay=[0.1, 0.2], seed=[0, 1]), **options)
    assert len(loads) == 1


def drawn_and_scaled(config: Config) -> jn.Splits:
    splits = jn.data.arrays(train=tiny.points(37, config.seed), test=tiny.points(23, 1))
    # Augmentation reads its fields when it is traced.
    return jn.data.with_augmentation(
        splits, lambda key, batch: batch._replace(inputs=batch.inputs * (config.num_steps + config.share))
    )


def test_fields_that_data_read_are_grouped_by():
    @functools.cache
    def cached(config: Config) -> jn.Splits:
        assert isinstance(config, Config)
        return jn.data.arrays(train=tiny.points(37, int(config.share)), test=tiny.points(23, 1))

    def by_dict(config: Config) -> jn.Splits:
        return cached(Config(share=vars(config)["share"]))

    def by_copy(config: Config) -> jn.Splits:
        return cached(dataclasses.replace(config, seed=3))

    assert groups_of(experiment(data=cached), jn.grid(decay=[0.1, 0.2])) == [(("decay",), [0, 1])]
    for data in (cached, by_dict, by_copy, drawn_and_scaled):
        with pytest.warns(UserWarning, match="reads 'share'"):
            assert groups_of(experiment(data=data), jn.grid(share=[0.0, 1.0])) == [((), [0]), ((), [1])]
