"""Fields that may not be tracers: found before anything is compiled, named with their line, and grouped by."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen

import jaxnn as jn
from jaxnn.sweeps._groups import Loader, plan_groups, plan_members, traced_values, watched
from tests import tiny


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


def experiment(optimizer: Any = None, **parts: Any) -> jn.Experiment[Config]:
    own = tiny.experiment()
    return jn.Experiment(
        Config(),
        parts.get("data", own.data),
        parts.get("task", own.task),
        optimizer or (lambda config: optax.adamw(config.learning_rate, weight_decay=config.decay)),
    )


def groups_of(swept: jn.Experiment[Config], points: jn.search.Points) -> list[tuple[tuple[str, ...], list[int]]]:
    members = plan_members(swept, points)
    groups, _ = plan_groups(members, Loader())
    assert not [member for member in members if member.log.error is not None]
    return [(group.traced, [member.number for member in group.members]) for group in groups]


def assert_equal_solo_runs(swept: jn.Experiment[Config], members: Sequence[jn.sweeps.Member]) -> None:
    for member in members:
        alone = tiny.fit(swept.replace(**member.point))
        assert member.final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-5)


def test_floats_and_the_seed_are_traced_and_other_fields_form_groups() -> None:
    points = jn.grid(batch_size=[4, 8], decay=[0.0, 0.1], seed=[0, 1])
    assert groups_of(experiment(), points) == [(("decay", "seed"), [0, 1, 2, 3]), (("decay", "seed"), [4, 5, 6, 7])]
    # A field that is the same in a group stays a Python number.
    points = jn.search.zip(batch_size=[4, 4, 8], decay=[0.1, 0.2, 0.3])
    assert groups_of(experiment(), points) == [(("decay",), [0, 1]), ((), [2])]


@pytest.mark.parametrize("optimizer", [if_decayed, by_optax, formatted])
def test_a_float_that_python_needs_is_named_with_its_line(optimizer: Callable[[Any], Any]) -> None:
    points = jn.grid(decay=[0.1, 0.2], learning_rate=[0.1, 0.2])
    with pytest.warns(UserWarning) as caught:
        assert groups_of(experiment(optimizer), points) == [(("learning_rate",), [0, 1]), (("learning_rate",), [2, 3])]
    # One of them has no use for the learning rate, and is said so too.
    (message,) = [told for one in caught if "nothing reads" not in (told := str(one.message))]
    assert "the field 'decay' decides what Python does at" in message
    file, line = message.partition(" at ")[2].partition(" (")[0].rsplit(":", 1)
    source = optimizer.__code__
    assert file.endswith("test_sweep_tracing.py") and "# here" in message
    assert source.co_firstlineno < int(line) <= source.co_firstlineno + 2


def test_flaxs_own_dropout_is_found_too() -> None:
    class Network(linen.Module):
        rate: Any

        @linen.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            x = linen.Dropout(self.rate, deterministic=not train)(x)
            return linen.Dense(3)(x)

    plain = experiment(task=lambda config: jn.tasks.classification(Network(config.share)))
    with pytest.warns(UserWarning, match="the field 'share' decides what Python does"):
        assert len(groups_of(plain, jn.grid(share=[0.1, 0.2], seed=[0, 1]))) == 2


@pytest.mark.slow
def test_members_grouped_so_equal_their_solo_runs() -> None:
    points = jn.grid(decay=[0.0, 0.3], learning_rate=[0.1, 0.2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sweep = jn.sweep(experiment(if_decayed), points, record=False, vmap_size=2, **tiny.HOW)
    assert_equal_solo_runs(experiment(if_decayed), sweep.members[::3])


@pytest.mark.slow
def test_a_field_that_the_data_are_made_from_is_grouped_by() -> None:
    def data(config: Config) -> jn.Splits:
        return jn.data.arrays(train=tiny.points(37, config.seed), test=tiny.points(23, 1))

    points = jn.grid(seed=[3, 4], learning_rate=[0.1, 0.2])
    with pytest.warns(UserWarning, match="data.config. reads 'seed'"):
        sweep = jn.sweep(experiment(data=data), points, record=False, vmap_size=2, **tiny.HOW)
    assert_equal_solo_runs(experiment(data=data), sweep.members[::3])


def test_data_that_depend_on_nothing_swept_are_loaded_once() -> None:
    loads = []

    def data(config: Config) -> jn.Splits:
        loads.append(config.batch_size and config.num_steps)
        return tiny.splits()

    jn.sweep(experiment(data=data), jn.grid(decay=[0.1, 0.2], seed=[0, 1]), record=False, vmap_size=4, **tiny.HOW)
    assert len(loads) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "values"), [("share", [0.0, 50.0]), ("num_steps", [19, 20])])
def test_a_field_that_augmentation_reads_when_it_is_traced_is_grouped_by(name: str, values: list[Any]) -> None:
    plain = tiny.splits()

    def data(config: Config) -> jn.Splits:
        return jn.data.with_augmentation(plain, lambda key, inputs: inputs * (1 + getattr(config, name)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sweep = jn.sweep(experiment(data=data), jn.grid(**{name: values}), record=False, vmap_size=2, **tiny.HOW)
    assert_equal_solo_runs(experiment(data=data), sweep.members)
    assert len(set(sweep.values("test_loss"))) == 2


def test_a_cache_around_data_hides_nothing() -> None:
    @functools.cache
    def data(config: Config) -> jn.Splits:
        return jn.data.arrays(train=tiny.points(37, int(config.share)), test=tiny.points(23, 1))

    cached = experiment(data=data)
    assert groups_of(cached, jn.grid(decay=[0.1, 0.2], seed=[0, 1])) == [(("decay", "seed"), [0, 1, 2, 3])]
    with pytest.warns(UserWarning, match="data.config. reads 'share'"):
        assert len(groups_of(cached, jn.grid(share=[0.0, 1.0], seed=[0, 1]))) == 2


def test_a_watched_config_is_the_config_and_tells_what_was_read() -> None:
    config = Config(decay=0.25)
    twin, read = watched(config)
    assert isinstance(twin, Config) and not read
    assert twin.decay == 0.25 and read == {"decay"}
    assert dataclasses.replace(twin, seed=3).seed == 3 and read == {f.name for f in dataclasses.fields(config)}


def test_traced_floats_take_the_precision_of_what_they_meet() -> None:
    members = [experiment().replace(decay=value, seed=seed) for value, seed in ((0.1, 1), (0.2, 2**32 - 1))]
    values = traced_values(members, ("decay", "seed"))
    assert (values["decay"].astype(np.float32) == np.float32([0.1, 0.2])).all() and values["decay"].weak_type
    assert values["seed"].dtype == np.uint32 and int(values["seed"][1]) == 2**32 - 1
