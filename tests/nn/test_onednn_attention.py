"""Native attention: exact in every size, to the bit for every row and member, and obstacles have a reason."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.nn import BatchSharding, attention, use_batch_sharding
from jaxnn.observe import implementations, product_flops
from jaxnn.types import ConfigError
from tests import draws, native
from tests.draws import assert_near
from tests.nn.test_attention import by_hand

pytestmark = native.needed
# Queries, keys, heads, heads of keys and features: one of each, parts of vectors and of tiles, two blocks of queries.
SIZES = [(1, 1, 1, 1, 1), (7, 20, 4, 2, 5), (64, 64, 2, 2, 32), (97, 65, 3, 1, 17), (200, 230, 2, 2, 8)]
BATCH = 3


def arrays_of(queries: int, keys: int, heads: int, key_heads: int, features: int) -> list[jax.Array]:
    shapes = [(queries, heads), (keys, key_heads), (keys, key_heads)]
    return [draws.normal(k, BATCH, *shape, features) for k, shape in enumerate(shapes)]


def graded(arrays: Any, **options: Any) -> Any:
    """The gradients of the sum of the outputs' cubes, and the outputs."""

    def loss(arrays: Any) -> tuple[jax.Array, jax.Array]:
        out = attention(*arrays, implementation="native", **options)
        return jnp.sum(out**3), out

    return jax.grad(loss, has_aux=True)(arrays)


def test_values_and_gradients_of_all_sizes_and_options_are_exact():
    cases = [(arrays_of(*sizes), {"causal": causal}) for sizes in SIZES for causal in (False, True)]
    lengths = np.array([0, 3, 100])  # of no key, of some, and of more than there are
    cases += [(arrays, {"lengths": lengths, **options}) for arrays, options in cases[2:6]]
    cases.append((arrays_of(*SIZES[1]), {"query_lengths": np.array([0, 3, 7]), "scale": 3.0}))
    options = [options for _, options in cases]
    run = jax.jit(lambda given: [graded(arrays, **how) for arrays, how in zip(given, options, strict=True)])
    given = [arrays for arrays, _ in cases]
    for found, arrays, how in zip(run(given), given, options, strict=True):
        output = by_hand(arrays, **how)[0]
        gradients = by_hand(arrays, 3 * output**2, **how)[1]
        assert_near(found, jax.tree.map(np.float32, (gradients, output)))


def test_rows_and_members_have_the_same_bits_alone():
    arrays = arrays_of(*SIZES[2])
    run = jax.jit(partial(graded, causal=True))
    members = jax.jit(jax.vmap(partial(graded, causal=True)))([np.stack([array, -2 * array]) for array in arrays])
    together, row = run(arrays), run([array[1:2] for array in arrays])
    jax.tree.map(lambda many, one: np.testing.assert_array_equal(many[0], one), members, together)
    jax.tree.map(lambda many, one: np.testing.assert_array_equal(many[1:2], one), together, row)


def test_sizes_dtypes_and_masks_choose_and_obstacles_have_a_reason():
    query, key, value = map(np.asarray, arrays_of(*SIZES[2]))

    def chosen(*arrays: Any, **options: Any) -> list[str]:
        return implementations(partial(attention, **options), *arrays)["attention"]

    assert chosen(query, key, value) == chosen(query, key, value, lengths=[1, 2, 3]) == ["native"]
    assert chosen(query[:1], key[:1], value[:1]) == chosen(query[:, :8], key[:, :8], value[:, :8]) == ["math"]
    # Forward two products, backward five, of which one is the scores again.
    gradient = jax.grad(lambda *arrays: attention(*arrays).sum(), (0, 1, 2))
    assert product_flops(gradient, query, key, value) == {"float32": 7 * 2.0 * BATCH * 2 * 64 * 64 * 32}
    mask = np.ones((1, 1, 64, 64), bool)
    for reason, arrays, options in (
        ("neither mask nor bias", (query, key, value), {"mask": mask}),
        ("neither mask nor bias", (query, key, value), {"bias": mask.astype("float32")}),
        ("float32, not in bfloat16", [array.astype(jnp.bfloat16) for array in (query, key, value)], {}),
    ):
        assert chosen(*arrays, **options) == ["math"]
        with pytest.raises(ConfigError, match=f"'native' here: .*{reason}.*; leave implementation out"):
            attention(*arrays, implementation="native", **options)
    rows = BatchSharding(BATCH, lambda rows: rows, lambda function, *_: function)
    with use_batch_sharding(rows), pytest.raises(ConfigError, match="whose axis is not the first"):
        attention(query[:2], key[:2], value[:2], implementation="native")
