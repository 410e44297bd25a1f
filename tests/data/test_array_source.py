"""Sources in memory: how batches are gathered, augmented and padded."""

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
    mask = np.array([1.0, 0.0], np.float32)
    np.testing.assert_array_equal(ArraySource(images()).gather(images(), np.array([0, 0]), mask).mask, mask)


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


@pytest.mark.parametrize(
    ("size", "indices", "masked"),
    (
        (3, [[0, 1, 2], [3, 4, 5], [6, 0, 0]], [[1, 1, 1], [1, 1, 1], [1, 0, 0]]),
        (7, [[0, 1, 2, 3, 4, 5, 6]], [[1] * 7]),
        (9, [[0, 1, 2, 3, 4, 5, 6, 0, 0]], [[1] * 7 + [0] * 2]),
    ),
)
def test_padded_indices_hold_each_example_once_and_mask_the_rest(size, indices, masked):
    found, mask = padded_indices(7, size)
    assert (found.tolist(), mask.tolist(), found.dtype, mask.dtype) == (indices, masked, np.int32, np.float32)
    with pytest.raises(DataError, match="batch of 0 "):
        padded_indices(7, 0)
