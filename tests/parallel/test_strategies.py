"""Strategies are values: a user's own trains as one device does, and one that is made wrong is named."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnn as jn
from jaxnn.models import MLP
from jaxnn.parallel import STRATEGIES, Layout, Strategy, find_strategy, make_layout
from jaxnn.types import PyTree, TrainState
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

SHAPES = TrainState(jnp.int32(0), {"w": jnp.zeros((32, 6))}, {}, (), jax.random.key(0))
SPECS = {"w": P()}


def shard_moments(mesh: Mesh, shapes: TrainState, specs: PyTree) -> TrainState:
    sharded = STRATEGIES["fsdp"].shard_state(mesh, shapes, specs)
    state: TrainState = STRATEGIES["data"].shard_state(mesh, shapes, specs)._replace(opt_state=sharded.opt_state)
    return state


# ZeRO's first stage: parameters are replicated, the optimizer's moments sharded.
zero1 = Strategy("zero1", shard_moments)
# As pmap, written by hand: each device computes with its rows, and jaxnn averages over the axis.
by_hand = zero1._replace(
    name="by_hand",
    shard_state=STRATEGIES["data"].shard_state,
    wrap=lambda mesh, function: jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False),
    axis_name="data",
)
# Batches are split over two axes of the mesh.
two_axes = STRATEGIES["data"]._replace(name="two_axes", batch_spec=lambda mesh: P(("data", "more")))
chooser = STRATEGIES["data"]._replace(name="chooser", choose=lambda mesh, shapes: zero1)


def adam(**fields: Any) -> jn.Experiment[Any]:
    return tiny.experiment(
        task=lambda config: jn.tasks.classification(MLP((128, 64, 3))),
        optimizer=lambda config: optax.adam(config.learning_rate),
        **fields,
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"strategy": zero1, "devices": 4}, "zero1"),
        ({"strategy": f"{__name__}:zero1", "devices": 2}, "zero1"),
        ({"strategy": by_hand, "devices": 2}, "by_hand"),
        ({"strategy": two_axes, "mesh": "data=2,more=2"}, "two_axes"),
        ({"strategy": chooser, "devices": 4}, "zero1"),
    ],
    ids=["value", "path", "mapped", "two axes", "chosen"],
)
def test_own_strategy_trains_as_one_device_does(options: dict[str, Any], name: str) -> None:
    run, alone = tiny.fit(adam(), **options), tiny.fit(adam())
    assert run.summary.metrics == pytest.approx(alone.summary.metrics, rel=1e-4)
    assert run._trainer.programs.layout.strategy.name == name
    if name == "zero1":
        kernel, moment = (tree["Dense_1"]["kernel"] for tree in (run.state.params, run.state.opt_state[0].mu))
        assert kernel.sharding.is_fully_replicated and moment.sharding.spec == P("data", None)


def test_own_strategy_is_recorded_and_resumed(tmp_path: Any) -> None:
    for number, strategy in enumerate((f"{__name__}:zero1", zero1)):
        path = tmp_path / str(number)
        tiny.fit(adam(num_steps=10), path, strategy=strategy, devices=2)
        assert tiny.read(path)["layout"] == {"strategy": "zero1", "mesh": {"data": 2}}
    tiny.fit(adam(num_steps=20), resume=tmp_path / "0")
    with pytest.raises(jn.ConfigError, match="strategy is 'zero1', which is unknown.*or pass the Strategy itself"):
        tiny.fit(adam(num_steps=20), resume=tmp_path / "1")
    run = tiny.fit(adam(num_steps=20), resume=tmp_path / "1", strategy=zero1)
    assert run.summary.metrics == pytest.approx(tiny.fit(adam(num_steps=20)).summary.metrics, rel=1e-4)


@pytest.mark.slow
def test_sweep_takes_own_strategy() -> None:
    points, how = jn.grid(learning_rate=[0.01, 0.1]), {"vmap_size": 1, "record": False, **tiny.HOW}
    got, expected = (jn.sweep(adam(), points, **how, **more) for more in ({"strategy": zero1}, {"devices": 1}))
    for member, alone in zip(got.members, expected.members, strict=True):
        assert member.metrics() == pytest.approx(alone.metrics(), rel=1e-4)


def test_find_strategy_takes_names_paths_and_values() -> None:
    assert find_strategy("fsdp") is STRATEGIES["fsdp"] and find_strategy(zero1) is zero1
    assert find_strategy(f"{__name__}:zero1").name == "zero1"


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("fdsp", "strategy is 'fdsp', which is unknown: did you mean 'fsdp'"),
        ("nowhere:mine", "'nowhere:mine', which cannot be imported .No module named 'nowhere'"),
        ("math:mine", "cannot be imported .module 'math' has no attribute 'mine'"),
        (":mine", "and must be MODULE:NAME"),
        ("math:pi", "'math:pi', of type float: it must be a jaxnn.parallel.Strategy"),
        (7, "strategy is 7, of type int"),
        (zero1._replace(wrap=None), "wrap of strategy zero1 is None: it must be a function"),  # type: ignore[arg-type]
        (zero1._replace(axis_name="batch"), "axis_name of strategy zero1 is 'batch': it must be 'data' or None"),
    ],
)
def test_find_strategy_names_what_is_wrong(which: Any, words: str) -> None:
    with pytest.raises(jn.ConfigError, match=words):
        find_strategy(which)


def layout(**parts: Any) -> Layout:
    return make_layout(zero1._replace(**parts), 4)


def sharding(mesh: Mesh, shapes: TrainState, spec: P) -> TrainState:
    state: TrainState = jax.tree.map(lambda leaf: NamedSharding(mesh, spec if leaf.ndim else P()), shapes)
    return state


@pytest.mark.parametrize(
    ("shard_state", "words"),
    [
        (lambda mesh, shapes, specs: None, "shard_state of strategy zero1 must return a tree like the state's"),
        (
            lambda mesh, shapes, specs: jax.tree.map(lambda leaf: P(), shapes),
            r"returned P\(\) for step \[\]: return a NamedSharding",
        ),
        (
            lambda mesh, shapes, specs: sharding(mesh, shapes, P(None, "data")),
            r"for params/w \[32, 6\], which does not",
        ),
    ],
)
def test_wrong_shard_state_is_named(shard_state: Any, words: str) -> None:
    with pytest.raises(jn.ConfigError, match=words):
        layout(shard_state=shard_state).state_shardings(SHAPES, SPECS)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("data", "batch_spec of strategy zero1 returned 'data': return a PartitionSpec of the first axis"),
        (P("data", "model"), "of the first axis of a batch alone"),
        (P(("data", "more")), "strategy zero1 splits batches over more, which the mesh data=4 lacks"),
    ],
)
def test_wrong_batch_spec_is_named(spec: Any, words: str) -> None:
    with pytest.raises(jn.ConfigError, match=words):
        tiny.fit(adam(), strategy=zero1._replace(batch_spec=lambda mesh: spec), devices=4)


def test_chosen_strategy_splits_batches_in_the_same_way() -> None:
    with pytest.raises(jn.ConfigError, match="strategy zero1 chose pmap, which splits batches in another way"):
        layout(choose=lambda mesh, shapes: STRATEGIES["pmap"]).resolve(SHAPES)
