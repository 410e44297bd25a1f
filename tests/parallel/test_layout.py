"""Devices, meshes and strategies: the requested ones are used, and errors are raised before data are read."""

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnn as jn
from jaxnn.observe import nbytes
from jaxnn.parallel import SINGLE_DEVICE, STRATEGIES, Layout, Strategy, find_strategy, make_layout
from jaxnn.types import PyTree, TrainState
from tests import tiny

SQUARE = TrainState(np.int32(0), {"w": np.zeros((32, 32), np.float32)}, {}, (), np.uint32(0))
NARROW = SQUARE._replace(params={"w": np.zeros((32, 6), np.float32)})


def init(key: jax.Array, inputs: jax.Array) -> dict[str, Any]:
    """Matrices that the mesh axis ``model`` shards, if there is one."""
    normal = linen.initializers.lecun_normal()
    hidden = jn.nn.partitioned(normal, (None, "model"))(key, (3, 128))
    return {"hidden": hidden, "out": jn.nn.partitioned(normal, ("model", None))(key, (128, 3)), "bias": jnp.zeros(3)}


def apply(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    return jax.nn.relu(inputs @ params["hidden"]) @ params["out"] + params["bias"][None]


def wide(**fields: Any) -> jn.Experiment[Any]:
    """A network with matrices that four devices share evenly, trained by SGD with momentum."""
    return tiny.experiment(model=(init, apply), **fields)


@functools.cache
def alone() -> tuple[jn.Run, str]:
    """The run on one device, and its report."""
    with contextlib.redirect_stdout(io.StringIO()) as report:
        return tiny.fit(wide(), progress="plain"), report.getvalue()


def expected() -> Any:
    """The metrics of the run on one device."""
    return pytest.approx(alone()[0].summary.metrics, rel=1e-4)


def test_one_device_is_used_unless_more_are_requested():
    assert make_layout() is make_layout(platform="cpu") is SINGLE_DEVICE
    assert make_layout("fsdp", 1).num_devices == 1
    assert make_layout(devices="all").num_devices == jax.device_count() == 4
    assert make_layout("data").num_devices == 4
    assert make_layout("fsdp", 2).num_devices == 2
    assert make_layout(mesh="data=2").num_devices == 2


def test_fully_sharded_state_is_created_in_shards_and_recorded(tmp_path, capsys):
    run = tiny.fit(wide(num_steps=5), tmp_path / "run", devices=4, strategy="fsdp", progress="plain")
    assert "fsdp, data=4: a batch of 8 is 4 × 2 examples" in capsys.readouterr().out
    assert "--devices all would use the other 3 too" in alone()[1]
    assert tiny.read(tmp_path / "run")["layout"] == {"strategy": "fsdp", "mesh": {"data": 4}}
    created = run._trainer.programs.init()
    small = sum(nbytes(leaf) for leaf in jax.tree.leaves(run.state) if leaf.size < 256)
    assert small < nbytes(run.state) / 5
    for state in (created, run.state):
        assert state.params["out"].sharding.spec == P("data", None)
        shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(state)]
        assert nbytes(shards) == (nbytes(run.state) - small) / 4 + small


def test_auto_shards_a_state_that_is_too_large_to_be_replicated():
    for size, expected in ((10**3, "data"), (10**15, "fsdp")):
        shapes = SQUARE._replace(params={"w": jax.ShapeDtypeStruct((size,), jnp.float32)})
        assert make_layout("auto", 4).resolve(shapes).strategy.name == expected


def test_model_axes_shard_its_parameters_and_moments():
    run = tiny.fit(wide(), mesh="data=2,model=2")
    for tree in (run.state.params, run.state.opt_state[0].trace):
        assert tree["hidden"].sharding.shard_shape((3, 128)) == (3, 64)
        assert tree["out"].sharding.shard_shape((128, 3)) == (64, 3)
    assert run.summary.metrics == expected()


@pytest.mark.slow
def test_accumulation_streaming_and_sweeps_train_the_same_on_several_devices():
    accumulating = tiny.experiment(optimizer=lambda config: jn.optim.with_accumulation(optax.adam(0.01), 2))
    got = tiny.fit(accumulating, resident=False, devices=4, strategy="fsdp").summary.metrics
    assert got == pytest.approx(tiny.fit(accumulating).summary.metrics, rel=1e-5)
    points, how = jn.grid(learning_rate=[0.01, 0.1]), {"vmap_size": 1, "record": False, **tiny.HOW}
    unsharded = jn.sweep(wide(), points, devices=1, **how)
    sharded = jn.sweep(wide(), points, mesh="members=2,data=2", strategy="fsdp", **how)
    for member, other in zip(sharded.members, unsharded.members, strict=True):
        assert member.final == pytest.approx(other.final, rel=1e-4)


def fully_sharded(spec: P, state: TrainState = SQUARE, mesh: str = "data=2,model=2") -> P:
    """How ``fsdp`` shards a parameter whose axes the model names in ``spec``."""
    found: P = STRATEGIES["fsdp"].shard_state(make_layout(mesh=mesh).mesh, state, {"w": spec}).params["w"].spec
    return found


def test_parameters_are_sharded_along_the_axes_of_the_model_and_then_data():
    assert fully_sharded(P("data", None)) == P("data", None), "not along data twice"
    assert fully_sharded(P(None, "model")) == P("data", "model")
    assert fully_sharded(P(None, ("data", "model"))) == P(None, ("data", "model"))
    assert fully_sharded(P(("model", "pipe"), None)) == P("model", "data"), "only the axes that the mesh has"


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


@pytest.mark.slow
def test_batches_sharded_along_two_axes_train_as_on_one_device():
    assert tiny.fit(wide(), strategy=two_axes, mesh="data=2,more=2").summary.metrics == expected()


@pytest.mark.slow
def test_own_strategies_are_chosen_recorded_and_resumed_and_train_as_on_one_device(tmp_path):
    run = tiny.fit(wide(num_steps=10), tmp_path, strategy=chooser, devices=2)
    kernel, moment = (tree["out"] for tree in (run.state.params, run.state.opt_state[0].trace))
    assert kernel.sharding.is_fully_replicated and moment.sharding.spec == P("data", None)
    assert moment.sharding.num_devices == 2
    assert tiny.read(tmp_path)["layout"] == {"strategy": "zero1", "mesh": {"data": 2}}
    with pytest.raises(jn.ConfigError, match="strategy is 'chooser', which is unknown.*or pass the Strategy itself"):
        tiny.fit(wide(), resume=tmp_path)
    tiny.fit(wide(num_steps=15), resume=tmp_path, strategy=f"{__name__}:by_hand", devices=4)
    # A path is recorded, and found again.
    run = tiny.fit(wide(), resume=tmp_path)
    assert run.summary.metrics == expected()
    assert run._trainer.programs.layout.strategy.name == "by_hand" and run._trainer.programs.layout.num_devices == 4
    assert [resumed["changed"] for resumed in tiny.read(tmp_path)["resumed"]] == [
        ["the layout zero1 data=2 → by_hand data=4", "num_steps 10 → 15"],
        ["num_steps 15 → 20"],
    ]


def unread(config: Any) -> Any:
    raise AssertionError("data were read")


def layout(**parts: Any) -> Layout:
    return make_layout(zero1._replace(**parts), 4)


def devices(**options: Any) -> Callable[[], object]:
    """Trains an experiment whose data must not be read."""
    return lambda: jn.fit(jn.Experiment(tiny.Config(), unread, unread, unread), record=False, **options)


def placed(shard_state: Callable[..., Any]) -> Callable[[], object]:
    """Places a state by the ``shard_state`` of a strategy."""
    return lambda: layout(shard_state=shard_state).state_shardings(NARROW, {"w": P()})


def along_data(mesh: Mesh, shapes: TrainState, specs: PyTree) -> Any:
    return jax.tree.map(lambda leaf: NamedSharding(mesh, P(None, "data") if leaf.ndim else P()), shapes)


NAMELESS = tiny.experiment()  # its parameters name no axis
NAMED_TWICE = r"parameter w has \[32, 32\], and is named .*: name each axis once"
ERRORS: list[tuple[Callable[[], object], str]] = [
    (devices(devices=5), "requested 5 devices, but only 4 CPU devices are available.*JAX_NUM_CPU_DEVICES=5"),
    (devices(devices=0), "devices must be an integer >= 1, not 0"),
    (devices(devices=3), "batch_size is 8, .* 3 devices .* 6 and 9"),
    (devices(devices=4, eval_batch_size=6), "eval_batch_size is 6, .* 4 and 8"),
    (devices(strategy="ddp"), "strategy is 'ddp', which is unknown: .*'auto', 'data', 'fsdp', 'pmap'"),
    (devices(mesh="2x2"), "mesh is '2x2', and must be axes with their sizes, as in data=2,model=2"),
    (devices(mesh="data=2", devices=4), "mesh data=2 .* 2 devices, .* 4"),
    (devices(mesh="data=2,model=2", strategy="pmap"), "strategy pmap .* axis data alone"),
    (devices(device="gpu"), r"device is 'gpu', which JAX cannot open here .*jax\[cuda13\].*--device cpu"),
    (devices(device="cuda"), "device is 'cuda', and must be one of None, cpu, gpu, tpu"),
    (lambda: tiny.fit(NAMELESS, mesh="data=2,modle=2"), "modle=2, and nothing is (split|sharded) .*modle.* over data"),
    (lambda: tiny.fit(NAMELESS, mesh="model=2"), "model=2, and nothing is (split|sharded) .*model.* over data"),
    (lambda: fully_sharded(P("data", "data")), NAMED_TWICE),
    (lambda: fully_sharded(P(None, None, "model")), NAMED_TWICE),
    (lambda: fully_sharded(P(("model", "data"), "model")), NAMED_TWICE),
    (lambda: fully_sharded(P(None, "model"), NARROW, "model=4"), r"w has \[32, 6\], whose axis 1 .* model=4 evenly"),
    (lambda: find_strategy("nowhere:mine"), "'nowhere:mine', .*No module named 'nowhere'"),
    (lambda: find_strategy("math:pi"), "'math:pi', of type float: .* jaxnn.parallel.Strategy"),
    (lambda: layout(axis_name="batch"), "axis_name of strategy zero1 is 'batch': .* 'data' or None"),
    (lambda: layout(batch_spec=lambda mesh: "data").data_size, "returned 'data': return a PartitionSpec of the fi"),
    (lambda: layout(batch_spec=lambda mesh: P(("data", "more"))).data_size, "along more, .* mesh data=4 lacks"),
    (placed(lambda *_: None), "a tree like the state's"),
    (
        placed(lambda mesh, shapes, specs: jax.tree.map(lambda leaf: P(), shapes)),
        r"returned P\(\) for step \[\]: return a NamedSharding",
    ),
    (placed(along_data), r"for params/w \[32, 6\], which does not fit"),
]


@pytest.mark.parametrize(("call", "words"), ERRORS, ids=[words for _, words in ERRORS])
def test_wrong_devices_axes_and_strategies_are_named(call, words):
    with pytest.raises(jn.ConfigError, match=words):
        call()
