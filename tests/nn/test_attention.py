"""Attention: each implementation against a softmax written out in float64."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn._batch_context import BatchSharding, use_batch_sharding
from jaxnn.kernels import collect_reasons
from jaxnn.nn import attention
from jaxnn.observe import Traced
from jaxnn.types import ConfigError
from tests import draws, native
from tests.draws import assert_near, graded

BATCH, HEADS, DIM = 3, 4, 5
NO_BIAS = np.zeros((1, 1, 1, 1))
BLOCK, LONG = 256, 300  # tokens of a block in memory_efficient; two blocks, one of them not full
near = partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
ours = pytest.mark.parametrize("implementation", ["math", "memory_efficient"])


def inputs(*sizes: int, dtype: Any = jnp.float32) -> list[Any]:
    """Query, key and value; ``sizes`` are queries, keys, heads of keys, heads and features."""
    queries, keys, key_heads, heads, dim = (*sizes, *(9, 9, HEADS, HEADS, DIM)[len(sizes) :])
    shapes = [(BATCH, queries, heads, dim), *[(BATCH, keys, key_heads, dim)] * 2]
    return [draws.normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def by_hand(
    arrays: Any,
    *,
    causal: bool = False,
    lengths: Any = None,
    query_lengths: Any = None,
    mask: Any = True,
    bias: Any = NO_BIAS,
    scale: float | None = None,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Softmax attention in float64: the output, and its gradients by query, key, value and bias."""
    (batch, num_queries, heads, dim), (num_keys, key_heads) = arrays[0].shape, arrays[1].shape[1:3]
    seen = np.ones((batch, heads, num_queries, num_keys), bool) & np.asarray(mask)
    if causal:
        seen &= np.arange(num_keys)[None] <= np.arange(num_queries)[:, None]
    if lengths is not None:
        seen &= np.arange(num_keys) < np.asarray(lengths)[:, None, None, None]
    if query_lengths is not None:
        seen &= np.arange(num_queries)[:, None] < np.asarray(query_lengths)[:, None, None, None]

    query, key, value, bias = (np.asarray(array, np.float64) for array in (*arrays, bias))
    scale, groups = dim**-0.5 if scale is None else scale, heads // key_heads
    keys, values = (np.repeat(array, groups, axis=2) for array in (key, value))
    scores = np.where(seen, scale * np.einsum("bthd,bshd->bhts", query, keys) + bias, -1e300)
    shares = np.exp(scores - scores.max(-1, keepdims=True)) * seen
    shares /= np.maximum(shares.sum(-1, keepdims=True), 1e-300)
    output = np.einsum("bhts,bshd->bthd", shares, values)
    slope = np.float64(draws.weights(np.float32(output)))
    to_shares = np.einsum("bthd,bshd->bhts", slope, values)
    to_scores = shares * (to_shares - (shares * to_shares).sum(-1, keepdims=True))
    to_query = scale * np.einsum("bhts,bshd->bthd", to_scores, keys)
    of_heads = scale * np.einsum("bhts,bthd->bshd", to_scores, query), np.einsum("bhts,bthd->bshd", shares, slope)
    to_key, to_value = (each.reshape(batch, num_keys, key_heads, groups, dim).sum(3) for each in of_heads)
    shared = tuple(axis for axis, size in enumerate(bias.shape) if size == 1)
    return output, (to_query, to_key, to_value, to_scores.sum(shared, keepdims=True))


def assert_exact(found: Any, arrays: Any, rtol: float = 1e-5, atol: float = 2e-6, **how: Any) -> None:
    """``found`` is what `graded` returns for query, key and value."""
    output, (*slopes, _) = by_hand(arrays, **how)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), found, (output, tuple(slopes)))


def random_mask(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < 0.5


# Sizes; the options.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one token": ((1, 1), {"causal": True}),
    "full blocks of keys": ((40, 2 * BLOCK, 2), {}),
    "one block": ((BLOCK, BLOCK), {"causal": True}),
    "more queries": ((LONG, 40, 1), {"causal": True}),
    "more keys": ((40, LONG), {"causal": True, "lengths": [3, LONG, 20]}),
    "mask of heads": ((LONG, LONG), {"mask": random_mask(1, 1, HEADS, LONG, LONG), "scale": 0.1}),
    "mask of keys": ((LONG, LONG), {"mask": random_mask(2, BATCH, 1, 1, LONG), "causal": True}),
    "bias": ((9, 9), {"bias": draws.normal(3, 1, HEADS, 9, 9)}),
}
# "math" has no blocks, and "memory_efficient" takes no bias.
MATH = ["one token", "more queries", "more keys", "mask of heads", "bias"]
TAKEN = {"math": MATH, "memory_efficient": list(CASES)[:-1]}


@ours
def test_values_equal_the_softmax_by_hand(implementation):
    cases = {name: (inputs(*CASES[name][0]), CASES[name][1]) for name in TAKEN[implementation]}

    def run(arrays: dict[str, Any]) -> Any:
        attend = partial(attention, implementation=implementation)
        return {name: attend(*arrays[name], **options) for name, (_, options) in cases.items()}

    outputs = jax.jit(run)({name: arrays for name, (arrays, _) in cases.items()})
    for name, (arrays, options) in cases.items():
        near(outputs[name], by_hand(arrays, **options)[0], err_msg=name)


@ours
def test_large_scores_half_precision_and_batch_axes(implementation):
    attend = partial(attention, causal=True, implementation=implementation)
    arrays, narrow, lengths = inputs(), inputs(dtype=jnp.bfloat16), np.array([9, 4, 1])

    @jax.jit
    def run(arrays: Any, narrow: Any) -> Any:
        mask = np.ones((BATCH, 1, 9, 9), bool)
        no_axis = attend(*(array[1] for array in arrays), lengths=lengths[1])
        two_axes = attend(*(array[None] for array in arrays), lengths=lengths[None], mask=mask)
        return attend(*arrays, scale=1e3), graded(attend)(*narrow), no_axis, two_axes

    large, (output, gradients), no_axis, two_axes = run(arrays, narrow)
    # Scores of thousands: exp of any above 88 is infinite in float32, which also rounds them by 1e-4 or so.
    np.testing.assert_allclose(large, by_hand(arrays, causal=True, scale=1e3)[0], atol=5e-3)
    assert {array.dtype for array in (output, *gradients)} == {jnp.dtype("bfloat16")}
    # bfloat16 has 8 bits: 0.4 % of values up to 3.
    np.testing.assert_allclose(np.float64(output), by_hand(narrow, causal=True)[0], atol=0.03)
    expected = by_hand(arrays, causal=True, lengths=lengths)[0]
    near(no_axis, expected[1])
    near(two_axes[0], expected)


# One of each, parts of vectors and of tiles, two blocks of queries.
SIZES = [(1, 1, 1, 1, 1), (7, 20, 2, 4, 5), (64, 64, 2, 2, 32), (97, 65, 1, 3, 17), (200, 230, 2, 2, 8)]


@native.needed
def test_native_values_and_gradients_of_all_sizes_and_options_are_exact():
    cases = [(inputs(*sizes), {"causal": causal}) for sizes in SIZES for causal in (False, True)]
    lengths = np.array([0, 3, 100])  # of no key, of some, and of more than there are
    cases += [(arrays, {"lengths": lengths, **options}) for arrays, options in cases[2:6]]
    cases.append((inputs(*SIZES[1]), {"query_lengths": np.array([0, 3, 7]), "scale": 3.0}))
    attends = [partial(attention, implementation="native", **options) for _, options in cases]
    run = jax.jit(lambda given: [graded(attend)(*arrays) for attend, arrays in zip(attends, given, strict=True)])
    for found, (arrays, how) in zip(run([arrays for arrays, _ in cases]), cases, strict=True):
        output, (*gradients, _) = by_hand(arrays, **how)
        assert_near(found, jax.tree.map(np.float32, (output, tuple(gradients))))


LOWEST_BIAS = np.zeros((1, 1, 9, 9), np.float32)
LOWEST_BIAS[:, :, 1] = np.finfo(np.float32).min


@pytest.mark.parametrize("implementation", ["xla", "math", "memory_efficient"])
def test_gradients_are_exact_and_queries_that_see_nothing_are_zero_without_one(implementation):
    size = LONG
    mask = random_mask(0, BATCH, 1, size, size) | np.eye(size, dtype=bool)
    mask[0, :, 3] = False  # query 3 of example 0 sees nothing; example 1 has no keys; example 2 has 9 queries
    lengths = {"lengths": np.array([size, 0, size]), "query_lengths": np.array([size, size, 9])}
    options = {"causal": True, "mask": mask, **lengths}
    arrays, few = inputs(size, size, 2), inputs()
    attend = partial(attention, implementation=implementation)
    # Of a bias that queries and examples share, and of one that hides all keys.
    takes_bias = implementation == "math"

    @jax.jit
    def run(arrays: Any, few: Any, bias: Any, lowest: Any) -> Any:
        masked = graded(partial(attend, **options))(*arrays)
        if implementation == "xla":  # JAX tests its own masks: here, how they are handed to it
            return masked, None, None
        causal = graded(partial(attend, causal=True))(*arrays)
        if not takes_bias:
            return masked, causal, None
        to_bias = graded(lambda bias: attend(*few, bias=bias))(bias)[1]
        return masked, causal, (to_bias, graded(partial(attend, bias=lowest))(*few))

    tolerance = {"rtol": 1e-4, "atol": 2e-5}
    masked, causal, biased = run(arrays, few, np.zeros((1, HEADS, 1, 9), np.float32), LOWEST_BIAS)
    for found, how in [(masked, options), *([(causal, {"causal": True})] if causal else [])]:
        assert_exact(found, arrays, **tolerance, **how)
    zero = np.zeros((BATCH, size), bool)
    zero[0, 3] = zero[1] = zero[2, 9:] = True
    output, (to_query, to_key, to_value) = jax.tree.map(np.asarray, masked)
    np.testing.assert_array_equal(np.all(output == 0, axis=(2, 3)), zero)
    assert not to_query[zero].any() and not to_key[1].any() and not to_value[1].any()
    if takes_bias:
        to_bias, (output, _) = biased
        np.testing.assert_allclose(to_bias[0], by_hand(few, bias=np.zeros((1, HEADS, 1, 9)))[1][3], **tolerance)
        assert_exact(biased[1], few, **tolerance, bias=LOWEST_BIAS)
        near(output[:, 1], np.mean(few[2], 1), rtol=1e-4)  # query 1 sees all keys as equal


PADDING = np.arange(6) >= 4
# What hides the last two of six keys.
HIDDEN: list[dict[str, Any]] = [
    {"lengths": np.full(BATCH, 4)},
    {"mask": ~PADDING[None, None, None]},
    {"mask": np.broadcast_to(~PADDING, (1, HEADS, 6, 6))},
]


@pytest.mark.parametrize("implementation", ["math", "memory_efficient", pytest.param("native", marks=native.needed)])
def test_nan_and_infinity_reach_only_queries_that_see_them(implementation):
    arrays = inputs(6, 6, 2)
    hidden = HIDDEN[:1] if implementation == "native" else HIDDEN  # which takes no mask
    attend = partial(attention, implementation=implementation)
    padded = PADDING[None, :, None, None]

    @jax.jit
    def run(arrays: Any, garbage: jax.Array) -> Any:
        query, key, value = arrays
        others = [jnp.where(padded, garbage, array) for array in arrays]
        slopes = [graded(partial(attend, **options))(query, *others[1:]) for options in hidden]
        short = graded(partial(attend, query_lengths=np.full(BATCH, 4)))(others[0], key, value)
        return slopes, short, attend(query, key.at[:, 4].set(garbage), value, causal=True)

    for garbage in (np.nan, np.inf):
        slopes, short, causal = run(arrays, garbage)
        cases = [*((found, HIDDEN[0]) for found in slopes), (short, {"query_lengths": [4] * BATCH})]
        for found, how in cases:
            assert_exact(found, arrays, **how)
        near(causal[:, :4], by_hand(arrays, causal=True)[0][:, :4])
        assert np.isnan(causal[:, 4:]).all() or garbage == np.inf


def test_memory_and_products_of_blocks():
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


def chosen(*arrays: Any, **options: Any) -> list[str]:
    return Traced(partial(attention, **options), *arrays).implementations["attention"]


def refused(implementation: str, words: str, arrays: Any, **options: Any) -> None:
    with pytest.raises(ConfigError, match=f"'{implementation}' here: .*{words}.*; leave implementation out"):
        attention(*arrays, **options, implementation=implementation)


def test_on_cpu_the_size_of_the_scores_chooses(monkeypatch):
    monkeypatch.setenv("JAXNN_NATIVE", "off")  # whose kernel would be taken

    def of_size(num_queries: int, num_keys: int, heads: int = 8, **options: Any) -> list[str]:
        query, key = (jax.ShapeDtypeStruct((1, size, heads, DIM), jnp.float32) for size in (num_queries, num_keys))
        return chosen(query, key, key, **options)

    # 8 heads, 512 by 512 floats: 8 MiB of scores.
    assert of_size(512, 512) == ["math"]
    assert of_size(512, 513) == of_size(257, 257, heads=32) == ["memory_efficient"]
    assert of_size(512, 513, implementation="math") == of_size(512, 513, bias=jnp.zeros((1, 1, 1, 513))) == ["math"]
    assert of_size(256, 256, heads=64) == of_size(1, 513) == ["math"]  # a single block; decoding


@native.needed
def test_native_is_taken_from_a_size_on_and_refused_with_a_reason():
    arrays = [np.asarray(array) for array in inputs(*SIZES[2])]
    assert chosen(*arrays) == chosen(*arrays, lengths=[1, 2, 3]) == ["native"]
    assert chosen(*(array[:1] for array in arrays)) == chosen(*(array[:, :8] for array in arrays)) == ["math"]
    # Forward two products, backward five, of which one is the scores again.
    gradient = jax.grad(lambda *arrays: attention(*arrays).sum(), (0, 1, 2))
    assert Traced(gradient, *arrays).product_flops() == {"float32": 7 * 2.0 * BATCH * 2 * 64 * 64 * 32}
    mask = np.ones((1, 1, 64, 64), bool)
    for words, given, options in (
        ("neither mask nor bias", arrays, {"mask": mask}),
        ("neither mask nor bias", arrays, {"bias": mask.astype("float32")}),
        ("float32, not in bfloat16", [array.astype(jnp.bfloat16) for array in arrays], {}),
    ):
        assert chosen(*given, **options) == ["math"]
        refused("native", words, given, **options)
    rows = BatchSharding(BATCH, lambda rows: rows, lambda function, *_: function)
    with use_batch_sharding(rows):
        refused("native", "whose axis is not the first", [array[:2] for array in arrays])


CUDNN: list[tuple[float, tuple[int, ...], Any, dict[str, Any], str]] = [
    (7.5, (1, 8, 2, 64), jnp.bfloat16, {}, "compute capability 8.0"),
    (9.0, (1, 8, 2, 64), jnp.float32, {}, "bfloat16 and float16, not float32"),
    (9.0, (1, 8, 2, 5), jnp.bfloat16, {}, "multiple of 8 up to 128, not 5"),
    (8.0, (1, 9, 2, 64), jnp.bfloat16, {"scale": np.ones((), np.float32)}, "scale must be a plain number"),
    (8.0, (1, 9, 2, 64), jnp.bfloat16, {"mask": np.ones((1, 1, 9, 9), bool)}, "even lengths, not 9 and 9"),
]


def test_cudnn_is_taken_on_a_gpu_that_can_and_refused_with_a_reason(monkeypatch, pretend_gpu):
    refused("cudnn", "compute capability 8.0", inputs())
    pretend_gpu("gfx942")
    refused("cudnn", "compute capability 8.0", inputs())
    for capability, shape, dtype, options, words in CUDNN:
        pretend_gpu(capability=str(capability))
        refused("cudnn", words, [np.zeros(shape, dtype)] * 3, **options)
    taken: list[dict[str, Any]] = []

    def pretend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        taken.append(options)
        return query

    pretend_gpu()
    monkeypatch.setattr(jax.nn, "dot_product_attention", pretend)
    half = [jnp.ones((2, 512, 2, 8), jnp.bfloat16)] * 3
    out = attention(*half, causal=True, lengths=np.array([0, 3]))
    assert [options["implementation"] for options in taken] == ["cudnn"]
    assert np.array_equal(taken[0]["key_value_seq_lengths"], [1, 3])  # outputs without keys are set to 0 afterwards
    assert np.all(out[0] == 0) and np.all(out[1] == 1)
    attention(*(array.astype(jnp.float32) for array in half))
    assert taken[1]["implementation"] == "xla"


# Keys, sequences, capability, and the implementation of bfloat16: as measured nearby, else cuDNN's.
BY_SIZE = [(64, 4, "9.0", "xla"), (510, 4, "9.0", "xla"), (512, 4, "9.0", "cudnn"), (256, 4, "8.0", "cudnn")]
BY_SIZE += [(256, 256, "9.0", "cudnn")]


@pytest.mark.parametrize(("keys", "batch", "capability", "expected"), BY_SIZE)
def test_the_faster_implementation_of_a_size_is_taken_where_it_was_measured(
    keys, batch, capability, expected, pretend_gpu, monkeypatch
):
    def taken(query: Any, *_: Any, implementation: str, **__: Any) -> Any:
        return found.append(implementation) or query

    found: list[str] = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", taken)
    pretend_gpu(capability)
    with collect_reasons() as reasons:
        attention(*[jnp.ones((batch, keys, 4, 64), "bfloat16")] * 3)
    measured = f"attention of {batch} × {keys} keys: xla, measured on an NVIDIA H200 (cudnn 208 µs, xla 149 µs)"
    assert found == [expected] and [*reasons] == ([measured] if expected == "xla" else [])


def test_a_function_is_an_implementation():
    def plain(query: Any, key: Any, value: Any, **given: Any) -> Any:
        options.append(given)
        return jax.nn.dot_product_attention(query, key, value, **given)

    arrays, options = inputs(), []
    attend = partial(attention, *arrays, causal=True, lengths=jnp.array([9, 4, 0]), scale=0.5)
    near(*jax.jit(lambda: (attend(implementation=plain), attend(implementation="math")))())
    assert options[0]["is_causal"] and options[0]["scale"] == 0.5 and options[0]["mask"].shape == (3, 1, 1, 9)
    assert chosen(*arrays, implementation=plain) == ["plain"]
