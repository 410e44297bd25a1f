"""Data sets of Hugging Face and Grain, as streams and tables: the same examples as in memory, at any position."""

import itertools

import grain
import jax
import numpy as np
import pytest

from jaxnn.data import arrays, iterable, stream

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table():
    """Images with a label: an epoch is no whole number of steps."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face data sets are missing: pip install datasets")
    images = np.random.default_rng(0).integers(0, 256, (44, 4, 4), np.uint8)
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "bright"])}
    columns = {"image": list(images), "label": (images.mean((1, 2)) > 127).astype(int).tolist()}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def to_pair(row):
    return {"image": np.asarray(row["image"])}, row["label"]


def assert_starts_at_any_position(source):
    (*_, last) = itertools.islice(source.batches(1, 0, 4), 13)
    jax.tree.map(np.testing.assert_array_equal, last, next(source.batches(1, 12, 4)))


def test_streamed_files_start_at_any_position(table, tmp_path):
    datasets = pytest.importorskip("datasets")
    for index in range(2):
        table.shard(2, index).to_parquet(tmp_path / f"{index}.parquet")
    streamed = datasets.load_dataset("parquet", data_files=f"{tmp_path}/*.parquet", split="train", streaming=True)

    def rows(seed, start):
        shuffled = streamed.shuffle(seed, buffer_size=8, max_buffer_input_shards=1)
        return map(to_pair, shuffled.repeat(None).skip(start))

    test = grain.MapDataset.source(table).map(to_pair)
    assert_starts_at_any_position(iterable(rows, test=test, class_names=table.features["label"].names).train)


@pytest.mark.parametrize("num_workers", (0, 1))
def test_rows_of_a_table_are_read_as_in_memory(table, num_workers):
    inputs, labels = zip(*map(to_pair, table), strict=True)
    held = arrays((jax.tree.map(lambda *leaves: np.stack(leaves), *inputs), list(labels))).train
    batches = stream(grain.MapDataset.source(table).map(to_pair), num_workers=num_workers).train.batches(3, 5, 8)
    for found, order in zip(itertools.islice(batches, 3), held.order(3, np.arange(5, 8), 8), strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, held.read(order))
    batches.close()


def test_grain_data_sets_start_at_any_position():
    numbers = grain.MapDataset.range(12).map(lambda index: (np.full(3, index, np.float32), index % 3))
    assert_starts_at_any_position(iterable(lambda seed, start: numbers.shuffle(seed=seed).repeat()[start:]).train)
