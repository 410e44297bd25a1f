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
near = partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
# What is JAX's own is slow: "math" shows what the implementations share.
XLA = pytest.param("xla", marks=pytest.mark.slow)
slow_xla = pytest.mark.parametrize("implementation", [XLA, *IMPLEMENTATIONS[1:]])


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


def random_mask(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < 0.5


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal and lengths": {"causal": True, "lengths": [3, 37, 16]},
    "mask of heads": {"mask": random_mask(1, 1, HEADS, 37, 37)},
    "mask of keys": {"mask": random_mask(2, BATCH, 1, 1, 37), "causal": True},
    "all together": {"mask": random_mask(0, BATCH, 1, 37, 37), "causal": True, "lengths": [30, 36, 37]},
}
SIZES = [(1, 1, True), (1, 40, False), (16, 16, True), (15, 50, True), (50, 15, True), (50, 15, False)]


@implementations
def test_values_equal_the_softmax_by_hand(implementation: str) -> None:
    attend = partial(attention, implementation=implementation)
    arrays, grouped, one_head = inputs(), inputs(20, 20, 2), inputs(20, 20, 1)
    # JAX tests its own masks: here, how they are handed to it.
    cases = {name: case for name, case in CASES.items() if implementation != "xla" or name == "all together"}
    sizes = [] if implementation == "xla" else SIZES
    bias = {} if implementation == "memory_efficient" else {"bias": draws.normal(3, 1, HEADS, 37, 37)}

    @jax.jit
    def run() -> Any:
        return (
            {name: attend(*arrays, **case) for name, case in cases.items()},
            [attend(*inputs(*size), causal=causal) for *size, causal in sizes],
            [attend(*grouped), attend(*one_head), attend(*arrays, **bias, scale=0.1)],
            attend(1e3 * arrays[0], *arrays[1:]),
        )

    outputs, by_size, (of_groups, of_one, scaled), large = run()
    for name, case in cases.items():
        near(outputs[name], by_hand(*arrays, seen_keys(37, 37, **case)), err_msg=name)
    for out, (*size, causal) in zip(by_size, sizes, strict=True):
        near(out, by_hand(*inputs(*size), seen_keys(*size, causal)), err_msg=str((size, causal)))
    near(of_groups, by_hand(*grouped))
    near(of_one, by_hand(*one_head))
    near(scaled, by_hand(*arrays, **bias, scale=0.1))
    # Scores of thousands: exp of any above 88 is infinite in float32, which also rounds them by 1e-4 or so.
    np.testing.assert_allclose(large, by_hand(1e3 * arrays[0], *arrays[1:]), atol=5e-3)


def slope(attend: Callable[..., Any], arrays: Any, weights: Any) -> Any:
    return jax.grad(lambda arrays: jnp.sum(attend(*arrays) * weights))(arrays)


def test_gradients_of_all_implementations_agree() -> None:
    arrays, weights = inputs(key_heads=2), draws.normal(3, BATCH, 37, HEADS, DIM)
    cases = [{"causal": True}, CASES["all together"]]

    def grads(name: str) -> Any:
        results = [slope(partial(attention, **case, implementation=name), arrays, weights) for case in cases]
        if name != "memory_efficient":  # of a bias that queries, or examples, share
            attend = partial(attention, *inputs(9, 9), implementation=name)
            bias = jnp.zeros((1, HEADS, 1, 9))
            results.append([jax.grad(lambda bias: jnp.sum(attend(bias=bias) ** 2))(bias)])
        return results

    xla, math, blocks = jax.jit(lambda: [grads(name) for name in IMPLEMENTATIONS])()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), math, xla)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), blocks, xla[:2])


@implementations
def test_queries_that_see_nothing_are_zero_and_have_no_gradient(implementation: str) -> None:
    mask = np.ones((BATCH, 1, 37, 37), bool)
    mask[0, :, 3] = False  # query 3 of example 0 sees nothing; example 1 has no keys; example 2 has 9 queries
    options = {"mask": mask, "lengths": jnp.array([37, 0, 37]), "query_lengths": jnp.array([37, 37, 9])}
    attend, arrays = partial(attention, **options, implementation=implementation), inputs()
    out, grads = jax.jit(lambda arrays: (attend(*arrays), slope(attend, arrays, 1.0 + attend(*arrays))))(arrays)
    zero = np.zeros((BATCH, 37), bool)
    zero[0, 3] = zero[1] = zero[2, 9:] = True
    np.testing.assert_array_equal(np.all(np.asarray(out) == 0, axis=(2, 3)), zero)
    to_query, to_key, to_value = map(np.asarray, grads)
    assert all(np.isfinite(grad).all() for grad in (to_query, to_key, to_value))
    assert not to_query[zero].any() and not to_key[1].any() and not to_value[1].any()


PADDING = np.arange(6) >= 4
# What hides the last two of six keys.
HIDDEN: list[dict[str, Any]] = [
    {"lengths": jnp.full(BATCH, 4)},
    {"mask": ~PADDING[None, None, None]},
    {"mask": np.broadcast_to(~PADDING, (1, HEADS, 6, 6))},
]
LOWEST_BIAS = np.zeros((1, 1, 6, 6), np.float32)
LOWEST_BIAS[:, :, 1] = np.finfo(np.float32).min


@slow_xla
def test_nan_and_infinity_reach_only_queries_that_see_them(implementation: str) -> None:
    query, key, value = inputs(6, 6, 2)
    attend, jaxs = partial(attention, implementation=implementation), jax.nn.dot_product_attention
    weights, padded = draws.normal(3, *query.shape), PADDING[None, :, None, None]

    @jax.jit
    def run(garbage: jax.Array) -> Any:
        others = [jnp.where(padded, garbage, array) for array in (query, key, value)]
        pairs = [(jaxs(query, key, value, mask=~PADDING[None, None, None]), attend(query, *others[1:], **HIDDEN[0]))]
        for options in HIDDEN:
            hidden = partial(attend, **options)
            pairs.append(tuple(slope(hidden, given, weights) for given in ([query, key, value], [query, *others[1:]])))
        short = partial(attend, query_lengths=jnp.full(BATCH, 4))
        pairs.append(tuple(slope(short, [each, key, value], 1.0) for each in (query, others[0])))
        if implementation != "memory_efficient":  # a bias that hides all keys from a query makes them equal
            biased, expected = partial(attend, bias=LOWEST_BIAS), partial(jaxs, bias=LOWEST_BIAS)
            arrays = [query, key, value]
            pairs.append(([expected(*arrays), value.mean(1)], [biased(*arrays), biased(*arrays)[:, 1, ::2]]))
            pairs.append((slope(expected, arrays, weights), slope(biased, arrays, weights)))
        causal = attend(query, key.at[:, 4].set(garbage), value, causal=True)
        pairs.append((jaxs(query, key, value, is_causal=True)[:, :4], causal[:, :4]))
        return pairs, causal[:, 4:]

    for garbage in (np.nan, np.inf):
        pairs, seeing = run(garbage)
        for expected, found in pairs:
            jax.tree.map(near, found, expected)
        assert np.isnan(seeing).all() or garbage == np.inf


@slow_xla
def test_half_precision_transformations_and_batch_axes(implementation: str) -> None:
    attend = partial(attention, causal=True, implementation=implementation)
    arrays, narrow, small = inputs(), inputs(dtype=jnp.bfloat16), inputs(9, 9)
    lengths, factors, few = jnp.array([37, 6, 17]), jnp.array([1.0, 0.5]), jnp.array([9, 4, 1])

    def loss(factor: Any) -> Any:
        return jnp.sum(attend(factor * arrays[0], *arrays[1:], lengths=lengths) ** 2)

    graded = jax.value_and_grad(jax.checkpoint(loss))

    @jax.jit
    def run() -> Any:
        return (
            (attend(*narrow), slope(attend, narrow, jnp.bfloat16(1))),
            [jax.value_and_grad(loss)(factor) for factor in (1.0, 0.5)],
            [jax.vmap(graded)(factors), jax.lax.scan(lambda _, factor: (None, graded(factor)), None, factors)[1]],
            (attend(*arrays, lengths=lengths), jax.vmap(lambda *a, n: attend(*a, lengths=n))(*arrays, n=lengths)),
            attend(*small, lengths=few),
            attend(*(array[1] for array in small), lengths=few[1]),  # no batch axis, then two
            attend(*(a[None] for a in small), lengths=few[None], mask=np.ones((BATCH, 1, 9, 9), bool)),
        )

    (out, grads), alone, mapped, (whole, per_example), three, one, two = run()
    assert {array.dtype for array in (out, *grads)} == {jnp.dtype("bfloat16")}
    # bfloat16 has 8 bits: 0.4 % of values up to 3.
    np.testing.assert_allclose(np.float64(out), by_hand(*narrow, seen_keys(37, 37, True)), atol=0.03)
    for many in mapped:
        np.testing.assert_allclose(many, np.transpose(alone), rtol=2e-5)
    near(per_example, whole)
    near(one, three[1])
    near(two[0], three)


def test_memory_and_products_of_blocks() -> None:
    def temporaries(implementation: str) -> int:
        arrays = [jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)] * 3
        attend = partial(attention, causal=True, implementation=implementation)
        program = jax.jit(partial(slope, attend, weights=1.0)).lower(arrays).compile()
        return program.memory_analysis().temp_size_in_bytes

    # All scores of 2 heads: 2 * 2048**2 * 4 bytes = 33.6 MB; the arrays themselves are 0.26 MB each.
    assert temporaries("math") > 33e6
    assert temporaries("memory_efficient") < 4e6

    def num_pairs(causal: bool) -> list[int]:
        attend = partial(attention, causal=causal, implementation="memory_efficient")
        program = jax.make_jaxpr(partial(slope, attend, weights=1.0))(inputs(64, 64))
        return [int(length) for length in re.findall(r"\blength=(\d+)", str(program))]

    # 64 tokens are 4 blocks of 16: 4 * 4 pairs, of which 4 + 3 + 2 + 1 are not hidden; forwards and backwards.
    assert num_pairs(causal=False) == [16, 16]
    assert num_pairs(causal=True) == [10, 10]


def scopes(*arrays: Any, **options: Any) -> set[str]:
    text = str(jax.jit(partial(attention, **options)).lower(*arrays).as_text(debug_info=True))
    return set(re.findall(r"jaxnn\.attention\.(\w+)", text))


def test_on_cpu_the_size_of_the_scores_chooses() -> None:
    short, long, decoding = inputs(64, 64), inputs(512, 512), inputs(1, 512)
    # 3 examples, 4 heads, 512 by 512 floats: 12.6 MB of scores.
    assert scopes(*long) == {"memory_efficient"}
    assert scopes(*long, bias=jnp.zeros((1, 1, 1, 512))) == {"math"}
    assert scopes(*long, implementation="math") == {"math"}
    assert scopes(*short) == scopes(*decoding) == {"math"}


CUDNN: list[tuple[float, tuple[int, ...], Any, dict[str, Any], str]] = [
    (7.5, (1, 8, 2, 64), jnp.bfloat16, {}, "compute capability 8.0"),
    (9.0, (1, 8, 2, 64), jnp.float32, {}, "bfloat16 and float16, not float32"),
    (9.0, (1, 8, 2, 5), jnp.bfloat16, {}, "multiple of 8 up to 128, not 5"),
    (8.0, (1, 9, 2, 64), jnp.bfloat16, {"scale": np.ones((), np.float32)}, "scale must be a plain number"),
    (8.0, (1, 9, 2, 64), jnp.bfloat16, {"mask": np.ones((1, 1, 9, 9), bool)}, "even lengths, not 9 and 9"),
]


def test_cudnn_is_taken_on_a_gpu_that_can_and_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, shape, dtype, options, words in CUDNN:
        monkeypatch.setattr(MODULE, "compute_capability", lambda capability=capability: capability)
        with pytest.raises(ConfigError, match=f"'cudnn' here: .*{words}.*; leave implementation out"):
            attention(*[jnp.zeros(shape, dtype)] * 3, **options, implementation="cudnn")
    taken: list[dict[str, Any]] = []

    def pretend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        taken.append(options)
        return query

    monkeypatch.setattr(MODULE, "compute_capability", lambda: 9.0)
    monkeypatch.setattr("jaxnn.nn._layer_arguments.platform", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", pretend)
    half = [jnp.ones((2, 8, 2, 64), jnp.bfloat16)] * 3
    out = attention(*half, causal=True, lengths=np.array([0, 3]))
    assert [options["implementation"] for options in taken] == ["cudnn"]
    assert np.array_equal(taken[0]["key_value_seq_lengths"], [1, 3])  # outputs without keys are set to 0 afterwards
    assert np.all(out[0] == 0) and np.all(out[1] == 1)
    attention(*(array.astype(jnp.float32) for array in half))
    assert taken[1]["implementation"] == "xla"


def test_a_function_is_an_implementation() -> None:
    def plain(query: Any, key: Any, value: Any, **given: Any) -> Any:
        options.append(given)
        return jax.nn.dot_product_attention(query, key, value, **given)

    arrays, options = inputs(9, 9), []
    attend = partial(attention, *arrays, causal=True, lengths=jnp.array([9, 4, 0]), scale=0.5)
    near(*jax.jit(lambda: (attend(implementation=plain), attend(implementation="math")))())
    assert options[0]["is_causal"] and options[0]["scale"] == 0.5 and options[0]["mask"].shape == (3, 1, 1, 9)
    assert scopes(*arrays, implementation=plain) == {"plain"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"key": np.zeros((3, 9, 4, 6))}, "not query .* key .*6.* and value"),
    ({"query": np.zeros((3, 9, 3, 5))}, "a multiple of key_heads"),
    ({"value": np.zeros((3, 9, 2, 5), np.float16)}, "one floating dtype"),
    ({"mask": np.ones((9, 9))}, "mask must be bool"),
    ({"mask": np.ones((4, 1, 9, 9), bool)}, r"mask of shape \(4, 1, 9, 9\) does not broadcast"),
    ({"bias": np.zeros((1, 3, 1, 1, 9), np.float32)}, "bias of shape .* does not broadcast"),
    ({"lengths": np.array([1, 2])}, r"lengths must be integers of shape \(3,\)"),
    ({"query_lengths": np.array([1.0, 2.0, 3.0])}, "query_lengths must be integers"),
    ({"scale": np.ones(4)}, r"scale must be one number, not of shape \[4\]"),
    ({"implementation": "flash"}, "no implementation 'flash'"),
    ({"implementation": "memory_efficient", "bias": np.zeros((9,), np.float32)}, "it takes no bias"),
]


def test_bad_arguments() -> None:
    arrays = dict(zip(("query", "key", "value"), inputs(9, 9, 2), strict=True))
    for change, words in BAD:
        with pytest.raises(ConfigError, match=words):
            attention(**(arrays | change))
