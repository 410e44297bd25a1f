"""Texts with labels as a data set: the vocabulary is that of training, reaches the user, and the loop trains on it."""

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


def test_the_vocabulary_reaches_the_user() -> None:
    splits = text_arrays(TRAIN, TEST, tokenizer=SHORT)
    known = vocabulary(splits)
    assert known.tokens[2:] == ("good", "film", "bad")
    assert known.decode(splits.test.examples.inputs) == ["bad good", "\N{REPLACEMENT CHARACTER} film"]
    assert vocabulary(jn.data.with_augmentation(splits, lambda key, inputs: inputs)) is known


def test_a_test_text_changes_nothing_of_training() -> None:
    alone, more = text_arrays(TRAIN), text_arrays(TRAIN, (["film film film more words"], [0]))
    np.testing.assert_array_equal(alone.train.examples.inputs, more.train.examples.inputs)
    assert vocabulary(alone).tokens == vocabulary(more).tokens


def test_the_fingerprint_tells_texts_and_tokenizers_apart() -> None:
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
        return jn.tasks.classification(jn.models.FastText(2, vocabulary_size=size, features=4, pad_id=0))

    return jn.Experiment(Config(), films, task, lambda config: optax.adam(0.1))


def test_a_tokenizer_is_a_field_of_a_config_and_words_are_learned(tmp_path: Path) -> None:
    run = jn.fit(films_experiment(), run_dir=tmp_path / "run", progress="none")
    assert run.evaluate()["accuracy"] == 1.0
    known = vocabulary(films(Config()))
    logits = run.predict(known.encode(["good", "bad"]))
    assert np.argmax(jax.device_get(logits), axis=-1).tolist() == [1, 0]
    assert '"vocabulary_size": 30' in (tmp_path / "run" / "run.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"train": TRAIN[0]}, "not a list of 3|must be a pair|the training texts"),
        ({"train": "text"}, r"train must be a pair \(texts, targets\), not one str"),
        ({"train": ("text", [1])}, "train's texts must be a list of texts, not one str"),
        ({"train": TRAIN, "test": ([1, 2], [0, 1])}, "text 0 of test's texts is a int, not a str"),
        ({"train": (["?", "!"], [0, 1])}, "2 training texts hold no words"),
        ({"train": TRAIN, "test": (["a", " ", ""], [0, 1, 1])}, r"text 1 of test is empty \(empty ones: 2\)"),
        ({"train": TRAIN, "tokenizer": str.split}, "tokenizer must be a jn.data.Tokenizer"),
        ({"train": TRAIN, "validation": (["a"], [0, 1])}, "validation has 1 inputs but 2 targets"),
        ({"train": TRAIN, "class_names": ("only",)}, "label 1 of example 0 in train is out of range"),
    ],
)
def test_what_is_no_data_set_of_texts_is_named(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        text_arrays(**arguments)


def test_other_data_have_no_vocabulary() -> None:
    with pytest.raises(DataError, match="arrays has no vocabulary of texts to classify"):
        vocabulary(jn.data.arrays((np.ones((2, 3)), [0, 1])))


def shared(folder: Path, shares: dict[str, Any], seed: int = 3) -> dict[str, list[int]]:
    """Which rows of a table of 50 each split has: every label is the row's number."""
    path = folder / "table.csv"
    path.write_text("".join(f"{number},word\n" for number in range(50)))
    splits = jn.data.read_csv(path, SHORT, text=1, label=0, header=False, seed=seed, **shares)
    return {name: source.targets.tolist() for name, source in splits.named().items()}


def test_shares_are_disjoint_and_complete_and_depend_on_the_seed(tmp_path: Path) -> None:
    shares = {"test": 0.1, "validation": 0.25}
    parts = shared(tmp_path, shares)
    assert {split: len(part) for split, part in parts.items()} == {"train": 33, "test": 5, "validation": 12}
    assert sorted(sum(parts.values(), [])) == list(range(50))
    assert shared(tmp_path, shares) == parts
    assert shared(tmp_path, shares, seed=4)["test"] != parts["test"]
    assert list(shared(tmp_path, {"test": 0.0})) == ["train"]
    assert len(shared(tmp_path, {"test": 0.001})["test"]) == 1


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        ({"test": 1.0}, "test must be a share of the examples, at least 0 and below 1, not 1.0"),
        ({"validation": -0.1}, "validation must be a share"),
        ({"test": True}, "test must be a share"),
        ({"test": None}, "test must be a share"),
        ({"test": 0.5, "validation": 0.5}, "25 for test and 25 for validation leaves nothing of 50 examples"),
    ],
)
def test_shares_that_cannot_be_held_out_are_named(shares: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        shared(tmp_path, shares)
