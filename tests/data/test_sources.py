"""Generated batches, iterables, mixtures, data in order, data sets of Hugging Face and Grain, at any position."""

import hashlib
import itertools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.data import arrays, generated, in_order, iterable, mixture, pad_sequences, stream, subset
from tests import tiny


def points(key, step):
    x = jax.random.uniform(key, (8, 3))
    return x, jnp.full(8, step % 3)


def test_generated_batches_are_functions_of_seed_and_step():
    splits = generated(points, test=2)
    assert repr(splits) == "Splits(generated: train generated, 16 test)" and splits.test.num_examples == 16
    train = splits.train

    @jax.jit
    def batches(seed, steps):
        rows = train.order(seed, steps, 8)
        return rows, jax.vmap(lambda row: train.gather(train.examples, row))(rows)

    found = {seed: jax.device_get(batches(np.uint32(seed), np.arange(3))) for seed in (0, 1, 7)}
    for seed, (rows, made) in found.items():
        np.testing.assert_array_equal(rows, train.order(seed, np.arange(3), 8))
        assert made.targets[:, 0].tolist() == [0, 1, 2]
        assert len({inputs.tobytes() for inputs in made.inputs}) == 3
        # No test batch is one of training.
        assert not np.isin(made.inputs, splits.test.examples.inputs).any()
    _, later = batches(np.uint32(7), np.arange(1, 4))
    np.testing.assert_array_equal(later.inputs[:2], found[7][1].inputs[1:])


@pytest.mark.slow
def test_generated_data_train_alone_swept_and_on_devices():
    experiment = tiny.experiment(data=generated(points), num_steps=6, batch_size=8)
    run, split = tiny.fit(experiment, resident=False), tiny.fit(experiment, steps_per_call=3, strategy="data")
    for name, leaf in run.state.params.items():
        np.testing.assert_allclose(leaf, split.state.params[name], rtol=1e-5)
    assert run.predict(np.ones((5, 3))).shape == (5, 3)
    how = {**tiny.MEMBERS, "record": False}
    swept = jn.sweep(experiment, jn.grid(seed=[experiment.config.seed, 5]), **how)
    losses = [member.final["train_loss"] for member in swept.members]
    assert losses[1] != losses[0] == pytest.approx(run.final["train_loss"], rel=1e-5)


def count(seed, start):
    return (({"x": np.full(3, index + seed, np.float32)}, index % 3) for index in itertools.count(start))


def test_an_iterable_goes_on_from_any_position():
    source = iterable(count).train
    whole = list(itertools.islice(source.batches(5, 0, 4), 3))
    (later,) = itertools.islice(source.batches(5, 2, 4, slice(1, 3)), 1)
    np.testing.assert_array_equal(whole[2].inputs["x"][1:3], later.inputs["x"])
    assert whole[2].inputs["x"][:, 0].tolist() == [13.0, 14.0, 15.0, 16.0] and whole[0].targets.tolist() == [0, 1, 2, 0]
    assert source.read(np.array([0, 2])).inputs["x"][:, 0].tolist() == [0.0, 2.0]


def test_an_iterable_is_evaluated_on_readers_and_arrays_of_its_shapes():
    rows = list(itertools.islice(count(0, 0), 6))

    class Reader:  # as a data set of Hugging Face: random access, no arrays
        __len__, __getitem__ = rows.__len__, rows.__getitem__

    inputs, labels = {"x": np.stack([row["x"] for row, _ in rows])}, [label for _, label in rows]
    starts = []
    splits = iterable(
        lambda *where: starts.append(where) or count(*where), Reader(), (inputs, labels), class_names="abc"
    )
    jax.tree.map(
        np.testing.assert_array_equal, *(one.read(np.array([4, 1])) for one in (splits.test, splits.validation))
    )
    assert repr(splits) == "Splits(iterable: train generated, 6 validation, 6 test, streamed, 3 classes)"
    splits.train.fingerprint(hashlib.blake2b())
    assert splits.train.targets == [0] and starts == [(0, 0)]  # some take seconds to start


def test_a_mixture_draws_parts_by_their_weights():
    few, many = arrays((np.arange(4), np.zeros(4, int))), arrays((np.arange(100, 200), np.ones(100, int)))
    mixed = mixture({"few": few, "many": many}, {"few": 3, "many": 1})
    order = jax.jit(lambda seed: mixed.train.order(seed, jnp.arange(100), 40))(jnp.uint32(0))
    inputs, labels = (np.asarray(part)[order] for part in mixed.train.examples)
    assert ((inputs < 100) == (labels == 0)).all()
    # 4,000 draws: three quarters with a deviation of 0.7 %, each of the few 750 times with one of 25.
    assert abs((labels == 0).mean() - 0.75) < 0.03
    assert abs(np.bincount(inputs[labels == 0]) - 750).max() < 120 and len(np.unique(inputs[labels == 1])) > 95


def test_rows_read_stretches_in_order():
    source = in_order(arrays(np.arange(11))).train
    assert source.order(3, np.arange(4), 3).tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 3, 6]]


def test_smaller_subset_is_part_of_larger_one():
    splits = arrays((np.arange(20), np.arange(20) % 2), test=(np.arange(3), np.zeros(3, int)))
    few, more, other = (subset(splits, number, seed).train.examples for number, seed in ((6, 1), (11, 1), (6, 2)))
    assert len({*few.inputs.tolist()}) == 6 and {*few.inputs.tolist()} < {*more.inputs.tolist()} != set(range(11))
    assert (few.targets == few.inputs % 2).all() and not np.array_equal(few.inputs, other.inputs)
    assert subset(splits, 20).test is splits.test


def test_padded_sequences_keep_their_lengths():
    padded, lengths = pad_sequences([np.ones((2, 2)), np.ones((0, 2)), np.ones((5, 2))], length=3, value=-1)
    assert padded.shape == (3, 3, 2) and lengths.tolist() == [2, 0, 3]
    assert (padded[0, 2] == -1).all() and (padded[1] == -1).all() and (padded[2] == 1).all()


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", (0, 1))
def test_rows_of_a_table_are_read_as_in_memory(table, num_workers):
    inputs, labels = zip(*map(to_pair, table), strict=True)
    held = arrays((jax.tree.map(lambda *leaves: np.stack(leaves), *inputs), list(labels))).train
    batches = stream(grain.MapDataset.source(table).map(to_pair), num_workers=num_workers).train.batches(3, 5, 8)
    for found, order in zip(itertools.islice(batches, 3), held.order(3, np.arange(5, 8), 8), strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, held.read(order))
    batches.close()


@pytest.mark.slow
def test_grain_data_sets_start_at_any_position():
    numbers = grain.MapDataset.range(12).map(lambda index: (np.full(3, index, np.float32), index % 3))
    assert_starts_at_any_position(iterable(lambda seed, start: numbers.shuffle(seed=seed).repeat()[start:]).train)
