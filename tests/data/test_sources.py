"""Data besides arrays: tables, generated batches, iterables, mixtures, and data sets of Grain."""

import gzip
import hashlib
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.data import arrays, generated, iterable, mixture, pad_sequences, stream, subset
from jaxnn.types import ConfigError, DataError
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
    noted = lambda *where: starts.append(where) or count(*where)  # noqa: E731
    splits = iterable(noted, Reader(), (inputs, labels), class_names="abc")
    pair = (one.read(np.array([4, 1])) for one in (splits.test, splits.validation))
    jax.tree.map(np.testing.assert_array_equal, *pair)
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


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", (0, 1))
def test_rows_of_a_data_set_are_read_as_in_memory(num_workers):
    # An epoch is no whole number of steps.
    images, labels = np.random.default_rng(0).integers(0, 256, (44, 4, 4), np.uint8), np.arange(44) % 2
    rows = pytest.importorskip("grain").MapDataset.source([*zip(images, labels.tolist(), strict=True)])
    streamed = stream(rows.map(lambda row: ({"image": row[0]}, row[1])), num_workers=num_workers).train
    held, batches = arrays(({"image": images}, labels)).train, streamed.batches(3, 5, 8)
    for found, order in zip(itertools.islice(batches, 3), held.order(3, np.arange(5, 8), 8), strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, held.read(order))
    batches.close()


COLUMNS: dict[str, Any] = {
    "job": ["cook ", "nurse", None, "cook"],
    "age": [25, None, 40, 31],
    "code": [3, None, 10, 3],
    "member": [True, False, True, False],
    "kind": ["b", "a", "b", "a"],
}
TEST = {"age": [50], "job": ["pilot"], "code": [10.0], "member": [True], "kind": ["a"]}
OPTIONS: dict[str, Any] = {"target": "kind", "categorical": ["code"]}
AGES = [[25], [np.nan], [40], [31]]
IDS = [[1, 1, 2], [2, 0, 1], [0, 2, 2], [1, 1, 1]]  # of job, code and member


def check(splits: Any) -> None:
    inputs, targets = splits.train.examples
    np.testing.assert_array_equal(inputs["numbers"], np.float32(AGES))
    np.testing.assert_array_equal(inputs["categories"], np.int32(IDS))
    assert splits.class_names == ("a", "b") and targets.tolist() == [1, 0, 1, 0]
    assert {array.dtype.name for array in (*inputs.values(), targets)} == {"float32", "int32"}


def test_columns_become_numbers_and_ids():
    splits: Any = jn.data.table(COLUMNS, test=TEST, **OPTIONS)
    check(splits)
    # A category that no training row has is missing; integers are in numerical order.
    assert splits.test.examples.inputs["categories"].tolist() == [[0, 2, 2]] and splits.test.targets.tolist() == [0]
    columns = splits.train.columns
    assert columns.categories["code"] == ("3", "10") and columns.num_categories == (3, 3, 3)
    jax.tree.map(np.testing.assert_array_equal, columns.apply({**TEST, "more": [0]}), splits.test.examples.inputs)


def test_files_and_frames_are_the_same_table(tmp_path):
    pandas: Any = pytest.importorskip("pandas")
    path = tmp_path / "people.csv"
    rows = [", ".join("?" if x is None else str(x) for x in row) for row in zip(*COLUMNS.values(), strict=True)]
    path.write_text("\n".join(rows))
    check(jn.data.table(path, names=[*COLUMNS], **OPTIONS))
    frame = pandas.DataFrame(COLUMNS).astype({"job": "category", "code": "Int64", "member": "boolean"})
    frame.to_parquet(tmp_path / "people.parquet")
    check(jn.data.table(tmp_path / "people.parquet", **OPTIONS))
    check(jn.data.table(frame.astype({"code": "category"}), target="kind"))
    with pytest.raises(DataError, match="line 1 of .*people.csv has 5 columns, but its names are 2: fix it"):
        jn.data.table(path, target="a", names=["a", "b"])


def test_categories_are_spelled_alike_in_every_file(tmp_path):
    (tmp_path / "train.csv").write_text("zip,size,y\n02134,1.50,1.5\nK1A,XL,-9\n00501,M,3.5\n")
    (tmp_path / "test.csv").write_text("zip,size,y\n00501,1.50,1.5\n02134,1.50,3.5\n")
    with pytest.raises(DataError, match="the target 'y' is missing in row 1"):
        jn.data.table(tmp_path / "train.csv", target="y", categorical="zip", missing=[-9])
    splits: Any = jn.data.table(tmp_path / "train.csv", target="y", categorical="zip", test=tmp_path / "test.csv")
    assert splits.train.columns.categories["zip"] == ("00501", "02134", "K1A")
    assert splits.test.examples.inputs["categories"].tolist() == [[1, 1], [2, 1]]
    columns = {"a": np.float32([0.1, 0.2]), "y": [-9.0, 1.0]}
    splits = jn.data.table(columns, target="a", classification=True, missing="-9")
    assert splits.class_names == ("0.1", "0.2") and np.isnan(splits.train.examples.inputs["numbers"][0, 0])


@pytest.mark.parametrize("kind", [dict, "frame", "file"])
def test_numbers_that_mean_missing_are_missing_everywhere(kind, tmp_path):
    numbers = {"x": [1e20, 2.5, 1e-5, -9, np.inf, 7.0], "whole": [-9, 1, 2, 3, 4, 5], "code": [-9, 1, 2, 1e20, 3, 2]}
    given: Any = {**numbers, "text": ["-9", "09", "z", "-9.0", "z", "inf"], "y": ["u", "v"] * 3}
    if kind is not dict:
        frame = pytest.importorskip("pandas").DataFrame(given)
        (tmp_path / "t.csv").write_text(frame.to_csv(index=False).replace("+", ""))  # 1e20
        given = frame if kind == "frame" else tmp_path / "t.csv"
    splits: Any = jn.data.table(given, target="y", categorical="code", missing=(1e20, 1e-5, -9.0, np.inf, 9))
    columns, inputs = splits.train.columns, splits.train.examples.inputs
    assert columns.categories == {"code": ("1", "2", "3"), "text": ("09", "z")}
    np.testing.assert_array_equal(
        inputs["numbers"].T, np.float32([[np.nan, 2.5, *[np.nan] * 3, 7], [np.nan, *range(1, 6)]])
    )
    assert inputs["categories"].T.tolist() == [[0, 1, 2, 0, 3, 2], [0, 1, 2, 0, 2, 0]]


def test_names_of_a_file_are_its_own(tmp_path):
    pandas: Any = pytest.importorskip("pandas")
    frame, path = pandas.DataFrame({"a": range(4), " b ": [2, 1, 4, 3], "y": [0, 1, 1, 0]}), tmp_path / "t.csv"
    frame.to_csv(path)
    how: dict[str, Any] = {"target": "y", "classification": True}
    with pytest.warns(UserWarning, match="train: column 1 has no name, as frame.to_csv writes its index, and is left"):
        assert jn.data.table(path, **how).train.columns.numbers == ("a", "b")
    path.write_text("x,b,x,y\n1,2,3,0\n2,3,4,1\n")
    with pytest.raises(DataError, match="t.csv has 2 columns called 'x'"):
        jn.data.table(path, **how)


def test_categories_of_another_spelling_are_the_same_and_unknown_ones_are_said(tmp_path):
    write = {"train": ("1", "02", "True", "1.10"), "test": ("1.0", "02", "TRUE", "1.10"), "other": ("9",) * 5}
    for name, zones in write.items():
        rows = "".join(f"{zone},{row}.5\n" for row, zone in enumerate(zones))
        (tmp_path / f"{name}.csv").write_text(f"zone,y\n{rows}")
    how: dict[str, Any] = {"target": "y", "categorical": "zone"}
    splits: Any = jn.data.table(tmp_path / "train.csv", test=tmp_path / "test.csv", **how)
    assert splits.train.columns.categories["zone"] == ("02", "1", "1.10", "True")
    ids = (splits.train.examples.inputs["categories"], splits.test.examples.inputs["categories"])
    np.testing.assert_array_equal(*ids)
    with pytest.warns(UserWarning, match="test: no value of column 'zone', such as '9', is a category of the training"):
        jn.data.table(tmp_path / "train.csv", test=tmp_path / "other.csv", **how)


@pytest.mark.parametrize("twin", (np.arange(40) % 2, np.where(np.arange(40) % 2, "yes", "no")))
def test_a_column_that_tells_the_target_is_named(twin):
    given = {"x": np.arange(40.0), "twin": twin, "y": np.arange(40) % 2}
    with pytest.warns(UserWarning, match="column 'twin' tells the target 'y' in every row: drop it"):
        jn.data.table(given, target="y", classification=True)


def test_a_polars_frame_is_the_same_table():
    check(jn.data.table(pytest.importorskip("polars").DataFrame(COLUMNS), **OPTIONS))


def test_parquet_files_need_pandas_and_csv_files_may_be_gzipped(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"a,y\n1_0,0.5\nNA,1\n"))
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert jn.data.table(tmp_path / "a.csv.gz", target="y").train.columns.categories == {"a": ("1_0",)}
    with pytest.raises(ConfigError, match=r'pip install "jaxnn\[tables\]"'):
        jn.data.table(tmp_path / "a.parquet", target="kind")


def test_fractions_are_disjoint_and_categories_those_of_train():
    columns = {"name": [*map(str, range(20))], "y": np.arange(20.0)}
    splits: Any = jn.data.table(columns, target="y", test=0.2, validation=0.15)
    parts = [source.targets.tolist() for source in splits.named().values()]
    assert [*map(len, parts)] == [13, 3, 4] and sorted(sum(parts, [])) == [*range(20)]
    assert splits.train.columns.categories["name"] == tuple(f"{y:.0f}" for y in parts[0])
    assert not splits.test.examples.inputs["categories"].any()


def test_standardize_fills_in_and_marks_missing_numbers():
    splits: Any = jn.data.standardize(jn.data.standardize(jn.data.table(COLUMNS, test=TEST, **OPTIONS)))
    mean, deviation = 32, np.std([25, 40, 31])
    expected = [[-7 / deviation, 0], [0, 1], [8 / deviation, 0], [-1 / deviation, 0]]
    np.testing.assert_allclose(splits.train.examples.inputs["numbers"], expected, rtol=1e-6)
    np.testing.assert_allclose(splits.test.examples.inputs["numbers"], [[(50 - mean) / deviation, 0]], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, splits.train.columns.apply(TEST), splits.test.examples.inputs)


def test_an_edge_lies_between_its_values_however_large_or_small_they_are():
    for low, high in ((-1.7e308, 1.7e308), (1e308, 1.7e308), (5e-324, 1e-323), (-0.0, 5e-324), (1, 1 + 2**-52)):
        (edge,) = jn.data.learn_bins(np.array([[low], [high]])).edges[0]
        assert low <= edge < high
    adjacent = (1 + np.arange(50) * 2.0**-52)[:, None]
    assert jn.data.learn_bins(adjacent, max_bins=50).apply(adjacent)[:, 0].tolist() == [*range(50)]


@pytest.mark.parametrize("max_bins", [255, 8, 3])
def test_a_frequent_value_has_a_bin_of_its_own(max_bins):
    rows = np.concatenate([np.zeros(5000), np.linspace(1, 2, 5000), -np.linspace(1, 2, 2500)])[:, None]
    counts = np.bincount(jn.data.learn_bins(rows, max_bins=max_bins).apply(rows)[:, 0])
    others = np.delete(counts, counts.argmax())
    assert counts.max() == 5000 and len(others) == max_bins - 1 and others.max() < 1.5 * 7500 / len(others)


def test_bins_of_a_table_are_those_of_its_columns():
    table: Any = jn.data.table(COLUMNS, test=TEST, **OPTIONS)
    splits: Any = jn.data.binned(table)
    matrix = np.hstack([AGES, np.where(np.array(IDS) > 0, IDS, np.nan)])
    by_hand: Any = jn.data.binned((matrix, table.train.targets), categorical=(1, 2, 3))
    np.testing.assert_array_equal(splits.train.examples.inputs, by_hand.train.examples.inputs)
    assert splits.train.bins.categorical == (1, 2, 3) and splits.class_names == ("a", "b")
    binned = splits.train.bins.apply(splits.train.columns.apply(TEST))
    np.testing.assert_array_equal(binned, splits.test.examples.inputs)
    jobs: Any = jn.data.binned(jn.data.table(COLUMNS, drop=["age", "code", "member"], target="kind"))
    assert jobs.train.examples.inputs.tolist() == [[0], [1], [255], [0]]
    rows = np.array([[1.0], [2.0], [4.0], [8.0]])
    far: Any = jn.data.binned(jn.data.arrays((rows, [0, 1, 1, 0]), others={"far": (rows + 1, [1, 1, 1, 1])})).others
    assert far["far"].examples.inputs.tolist() == [[1], [1], [2], [3]]
