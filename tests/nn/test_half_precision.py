"""Half precision: what sums over rows, positions, time or tokens sums in float32, and is rounded once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jaxnn as jn
from jaxnn import nn
from tests import draws, tiny

ROWS = 16_384
ROW, IMAGES = draws.normal(0, ROWS, 4), draws.normal(1, 64, 16, 16, 4)
SEQUENCES = draws.normal(2, 512, 32, 4)
TOKENS = np.minimum(np.random.default_rng(0).zipf(1.3, ROWS), 63).astype(np.int32)


class Mean(linen.Module):
    """The means of 32 tokens."""

    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        return nn.Embed(64, 4).mean(ids.reshape(-1, 32))


class Pooled(linen.Module):
    """Pools overlapping windows of 81 pixels by a mean, of a bias alone."""

    @linen.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        bias = self.param("bias", linen.initializers.zeros_init(), (1, 16, 16, 4))
        return nn.avg_pool(nn.add_broadcast(jnp.zeros_like(images), bias), (9, 9))


LAYERS: dict[str, tuple[linen.Module, Any]] = {
    "Dense": (nn.Dense(4), ROW),
    "Conv": (nn.Conv(4, (3, 3)), IMAGES),
    "depthwise Conv": (nn.Conv(4, (3, 3), feature_group_count=4), IMAGES),
    "LSTM": (nn.LSTM(4), SEQUENCES),
    "Embed": (nn.Embed(64, 4), TOKENS),
    "grouped Conv": (nn.Conv(4, (3, 3), feature_group_count=2), IMAGES),
    "transposed Conv": (nn.Conv(4, (3, 3), input_dilation=2, padding=1), IMAGES),
    "GRU": (nn.GRU(4), SEQUENCES),
    "Embed.mean": (Mean(), TOKENS),
    "LayerNorm": (nn.LayerNorm(), ROW),
    "avg_pool": (Pooled(), IMAGES),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_float32(name):
    module, inputs = LAYERS[name]
    params = draws.variables(module, inputs)
    # The gradients of a sum have equal terms: the first that half precision loses.
    ones = jnp.ones(jax.eval_shape(module.apply, params, inputs).shape)

    def gradient(dtype: str, params: Any, inputs: Any, ones: jax.Array) -> Any:
        cast = nn.Policy(compute=dtype).cast_to_compute
        return jax.grad(lambda params: jnp.sum(ones * module.apply(cast(params), cast(inputs))))(params)

    run = jax.jit(lambda *given: [gradient(dtype, *given) for dtype in ("float32", "bfloat16", "float16")])
    expected, *found = run(params, inputs, ones)
    for one in found:
        for (path, full), half in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(one), strict=True):
            assert np.linalg.norm(half - full) < 0.01 * np.linalg.norm(full), path


class Own(linen.Module):
    """A user's module of Flax's layers, which sum in the dtype of their inputs."""

    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        cells = linen.RNN(linen.SimpleCell(2))(linen.Embed(64, 4)(ids))
        return linen.Dense(3)(jnp.cumsum(cells, axis=1)[:, -1])


def test_sums_of_own_modules_are_named_once(capsys):
    ids, policy = TOKENS.reshape(-1, 128), nn.Policy(compute="bfloat16")
    experiment = tiny.experiment(
        data=jn.data.arrays((ids, ids[:, 0] % 3)),
        task=lambda config: jn.tasks.classification(Own(), policy=policy),
        batch_size=100,
        num_steps=1,
    )
    jn.fit(experiment, record=False, progress="plain")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "loses terms" in line)
    assert "sums 12,800 terms in bfloat16 in Own/Embed_0 (scatter-add) (and" in line and "jn.nn.Dense" in line


class Encoder(linen.Module):
    """A table that is not looked up by ``__call__``."""

    def setup(self) -> None:
        self.table = linen.Embed(64, 4)

    def encode(self, ids: jax.Array) -> jax.Array:
        return self.table(ids)


class Two(linen.Module):
    """Two modules of the same class."""

    def setup(self) -> None:
        self.left, self.right = Encoder(), Encoder()

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.left.encode(ids) + self.right.encode(ids)


def test_sums_have_the_paths_of_their_modules_and_loops_those_of_their_terms():
    variables = jax.tree.map(jnp.bfloat16, draws.variables(Two(), TOKENS))
    found = jn.observe.half_sums(jax.grad(lambda v: jnp.sum(jnp.float32(Two().apply(v, TOKENS)))), variables)
    assert {one.where for one in found} == {"Two/left/table", "Two/right/table"}

    def loop(step: Any) -> list[int]:
        run = lambda start, rows: jax.lax.scan(step, start, rows)  # noqa: E731
        return [one.terms for one in jn.observe.half_sums(run, jnp.bfloat16(0), jnp.ones(100, jnp.bfloat16))]

    assert loop(lambda total, row: (total + row, None)) == [100]
    assert loop(lambda x, row: (x + jnp.sin(x) * row, None)) == loop(lambda last, row: (row, last + row)) == []


def test_layers_are_intercepted_once_and_tables_have_tangents():
    ids, layer = jnp.arange(8), nn.Dense(2)
    params = layer.init(jax.random.key(0), ROW[:1])
    _, captured = layer.apply(params, ROW[:1], capture_intermediates=True)
    assert len(captured["intermediates"]["__call__"]) == 1
    table = jax.tree.map(jnp.bfloat16, draws.variables(nn.Embed(8, 4), ids))
    rows, tangents = jax.jvp(lambda table: nn.Embed(8, 4).apply(table, ids), (table,), (table,))
    np.testing.assert_array_equal(rows, tangents)


def test_trained_parameters_in_half_precision_are_refused():
    def task(**options: Any) -> Any:
        return lambda config: jn.tasks.classification(nn.Dense(3, param_dtype=jnp.bfloat16), **options)

    with pytest.raises(jn.ConfigError, match="the parameter bias is bfloat16, which loses small updates"):
        tiny.fit(tiny.experiment(task=task()))
    run = tiny.fit(tiny.experiment(task=task(policy=nn.Policy(compute="bfloat16")), num_steps=5))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(run.state.params)} == {"float32"}
