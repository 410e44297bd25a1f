"""A source in arrays: what it gathers, augments and goes through, and what importing it costs."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.data import ArraySource, padded_indices
from jaxnn.types import Batch, DataError, Examples


def images():
    inputs = np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2, 1) * 10
    return Examples(inputs, np.arange(6, dtype=np.int32))


def test_gather_takes_rows_and_scales_bytes_to_the_unit_interval():
    batch = jax.jit(ArraySource(images()).gather)(images(), np.array([5, 0], np.int32))
    assert batch.inputs.dtype == jnp.float32
    # Example 5 begins with byte 20 of 24, times ten; example 0 with 0, 10, 20, 30.
    np.testing.assert_allclose(batch.inputs[0, 0, 0, 0], 200 / 255, rtol=1e-6)
    np.testing.assert_allclose(batch.inputs[1].ravel(), np.array([0, 10, 20, 30]) / 255, rtol=1e-6)
    np.testing.assert_array_equal(batch.targets, [5, 0])
    np.testing.assert_array_equal(batch.mask, [1.0, 1.0])
    assert batch.mask.dtype == jnp.float32


def test_all_256_bytes_have_the_same_bits_with_and_without_jit_and_end_at_one():
    examples = Examples(np.arange(256, dtype=np.uint8)[:, None], np.zeros(256, np.int32))
    source = ArraySource(examples)
    eager = source.gather(examples, np.arange(256)).inputs
    np.testing.assert_array_equal(jax.jit(source.gather)(examples, np.arange(256)).inputs, eager)
    assert eager[0] == 0.0
    assert eager[255] == 1.0


@pytest.mark.parametrize("dtype", (np.int32, np.float32))
def test_gather_leaves_other_dtypes_as_they_are(dtype):
    examples = Examples(np.array([[3], [200], [-7]], dtype), np.array([[0.5], [1.5], [2.5]]))
    batch = ArraySource(examples).gather(jax.device_put(examples), np.array([2, 1]))
    assert batch.inputs.dtype == dtype
    np.testing.assert_array_equal(batch.inputs, [[-7], [200]])
    np.testing.assert_array_equal(batch.targets, [[2.5], [1.5]])


def test_gather_passes_a_mask_on():
    mask = np.array([1.0, 0.0], np.float32)
    batch = ArraySource(images()).gather(images(), np.array([0, 0]), mask)
    np.testing.assert_array_equal(batch.mask, mask)


def test_order_covers_the_split_and_names_a_batch_that_is_too_large():
    source = ArraySource(images())
    order = source.order(3, np.arange(3), 2)
    np.testing.assert_array_equal(np.sort(order.ravel()), np.arange(6))
    with pytest.raises(DataError, match="batch of 7 .* 6 examples"):
        source.order(3, np.arange(1), 7)


def test_transform_augments_inputs_only_and_is_the_identity_without_augmentation():
    batch = Batch(jnp.ones((2, 3)), jnp.arange(2), jnp.ones(2))
    key = jax.random.key(0)
    assert ArraySource(images()).transform(batch, key) is batch

    def noise(key, inputs):
        return inputs + jax.random.normal(key, inputs.shape)

    changed = ArraySource(images(), noise).transform(batch, key)
    np.testing.assert_array_equal(changed.inputs, 1 + jax.random.normal(key, (2, 3)))
    assert changed.targets is batch.targets
    assert changed.mask is batch.mask


def test_gather_works_in_a_scan_over_the_order_as_it_does_step_by_step():
    source, examples = ArraySource(images()), images()
    order = source.order(1, np.arange(6), 2)

    def body(carry, indices):
        return carry, source.gather(jax.device_put(examples), indices)

    _, scanned = jax.lax.scan(body, None, jnp.asarray(order))
    for step, indices in enumerate(order):
        alone = source.gather(examples, indices)
        jax.tree.map(lambda a, b, s=step: np.testing.assert_array_equal(a[s], b), scanned, alone)


def test_padded_indices_hold_each_example_once_and_mask_the_rest():
    # 7 examples in batches of 3: two whole ones, then example 6 and two of padding.
    indices, mask = padded_indices(7, 3)
    np.testing.assert_array_equal(indices, [[0, 1, 2], [3, 4, 5], [6, 0, 0]])
    np.testing.assert_array_equal(mask, [[1, 1, 1], [1, 1, 1], [1, 0, 0]])
    assert (indices.dtype, mask.dtype) == (np.int32, np.float32)


def test_padded_indices_without_a_tail_and_with_a_batch_larger_than_the_set():
    indices, mask = padded_indices(6, 3)
    assert (indices.shape, mask.min()) == ((2, 3), 1.0)
    indices, mask = padded_indices(2, 5)
    np.testing.assert_array_equal(mask, [[1, 1, 0, 0, 0]])
    with pytest.raises(DataError, match="batch of 0 "):
        padded_indices(2, 0)


def test_importing_the_data_package_loads_nothing_heavy_and_touches_no_device():
    program = (
        "import sys, jaxnn.data\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized(), 'a device was touched'\n"
        "heavy = {'sklearn', 'pooch', 'PIL', 'requests'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
