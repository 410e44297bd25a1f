"""Placement is read from the arrays."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.observe import Placement, check_placement, observe_placement
from jaxnn.types import TrainingError


@pytest.fixture
def platform() -> str:
    return jax.default_backend()


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    types = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((2,), ("data",), axis_types=types, devices=jax.devices()[:2])


def test_arrays_of_one_device(platform) -> None:
    params = {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}
    tree, key = observe_placement(parameters=params, key=jax.random.key(0))
    assert key.device_bytes == {f"{platform}:0": 8}
    assert tuple(tree.first_leaf) == (platform,)
    assert (tree.num_leaves, tree.num_committed) == (2, 0)
    assert tree.num_bytes == 6 * 4 + 3 * 4
    assert tree.device_bytes == {f"{platform}:0": 36}


def test_a_committed_leaf_is_counted() -> None:
    tree = {"a": jnp.zeros(2), "b": jax.device_put(jnp.zeros(2), jax.devices()[0])}
    (observed,) = observe_placement(data=tree)
    assert observed.num_committed == 1
    assert str(observed).endswith("(1 committed)")


def test_copies_count_on_each_device_and_shards_once(mesh, platform) -> None:
    copied = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, jax.P()))
    split = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, jax.P("data")))
    parameters, data = observe_placement(parameters=copied, data=split)
    # 8 floats of 4 bytes: whole on both, or half on each.
    assert parameters.device_bytes == {f"{platform}:0": 32, f"{platform}:1": 32}
    assert data.device_bytes == {f"{platform}:0": 16, f"{platform}:1": 16}
    assert parameters.num_bytes == data.num_bytes == 32


def test_a_host_array_is_named_by_its_path(platform) -> None:
    state = {"layer": {"bias": jnp.zeros(2), "kernel": np.zeros((2, 2), np.float32)}}
    state["rest"] = np.zeros(3, np.float32)
    placement = observe_placement(optimizer_state=state)
    with pytest.raises(TrainingError, match=r"optimizer state\['layer'\]\['kernel'\] is on host"):
        check_placement(placement, platform)
    assert placement[0].device_bytes == {f"{platform}:0": 8, "host": 16 + 12}


def test_check_names_the_first_leaf_elsewhere_and_is_silent_if_all_is_well() -> None:
    good = Placement("parameters", 1, 0, 4, {"gpu:0": 4}, {"gpu": "['a']"})
    bad = Placement("data", 2, 1, 8, {"gpu:0": 4, "cpu:0": 4}, {"gpu": "[0]", "cpu": "[1]"})
    check_placement([good], "gpu")
    with pytest.raises(TrainingError, match=r"^data\[1\] is on cpu, not on gpu"):
        check_placement([good, bad], "gpu")


def test_an_empty_tree_is_nowhere_and_passes(platform) -> None:
    placement = observe_placement(model_state={})
    check_placement(placement, platform)
    assert [str(tree) for tree in placement] == ["model state: 0 leaves, 0 B on no device"]


def test_it_reads_well_and_is_json() -> None:
    tree = Placement("parameters", 4, 4, 1536 * 1024, {"gpu:0": 1}, {"gpu": "['a']"})
    assert str(tree) == "parameters: 4 leaves, 1.5 MiB on gpu:0 (committed)"
    written = json.loads(json.dumps(dataclasses.asdict(tree)))
    assert written["device_bytes"] == {"gpu:0": 1}
    assert written["first_leaf"] == {"gpu": "['a']"}
