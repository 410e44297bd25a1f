"""Attention: each implementation against a softmax written out in float64, and under every transformation."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.nn import attention
from jaxnn.types import ConfigError
from tests import draws

MODULE = sys.modules["jaxnn.nn._attention"]
IMPLEMENTATIONS = ("xla", "math", "memory_efficient")
BATCH, HEADS, DIM, BLOCK = 3, 4, 5, 16
# One compilation each, where eagerly each operation would be one.
compiled = jax.jit(attention, static_argnames=("causal", "implementation"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of 16, so that short sequences take several."""
    monkeypatch.setattr(MODULE, "memory_efficient_attention", partial(MODULE.memory_efficient_attention, block=BLOCK))
    monkeypatch.setattr(MODULE, "BLOCK", BLOCK)
    yield


def inputs(num_queries: int = 37, num_keys: int = 37, key_heads: int = HEADS, dtype: Any = jnp.float32) -> list[Any]:
    shapes = [(BATCH, num_queries, HEADS, DIM), *[(BATCH, num_keys, key_heads, DIM)] * 2]
    return [draws.normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def by_hand(query: Any, key: Any, value: Any, seen: Any = None, bias: Any = 0.0, scale: float | None = None) -> Any:
    """Softmax attention of one query at a time, in NumPy's float64; ``seen [batch, heads, T, S]``."""
    query, key, value, bias = (np.asarray(array, np.float64) for array in (query, key, value, bias))
    batch, num_queries, heads, dim = query.shape
    bias = np.broadcast_to(bias, (batch, heads, num_queries, key.shape[1]))
    group = heads // key.shape[2]
    out = np.zeros(query.shape)
    for b, t, h in np.ndindex(batch, num_queries, heads):
        scores = key[b, :, h // group] @ query[b, t, h] * (dim**-0.5 if scale is None else scale) + bias[b, h, t]
        weights = np.exp(scores - scores.max()) * (1 if seen is None else seen[b, h, t])
        out[b, t, h] = weights @ value[b, :, h // group] / max(weights.sum(), 1e-300)
    return out


def seen_keys(num_queries: int, num_keys: int, causal: bool = False, lengths: Any = None, mask: Any = True) -> Any:
    seen = np.ones((BATCH, HEADS, num_queries, num_keys), bool) & np.asarray(mask)
    if causal:
        seen &= np.arange(num_keys)[None] <= np.arange(num_queries)[:, None]
    if lengths is not None:
        seen &= np.arange(num_keys) < np.asarray(lengths)[:, None, None, None]
    return seen


MASK = np.random.default_rng(0).random((BATCH, 1, 37, 37)) < 0.5
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"lengths": [37, 5, 17]},
    "causal and lengths": {"causal": True, "lengths": [3, 37, 16]},
    "mask": {"mask": MASK},
    "mask of heads": {"mask": np.random.default_rng(1).random((1, HEADS, 37, 37)) < 0.5},
    "mask of keys": {"mask": np.random.default_rng(2).random((BATCH, 1, 1, 37)) < 0.5, "causal": True},
    "all together": {"mask": MASK, "causal": True, "lengths": [30, 36, 37]},
}


@pytest.mark.parametrize(
    ("implementation", "case"),
    # JAX tests its own masks: here, how they are handed to it.
    [(name, case) for name in ("math", "memory_efficient") for case in CASES]
    + [("xla", "all together"), ("xla", "lengths")],
)
def test_values_are_those_of_the_softmax_by_hand(implementation: str, case: str) -> None:
    arrays, options = inputs(), CASES[case]
    lengths = None if "lengths" not in options else jnp.array(options["lengths"])
    out = compiled(*arrays, **(options | {"lengths": lengths}), implementation=implementation)
    np.testing.assert_allclose(out, by_hand(*arrays, seen_keys(37, 37, **options)), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("implementation", "sizes", "causal"),
    [
        ("math", (1, 1), True),
        ("math", (15, 50), True),
        ("math", (50, 15), False),
        ("memory_efficient", (1, 1), True),
        ("memory_efficient", (1, 40), False),
        ("memory_efficient", (16, 16), True),
        ("memory_efficient", (15, 50), True),
        ("memory_efficient", (50, 15), True),
        ("memory_efficient", (50, 15), False),
    ],
)
def test_any_number_of_queries_and_keys(implementation: str, sizes: tuple[int, int], causal: bool) -> None:
    arrays = inputs(*sizes)
    out = compiled(*arrays, causal=causal, implementation=implementation)
    np.testing.assert_allclose(out, by_hand(*arrays, seen_keys(*sizes, causal)), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("implementation", "key_heads"), [("xla", 2), ("math", 2), ("memory_efficient", 2), ("math", 1)]
)
def test_queries_share_keys_in_groups(implementation: str, key_heads: int) -> None:
    arrays = inputs(20, 20, key_heads)
    np.testing.assert_allclose(compiled(*arrays, implementation=implementation), by_hand(*arrays), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("implementation", ["xla", "math"])
def test_a_bias_and_a_scale_of_ones_own(implementation: str) -> None:
    arrays, bias = inputs(), draws.normal(3, 1, HEADS, 37, 37)
    out = compiled(*arrays, bias=bias, scale=0.1, implementation=implementation)
    np.testing.assert_allclose(out, by_hand(*arrays, bias=bias, scale=0.1), rtol=1e-5, atol=2e-6)


def slope(attend: Callable[..., Any], arrays: list[Any], weights: Any) -> Any:
    return jax.jit(jax.grad(lambda arrays: jnp.sum(attend(*arrays) * weights)))(arrays)


@pytest.mark.parametrize("case", ["causal", "all together"])
def test_gradients_of_all_implementations_are_the_same(case: str) -> None:
    arrays, options = inputs(key_heads=2), dict(CASES[case])
    if "lengths" in options:
        options["lengths"] = jnp.array(options["lengths"])
    weights = draws.normal(3, *arrays[0].shape)
    xla, *others = (
        slope(partial(compiled, **options, implementation=name), arrays, weights) for name in IMPLEMENTATIONS
    )
    for grads in others:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), grads, xla)


def test_the_gradient_of_a_bias_is_summed_over_what_shares_it() -> None:
    arrays, bias = inputs(9, 9), jnp.zeros((1, HEADS, 1, 9))
    grads = [
        jax.grad(lambda bias, name=name: jnp.sum(compiled(*arrays, bias=bias, implementation=name) ** 2))(bias)
        for name in ("xla", "math")
    ]
    np.testing.assert_allclose(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_sees_nothing_is_zero_and_has_no_gradient(implementation: str) -> None:
    mask = np.ones((BATCH, 1, 37, 37), bool)
    mask[0, :, 3] = False  # query 3 of example 0 sees nothing; example 1 has no keys; example 2 has 9 queries
    options = {"mask": mask, "lengths": jnp.array([37, 0, 37]), "query_lengths": jnp.array([37, 37, 9])}
    attend = partial(compiled, **options, implementation=implementation)
    arrays = inputs()
    out = attend(*arrays)
    zero = np.zeros((BATCH, 37), bool)
    zero[0, 3] = zero[1] = zero[2, 9:] = True
    np.testing.assert_array_equal(np.all(np.asarray(out) == 0, axis=(2, 3)), zero)
    to_query, to_key, to_value = slope(attend, arrays, 1.0 + out)
    assert all(np.all(np.isfinite(grad)) for grad in (to_query, to_key, to_value))
    assert np.all(to_query[zero] == 0) and np.all(to_key[1] == 0) and np.all(to_value[1] == 0)


PADDING = jnp.arange(6) >= 4
LOWEST = np.finfo(np.float32).min
# What hides the last two of six keys, or with BIAS all keys of query 1 and none of the others.
HIDDEN: dict[str, dict[str, Any]] = {
    "lengths": {"lengths": jnp.full(BATCH, 4)},
    "mask of keys": {"mask": ~PADDING[None, None, None]},
    "mask of heads": {"mask": jnp.broadcast_to(~PADDING, (1, HEADS, 6, 6))},
}
BIAS = jnp.zeros((1, 1, 6, 6)).at[:, :, 1].set(LOWEST)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("case", HIDDEN)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_garbage_in_hidden_keys_and_values_is_seen(implementation: str, case: str, garbage: float) -> None:
    query, key, value = inputs(6, 6, 2)
    attend = partial(compiled, **HIDDEN[case], implementation=implementation)
    other = [query, *(jnp.where(PADDING[None, :, None, None], garbage, array) for array in (key, value))]
    expected = jax.nn.dot_product_attention(query, key, value, mask=~PADDING[None, None, None])
    np.testing.assert_allclose(attend(*other), expected, rtol=1e-5, atol=1e-6)
    grads = slope(attend, other, jnp.cos(expected))
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        grads,
        slope(attend, [query, key, value], jnp.cos(expected)),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_garbage_in_a_key_reaches_only_the_queries_that_see_it(implementation: str) -> None:
    query, key, value = inputs(6, 6)
    out = compiled(query, key.at[:, 4].set(np.nan), value, causal=True, implementation=implementation)
    expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(out[:, :4], expected[:, :4], rtol=1e-5, atol=1e-6)
    assert np.isnan(out[:, 4:]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_garbage_in_queries_beyond_their_length_has_no_gradient(implementation: str) -> None:
    query, key, value = inputs(6, 6)
    attend = partial(compiled, query_lengths=jnp.full(BATCH, 4), implementation=implementation)
    found, expected = (
        slope(attend, [array, key, value], 1.0)
        for array in (jnp.where(PADDING[None, :, None, None], np.nan, query), query)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("implementation", ["xla", "math"])
def test_a_lowest_bias_of_all_keys_is_the_same_for_each(implementation: str) -> None:
    # Added to any score it is what all scores of the query are: a softmax of equal scores.
    arrays = inputs(6, 6)
    attend = partial(compiled, bias=BIAS, implementation=implementation)
    jaxs = partial(jax.nn.dot_product_attention, bias=BIAS)
    near = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    near(attend(*arrays), jaxs(*arrays))
    near(attend(*arrays)[:, 1], arrays[2].mean(1))
    weights = draws.normal(3, *arrays[0].shape)
    jax.tree.map(near, slope(attend, arrays, weights), slope(jaxs, arrays, weights))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(implementation: str) -> None:
    query, key, value = inputs()
    # Scores of thousands: exp of any above 88 is infinite in float32, which also rounds them by 1e-4 or so.
    out = compiled(query * 1e3, key, value, implementation=implementation)
    np.testing.assert_allclose(out, by_hand(query * 1e3, key, value), atol=5e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision_keeps_its_dtype_and_is_near(implementation: str) -> None:
    arrays = inputs(dtype=jnp.bfloat16)
    attend = partial(compiled, causal=True, implementation=implementation)
    out, grads = attend(*arrays), slope(attend, arrays, jnp.bfloat16(1))
    assert {array.dtype for array in (out, *grads)} == {jnp.dtype("bfloat16")}
    # bfloat16 has 8 bits: 0.4 % of values up to 3.
    np.testing.assert_allclose(np.float64(out), by_hand(*arrays, seen_keys(37, 37, True)), atol=0.03)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_under_jit_vmap_scan_and_checkpoint(implementation: str) -> None:
    lengths = jnp.array([37, 6, 17])
    attend = partial(attention, causal=True, lengths=lengths, implementation=implementation)
    arrays = inputs()  # 37 tokens: three blocks
    factors = jnp.array([1.0, 0.5])

    def loss(factor: Any, arrays: Any) -> Any:
        return jnp.sum(attend(factor * arrays[0], *arrays[1:]) ** 2)

    graded = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))
    alone = [graded(factor, arrays) for factor in factors]
    together = jax.jit(jax.vmap(graded, (0, None)))(factors, arrays)
    _, in_turn = jax.lax.scan(lambda carry, factor: (carry, graded(factor, arrays)), 0, factors)
    one = partial(attention, causal=True, implementation=implementation)
    per_example = jax.jit(jax.vmap(lambda *arrays, n: one(*arrays, lengths=n)))(*arrays, n=lengths)
    for many in (together, in_turn):
        np.testing.assert_allclose(many, np.transpose(alone), rtol=2e-5)
    np.testing.assert_allclose(per_example, jax.jit(attend)(*arrays), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_batch_axis_or_two(implementation: str) -> None:
    arrays, lengths = inputs(9, 9), jnp.array([9, 4, 1])
    attend = partial(compiled, implementation=implementation)
    out = attend(*arrays, lengths=lengths)
    alone = attend(*(array[1] for array in arrays), lengths=lengths[1])
    two = attend(*(array[None] for array in arrays), lengths=lengths[None], mask=np.ones((BATCH, 1, 9, 9), bool))
    np.testing.assert_allclose(alone, out[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(two[0], out, rtol=1e-5, atol=1e-6)


def temporaries(implementation: str) -> int:
    arrays = [jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)] * 3
    attend = partial(compiled, causal=True, implementation=implementation)
    program = jax.jit(partial(slope, attend, weights=1.0)).lower(arrays).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_blocks_need_less_memory_forwards_and_backwards() -> None:
    # All scores of 2 heads: 2 * 2048**2 * 4 bytes = 33.6 MB; the arrays themselves are 0.26 MB each.
    assert temporaries("math") > 33e6
    assert temporaries("memory_efficient") < 4e6


def test_blocks_that_a_causal_mask_hides_are_not_computed() -> None:
    def num_pairs(causal: bool) -> list[int]:
        attend = partial(attention, causal=causal, implementation="memory_efficient")
        program = jax.make_jaxpr(partial(slope, attend, weights=1.0))(inputs(64, 64))
        return [int(length) for length in re.findall(r"\blength=(\d+)", str(program))]

    # 64 tokens are 4 blocks of 16: 4 * 4 pairs, of which 4 + 3 + 2 + 1 are not hidden; forwards and backwards.
    assert num_pairs(causal=False) == [16, 16]
    assert num_pairs(causal=True) == [10, 10]


def scopes(*arrays: Any, **options: Any) -> set[str]:
    text = str(jax.jit(partial(attention, **options)).lower(*arrays).as_text(debug_info=True))
    return {name for name in (*IMPLEMENTATIONS, "cudnn") if f"jaxnn.attention.{name}" in text}


def test_on_cpu_the_size_of_the_scores_chooses() -> None:
    short, long, decoding = inputs(64, 64), inputs(512, 512), inputs(1, 512)
    # 3 examples, 4 heads, 512 by 512 floats: 12.6 MB of scores.
    assert scopes(*long) == {"memory_efficient"}
    assert scopes(*long, bias=jnp.zeros((1, 1, 1, 512))) == {"math"}
    assert scopes(*long, implementation="math") == {"math"}
    assert scopes(*short) == scopes(*decoding) == {"math"}


CUDNN: list[tuple[float, tuple[int, ...], Any, dict[str, Any], str]] = [
    (7.5, (1, 8, 2, 64), jnp.bfloat16, {}, "NVIDIA GPU of compute capability 8.0"),
    (9.0, (1, 8, 2, 64), jnp.float32, {}, "bfloat16 and float16, not float32"),
    (9.0, (1, 8, 2, 5), jnp.bfloat16, {}, "multiple of 8 up to 128, not 5"),
    (8.0, (1, 9, 2, 64), jnp.bfloat16, {"scale": jnp.float32(1)}, "scale must be a plain number"),
    (8.0, (1, 9, 2, 64), jnp.bfloat16, {"mask": np.ones((1, 1, 9, 9), bool)}, "even lengths, not 9 and 9"),
]


def test_cudnn_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, shape, dtype, options, message in CUDNN:
        monkeypatch.setattr(MODULE, "_compute_capability", lambda capability=capability: capability)
        with pytest.raises(ConfigError, match=f"'cudnn' here: .*{message}.*; leave implementation out"):
            attention(*[jnp.zeros(shape, dtype)] * 3, **options, implementation="cudnn")


def test_a_function_is_an_implementation() -> None:
    def plain(query: Any, key: Any, value: Any, **given: Any) -> Any:
        options.append(given)
        return jax.nn.dot_product_attention(query, key, value, **given)

    arrays, options = inputs(9, 9), []
    call = {"causal": True, "lengths": jnp.array([9, 4, 0]), "scale": 0.5}
    out = attention(*arrays, **call, implementation=plain)
    np.testing.assert_allclose(out, attention(*arrays, **call, implementation="math"), rtol=1e-5, atol=1e-6)
    assert options[0]["is_causal"] and options[0]["scale"] == 0.5 and options[0]["mask"].shape == (3, 1, 1, 9)
    text = jax.jit(partial(attention, implementation=plain)).lower(*arrays).as_text(debug_info=True)
    assert "jaxnn.attention.plain" in text


def test_cudnn_is_what_a_gpu_takes_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, Any]] = []

    def pretend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        taken.append(options)
        return query

    monkeypatch.setattr(MODULE, "_compute_capability", lambda: 9.0)
    monkeypatch.setattr("jaxnn.nn._layer_arguments.platform", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", pretend)
    half = [jnp.ones((2, 8, 2, 64), jnp.bfloat16)] * 3
    out = attention(*half, causal=True, lengths=np.array([0, 3]))
    assert [options["implementation"] for options in taken] == ["cudnn"]
    assert np.array_equal(taken[0]["key_value_seq_lengths"], [1, 3])  # and what has no keys is made 0 after it
    assert np.all(out[0] == 0) and np.all(out[1] == 1)
    attention(*(array.astype(jnp.float32) for array in half))
    assert taken[1]["implementation"] == "xla"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": jnp.zeros((3, 9, 4, 6))}, "not query .* key .*6.* and value"),
        ({"query": jnp.zeros((3, 9, 3, 5))}, "a multiple of key_heads"),
        ({"value": jnp.zeros((3, 9, 2, 5), jnp.float16)}, "one floating dtype"),
        ({"mask": jnp.ones((9, 9))}, "mask must be bool"),
        ({"mask": jnp.ones((4, 1, 9, 9), bool)}, r"mask of shape \(4, 1, 9, 9\) does not broadcast"),
        ({"bias": jnp.zeros((1, 3, 1, 1, 9))}, "bias of shape .* does not broadcast"),
        ({"lengths": jnp.array([1, 2])}, r"lengths must be integers of shape \(3,\)"),
        ({"query_lengths": jnp.array([1.0, 2.0, 3.0])}, "query_lengths must be integers"),
        ({"scale": jnp.ones(4)}, r"scale must be one number, not of shape \[4\]"),
        ({"implementation": "flash"}, "no implementation 'flash'"),
        (
            {"implementation": "memory_efficient", "bias": jnp.zeros((9,))},
            "cannot use 'memory_efficient' here: it takes no bias",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    query, key, value = inputs(9, 9, 2)
    with pytest.raises(ConfigError, match=message):
        attention(**({"query": query, "key": key, "value": value} | change))
