"""Wrong arguments of layers and losses, by one table: each is named before anything is compiled; policies of dtypes."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen

from jaxnn import nn
from jaxnn.nn import Policy
from jaxnn.types import ConfigError, DataError

KEY = jax.random.key(0)
X = np.ones((3, 6, 5), np.float32)
ROWS, KERNEL, LABELS = np.ones((2, 3), np.float32), np.ones((3, 5), np.float32), np.ones(2, np.int32)
STATE = np.ones((3, 4), np.float32)
both = nn.Bidirectional(nn.GRU(4), nn.GRU(4))


def attend(**change: Any) -> Any:
    query, keys = np.ones((3, 9, 4, 5), np.float32), np.ones((3, 9, 2, 5), np.float32)
    return nn.attention(**({"query": query, "key": keys, "value": keys} | change))


def run(layer: linen.Module, inputs: Any = X, **call: Any) -> Any:
    return layer.init(KEY, inputs, **call)


def drop(x: Any, **rngs: Any) -> Any:
    return nn.Dropout(1.0, rng_collection="noise").apply({}, x, train=True, rngs=rngs)


lstm = functools.partial(run, nn.LSTM(4))
linear = nn.linear_cross_entropy
TABLE: list[tuple[Callable[[], Any], str]] = [
    (lambda: attend(key=np.zeros((3, 9, 4, 6))), "not query .* key .*6.* and value"),
    (lambda: attend(query=np.zeros((3, 9, 3, 5))), "a multiple of key_heads"),
    (lambda: attend(value=np.zeros((3, 9, 2, 5), np.float16)), "one floating dtype"),
    (lambda: attend(mask=np.ones((9, 9))), "mask must be bool"),
    (lambda: attend(mask=np.ones((4, 1, 9, 9), bool)), r"mask of shape \(4, 1, 9, 9\) does not broadcast"),
    (lambda: attend(bias=np.zeros((1, 3, 1, 1, 9), np.float32)), "bias of shape .* does not broadcast"),
    (lambda: attend(lengths=np.array([1, 2])), r"lengths must be integers of shape \(3,\)"),
    (lambda: attend(query_lengths=np.array([1.0, 2.0, 3.0])), "query_lengths must be integers"),
    (lambda: attend(scale=np.ones(4)), r"scale must be one number, not of shape \[4\]"),
    (lambda: attend(implementation="flash"), "no implementation 'flash'"),
    (lambda: attend(implementation="memory_efficient", bias=np.zeros((9,), np.float32)), "it takes no bias"),
    (lambda: nn.cross_entropy(ROWS, np.ones(2, np.float32)), r"integers, not \[2, 3\] and float32"),
    (lambda: nn.cross_entropy(ROWS, np.ones(3, np.int32)), r"not \[2, 3\] and int32 \[3\]"),
    (lambda: nn.cross_entropy(jnp.float32(1), jnp.int32(0)), r"logits \[..., classes\]"),
    (lambda: nn.cross_entropy(ROWS[0], jnp.int32(0), 1.5), "label_smoothing .*0…1, not 1.5"),
    (lambda: linear(ROWS, np.ones((4, 5), np.float32), LABELS), r"kernel \(4, 5\), bias None"),
    (lambda: linear(ROWS, KERNEL, LABELS, np.ones(4)), r"hidden \(2, 3\), .*\(3, 5\), bias \(4,\)"),
    (lambda: linear(ROWS, KERNEL, LABELS, chunk=0), "chunk must be an integer >= 1, not 0"),
    (lambda: nn.Policy(compute="bfloat61"), "compute='bfloat61' .*did you mean 'bfloat16'"),
    (lambda: nn.Policy(compute=jnp.int32), "compute=.*int32"),
    (lambda: nn.Policy(compute=None), "compute=None"),
    (lambda: nn.avg_pool(np.ones((4, 4), np.float32), (2, 2), (2, 2)), r"2 spatial axes, features\], not"),
    (lambda: nn.avg_pool(np.ones((1, 4, 4, 1), bool), (2, 2), (2, 2)), r"2 spatial axes, features\], not"),
    (lambda: nn.Dropout(-0.1), "dropout rate .* 0…1"),
    (lambda: nn.Dropout(1.5), "dropout rate .* 0…1"),
    (lambda: nn.Dropout(float("nan")), "dropout rate .* 0…1"),
    (lambda: drop(ROWS), "rngs={'noise': key}"),
    (lambda: drop(LABELS, noise=KEY), "floats.* int32"),
    (lambda: run(nn.Embed(7, 3), ROWS), "integer ids, not float32: cast"),
    (lambda: nn.Bidirectional(linen.RNN(linen.GRUCell(4)), nn.GRU(4)), "not RNN: use flax.linen.Bidirectional"),
    (lambda: nn.GRU(0), "GRU: features must be an integer >= 1, not 0"),
    (lambda: run(nn.GRU(4, implementation="hoist")), "recurrence has no implementation 'hoist'"),
]
# Window, strides and padding, of either kind of pooling.
POOLS: list[tuple[tuple[Any, Any, Any], str]] = [
    ((2, None, "VALID"), r"the window must be a tuple of integers >= 1, as \(2, 2\), not 2"),
    (((0, 2), (0, 2), "VALID"), r"the window must be a tuple of integers >= 1"),
    (((2, 2), 2, "VALID"), r"the strides must be a tuple of integers >= 1"),
    (((2, 2), (2,), "VALID"), r"window \(2, 2\) and strides \(2,\)"),
    (((2, 2), None, "FULL"), "no padding 'FULL'.* 'SAME', 'SAME_LOWER', 'VALID'"),
    (((2, 2), None, 1), r"padding must be .*\(low, high\).*, not 1"),
    (((2, 2), None, ((1, 1),)), r"padding must be .*\(low, high\)"),
]
TABLE += [
    (functools.partial(pool, np.ones((1, 4, 4, 1)), *how), words)
    for how, words in POOLS
    for pool in (nn.max_pool, nn.avg_pool)
]
BAD_DATA: list[tuple[Callable[[], Any], str]] = [
    (lambda: lstm(np.ones((2, 3), np.int32)), r"floats \[\*batch, time, features\], not int32 \[2, 3\]: embed"),
    (lambda: lstm(np.ones(3, np.float32), time_major=True), r"floats \[time, \*batch, features\], not"),
    (lambda: lstm(seq_lengths=np.ones((3, 1), int)), r"seq_lengths .* \[3\], not int32 \[3, 1\]"),
    (lambda: lstm(seq_lengths=np.ones(3, np.float32)), r"\[3\], not float32 \[3\]"),
    (lambda: lstm(initial_carry=STATE), r"initial_carry \(c, h\) of \[3, 4\] each, not \(3, 4\)"),
    (lambda: lstm(initial_carry=(STATE, np.ones((3, 5)))), r"not \(\(3, 4\), \(3, 5\)\)"),
    (lambda: run(nn.GRU(4), initial_carry=(X, X)), r"initial_carry \[3, 4\], not"),
    (lambda: run(both, initial_carry=X), "initial_carry of 2 states"),
]


@pytest.mark.parametrize(
    ("error", "call", "words"), [*((ConfigError, *row) for row in TABLE), *((DataError, *row) for row in BAD_DATA)]
)
def test_wrong_arguments_are_named(error, call, words):
    def traced() -> None:
        call()

    with pytest.raises(error, match=words):
        jax.eval_shape(traced)


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
