"""Mixed precision: floating arrays change their dtype, nothing else does."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxnn.nn import Policy

MIXED = Policy(params="float32", compute="bfloat16", outputs="float16")


def test_casts_change_floating_arrays_only():
    tree = {"w": jnp.ones((2, 3)), "b": [np.ones(3, np.float64), jnp.ones((), jnp.bfloat16)]}
    casts = (MIXED.cast_to_params, MIXED.cast_to_compute, MIXED.cast_to_outputs)
    for cast, dtype in zip(casts, ("float32", "bfloat16", "float16"), strict=True):
        got = cast(tree)
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {dtype}
    others = [np.arange(3), np.arange(3, dtype=np.uint8), np.array([True]), jax.random.key(0)]
    others += [np.ones(2, np.complex64), 2.5, 3, None]
    for got, leaf in zip(MIXED.cast_to_compute(others), others, strict=True):
        assert got is leaf
    # 1 + 2^-9 lies between two bfloat16, 2^-7 apart there: it becomes 1. The gradient keeps the parameter's dtype.
    value, gradient = jax.value_and_grad(lambda w: MIXED.cast_to_compute(w) * 3)(jnp.float32(1 + 2**-9))
    assert float(value) == 3.0 and gradient.dtype == jnp.float32


def test_policies_are_values_that_can_be_recorded():
    for dtype in (jnp.bfloat16, ml_dtypes.bfloat16, jnp.dtype("bfloat16")):
        policy = Policy(compute=dtype)
        assert policy == Policy(compute="bfloat16") and hash(policy) == hash(Policy(compute="bfloat16"))
    fields = json.loads(json.dumps(dataclasses.asdict(Policy(compute=jnp.bfloat16))))
    assert Policy(**fields) == Policy(compute="bfloat16")
