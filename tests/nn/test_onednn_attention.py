"""Native attention: equal to the plain form in every size and derivative, to the bit in every run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxnn.nn import BatchSharding, attention, use_batch_sharding
from jaxnn.observe import implementations, product_flops
from jaxnn.parallel import Layout
from jaxnn.types import ConfigError
from tests import draws, native
from tests.draws import assert_near

pytestmark = native.needed
# Queries, keys, heads, heads of keys and features: one of each, parts of vectors and of tiles, two blocks of queries.
SIZES = [(1, 1, 1, 1, 1), (7, 20, 4, 2, 5), (64, 64, 2, 2, 32), (97, 65, 3, 1, 17), (200, 230, 2, 2, 8)]
BATCH = 3


def arrays_of(queries: int, keys: int, heads: int, key_heads: int, features: int) -> list[jax.Array]:
    shapes = [(queries, heads), (keys, key_heads), (keys, key_heads)]
    return [draws.normal(k, BATCH, *shape, features) for k, shape in enumerate(shapes)]


def graded(by: str, arrays: Any, **options: Any) -> Any:
    """Outputs, and the gradients of the sum of their cubes."""

    def loss(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        out = attention(*arrays, implementation=by, **options)
        return jnp.sum(out**3), out

    return jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)


def by_both(run: Any) -> Any:
    return jax.jit(lambda: [run(by) for by in ("native", "math")])()


def test_values_and_gradients_of_all_sizes_and_options_equal_the_plain_form() -> None:
    cases = [(arrays_of(*sizes), {"causal": causal}) for sizes in SIZES for causal in (False, True)]
    lengths = jnp.array([0, 3, 100])  # of no key, of some, and of more than there are
    cases += [(arrays, {"lengths": lengths, **options}) for arrays, options in cases[2:6]]
    cases.append((arrays_of(*SIZES[1]), {"query_lengths": jnp.array([0, 3, 7]), "scale": 3.0}))
    assert_near(*by_both(lambda by: [graded(by, *case[:1], **case[1]) for case in cases]))


def test_second_derivatives_and_forward_mode_equal_the_plain_form() -> None:
    arrays = arrays_of(*SIZES[1])
    tangents = [draws.normal(3 + k, *array.shape) for k, array in enumerate(arrays)]
    lengths = jnp.array([20, 0, 5])

    def derivatives(by: str) -> Any:
        attend = partial(attention, causal=True, lengths=lengths, implementation=by)

        def gradient(*arrays: Any) -> Any:
            return graded(by, arrays, causal=True, lengths=lengths)[0]

        reverse = jax.grad(lambda *arrays: sum(jnp.sum(g**2) for g in gradient(*arrays)), (0, 1, 2))
        pushed = [jax.jvp(function, arrays, tangents) for function in (attend, gradient)]
        return pushed, reverse(*arrays), jax.linearize(attend, *arrays)[1](*tangents)

    assert_near(*by_both(derivatives))


def test_vmap_equals_separate_runs_and_all_runs_have_the_same_bits() -> None:
    arrays = arrays_of(*SIZES[2])
    members = jnp.stack([arrays[0], -arrays[0]])
    run = partial(graded, "native", causal=True)
    nested = jax.jit(jax.vmap(jax.vmap(lambda q, k: run([q, k, arrays[2]]), (0, None)), (None, 0)))
    found = nested(members, arrays[1][None])
    one = jax.jit(run)
    for member, query in enumerate(members):
        jax.tree.map(
            lambda many, alone, member=member: np.testing.assert_array_equal(many[0, member], alone),
            found,
            one([query, *arrays[1:]]),
        )
    rows = one([array[1:2] for array in arrays])
    jax.tree.map(lambda many, alone: np.testing.assert_array_equal(many[1:2], alone), one(arrays), rows)


def test_nan_and_infinity_reach_only_queries_that_see_them() -> None:
    query, key, value = arrays_of(*SIZES[2])
    for garbage in (np.nan, np.inf):
        out = attention(query, key.at[1, 40, 0].set(garbage), value, causal=True, implementation="native")
        expected = np.zeros(out.shape[:3], bool)
        expected[1, 40:, 0] = True
        finite = np.isfinite(out).all(-1)
        assert finite[~expected].all() and (not finite[expected].any() or garbage == np.inf)
    empty = jax.jit(partial(graded, "native"))([array[:0] for array in (query, key, value)])
    assert [array.shape[0] for array in jax.tree.leaves(empty)] == [0] * 4


def test_each_device_attends_to_its_rows() -> None:
    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    arrays = arrays_of(*SIZES[2])
    run = partial(graded, "native", causal=True)
    with use_batch_sharding(
        BatchSharding(BATCH, lambda rows: rows, Layout(mesh=mesh).map_rows)
    ):  # in a program that XLA partitions
        program = jax.jit(run).lower(arrays)
        with pytest.raises(ConfigError, match="devices share the batch, whose axis is not the first"):
            run([array[:2] for array in arrays])
    calls = re.findall(r"@jaxnn_attention.*?: \(tensor<(\d+)x64x2x32", program.as_text())
    assert calls == ["1", "1"]
    assert_near(program.compile()(arrays), jax.jit(run)(arrays))


def test_obstacles_have_a_reason_and_programs_for_other_platforms_have_xlas_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, key, value = arrays_of(*SIZES[2])

    def chosen(*arrays: Any, **options: Any) -> list[str]:
        return implementations(partial(attention, **options), *arrays)["attention"]

    assert chosen(query, key, value) == chosen(query, key, value, lengths=[1, 2, 3]) == ["native"]
    assert chosen(query[:1], key[:1], value[:1]) == chosen(query[:, :8], key[:, :8], value[:, :8]) == ["math"]
    # Forward two products, backward five, of which one is the scores again.
    gradient = jax.grad(lambda *arrays: attention(*arrays).sum(), (0, 1, 2))
    assert product_flops(gradient, query, key, value) == {"float32": 7 * 2.0 * BATCH * 2 * 64 * 64 * 32}
    mask = jnp.ones((1, 1, 64, 64), bool)
    for reason, arrays, options in (
        ("neither mask nor bias", (query, key, value), {"mask": mask}),
        ("neither mask nor bias", (query, key, value), {"bias": mask.astype("float32")}),
        ("float32, not in bfloat16", [array.astype("bfloat16") for array in (query, key, value)], {}),
    ):
        assert chosen(*arrays, **options) == ["math"]
        with pytest.raises(ConfigError, match=f"'native' here: .*{reason}.*; leave implementation out"):
            attention(*arrays, implementation="native", **options)
    run = jax.jit(partial(graded, "native"))
    text = jax.export.export(run, platforms=["cuda"])((query, key, value)).mlir_module()
    assert "stablehlo.dot_general" in text and "jaxnn_attention" not in text
    monkeypatch.setenv("JAXNN_NATIVE", "off")
    assert chosen(query, key, value) == ["math"]


NARROW = """
from tests.nn.test_onednn_attention import *
test_values_and_gradients_of_all_sizes_and_options_equal_the_plain_form()
"""


@pytest.mark.slow
def test_fewer_instructions_and_one_thread() -> None:
    for settings in ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"PYTHONPATH": "."}):
        run = ["taskset", "-c", "0", sys.executable, "-c", NARROW] if "PYTHONPATH" in settings else None
        subprocess.run(run or [sys.executable, "-c", NARROW], env=os.environ | settings, check=True)
