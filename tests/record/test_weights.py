"""Weights as safetensors: equal bytes on a round trip, names that other tools use, clear errors."""

from __future__ import annotations

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
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    for name in ("torn", "missing"):
        with pytest.raises(jn.RecordError, match=f"{name}.safetensors cannot be read as safetensors"):
            jn.load_weights(tmp_path / f"{name}.safetensors")
