"""Bad input gives one line that names it and the fix, from Python and from the shell, before anything is written."""

from __future__ import annotations

import dataclasses
import gzip
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen
from PIL import Image

import jaxnn as jn
from jaxnn.engine import check_config
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

INPUTS, LABELS = tiny.points(37)
IDS, CLASSES = np.arange(36).reshape(9, 4) % 8, np.arange(9) % 3
SEQUENCES = np.zeros((9, 4, 3), np.float32)
NEXT_TOKEN = jn.tasks.next_token((tiny.init, lambda params, x: x @ params["kernel"]))
FOLDED = jn.models.RecurrentClassifier(3, vocabulary_size=6, features=2, embedding_features=None)


class Reader(linen.Module):
    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return linen.Embed(6, 3, name="Table")(tokens.T).mean(axis=0)


def task(made: Any) -> dict[str, Any]:
    return {"task": lambda config: made}


def images(labels: Any = range(8), broken: Callable[[bytes], bytes] | None = None) -> Callable[[Path], jn.Splits]:
    """MNIST's files with ``labels``, their first file changed by ``broken``."""

    def make(folder: Path) -> jn.Splits:
        (folder / "mnist").mkdir()
        for split in ("train", "t10k"):
            for name, array in (("images-idx3", np.zeros((8, 28, 28))), ("labels-idx1", np.asarray(labels))):
                content = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
                content += array.astype(np.uint8).tobytes()
                content = broken(content) if broken is not None and (split, name[0]) == ("train", "i") else content
                (folder / "mnist" / f"{split}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
        return jn.data.mnist(folder)

    return make


def broken_image(folder: Path) -> jn.Splits:
    (folder / "train" / "cats").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(folder / "train" / "cats" / "a.png")
    (folder / "train" / "cats" / "b.png").write_bytes(b"no picture")
    return jn.data.image_folder(folder, (8, 8))


def python_pickles(folder: Path) -> jn.Splits:
    (folder / "cifar-10-batches-py").mkdir()
    return jn.data.cifar10(folder)


# The parts of an experiment, its data made in a folder if they are a function, and what the message must say.
EXPERIMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "truncated idx": ({"data": images(broken=lambda content: content[:-1])}, r"train-images-idx3-ubyte\.gz"),
    "not idx": ({"data": images(broken=lambda _: b"<html>not found</html>")}, r"train-images-idx3-ubyte\.gz"),
    "label of no class": ({"data": images(np.full(8, 10))}, "10"),
    "broken image": ({"data": broken_image}, r"b\.png"),
    "CIFAR-10 as pickles": ({"data": python_pickles}, r"cifar-10-batches-py .*convert_cifar"),
    "empty split": (
        {"data": lambda _: jn.data.arrays((INPUTS, LABELS), (np.ones((0, 3)), np.ones(0, int)))},
        "test.*(empty|no example)|empty.*test",
    ),
    "NaN": (
        {"data": lambda _: jn.data.arrays((np.where(np.arange(37)[:, None] == 5, np.nan, INPUTS), LABELS))},
        "train.*5|5.*train",
    ),
    "batch above the set": ({"batch_size": 38}, "batch of 38 is larger than the set of 37"),
    "negative rate": ({"learning_rate": -0.1}, "learning_rate is -0.1"),
    "label above the outputs": (
        {"data": jn.data.arrays((INPUTS, np.arange(37) % 4))},
        "label 3 of example 3 in train .* model has 3 outputs",
    ),
    "label above the outputs in test": (
        {"data": jn.data.arrays((INPUTS, LABELS), (INPUTS, np.arange(37) % 5))},
        "label 3 of example 3 in test is out of range",
    ),
    "output shape": (
        {"model": (tiny.init, lambda params, inputs: tiny.apply(params, inputs)[:, None])},
        r"logits \[batch, classes\], not \[8, 1, 3\]",
    ),
    "not a model": ({"model": 3}, "a model must be a Flax Linen module or a pair"),
    "data as a pair": ({"data": (INPUTS, LABELS)}, r"experiment's data gave a tuple: .* jn\.data\.arrays"),
    "model as a task": (task(jn.models.MLP((3,))), r"experiment's task gave a MLP: .* jn\.tasks\.classification"),
    "number as an optimizer": ({"optimizer": lambda config: 0.1}, "experiment's optimizer gave a float: .* Optax"),
    "loss shape": (
        task(jn.tasks.supervised(tiny.MODEL, lambda outputs, targets: outputs**2, {})),
        r"a number an example, \[8\], not \[8, 3\]: take its mean over every axis but the first",
    ),
    "token above the table in test": (
        {"data": jn.data.arrays((IDS % 5, CLASSES), (IDS, CLASSES))}
        | task(jn.tasks.classification(jn.models.BagOfTokens(3, vocabulary_size=5, features=2))),
        r"token id 5 of example 1 in test .* 5 rows",
    ),
    "token above an own table": (
        {"data": jn.data.arrays((IDS, CLASSES))}
        | task(jn.tasks.supervised(Reader(), lambda outputs, targets: outputs.mean(axis=1), {})),
        r"token id 6 of example 1 in train .* Table has 6 rows",
    ),
    "token above a vocabulary without a table": (
        {"data": jn.data.arrays((IDS, CLASSES))} | task(jn.tasks.classification(FOLDED)),
        r"token id 6 of example 1 in train .* 6 rows",
    ),
    "binary labels from 1": (
        {"data": jn.data.arrays((INPUTS, np.arange(37) % 2 + 1))}
        | task(jn.tasks.binary_classification((tiny.init, lambda p, x: tiny.apply(p, x)[:, :1]))),
        "label 2 of example 1 in train .* 0 to 1",
    ),
    "one-hot labels": (
        {"data": jn.data.arrays((INPUTS, np.eye(3)[LABELS]))},
        r"integers \[batch\], not float32 .* argmax",
    ),
    "label -2": (
        {"data": jn.data.arrays((SEQUENCES, np.full((9, 4), -2)))} | task(NEXT_TOKEN),
        "label -2 of example 0 in train is out of range",
    ),
    "token above the outputs": (
        {"data": jn.data.arrays((SEQUENCES, np.full((9, 4), 7)))} | task(NEXT_TOKEN),
        "label 7 of example 0 in train is out of range: labels must be 0 to 2",
    ),
}


@pytest.mark.parametrize("case", EXPERIMENTS)
def test_bad_experiments_from_python_and_the_shell(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, words = EXPERIMENTS[case]
    experiment = tiny.experiment(**parts)
    if callable(make := parts.get("data")):
        experiment = dataclasses.replace(experiment, data=lambda config: make(Path(tempfile.mkdtemp(dir=tmp_path))))
    with pytest.raises((jn.ConfigError, jn.DataError)) as caught:
        tiny.fit(experiment, tmp_path / "run")
    assert re.search(words, str(caught.value)) and "\n" not in str(caught.value), str(caught.value)
    with pytest.raises(SystemExit) as left:
        jn.main(experiment, ["--run-dir", str(tmp_path / "run"), "--progress", "none"])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and line.startswith("error: ") and re.search(words, line), line
    assert not (tmp_path / "run").exists()


@dataclasses.dataclass(frozen=True)
class Typed(tiny.Config):
    rate: float = 0.1
    name: str = "a"
    widths: tuple[int, ...] = (4,)
    limit: float | None = None
    verbose: bool = False


@dataclasses.dataclass(frozen=True)
class NoSeed:
    batch_size: int = 4
    num_steps: int = 2


TYPED = dataclasses.replace(tiny.experiment(), config=Typed())


def train(data: Any = (INPUTS, LABELS), model: Any = tiny.MODEL, **given: Any) -> jn.Run:
    return jn.train(model, optax.sgd(0.1), data, record=False, progress="none", **given)


CALLS: list[tuple[Callable[[], Any], str]] = [
    *(
        (lambda change=change: jn.fit(TYPED.replace(**change), record=False), words)  # type: ignore[misc]
        for change, words in (
            ({"batch_size": 0}, "batch_size is 0"),
            ({"num_steps": -1}, "num_steps is -1"),
            ({"seed": 0.5}, "seed is 0.5"),
            ({"seed": 2**32}, r"below 2\*\*32"),
            ({"sed": 1}, "did you mean 'seed'"),
            ({"epochs": 1}, "did you mean 'num_steps'"),
            ({"num_steps": 2**31}, r"num_steps is 2147483648, and must be below 2\*\*31"),
            ({"batch_size": "4"}, "batch_size is '4', of type str"),
            ({"rate": "0.1"}, "rate is '0.1', of type str"),
            ({"rate": True}, "rate is True, of type bool"),
            ({"name": 3}, "name is 3, of type int"),
            ({"widths": 3}, "widths is 3, of type int"),
            ({"limit": "none"}, "limit is 'none', of type str"),
            ({"verbose": 1}, "verbose is 1, of type int"),
        )
    ),
    *(
        (lambda call=call, given=given: call(**given), words)  # type: ignore[misc]
        for given, words in (
            ({"epochs": 3}, r"'num_steps' is a field of the config.*experiment\.replace"),
            ({"rate": 3}, "'rate' is a field of the config"),
            ({"out_dir": "x"}, "did you mean 'run_dir'"),
            ({"patients": 1}, "did you mean 'patience'"),
        )
        for call in (lambda **o: jn.fit(TYPED, **o), lambda **o: jn.sweep(TYPED, jn.grid(seed=[0, 1]), **o))
    ),
    *(
        (lambda given=given: jn.fit(TYPED, record=False, **given), words)  # type: ignore[misc]
        for given, words in (
            ({"monitor": "acuracy"}, "monitor is 'acuracy', .* did you mean 'accuracy'"),
            ({"resume": 3}, "resume is 3, and must be a path"),
            ({"run_dir": True}, "run_dir is True, and must be a path"),
            ({"options": {"record": False}}, r"options is \{'record': False\}.*RunOptions"),
            *(({"stall_after": bad}, "stall_after is .* 0 or more") for bad in (-1.0, float("nan"), "5", None, True)),
        )
    ),
    (lambda: jn.fit(tiny.experiment(data=jn.data.arrays((INPUTS, LABELS))), patience=2), "patience needs"),
    *(
        (lambda call=call: call(Typed()), r"Typed.* is no experiment: give jn\.Experiment")
        for call in (jn.fit, jn.iterate)
    ),  # type: ignore[misc]
    (lambda: jn.fit(None), "None is no experiment"),  # type: ignore[arg-type]
    (lambda: jn.fit(dataclasses.replace(TYPED, config=NoSeed())), "no field 'seed'"),
    (lambda: jn.Experiment({"seed": 0}, *[lambda c: None] * 3), "must be an instance of a dataclass"),  # type: ignore[arg-type]
    (lambda: jn.iterate(TYPED).run, "iterate first"),
    (lambda: train(num_epochs=1, num_steps=5), "both num_epochs and num_steps"),
    *(
        (lambda given=given: train(**given), words)  # type: ignore[misc]
        for given, words in (
            ({"num_epochs": float("nan")}, "num_epochs is nan"),
            ({"num_epochs": float("inf")}, "num_epochs is inf"),
            ({"num_epochs": 0}, "num_epochs is 0"),
            ({"num_steps": 0}, "num_steps is 0"),
            ({"batch_size": 0}, "batch_size is 0"),
            ({"batch_size": "8"}, "batch_size is '8'"),
            ({"batch_size": 38}, "larger than the set of 37"),
            ({"epochs": 3}, "no argument 'epochs': did you mean 'num_epochs'"),
            ({"monitr": "loss"}, "did you mean 'monitor'"),
            ({"data": (INPUTS, np.eye(3)[LABELS])}, r"one-hot .*argmax\(axis=-1\)"),
            ({"data": (INPUTS, np.zeros((37, 2), int))}, r"\[37, 2\] are no labels \[examples\]"),
        )
    ),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_bad_calls(number: int) -> None:
    call, words = CALLS[number]
    with pytest.raises((jn.ConfigError, jn.DataError)) as caught:
        call()
    assert re.search(words, str(caught.value)) and "\n" not in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "fields", [{"rate": 1}, {"rate": np.float32(0.5)}, {"limit": 3}, {"widths": [4, 5]}, {"batch_size": np.int64(4)}]
)
def test_convertible_config_values_are_accepted(fields: dict[str, Any]) -> None:
    check_config(Typed(**fields))


def test_one_hot_and_integer_targets_are_regressed_if_asked() -> None:
    with pytest.raises(jn.DataError, match=r"targets of train are float32 .*argmax\(axis=-1\)"):
        jn.data.arrays((INPUTS, np.eye(3)[LABELS]), class_names=("a", "b", "c"))
    assert train((INPUTS, np.eye(3)[LABELS]), jn.tasks.regression(tiny.MODEL), num_steps=1, steps_per_call=1)
    model = (tiny.init, lambda params, inputs: tiny.apply(params, inputs)[:, :1])
    integers = tiny.experiment(
        data=jn.data.arrays((INPUTS, np.arange(37))), learning_rate=0.01, **task(jn.tasks.regression(model))
    )
    losses = tiny.fit(integers).metrics["train_loss"]
    assert losses[-1] < losses[0]
