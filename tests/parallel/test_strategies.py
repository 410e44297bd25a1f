"""Strategies are values: a user's own trains as one device does, and its errors are named."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
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

SHAPES = TrainState(np.int32(0), {"w": np.zeros((32, 6), np.float32)}, {}, (), np.uint32(0))
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
# Batches are sharded along two axes of the mesh.
two_axes = STRATEGIES["data"]._replace(name="two_axes", batch_spec=lambda mesh: P(("data", "more")))
chooser = STRATEGIES["data"]._replace(name="chooser", choose=lambda mesh, shapes: zero1)


def adam(**fields: Any) -> jn.Experiment[Any]:
    return tiny.experiment(
        task=lambda config: jn.tasks.classification(MLP((64, 32, 3))),
        optimizer=lambda config: optax.adam(config.learning_rate),
        **fields,
    )


@functools.cache
def expected() -> Any:
    """The metrics of the same run on one device."""
    return pytest.approx(tiny.fit(adam()).summary.metrics, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"strategy": by_hand, "devices": 2}, "by_hand"),
        ({"strategy": two_axes, "mesh": "data=2,more=2"}, "two_axes"),
        ({"strategy": chooser, "devices": 4}, "zero1"),
    ],
    ids=["mapped", "two axes", "chosen"],
)
def test_own_strategy_trains_as_one_device_does(options: dict[str, Any], name: str) -> None:
    run = tiny.fit(adam(), **options)
    assert run.summary.metrics == expected()
    assert run._trainer.programs.layout.strategy.name == name
    if name == "zero1":
        kernel, moment = (tree["Dense_1"]["kernel"] for tree in (run.state.params, run.state.opt_state[0].mu))
        assert kernel.sharding.is_fully_replicated and moment.sharding.spec == P("data", None)


def test_own_strategy_is_recorded_and_resumed(tmp_path: Path) -> None:
    for name, strategy in {"path": f"{__name__}:zero1", "value": zero1}.items():
        tiny.fit(adam(num_steps=10), tmp_path / name, strategy=strategy, devices=2)
        assert tiny.read(tmp_path / name)["layout"] == {"strategy": "zero1", "mesh": {"data": 2}}
    with pytest.raises(jn.ConfigError, match="strategy is 'zero1', which is unknown.*or pass the Strategy itself"):
        tiny.fit(adam(), resume=tmp_path / "value")
    for name, options in {"path": {}, "value": {"strategy": zero1}}.items():
        assert tiny.fit(adam(), resume=tmp_path / name, **options).summary.metrics == expected()


@pytest.mark.slow
def test_sweep_trains_with_own_strategy() -> None:
    points, how = jn.grid(learning_rate=[0.01, 0.1]), {"vmap_size": 1, "record": False, **tiny.HOW}
    got, alone = (jn.sweep(adam(), points, **how, **more) for more in ({"strategy": zero1}, {"devices": 1}))
    for member, other in zip(got.members, alone.members, strict=True):
        assert member.metrics() == pytest.approx(other.metrics(), rel=1e-4)


def test_find_strategy_takes_names_paths_and_values() -> None:
    assert find_strategy("fsdp") is STRATEGIES["fsdp"] and find_strategy(zero1) is zero1
    assert find_strategy(f"{__name__}:zero1").name == "zero1"


def layout(**parts: Any) -> Layout:
    return make_layout(zero1._replace(**parts), 4)


def state_shardings(sharding: Any) -> Any:
    """The shardings of a strategy that gives each array ``sharding(mesh, leaf)``."""
    return layout(
        shard_state=lambda mesh, shapes, specs: jax.tree.map(functools.partial(sharding, mesh), shapes)
    ).state_shardings(SHAPES, SPECS)


def along_data(mesh: Mesh, leaf: Any) -> NamedSharding:
    return NamedSharding(mesh, P(None, "data") if leaf.ndim else P())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: find_strategy("fdsp"), "strategy is 'fdsp', which is unknown: did you mean 'fsdp'"),
        (lambda: find_strategy("nowhere:mine"), "'nowhere:mine', .*No module named 'nowhere'"),
        (lambda: find_strategy("math:mine"), "module 'math' has no attribute 'mine'"),
        (lambda: find_strategy(":mine"), "must be MODULE:NAME"),
        (lambda: find_strategy("math:pi"), "'math:pi', of type float: .* jaxnn.parallel.Strategy"),
        (lambda: find_strategy(7), "strategy is 7, of type int"),  # type: ignore[arg-type]
        (lambda: layout(wrap=None), "wrap of strategy zero1 is None: it must be a function"),
        (lambda: layout(axis_name="batch"), "axis_name of strategy zero1 is 'batch': .* 'data' or None"),
        (lambda: layout(batch_spec=lambda mesh: "data").data_size, "returned 'data': return a PartitionSpec of the fi"),
        (lambda: layout(batch_spec=lambda mesh: P("data", "model")).data_size, "of the first axis"),
        (lambda: layout(batch_spec=lambda mesh: P(("data", "more"))).data_size, "along more, .* mesh data=4 lacks"),
        (lambda: layout(shard_state=lambda *_: None).state_shardings(SHAPES, SPECS), "a tree like the state's"),
        (lambda: state_shardings(lambda mesh, leaf: P()), r"returned P\(\) for step \[\]: return a NamedSharding"),
        (lambda: state_shardings(along_data), r"for params/w \[32, 6\], which does not fit"),
        (lambda: layout(choose=lambda *_: STRATEGIES["pmap"]).resolve(SHAPES), "zero1 chose pmap, .*in another way"),
    ],
)
def test_wrong_strategies_are_named(call: Any, words: str) -> None:
    with pytest.raises(jn.ConfigError, match=words):
        call()
