"""Devices, meshes and strategies: what is asked for is what is used, and mistakes are named before data are read."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxnn as jn
from jaxnn.models import GPT, MLP
from jaxnn.observe import nbytes
from jaxnn.parallel import STRATEGIES, make_layout, parse_mesh
from jaxnn.types import TrainState
from tests import shell, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

WIDE = MLP((128, 64, 3))


def wide(**fields: Any) -> jn.Experiment[Any]:
    """Matrices whose axes four devices share evenly, trained by Adam."""
    return tiny.experiment(
        task=lambda config: jn.tasks.classification(WIDE),
        optimizer=lambda config: optax.adam(config.learning_rate),
        **fields,
    )


def bytes_on_a_device(tree: Any) -> int:
    """Read off the arrays: what the first device holds of them."""
    return sum(
        nbytes(shard.data)
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device.id == 0
    )


# What is asked for is what is used.


def test_one_device_is_used_unless_more_are_asked_for() -> None:
    assert make_layout().mesh is None
    assert make_layout(devices="all").num_devices == jax.device_count() == 4
    assert make_layout("data").num_devices == 4
    assert make_layout("fsdp", 2).num_devices == 2
    assert make_layout(mesh="data=2").num_devices == 2


def test_fully_sharded_state_is_born_so_and_takes_fewer_bytes_on_more_devices() -> None:
    whole = tiny.fit(wide(num_steps=5)).state
    for num_devices in (2, 4):
        run = tiny.fit(wide(num_steps=5), devices=num_devices, strategy="fsdp")
        born = run._trainer.programs.init().params["Dense_1"]["kernel"].sharding
        assert born.spec == P("data", None)
        state = run.state
        small = sum(nbytes(leaf) for leaf in jax.tree.leaves(state) if leaf.size < 256)
        assert small < nbytes(whole) / 10
        assert bytes_on_a_device(state) == (nbytes(whole) - small) / num_devices + small


@pytest.mark.parametrize(("size", "expected"), [(10**3, "data"), (10**15, "fsdp")])
def test_auto_shards_a_state_that_is_too_large_to_be_replicated(size: int, expected: str) -> None:
    shapes = SQUARE._replace(params={"w": jax.ShapeDtypeStruct((size,), jnp.float32)})
    assert make_layout("auto", 4).resolve(shapes).strategy.name == expected


@pytest.mark.slow
def test_a_models_names_lay_it_out() -> None:
    model = GPT(7, num_layers=1, features=16, num_heads=4, max_length=8, dropout=0.2)
    tokens = np.random.default_rng(0).integers(0, 7, (32, 9)).astype(np.int32)
    data = jn.data.arrays(train=(tokens[:, :-1], tokens[:, 1:]), test=(tokens[:9, :-1], tokens[:9, 1:]))
    gpt = tiny.experiment(
        data=data, task=lambda config: jn.tasks.next_token(model), optimizer=lambda config: optax.adam(1e-3)
    )
    alone = tiny.fit(gpt)
    for mesh in ("data=2,model=2", "model=4"):
        split = tiny.fit(gpt, mesh=mesh)
        block, moments = split.state.params["Block_0"], split.state.opt_state[0].mu["Block_0"]
        size = parse_mesh(mesh)["model"]
        for tree in (block, moments):
            assert tree["Dense_0"]["kernel"].sharding.shard_shape((16, 48)) == (16, 48 // size)
            assert tree["Dense_3"]["kernel"].sharding.shard_shape((64, 16)) == (64 // size, 16)
        assert split.summary.metrics == pytest.approx(alone.summary.metrics, rel=1e-4)


@pytest.mark.slow
def test_accumulated_gradients_and_streamed_data_are_split_alike() -> None:
    accumulating = tiny.experiment(optimizer=lambda config: jn.optim.with_accumulation(optax.adam(0.01), 2))
    expected = tiny.fit(accumulating).summary.metrics
    for options in ({"strategy": "data"}, {"strategy": "fsdp"}, {"strategy": "pmap"}):
        got = tiny.fit(accumulating, resident=False, devices=4, **options).summary.metrics
        assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"mesh": "members=2,data=2"}, {"strategy": "data"}, {"mesh": "members=2,data=2", "strategy": "fsdp"}]
)
def test_a_sweeps_members_are_split_too(options: dict[str, Any]) -> None:
    points = jn.grid(learning_rate=[0.01, 0.1], seed=[0, 1])
    how = {"vmap_size": 1, "record": False, **tiny.HOW}
    expected = jn.sweep(wide(), points, devices=1, **how)
    got = jn.sweep(wide(), points, **options, **how)
    for member, alone in zip(got.members, expected.members, strict=True):
        assert member.metrics() == pytest.approx(alone.metrics(), rel=1e-4)


def test_a_run_tells_how_it_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.fit(tiny.experiment(), tmp_path / "run", devices=4, strategy="fsdp", progress="plain")
    assert "fsdp, data=4: a batch of 8 is 4 × 2 examples" in capsys.readouterr().out
    assert tiny.read(tmp_path / "run")["layout"] == {"strategy": "fsdp", "mesh": {"data": 4}}
    tiny.fit(tiny.experiment(), progress="plain")
    assert "--devices all would use the other 3 too" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_goes_on_on_other_devices_and_says_so(tmp_path: Path) -> None:
    tiny.fit(wide(num_steps=10), tmp_path / "run", devices=4, strategy="fsdp")
    assert tiny.fit(wide(num_steps=10), resume=tmp_path / "run")._trainer.programs.layout.num_devices == 4
    longer = tiny.fit(wide(num_steps=20), resume=tmp_path / "run", devices=2)
    assert longer.summary.metrics == pytest.approx(tiny.fit(wide(num_steps=20)).summary.metrics, rel=1e-4)
    resumed = tiny.read(tmp_path / "run")["resumed"][-1]
    assert resumed["changed"] == ["the layout fsdp data=4 → fsdp data=2", "num_steps 10 → 20"]


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_on_one_device_the_program_is_that_of_a_plain_run(strategy: str) -> None:
    def operations(**options: Any) -> Counter[str]:
        program: Any = tiny.fit(wide(num_steps=5), **options)._trainer.programs.train(None, 5, "to look into")
        return Counter(re.findall(r"= \S+ ([a-z-]+)\(", program.as_text()))

    plain = operations()
    assert plain["dot"] + plain["fusion"] > 10
    assert operations(strategy=strategy, devices=1) == plain


# Mistakes are named before data are read.


def unread(config: Any) -> Any:
    raise AssertionError("data were read")


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"devices": 5}, {}, r"requested 5 devices, but only 4 CPU devices are available"),
        ({"devices": 0}, {}, r"devices is 0, and must be a whole number of at least 1"),
        ({"devices": 3}, {}, r"batch_size is 8, which 3 devices cannot share evenly: .* are 6 and 9"),
        ({"devices": 4}, {"batch_size": 2}, r"nearest that they can are 4;"),
        ({"devices": 4, "eval_batch_size": 6}, {}, r"eval_batch_size is 6, .* 4 and 8"),
        ({"strategy": "ddp"}, {}, r"strategy is 'ddp', which is unknown: .*Known are 'auto', 'data', 'fsdp', 'pmap'"),
        ({"mesh": "2x2"}, {}, r"mesh is '2x2', and must be axes with their sizes, as in data=2,model=2"),
        ({"mesh": "data=2,data=2"}, {}, r"must be axes with their sizes"),
        ({"mesh": "data=2", "devices": 4}, {}, r"mesh data=2 is of 2 devices, and this run is to use 4"),
        ({"mesh": "data=2,model=2", "strategy": "pmap"}, {}, r"strategy pmap has the axis data alone"),
        ({"device": "gpu"}, {}, r"device is 'gpu', which JAX cannot open here .*jax\[cuda13\].*--device cpu"),
        ({"device": "cuda"}, {}, r"device is 'cuda', and must be one of None, cpu, gpu, tpu"),
    ],
)
def test_what_cannot_be_is_said_before_data_are_read(
    options: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    example = jn.Experiment(tiny.Config(**fields), unread, unread, unread)
    with pytest.raises(jn.ConfigError, match=message):
        jn.fit(example, record=False, **options)


def test_a_width_that_the_mesh_does_not_divide_is_named() -> None:
    model = GPT(7, num_layers=1, features=6, num_heads=2, max_length=8)
    tokens = np.zeros((16, 8), np.int32)
    gpt = tiny.experiment(data=jn.data.arrays(train=(tokens, tokens)), task=lambda config: jn.tasks.next_token(model))
    with pytest.raises(jn.ConfigError, match=r"parameter Block_0/Dense_0/bias has \[18\], whose axis 0 .* model=4"):
        tiny.fit(gpt, mesh="model=4")


@pytest.mark.parametrize("mesh", ["data=2,modle=2", "model=2"])
def test_an_axis_that_nothing_is_split_over_is_refused(mesh: str, tmp_path: Path) -> None:
    told = "=2, and nothing is split over mod.*: this model names no axis of its own, and batches are split over data"
    with pytest.raises(jn.ConfigError, match=told):
        tiny.fit(tiny.experiment(), tmp_path / "run", mesh=mesh)
    assert not (tmp_path / "run").exists()


def test_a_sweep_may_spread_members_and_nothing_else_that_is_not_named() -> None:
    with pytest.raises(jn.ConfigError, match="mesh has membres=2, and nothing is split over membres"):
        jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), mesh="membres=2,data=2", record=False, **tiny.HOW)


SQUARE = TrainState(jnp.int32(0), {"w": jnp.zeros((32, 32))}, {}, (), jax.random.key(0))


def fully_sharded(spec: P) -> P:
    """How a parameter ``[32, 32]`` of which the model names ``spec`` is split under fsdp."""
    mesh = make_layout("fsdp", mesh="data=2,model=2").mesh
    assert mesh is not None
    found: P = STRATEGIES["fsdp"].shard_state(mesh, SQUARE, {"w": spec}).params["w"].spec
    return found


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P("data", None), P("data", None)),  # not split over data twice
        (P(None, "model"), P("data", "model")),
        (P(None, ("data", "model")), P(None, ("data", "model"))),
        (P(("model", "pipe"), None), P("model", "data")),  # of what the mesh has
    ],
)
def test_what_a_model_names_is_split_so_and_the_rest_over_data(spec: P, expected: P) -> None:
    assert tuple(fully_sharded(spec)) == tuple(expected)


@pytest.mark.parametrize("spec", [P("data", "data"), P(None, None, "model"), P(("model", "data"), "model")])
def test_names_that_cannot_be_are_an_error_with_the_parameter(spec: P) -> None:
    with pytest.raises(jn.ConfigError, match=r"parameter w has \[32, 32\], and is named .*: name each axis once"):
        fully_sharded(spec)


@pytest.mark.parametrize("platforms", ["cuda", "foo"])
@pytest.mark.parametrize("options", ["", "device='gpu'"])
def test_a_backend_that_cannot_be_opened_is_a_sentence(platforms: str, options: str) -> None:
    script = f"""
        import jaxnn as jn
        from tests import tiny
        try:
            tiny.fit(tiny.experiment(), {options})
        except jn.ConfigError as error:
            print(error)
    """
    told = shell.python("-c", textwrap.dedent(script), JAX_PLATFORMS=platforms).stdout
    assert f"JAX_PLATFORMS allows only '{platforms}': unset it, or name what is there." in told


def test_another_kind_of_device_is_computed_on() -> None:
    run = tiny.fit(tiny.experiment(), device="cpu")
    assert {device.platform for leaf in jax.tree.leaves(run.state) for device in leaf.devices()} == {"cpu"}
