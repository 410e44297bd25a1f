"""Native sums of batch normalization: equal to XLA's in every shape and over devices, and exact."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxnn.nn import BatchNorm, use_batch_axis, use_batch_mask
from jaxnn.observe import implementations
from jaxnn.types import ConfigError
from tests import draws, native
from tests.draws import assert_near

pytestmark = native.needed
# Few rows; one channel; parts of blocks and of lanes; several blocks, of which the last is small; many channels.
SHAPES = [(5, 3), (7, 1), (5, 3, 7), (2, 3, 20, 64), (40, 30, 33, 5), (70, 300)]


def batch(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Channels of different means and deviations."""
    channels = np.arange(1, shape[-1] + 1, dtype=np.float32)
    return np.asarray(draws.normal(seed, *shape)) * channels + 3 * channels


def graded(by: str, x: jax.Array) -> Any:
    """Outputs and statistics, and the gradients of a cubic function of them by the inputs, scale and bias."""
    layer = BatchNorm(use_running_average=False, implementation=by)
    variables = draws.variables(layer, x)

    def loss(params: Any, x: jax.Array) -> Any:
        y, updates = layer.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return jnp.sum(y**3) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(updates)), (y, updates)

    return jax.grad(loss, (0, 1), has_aux=True)(variables["params"], x)


def test_results_and_gradients_equal_xlas():
    xs = [batch(shape) for shape in SHAPES]
    assert_near(*jax.jit(lambda xs: [[graded(by, x) for x in xs] for by in ("native", "custom_vjp")])(xs))


def test_statistics_are_those_of_all_devices():
    x, mesh = batch((8, 5, 3)), Mesh(np.array(jax.devices()[:2]), ("devices",))

    def shard(by: str, x: jax.Array) -> Any:
        with use_batch_axis("devices"):
            (params, to_x), (y, updates) = graded(by, x)
        return (params, updates), (to_x, y)

    def run(by: str, x: jax.Array) -> Any:
        specs = PartitionSpec(), PartitionSpec("devices")
        return jax.shard_map(lambda x: shard(by, x), mesh=mesh, in_specs=specs[1], out_specs=specs)(x)

    assert_near(*jax.jit(lambda x: [run(by, x) for by in ("native", "custom_vjp")])(x))


def test_moments_are_those_of_float64_and_have_the_same_bits_in_a_batch_of_members():
    x = np.float32(4096 + np.random.default_rng(0).normal(size=(5000, 6)))
    layer = BatchNorm(use_running_average=False, momentum=0.0, implementation="native")

    def moments(x: Any) -> Any:
        return layer.apply(draws.variables(layer, x), x, mutable=["batch_stats"])[1]["batch_stats"]

    alone, members = jax.jit(lambda x: (moments(x), jax.vmap(moments)(jnp.stack([x + 1, x]))))(x)
    np.testing.assert_allclose(alone["mean"], np.float64(x).mean(0), rtol=1e-7)
    np.testing.assert_allclose(alone["var"], np.float64(x).var(0), rtol=1e-5)
    jax.tree.map(lambda one, both: np.testing.assert_array_equal(one, both[1]), alone, members)


def test_obstacles_have_a_reason_and_evaluation_needs_no_kernel():
    x = batch((6, 4, 3))
    layer = BatchNorm(use_running_average=False)

    def refused(words: str, x: Any, **options: Any) -> None:
        with pytest.raises(ConfigError, match=f"cannot use 'native' here: .*{words}.*leave implementation"):
            jax.eval_shape(layer.clone(implementation="native", **options).init, jax.random.key(0), x)

    refused("float32", x.astype(jnp.bfloat16))
    refused("float32", x, dtype=jnp.bfloat16)
    with use_batch_mask(np.arange(6) < 5):
        refused("padding", x)
    evaluated = layer.clone(implementation="native", use_running_average=True)
    assert implementations(lambda x: evaluated.init_with_output(jax.random.key(0), x)[0], x)["normalization"] == ["xla"]
