"""Weights as safetensors: equal bytes on a round trip, names that other tools use, clear errors."""

from __future__ import annotations

import importlib
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxnn as jn

safetensors = pytest.importorskip("safetensors", reason="weights need jaxnn[safetensors]")


def test_weights_keep_names_shapes_dtypes_and_bytes(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4,), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    weights = {
        "Dense_0": {"kernel": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3).T, "bias": np.float16([1, np.nan])},
        "scale": jnp.float32(3),
        "table": jax.device_put(np.arange(8, dtype=np.int32), sharding),
        "order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    jn.save_weights(tmp_path / "w.safetensors", weights)
    found = jn.load_weights(tmp_path / "w.safetensors")
    chex.assert_trees_all_equal_shapes_and_dtypes(found, weights)
    as_bytes = [jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), tree) for tree in (found, weights)]
    assert as_bytes[0] == as_bytes[1]
    with safetensors.safe_open(tmp_path / "w.safetensors", "np") as file:
        assert sorted(file.keys()) == ["Dense_0.bias", "Dense_0.kernel", "order", "scale", "table"]


def test_what_is_no_weights_is_named(tmp_path: Path) -> None:
    for wrong in ({"a.b": np.ones(1)}, [np.ones(1)], np.ones(1), {1: {"b": [np.ones(1)]}}):
        with pytest.raises(jn.ConfigError, match="weights must be arrays in dicts, whose keys have no dots"):
            jn.save_weights(tmp_path / "w.safetensors", wrong)
    kinds = {"float8_e5m2": jnp.ones(1, "float8_e5m2"), "key<fry>": jax.random.key(0), "object": None, "<U1": "w"}
    for dtype, wrong in kinds.items():
        with pytest.raises(jn.ConfigError, match=f"cannot hold Dense_0.bias of dtype {dtype}: convert it"):
            jn.save_weights(tmp_path / "w.safetensors", {"Dense_0": {"bias": wrong}})
    with pytest.raises(jn.ConfigError, match="cannot hold __metadata__"):
        jn.save_weights(tmp_path / "w.safetensors", {"__metadata__": np.ones(1)})
    assert not any(tmp_path.iterdir())


def test_files_that_are_no_dicts_of_arrays_are_named(tmp_path: Path) -> None:
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    save = importlib.import_module("safetensors.numpy").save_file
    save({"Dense.bias": np.asarray(jnp.ones(1, "float8_e5m2"))}, tmp_path / "float8.safetensors")
    save({"a.b": np.ones(1), "a.b.c": np.ones(1)}, tmp_path / "both.safetensors")
    files = dict.fromkeys(("torn", "missing", "float8"), "cannot be read as safetensors")
    for name, words in {**files, "both": "has a tensor a.b and others below this name"}.items():
        with pytest.raises(jn.RecordError, match=f"{name}.safetensors {words}"):
            jn.load_weights(tmp_path / f"{name}.safetensors")
