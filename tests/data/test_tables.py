"""Tables of numbers and categories: the same from each kind of table, by hand."""

import sys
from typing import Any

import jax
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.types import ConfigError, DataError

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
    with pytest.raises(DataError, match="people.csv cannot be read .Length of header or names"):
        jn.data.table(path, target="a", names=["a", "b"])


def test_categories_are_spelled_alike_in_every_file(tmp_path):
    pytest.importorskip("pandas")
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


def test_names_of_a_file_are_its_own(tmp_path):
    pandas: Any = pytest.importorskip("pandas")
    frame, path = pandas.DataFrame({"a": range(4), " b ": [2, 1, 4, 3], "y": [0, 1, 1, 0]}), tmp_path / "t.csv"
    frame.to_csv(path)
    how: dict[str, Any] = {"target": "y", "classification": True}
    with pytest.warns(UserWarning, match="train: column 1 has no name, as frame.to_csv writes its index, and is left"):
        assert jn.data.table(path, **how).train.columns.numbers == ("a", "b")
    path.write_text("x,b,x,y\n1,2,3,0\n2,3,4,1\n")
    with pytest.raises(DataError, match="t.csv cannot be read .it has 2 columns called 'x'"):
        jn.data.table(path, **how)


def test_categories_of_another_spelling_are_the_same_and_unknown_ones_are_said(tmp_path):
    pytest.importorskip("pandas")
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


def test_files_need_pandas(tmp_path, monkeypatch):
    (tmp_path / "a.csv").touch()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r'pip install "jaxnn\[tables\]"'):
        jn.data.table(tmp_path / "a.csv", target="kind")


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
    for low, high in ((-1.7e308, 1.7e308), (1e308, 1.7e308), (5e-324, 1e-323), (-0.0, 5e-324)):
        (edge,) = jn.data.learn_bins(np.array([[low], [high]])).edges[0]
        assert low <= edge < high


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
