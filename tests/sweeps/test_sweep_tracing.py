"""Fields that cannot be tracers: found before compilation, reported with their line, and grouped by."""

import dataclasses
import functools
from typing import Any

import jax
import optax
import pytest
from flax import linen

import jaxnn as jn
from jaxnn.sweeps import SweepOptions, plan_sweep
from tests import tiny
from tests.sweeps.test_sweep_points import Config as Nested
from tests.sweeps.test_sweep_points import Model


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
    assert not [member for member in plan.members if member.log.error is not None]
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
    assert file.endswith("test_sweep_tracing.py") and "# here" in message and first < int(line) <= first + 2


def test_flaxs_own_dropout_is_found_too():
    class Network(linen.Module):
        rate: Any

        @linen.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            return linen.Dense(3)(linen.Dropout(self.rate, deterministic=not train)(x))

    plain = experiment(task=lambda config: jn.tasks.classification(Network(config.share)))
    with pytest.warns(UserWarning, match="the field 'share' decides what Python does"):
        assert len(groups_of(plain, jn.grid(share=[0.1, 0.2], seed=[0, 1]))) == 2


def test_members_with_values_that_the_model_refuses_fail_alone():
    dropped = experiment(task=lambda config: jn.tasks.classification(jn.models.MLP((4, 3), dropout=config.share)))
    # Beside the first, the least and the greatest value are tried, and all if one of these is refused.
    for wrong in (-0.5, 1.5):
        plan = plan_sweep(dropped, jn.grid(share=[0.1, 0.2, wrong, 0.3]), SweepOptions())
        assert [member.log.status == "failed" for member in plan.members] == [False, False, True, False]
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("parts", "points"),
    [
        ({"optimizer": if_decayed}, jn.grid(decay=[0.0, 0.3], learning_rate=[0.1, 0.2])),
        ({"data": drawn_and_scaled}, jn.search.zip(seed=[3, 4], share=[0.0, 50.0])),
        ({"data": drawn_and_scaled}, jn.grid(num_steps=[19, 20])),
    ],
)
def test_members_grouped_by_untraceable_fields_equal_their_solo_runs(parts, points):
    sweep = jn.sweep(experiment(**parts), points, record=False, vmap_size=2, **tiny.HOW)
    member = sweep.members[-1]
    alone = tiny.fit(experiment(**parts).replace(**member.point))
    assert member.final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-5)
    assert len(set(sweep.values("test_loss"))) == len(points)


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
