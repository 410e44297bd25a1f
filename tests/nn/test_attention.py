"""Attention: each implementation against a softmax written out in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.nn import attention
from jaxnn.types import ConfigError
from tests import draws

IMPLEMENTATIONS = ("xla", "math", "memory_efficient")
BATCH, HEADS, DIM = 3, 4, 5
BLOCK, LONG = 256, 300  # tokens of a block in memory_efficient; two blocks, one of them not full
near = partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def inputs(num_queries: int = 9, num_keys: int = 9, key_heads: int = HEADS, dtype: Any = jnp.float32) -> list[Any]:
    shapes = [(BATCH, num_queries, HEADS, DIM), *[(BATCH, num_keys, key_heads, DIM)] * 2]
    return [draws.normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def by_hand(
    arrays: Any, causal: bool = False, lengths: Any = None, mask: Any = True, bias: Any = 0.0, scale: float = DIM**-0.5
) -> Any:
    """Softmax attention in NumPy's float64."""
    query, key, value, bias = (np.asarray(array, np.float64) for array in (*arrays, bias))
    num_queries, num_keys = query.shape[1], key.shape[1]
    key, value = (np.repeat(array, HEADS // array.shape[2], axis=2) for array in (key, value))
    seen = np.ones((BATCH, HEADS, num_queries, num_keys), bool) & np.asarray(mask)
    if causal:
        seen &= np.arange(num_keys)[None] <= np.arange(num_queries)[:, None]
    if lengths is not None:
        seen &= np.arange(num_keys) < np.asarray(lengths)[:, None, None, None]
    scores = np.where(seen, np.einsum("bthd,bshd->bhts", query, key) * scale + bias, -1e300)
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * seen
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bhts,bshd->bthd", weights, value)


def random_mask(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < 0.5


# Queries, keys and heads of keys; the options.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one token": ((1, 1), {"causal": True}),
    "full blocks of keys": ((40, 2 * BLOCK, 2), {}),
    "one block": ((BLOCK, BLOCK), {"causal": True}),
    "more queries": ((LONG, 40, 1), {"causal": True}),
    "more keys": ((40, LONG), {"causal": True, "lengths": [3, LONG, 20]}),
    "mask of heads": ((LONG, LONG), {"mask": random_mask(1, 1, HEADS, LONG, LONG), "scale": 0.1}),
    "mask of keys": ((LONG, LONG), {"mask": random_mask(2, BATCH, 1, 1, LONG), "causal": True}),
    "all": ((LONG, LONG), {"mask": random_mask(0, BATCH, 1, LONG, LONG), "causal": True, "lengths": [30, 299, LONG]}),
    "bias": ((9, 9), {"bias": draws.normal(3, 1, HEADS, 9, 9)}),
}
# JAX tests its own masks: here, how they are handed to it. "memory_efficient" takes no bias.
TAKEN = {"xla": ["all"], "math": list(CASES), "memory_efficient": list(CASES)[:-1]}


@implementations
def test_values_equal_the_softmax_by_hand(implementation: str) -> None:
    cases = {name: (inputs(*CASES[name][0]), CASES[name][1]) for name in TAKEN[implementation]}

    def run(arrays: dict[str, Any]) -> Any:
        attend = partial(attention, implementation=implementation)
        return {name: attend(*arrays[name], **options) for name, (_, options) in cases.items()}

    outputs = jax.jit(run)({name: arrays for name, (arrays, _) in cases.items()})
    for name, (arrays, options) in cases.items():
        near(outputs[name], by_hand(arrays, **options), err_msg=name)


@implementations
def test_large_scores_half_precision_and_batch_axes(implementation: str) -> None:
    attend = partial(attention, causal=True, implementation=implementation)
    arrays, narrow, lengths = inputs(), inputs(dtype=jnp.bfloat16), jnp.array([9, 4, 1])

    @jax.jit
    def run(arrays: Any, narrow: Any) -> Any:
        mask = np.ones((BATCH, 1, 9, 9), bool)
        no_axis = attend(*(array[1] for array in arrays), lengths=lengths[1])
        two_axes = attend(*(array[None] for array in arrays), lengths=lengths[None], mask=mask)
        return attend(*arrays, scale=1e3), slope(attend, narrow), attend(*narrow), no_axis, two_axes

    large, gradients, output, no_axis, two_axes = run(arrays, narrow)
    # Scores of thousands: exp of any above 88 is infinite in float32, which also rounds them by 1e-4 or so.
    np.testing.assert_allclose(large, by_hand(arrays, True, scale=1e3), atol=5e-3)
    assert {array.dtype for array in (output, *gradients)} == {jnp.dtype("bfloat16")}
    # bfloat16 has 8 bits: 0.4 % of values up to 3.
    np.testing.assert_allclose(np.float64(output), by_hand(narrow, True), atol=0.03)
    expected = by_hand(arrays, True, lengths)
    near(no_axis, expected[1])
    near(two_axes[0], expected)


LOWEST_BIAS = np.zeros((1, 1, 9, 9), np.float32)
LOWEST_BIAS[:, :, 1] = np.finfo(np.float32).min


def slope(attend: Callable[..., Any], arrays: Any) -> Any:
    def weighed(arrays: Any) -> jax.Array:
        output = attend(*arrays)
        return jnp.sum(output * draws.normal(3, *output.shape, dtype=output.dtype))

    return jax.grad(weighed)(arrays)


def test_gradients_agree_and_queries_that_see_nothing_are_zero_without_a_gradient() -> None:
    size = LONG
    mask = random_mask(0, BATCH, 1, size, size) | np.eye(size, dtype=bool)
    mask[0, :, 3] = False  # query 3 of example 0 sees nothing; example 1 has no keys; example 2 has 9 queries
    options = {"mask": mask, "lengths": np.array([size, 0, size]), "query_lengths": np.array([size, size, 9])}
    arrays, few = inputs(size, size, 2), inputs()

    def results(name: str, arrays: Any, few: Any) -> Any:
        attend = partial(attention, implementation=name)
        masked = partial(attend, causal=True, **options)
        found = [masked(*arrays), slope(masked, arrays), slope(partial(attend, causal=True), arrays)]
        if name != "memory_efficient":  # of a bias that queries, or examples, share, and of one that hides all keys
            slopes = jax.grad(lambda bias: jnp.sum(attend(*few, bias=bias) ** 2))(jnp.zeros((1, HEADS, 1, 9)))
            hidden = partial(attend, bias=LOWEST_BIAS)
            found += [slopes, slope(hidden, few), hidden(*few)]
        return found

    xla, *others = jax.jit(lambda *given: [results(name, *given) for name in IMPLEMENTATIONS])(arrays, few)
    near(others[0][-1][:, 1], few[2].mean(1))  # query 1 sees all keys as equal
    zero = np.zeros((BATCH, size), bool)
    zero[0, 3] = zero[1] = zero[2, 9:] = True
    for found in (xla, *others):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), found, xla[: len(found)])
        output, (to_query, to_key, to_value), *_ = jax.tree.map(np.asarray, found)
        np.testing.assert_array_equal(np.all(output == 0, axis=(2, 3)), zero)
        assert not to_query[zero].any() and not to_key[1].any() and not to_value[1].any()


PADDING = np.arange(6) >= 4
# What hides the last two of six keys.
HIDDEN: list[dict[str, Any]] = [
    {"lengths": jnp.full(BATCH, 4)},
    {"mask": ~PADDING[None, None, None]},
    {"mask": np.broadcast_to(~PADDING, (1, HEADS, 6, 6))},
]
JAXS = jax.nn.dot_product_attention


@pytest.mark.parametrize("implementation", ["math", "memory_efficient"])
def test_nan_and_infinity_reach_only_queries_that_see_them(implementation: str) -> None:
    query, key, value = inputs(6, 6, 2)
    attend = partial(attention, implementation=implementation)
    padded = PADDING[None, :, None, None]

    @jax.jit
    def run(garbage: jax.Array) -> Any:
        others = [jnp.where(padded, garbage, array) for array in (query, key, value)]
        expected = slope(partial(JAXS, mask=HIDDEN[1]["mask"]), [query, key, value])
        pairs = [(slope(partial(attend, **options), [query, *others[1:]]), expected) for options in HIDDEN]
        pairs.append((attend(query, *others[1:], **HIDDEN[0]), JAXS(query, key, value, **HIDDEN[1])))
        short = partial(attend, query_lengths=jnp.full(BATCH, 4))
        pairs.append(tuple(slope(short, [each, key, value]) for each in (others[0], query)))
        causal = attend(query, key.at[:, 4].set(garbage), value, causal=True)
        pairs.append((causal[:, :4], JAXS(query, key, value, is_causal=True)[:, :4]))
        return pairs, causal[:, 4:]

    for garbage in (np.nan, np.inf):
        pairs, seeing = run(garbage)
        for found, expected in pairs:
            jax.tree.map(near, found, expected)
        assert np.isnan(seeing).all() or garbage == np.inf


def test_memory_and_products_of_blocks() -> None:
    def gradient(causal: bool) -> Callable[..., Any]:
        attend = partial(attention, causal=causal, implementation="memory_efficient")
        return jax.grad(lambda arrays: jnp.sum(attend(*arrays)))

    # All scores of 2 heads: 2 * 2048**2 * 4 bytes = 33.6 MB; the arrays themselves are 0.26 MB each.
    arrays = [jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)] * 3
    assert jax.jit(gradient(causal=True)).lower(arrays).compile().memory_analysis().temp_size_in_bytes < 4e6

    def num_pairs(causal: bool) -> list[int]:
        arrays = [jax.ShapeDtypeStruct((1, 4 * BLOCK, 2, 16), jnp.float32)] * 3
        return [int(length) for length in re.findall(r"\blength=(\d+)", str(jax.make_jaxpr(gradient(causal))(arrays)))]

    # 4 blocks: 4 * 4 pairs, of which 4 + 3 + 2 + 1 are not hidden; forwards and backwards.
    assert num_pairs(causal=False) == [16, 16]
    assert num_pairs(causal=True) == [10, 10]


def scopes(*arrays: Any, **options: Any) -> set[str]:
    text = str(jax.jit(partial(attention, **options)).lower(*arrays).as_text(debug_info=True))
    return set(re.findall(r"jaxnn\.attention\.(\w+)", text))


def test_on_cpu_the_size_of_the_scores_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXNN_NATIVE", "off")  # whose kernel would be taken

    def chosen(num_queries: int, num_keys: int, heads: int = 8, **options: Any) -> set[str]:
        query, key = (jax.ShapeDtypeStruct((1, size, heads, DIM), jnp.float32) for size in (num_queries, num_keys))
        return scopes(query, key, key, **options)

    # 8 heads, 512 by 512 floats: 8 MiB of scores.
    assert chosen(512, 512) == {"math"}
    assert chosen(512, 513) == chosen(257, 257, heads=32) == {"memory_efficient"}
    assert chosen(512, 513, implementation="math") == chosen(512, 513, bias=jnp.zeros((1, 1, 1, 513))) == {"math"}
    assert chosen(256, 256, heads=64) == chosen(1, 513) == {"math"}  # a single block; decoding


CUDNN: list[tuple[float, tuple[int, ...], Any, dict[str, Any], str]] = [
    (7.5, (1, 8, 2, 64), jnp.bfloat16, {}, "compute capability 8.0"),
    (9.0, (1, 8, 2, 64), jnp.float32, {}, "bfloat16 and float16, not float32"),
    (9.0, (1, 8, 2, 5), jnp.bfloat16, {}, "multiple of 8 up to 128, not 5"),
    (8.0, (1, 9, 2, 64), jnp.bfloat16, {"scale": np.ones((), np.float32)}, "scale must be a plain number"),
    (8.0, (1, 9, 2, 64), jnp.bfloat16, {"mask": np.ones((1, 1, 9, 9), bool)}, "even lengths, not 9 and 9"),
]


def test_cudnn_is_taken_on_a_gpu_that_can_and_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, pretend_gpu: Callable[..., None]
) -> None:
    def refused(words: str, arrays: Any, **options: Any) -> None:
        with pytest.raises(ConfigError, match=f"'cudnn' here: .*{words}.*; leave implementation out"):
            attention(*arrays, **options, implementation="cudnn")

    refused("compute capability 8.0", inputs())
    pretend_gpu("gfx942")
    refused("compute capability 8.0", inputs())
    for capability, shape, dtype, options, words in CUDNN:
        pretend_gpu(capability=str(capability))
        refused(words, [np.zeros(shape, dtype)] * 3, **options)
    taken: list[dict[str, Any]] = []

    def pretend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        taken.append(options)
        return query

    pretend_gpu()
    monkeypatch.setattr(jax.nn, "dot_product_attention", pretend)
    half = [jnp.ones((2, 8, 2, 128), jnp.bfloat16)] * 3
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

    arrays, options = inputs(), []
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
