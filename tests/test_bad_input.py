"""Bad input gets one clear sentence, from Python and from the shell, and nothing is written."""

import dataclasses
import gzip
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from jaxnn.loop.options import check_config
from PIL import Image

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 4
    num_steps: int = 2
    seed: int = 0


def experiment(data: Callable[[Any], jn.Splits], num_classes: int = 10) -> jn.Experiment:
    return jn.Experiment(
        Config(),
        data,
        task=lambda config: jn.tasks.classification(jn.models.MLP((num_classes,))),
        optimizer=lambda config: optax.sgd(0.1),
    )


def idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(exist_ok=True)
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def mnist_folder(folder: Path, **replaced: np.ndarray) -> Path:
    images, labels = np.zeros((8, 28, 28)), np.arange(8)
    for split in ("train", "t10k"):
        idx(folder / "mnist" / f"{split}-images-idx3-ubyte.gz", replaced.get("images", images))
        idx(folder / "mnist" / f"{split}-labels-idx1-ubyte.gz", replaced.get("labels", labels))
    return folder


def truncated(folder: Path) -> jn.Splits:
    file = mnist_folder(folder) / "mnist" / "train-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes())[:-1]))
    return jn.data.mnist(folder)


def not_idx(folder: Path) -> jn.Splits:
    file = mnist_folder(folder) / "mnist" / "train-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(b"<html>not found</html>"))
    return jn.data.mnist(folder)


def label_out_of_range(folder: Path) -> jn.Splits:
    return jn.data.mnist(mnist_folder(folder, labels=np.full(8, 10)))


def broken_image(folder: Path) -> jn.Splits:
    (folder / "train" / "cats").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(folder / "train" / "cats" / "a.png")
    (folder / "train" / "cats" / "b.png").write_bytes(b"no picture")
    return jn.data.image_folder(folder, (8, 8))


def empty_split(folder: Path) -> jn.Splits:
    return jn.data.arrays(train=(np.ones((8, 3)), np.arange(8)), test=(np.ones((0, 3)), np.ones(0, int)))


def not_a_number(folder: Path) -> jn.Splits:
    inputs = np.ones((8, 3))
    inputs[5, 1] = np.nan
    return jn.data.arrays(train=(inputs, np.arange(8)))


def large_batch(folder: Path) -> jn.Splits:
    return jn.data.arrays(train=(np.ones((3, 3)), np.arange(3)))


def more_labels_than_outputs(folder: Path) -> jn.Splits:
    return jn.data.arrays(train=(np.ones((20, 3)), np.arange(20)))


def unknown_python_pickle(folder: Path) -> jn.Splits:
    batches = folder / "cifar-10-batches-py"
    batches.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (batches / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    return jn.data.cifar10(folder)


# What is wrong, and the words that must name it and where.
TABLE: dict[str, tuple[Callable[[Path], jn.Splits], str]] = {
    "truncated idx": (truncated, r"train-images-idx3-ubyte\.gz"),
    "not idx": (not_idx, r"train-images-idx3-ubyte\.gz"),
    "label out of range": (label_out_of_range, r"10"),
    "image does not decode": (broken_image, r"b\.png"),
    "empty split": (empty_split, r"test.*empty|empty.*test|test.*no example"),
    "NaN": (not_a_number, r"train.*5|5.*train"),
    "batch larger than the set": (large_batch, r"batch of 4 is larger than the set of 3"),
    "labels beyond the outputs": (more_labels_than_outputs, r"label 10 .* the model has 10 outputs"),
    "pickle that calls": (unknown_python_pickle, r"data_batch_1|system"),
}


@pytest.mark.parametrize("case", TABLE)
def test_bad_data_from_python(case: str, tmp_path: Path) -> None:
    make, words = TABLE[case]
    folder, run_dir = tmp_path / "data", tmp_path / "run"
    folder.mkdir()
    with pytest.raises(jn.JaxnnError) as caught:
        jn.fit(experiment(lambda config: make(folder)), run_dir=run_dir, progress="none")
    assert re.search(words, str(caught.value)), str(caught.value)
    assert not run_dir.exists()


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("case", TABLE)
def test_bad_data_from_the_shell(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = TABLE[case]
    folder, run_dir = tmp_path / "data", tmp_path / "run"
    folder.mkdir()
    with pytest.raises(SystemExit) as caught:
        jn.main(experiment(lambda config: make(folder)), ["--run-dir", str(run_dir), "--progress", "none"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and re.search(words, line), line
    assert not run_dir.exists()


@dataclasses.dataclass(frozen=True)
class Typed(Config):
    rate: float = 0.1
    name: str = "a"
    widths: tuple[int, ...] = (4,)
    limit: float | None = None
    verbose: bool = False


@dataclasses.dataclass(frozen=True)
class NoSeed:
    batch_size: int = 4
    num_steps: int = 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_steps": -1}, "num_steps is -1"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"seed": 2**32}, "below 2"),
        ({"sed": 1}, "did you mean 'seed'"),
        ({"epochs": 1}, "did you mean 'num_steps'"),
        ({"num_steps": 2**31}, "num_steps is 2147483648, and must be below 2**31"),
        ({"batch_size": "4"}, "batch_size is '4', of type str"),
        ({"rate": "0.1"}, "rate is '0.1', of type str"),
        ({"rate": True}, "rate is True, of type bool"),
        ({"name": 3}, "name is 3, of type int"),
        ({"widths": 3}, "widths is 3, of type int"),
        ({"limit": "none"}, "limit is 'none', of type str"),
        ({"verbose": 1}, "verbose is 1, of type int"),
    ],
)
def test_bad_config_is_named(change: dict[str, Any], words: str) -> None:
    typed = dataclasses.replace(experiment(lambda config: jn.data.digits()), config=Typed())
    with pytest.raises(jn.ConfigError, match=re.escape(words)):
        jn.fit(typed.replace(**change), record=False, progress="none")


@pytest.mark.parametrize(
    "fields", [{"rate": 1}, {"rate": np.float32(0.5)}, {"limit": 3}, {"widths": [4, 5]}, {"batch_size": np.int64(4)}]
)
def test_a_value_that_serves_as_its_field_is_no_mistake(fields: dict[str, Any]) -> None:
    check_config(Typed(**fields))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 3}, r"'num_steps' is a field of the config.*experiment\.replace"),
        ({"rate": 3}, "'rate' is a field of the config"),
        ({"out_dir": "x"}, "did you mean 'run_dir'"),
        ({"patients": 1}, "did you mean 'patience'"),
    ],
)
def test_the_option_or_field_that_is_meant_is_named(options: dict[str, Any], words: str) -> None:
    typed = dataclasses.replace(experiment(lambda config: jn.data.digits()), config=Typed())
    with pytest.raises(jn.ConfigError, match=words):
        jn.fit(typed, **options)
    with pytest.raises(jn.ConfigError, match=words):
        jn.sweep(typed, jn.grid(seed=[0, 1]), **options)


def test_a_config_without_what_the_loop_reads_is_named() -> None:
    digits = dataclasses.replace(experiment(lambda config: jn.data.digits()), config=NoSeed())
    with pytest.raises(jn.ConfigError, match="no field 'seed'"):
        jn.fit(digits, record=False, progress="none")


def test_a_config_that_is_no_dataclass_is_named() -> None:
    with pytest.raises(jn.ConfigError, match="must be an instance of a dataclass"):
        jn.Experiment({"seed": 0}, lambda c: None, lambda c: None, lambda c: None)  # type: ignore[arg-type]
