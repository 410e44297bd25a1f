"""Mixed precision: floating arrays change their dtype, nothing else does."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxnn.nn import Policy
from jaxnn.types import ConfigError

MIXED = Policy(params="float32", compute="bfloat16", outputs="float16")


def test_each_cast_has_its_dtype() -> None:
    tree = {"w": jnp.ones((2, 3)), "b": [np.ones(3, np.float64), jnp.ones((), jnp.bfloat16)]}
    casts = (MIXED.cast_to_params, MIXED.cast_to_compute, MIXED.cast_to_outputs)
    for cast, dtype in zip(casts, ("float32", "bfloat16", "float16"), strict=True):
        got = cast(tree)
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {dtype}


def test_what_is_not_floating_is_untouched() -> None:
    tree = [
        jnp.arange(3),
        np.arange(3, dtype=np.uint8),
        jnp.array([True]),
        jax.random.key(0),
        jnp.ones(2, jnp.complex64),
        2.5,
        3,
        None,
    ]
    for got, leaf in zip(MIXED.cast_to_compute(tree), tree, strict=True):
        assert got is leaf


def test_values_are_rounded_once_and_gradients_come_back_wide() -> None:
    # 1 + 2^-9 lies between two bfloat16, 2^-7 apart there: it becomes 1.
    params = {"w": jnp.float32(1 + 2**-9)}
    loss = lambda params: MIXED.cast_to_compute(params)["w"] * 3  # noqa: E731
    assert float(loss(params)) == 3.0
    assert jax.grad(loss)(params)["w"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, ml_dtypes.bfloat16, jnp.dtype("bfloat16")])
def test_a_dtype_does_for_its_name(dtype: object) -> None:
    policy = Policy(compute=dtype)
    assert policy == Policy(compute="bfloat16")
    assert hash(policy) == hash(Policy(compute="bfloat16"))


def test_a_policy_can_be_recorded() -> None:
    fields = json.loads(json.dumps(dataclasses.asdict(Policy(compute=jnp.bfloat16))))
    assert Policy(**fields) == Policy(compute="bfloat16")


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        ("bfloat61", "compute='bfloat61' is no dtype to train in: did you mean 'bfloat16'"),
        ("int8", "Known are 'bfloat16', 'float16', 'float32'"),
        (jnp.int32, "compute=.*int32.* is no dtype"),
        (7, "compute=7 is no dtype"),
        (None, "compute=None is no dtype"),
    ],
)
def test_another_dtype_is_named(dtype: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Policy(compute=dtype)
