"""Labelled texts as a data set: ids by hand, the vocabulary of the training texts, training on them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.data import Tokenizer, text_arrays, vocabulary
from jaxnn.record import data_fingerprint
from jaxnn.types import DataError, Splits

SHORT = Tokenizer(length=3)
TRAIN = (["good good film", "bad film", "good"], [1, 0, 1])
TEST = (["bad good", "what film"], [0, 1])


def test_texts_and_labels_by_hand() -> None:
    splits = text_arrays(TRAIN, TEST, tokenizer=SHORT, name="films", class_names=("neg", "pos"))
    # "good" three times is 2, "film" twice is 3, "bad" is 4.
    np.testing.assert_array_equal(splits.train.examples.inputs, [[2, 2, 3], [4, 3, 0], [2, 0, 0]])
    np.testing.assert_array_equal(splits.train.targets, [1, 0, 1])
    assert splits.test is not None and splits.validation is None
    np.testing.assert_array_equal(splits.test.examples.inputs, [[4, 2, 0], [1, 3, 0]])
    assert splits.train.examples.inputs.dtype == splits.train.targets.dtype == np.int32
    assert (splits.name, splits.class_names) == ("films", ("neg", "pos"))
    known = vocabulary(splits)
    assert known.tokens[2:] == ("good", "film", "bad")
    assert known.decode(splits.test.examples.inputs) == ["bad good", "\N{REPLACEMENT CHARACTER} film"]
    assert vocabulary(jn.data.with_augmentation(splits, lambda key, inputs: inputs)) is known


def test_fingerprints_differ_by_texts_labels_and_tokenizers() -> None:
    other = (["good good film", "bad film", "bad"], [1, 0, 1])
    made = [
        text_arrays(TRAIN, tokenizer=SHORT),
        text_arrays(TRAIN, tokenizer=dataclasses.replace(SHORT, pad="start")),
        text_arrays(other, tokenizer=SHORT),
        text_arrays((TRAIN[0], [1, 1, 1]), tokenizer=SHORT),
    ]
    assert len({data_fingerprint(splits) for splits in made}) == 4
    assert data_fingerprint(made[0]) == data_fingerprint(text_arrays(TRAIN, tokenizer=SHORT))


@dataclasses.dataclass(frozen=True)
class Config:
    tokenizer: Tokenizer = Tokenizer(vocabulary_size=30, length=4)
    batch_size: int = 8
    num_steps: int = 60
    seed: int = 0


def films(config: Config) -> Splits:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 64)
    lines = [f"a {('bad', 'good')[label]} film {number % 7}" for number, label in enumerate(labels)]
    return text_arrays((lines, labels), (lines[:16], labels[:16]), tokenizer=config.tokenizer)


def films_experiment() -> jn.Experiment[Config]:
    def task(config: Config) -> jn.Task:
        size = config.tokenizer.vocabulary_size
        return jn.tasks.classification(jn.models.BagOfTokens(2, vocabulary_size=size, features=4, pad_id=0))

    return jn.Experiment(Config(), films, task, lambda config: optax.adam(0.1))


def test_a_model_trains_with_a_tokenizer_in_its_config(tmp_path: Path) -> None:
    run = jn.fit(films_experiment(), run_dir=tmp_path / "run", progress="none")
    assert run.evaluate()["accuracy"] == 1.0
    known = vocabulary(films(Config()))
    logits = run.predict(known.encode(["good", "bad"]))
    assert np.argmax(jax.device_get(logits), axis=-1).tolist() == [1, 0]
    assert '"vocabulary_size": 30' in (tmp_path / "run" / "run.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "text"}, r"train must be a pair \(texts, targets\), not a str"),
        ({"train": ("text", [1])}, "train's texts must be a list of texts, not one str"),
        ({"train": TRAIN, "test": ([1, 2], [0, 1])}, "text 0 of test's texts is a int, not a str"),
        ({"train": (["?", "!"], [0, 1])}, "2 training texts have no words"),
        ({"train": TRAIN, "test": (["a", " ", ""], [0, 1, 1])}, r"text 1 of test is empty \(empty texts: 2\)"),
        ({"train": TRAIN, "tokenizer": str.split}, "tokenizer must be a jn.data.Tokenizer"),
        ({"train": TRAIN, "validation": (["a"], [0, 1])}, "validation has 1 inputs but 2 targets"),
        ({"train": TRAIN, "class_names": ("only",)}, "label 1 of example 0 in train is out of range"),
        ({"train": TRAIN, "num_classes": 1}, "label 1 of example 0 in train is out of range"),
    ],
)
def test_bad_texts_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        text_arrays(**arguments)


def test_other_data_have_no_vocabulary() -> None:
    with pytest.raises(DataError, match="arrays has no vocabulary: .*jn.data.text_arrays"):
        vocabulary(jn.data.arrays((np.ones((2, 3)), [0, 1])))
