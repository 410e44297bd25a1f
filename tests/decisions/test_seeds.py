"""Seeds by purpose: what each decides, alone and as traced fields of a sweep."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.types import ConfigError
from tests import tiny


@dataclasses.dataclass(frozen=True)
class Config(tiny.Config):
    init_seed: int | None = None
    order_seed: int | None = None
    step_seed: int | None = None


def noisy(**fields: Any) -> jn.Experiment[Any]:
    """The linear classifier with dropout of its inputs, so that all purposes of a seed matter."""
    plain = tiny.experiment(model=jn.models.MLP((8, 3), dropout=0.3))
    return dataclasses.replace(plain, config=Config(**fields))


def leaves(state: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))]


def test_a_seed_of_a_purpose_takes_that_part_of_the_seed(tmp_path):
    """All three together are the seed; each alone changes the run, and a member of a sweep is its solo run."""
    seeds = ("init_seed", "order_seed", "step_seed")
    points = [dict.fromkeys(seeds, 0), dict.fromkeys(seeds, 5), *({**dict.fromkeys(seeds, 0), one: 5} for one in seeds)]
    listed = jn.search.zip(**{name: [point[name] for point in points] for name in seeds})
    swept = jn.sweep(noisy(), listed, run_dir=tmp_path / "sweep", **tiny.MEMBERS)
    assert swept.summary["num_compilations"] <= 4  # one group
    solo = [tiny.fit(noisy(**point)) for point in points]
    for member, run in zip(swept.members, solo, strict=True):
        for ours, alone in zip(leaves(swept.run(member).state), leaves(run.state), strict=True):
            np.testing.assert_allclose(ours, alone, rtol=1e-5, atol=1e-6)
    for seed, run in ((0, solo[0]), (5, solo[1])):
        for ours, plain in zip(leaves(run.state), leaves(tiny.fit(noisy(seed=seed)).state), strict=True):
            np.testing.assert_array_equal(ours, plain)
    finals = [run.final["train_loss"] for run in solo]
    assert len(set(finals)) == len(finals)


def test_wrong_seeds_are_refused_and_one_that_decides_nothing_is_warned_of():
    with pytest.raises(ConfigError, match=r"order_seed must be an integer >= 0, not -1"):
        tiny.fit(noisy(order_seed=-1))
    with pytest.warns(UserWarning, match="nothing reads the swept field 'seed'"):
        jn.sweep(noisy(init_seed=1, order_seed=1, step_seed=1), jn.grid(seed=[0, 1]), plan_only=True, **tiny.MEMBERS)
