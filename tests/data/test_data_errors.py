"""What is wrong with data is said in one line before anything is trained."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxnn import data
from jaxnn.data import Tokenizer, arrays, iterable, mixture, text_arrays
from jaxnn.types import Batch, ConfigError, DataError, Splits
from tests import tiny
from tests.data.test_arrays import GOOD, batch_of
from tests.data.test_sources import COLUMNS, OPTIONS, TEST, count, points
from tests.data.test_stream import IMAGE, Counting, Listing, noise
from tests.data.test_texts import REVIEWS, SHORT, TRAIN, write, write_all

SECONDS = 1.7e9 + np.arange(40) / 7  # since 1970
LABELS = (GOOD[0], np.array([0, 1, 2, 3, 2]))
TOKENS = (GOOD[0], np.array([[0, 1], [1, 7], [0, 0], [0, 0], [0, 0]]))
PAIR = (np.arange(10)[:, None], np.arange(10))
HALVES = {"a": np.arange(8).reshape(4, 2), "b": np.arange(6).reshape(3, 2)}


def with_value(value: float, dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.zeros((5, 2), dtype)
    inputs[3, 1] = value
    return inputs, GOOD[1]


ARRAYS = [
    ({"train": None}, "train must be a pair .* NoneType"),
    ({"train": (GOOD[0],)}, "train must be a pair .* tuple of 1"),
    ({"train": (GOOD[0], np.zeros(4, int))}, "train has 5 inputs but 4 targets"),
    ({"train": (np.zeros((0, 2)), np.zeros(0))}, r"train inputs: empty, of shape \(0, 2\)"),
    ({"train": (3.0, GOOD[1])}, "train inputs: one float"),
    ({"train": ([[1, 2], [3]], [0, 1])}, "train inputs: a list, not one array"),
    ({"train": (np.ma.masked_equal(np.arange(5), 2), GOOD[1])}, "train inputs: a masked array"),
    ({"train": with_value(np.nan)}, r"train inputs: NaN .* example 3 \(such examples: 1\)"),
    ({"train": with_value(1e300, float)}, "infinity .as float32. in example 3"),
    ({"train": with_value(2**31, int)}, "train inputs: .* beyond int32 in example 3"),
    ({"train": (GOOD[0], [0, 0, 0, 0, -(2**31) - 1])}, "targets: .* beyond int32 in example 4"),
    ({"train": (GOOD[0], list("abcde")), "test": (GOOD[0], list("abcdx"))}, "test has the label 'x'"),
    ({"train": GOOD, "test": (GOOD[0][:, :1], GOOD[1])}, r"inputs of test is .* \(1,\) .* train is float32 \(2,\)"),
    ({"train": GOOD, "test": (GOOD[0], np.zeros(5))}, "targets of test is float32 .* those of train is int32"),
    ({"train": (GOOD[0], [0, 1, -1, 0, 0]), "num_classes": 2}, "label -1 of example 2 in train .* 0 to 1"),
    ({"train": GOOD, "test": LABELS, "class_names": "abc"}, "label 3 of example 3 in test .* 0 to 2"),
    ({"train": TOKENS, "num_classes": 5}, "label 7 of example 1 in train"),
    ({"train": (GOOD[0], GOOD[0]), "num_classes": 2}, r"targets of train are float32 .*argmax\(axis=-1\)"),
    ({"train": GOOD, "class_names": "ab", "num_classes": 3}, "2 class_names but num_classes is 3"),
    ({"train": HALVES}, r"4 inputs\['a'\] but 3 inputs\['b'\]"),
    ({"train": {"a": HALVES["a"]}, "test": {"b": HALVES["a"]}}, r"inputs of test has \['b'\] but .* has \['a'\]"),
    ({"train": ({}, [1])}, "train has no inputs"),
    (
        {"train": (SECONDS[:, None], GOOD[1].repeat(8))},
        "float32 cannot tell the values of train inputs apart: subtract",
    ),
    ({"train": (GOOD[0].repeat(8, 0), SECONDS)}, "float32 cannot tell the values of train targets apart"),
    ({"train": np.append(SECONDS, [0.0, np.pi * 1e9])}, "float32 cannot tell the values of train inputs apart"),
]
READERS = [
    ({"train": {1, 2}}, "train must be a reader .* the set has no __getitem__: add random access"),
    ({"train": Counting(), "test": []}, "test is empty: its reader's length is 0"),
    ({"train": range(2**40)}, "train has 1,099,511,627,776 examples: give each once"),
    ({"train": (np.zeros((5, 2)), np.zeros(5))}, r"train is a tuple of arrays .*: use jn\.data\.arrays"),
    ({"train": [(IMAGE, second) for second in SECONDS]}, r"the values of train\[1\] apart"),
    ({"train": [(1, 2, 3)]}, r"example 0 of train must be a pair \(inputs, targets\), or .* not a tuple of 3"),
    ({"train": Counting(at0=OSError("gone"))}, r"reading example 0 of train failed with OSError: gone \(test_"),
    ({"train": [(0, np.inf)]}, r"the target of example 0 of train: NaN or infinity \(as float32\)"),
    ({"train": [(IMAGE, -1)]}, "the label -1 of example 0 in train is out of range: labels must be at least 0"),
    ({"train": [(IMAGE, 3)], "class_names": "abc"}, "the label 3 of example 0 .*: labels must be 0 to 2"),
    ({"train": Listing(), "num_classes": 2}, "label 2 of example 2 in train is out of range"),
    ({"train": Listing(at0=(IMAGE, 0.5))}, r"targets that train lists is int32 \(\) but .* float32 \(\)"),
    ({"train": Counting(), "test": [(IMAGE[0], 0)]}, r"the input of example 0 of test is uint8 \(3,\) but "),
    ({"train": Counting(), "validation": [(IMAGE, 0.5)]}, "the target of example 0 of validation is float32"),
]
TABLES = [
    ({"target": "age", "age": SECONDS[:4]}, "float32 cannot tell the values of train: the target 'age' apart"),
    (
        {name: [f"id{row}" for row in range(21)] for name in COLUMNS} | {"kind": list("aab" * 7)},
        "'id0': add it to drop if it is an id",
    ),
    ({"target": "knd"}, "train has no column 'knd': did you mean 'kind'"),
    ({"kind": [1, 0, 1, 0]}, "the target 'kind' is integers: say classification=True"),
    ({"kind": ["a"] * 4}, "the target 'kind' has 1 class in 4 rows, such as 'a':"),
    ({name: np.arange(50) / 7 for name in COLUMNS} | {"classification": True}, "has 50 classes in 50 rows"),
    ({"kind": ["a", None, "b", "b"]}, r"train: the target 'kind' is missing in row 1 \(such rows: 1\)"),
    ({"age": [None] * 4}, "column 'age' has no value"),
    ({"age": [1.0, np.inf, 2, 3]}, "train: column 'age' is infinite, as float32, in row 1"),
    ({"age": ["1", "2", "3", "old"]}, "column 'age' has numbers, and texts such as 'old'"),
    ({"age": ["1,5", "2,5", "3,1", "x"]}, "column 'age' has numbers, and texts such as '1,5'"),
    ({"age": 1.6e9 + np.arange(4.0)}, "float32 cannot tell the values of train: column 'age' apart"),
    ({"age": np.int32([1_600_000_001, 1_600_000_003, 0, 0])}, "cannot tell the values of train: column 'age' apart"),
    (
        {"test": {name: one * 9 for name, one in TEST.items()} | {"age": [0.0, *SECONDS[:8]]}},
        "float32 cannot tell the values of test: column 'age' apart: subtract their median",
    ),
    *(
        ({"kind": [sentinel, *rest], "missing": (1e20, -9.0, np.inf)}, r"the target 'kind' is missing in row 0 \(such")
        for sentinel, rest in ((1e20, [2.5] * 3), (np.inf, [2.5] * 3), (-9, [1.0] * 3), ("-9", ["a", "b", "a"]))
    ),
    ({"age": [1, 2]}, "train must have rows, as many in each column"),
    ({"age": np.zeros((4, 2))}, r"column 'age' must be numbers or texts \[rows\], not float64 \[4, 2\]"),
    ({"test": {**TEST, "age": ["old"]}}, "test: column 'age' is of numbers: .*'old'"),
    ({"test": {**TEST, "kind": ["c"]}}, r"the target 'kind' is 'c', no class of train \(a, b\), in row 0"),
    ({"test": [1, 2]}, "test must be a path, a data frame or a dict of columns, not a list"),
]


def table(folder: Path, given: dict[str, Any]) -> None:
    """Reads the table of the tests with other columns and options."""
    changed = {name: column for name, column in given.items() if name in COLUMNS}
    options = {name: value for name, value in given.items() if name not in COLUMNS}
    data.table({**COLUMNS, **changed}, **{**OPTIONS, **options})


BINS = [
    ([[1.0, np.inf], [0.0, 1.0]], "row 0, column 1 is infinite"),
    ([[np.nan, 1.0], [np.nan, 2.0]], "column 0 has no value"),
    ([["a", "b"]], "must be numbers"),
    ([1.0, 2.0], "must be numbers"),
]
ROWS = "kind,words\nham,so long\nspam,buy\n"
CSV = [
    ({"": ""}, "news.csv has no row: give"),
    ({"": ROWS + "ham\n"}, "line 4 of .*news.csv has 1 columns, but the first row has 2"),
    ({"": ROWS + " ,so\n"}, "line 4 of .*news.csv has no label"),
    ({"": ROWS + "ham, \n"}, r"line 4 of .*news.csv has no text"),
    ({"": ROWS + 'ham,"so\nham,x\n'}, r"the row that starts in line 4 of .*news.csv is .*quoting=False"),
    ({"": "kind,words\nham,caf\udce9!\n"}, r"news\.csv is not UTF-8 text .*at byte 18"),
    ({"label": "kin"}, "has no column 'kin': did you mean 'kind'"),
    ({"text": (1, 2)}, "has no column 1: .*known are 'kind', 'words'; .*header=False"),
    ({"header": False}, "has no column 'words': with header=False, columns are 0 to 1"),
    ({"text": ()}, "text is empty"),
    ({"test": 0.5, "validation": 0.5}, "1 for test and 1 for validation leaves none of 2 examples"),
    ({"test": "other.csv"}, "test has the label 'eggs', which is no class of train"),
]


def read_csv(folder: Path, given: dict[str, Any]) -> None:
    """Reads news.csv, with the content at "" if it is given, by other options; other.csv has another label."""
    path, other = write(folder / "news.csv", given.get("", ROWS)), write(folder / "other.csv", "kind,words\neggs,x\n")
    options = {name: other if value == "other.csv" else value for name, value in given.items() if name}
    data.read_csv(path, SHORT, **{"text": "words", "label": "kind", **options})


TEXT_FOLDERS: list[tuple[dict[str, str], str]] = [
    ({}, "films is not a folder: give the folder that contains train/"),
    ({"test/a/a.txt": "x"}, r"no train/ \(of train, val and test it has test\): arrange .* train/<class>/\*\.txt"),
    ({"train/a/a.txt": "x", "val/a/a.txt": "x", "validation/a/a.txt": "x"}, "has both val and validation"),
    ({**REVIEWS, "test/so/a.txt": "x"}, r"test does not have the classes of train \(they differ in so\)"),
    ({**REVIEWS, "train/none/a.md": "x", "test/none/a.txt": "x"}, r"train/none has no \.txt"),
    ({"train/a/a.txt": "caf\udce9"}, r"a/a\.txt is not UTF-8 text \(unexpected end of data at byte 3\)"),
    ({"train/a/a.txt": "x", "train/a/b.txt": " \n"}, r"b\.txt has no text \(empty files: 1\)"),
]
FITTED = Tokenizer().fit(["The cat sat.", "the dog; the CAT's dog", "a-cat"])
BATCH = batch_of(np.zeros((64, 4, 4, 3), np.float32))
EVEN, ODD = arrays((np.arange(4), np.zeros(4, int))), arrays((np.arange(3.0), [0, 1, 1]))
TEXTS, OTHERS = (text_arrays(([text, "film"], [1, 0]), tokenizer=Tokenizer(length=2)) for text in ("good", "bad"))
MIXED = mixture({"even": EVEN}, {"even": 1})
PICTURE = {"train/cats/a.png": "no image"}
SIX, WIDER = ({"x": np.zeros((6, 3), np.float32)}, [3] * 6), ({"x": np.ones((2, 4))}, [0, 1])
GENERATED, TREES = data.generated(points), BATCH._replace(targets={"a": np.zeros(64)})


def read_first(start: Callable[[int, int], Any], batch_size: int = 1, **options: Any) -> None:
    list(iterable(start, **options).train.batches(0, 0, batch_size))


def augmented(augment: data.Augmentation, batch: Batch = BATCH) -> None:
    train = data.with_augmentation(arrays(GOOD), augment).train
    jax.eval_shape(lambda batch: train.transform(batch, jax.random.key(0)), batch)


def tale(folder: Path, text: str) -> Path:
    return write(folder / "tale.txt", text)


def pipe(folder: Path) -> Path:
    os.mkfifo(write_all(folder, REVIEWS) / "train" / "neg" / "odd.txt")
    return folder


SIZE = r"image_size must be \(height, width\)"
CALLS: list[tuple[Callable[[Path], Any], str]] = [
    # Arrays and texts in memory.
    (lambda _: data.standardize(arrays((np.zeros((2, 2), np.uint8), [0, 1]))), r"uint8 \[2\] cannot be standardized"),
    (lambda _: data.with_augmentation(Splits(object()), data.random_flip()), "a object cannot be augmented here"),
    (lambda _: data.check_labels(arrays((GOOD[0], TOKENS[1] - 1)), 9), "label -1 of example 0 in train .* 0 to 8"),
    (lambda _: data.check_labels(arrays((GOOD[0], np.zeros(5))), 10), "targets of train are float32"),
    (lambda _: data.split_off_validation(PAIR, 10), "num_validation = 10 of 10 .* 0 to 9"),
    (lambda _: data.batch_indices(0, np.arange(1), 32, 0), "batch_size must be .* not 0"),
    (lambda _: data.iris(test_fraction=1.0), "test_fraction must be a fraction .* at least 0 and below 1, not 1.0"),
    (lambda _: data.iris(validation_fraction=float("nan")), "validation_fraction must be .* not nan"),
    (lambda _: data.iris(test_fraction=0.6, validation_fraction=0.4), "leave nothing to train on"),
    (lambda _: data.iris(test_fraction=0.01), "test split of 2 of 150 examples cannot be stratified"),
    (lambda _: text_arrays(TRAIN, ([1, 2], [0, 1])), "text 0 of test's texts is a int, not a str"),
    (lambda _: text_arrays(TRAIN, (["a", " ", ""], [0, 1, 1])), r"text 1 of test is empty \(empty texts: 2\)"),
    (lambda _: text_arrays(TRAIN, tokenizer=str.split), "tokenizer must be a jn.data.Tokenizer"),
    (lambda _: text_arrays(TRAIN, validation=(["a"], [0, 1])), "validation has 1 inputs but 2 targets"),
    (lambda _: data.vocabulary(arrays((np.ones((2, 3)), [0, 1]))), "arrays has no vocabulary: .*text_arrays"),
    (lambda _: Tokenizer().fit(["", "?! ..."]), "2 training texts have no words"),
    (lambda _: Tokenizer().fit("one text"), "must be a list of texts, not one str"),
    (lambda _: FITTED.encode([b"a"]), "text 0 of the texts to encode is a bytes, not a str: decode"),
    (lambda _: FITTED.decode(np.zeros((2, 3))), r"integers \[texts, length\], not float64 \[2, 3\]"),
    (lambda _: FITTED.decode([[0, 8]]), "are 0 to 7, not 0 to 8"),
    (lambda _: FITTED.decode([[-1, 2]]), "are 0 to 7, not -1 to 2"),
    (lambda _: data.encode_text("abc", ("a", "b")), "the vocabulary of 2 tokens lacks 'c'"),
    # Iterables, mixtures, sequences.
    (lambda _: read_first(lambda seed, start: [(1.0, 0)][start:]), "train ends before example 1: let it repeat"),
    (lambda _: read_first(lambda seed, start: [np.ones(1), np.ones(2)]), r"example 1 .* float32 \(2,\) but .* 0"),
    (lambda _: read_first(count, 4, num_classes=2), "label 2 of example 2 in train .* must be 0 to 1"),
    (
        lambda _: read_first(lambda seed, start: (1 / (4 - n) for n in range(start, 9)), 8),
        "example 4 of train failed with ZeroDivisionError",
    ),
    (lambda _: iterable(count, validation=SIX, num_classes=3), "label 3 of example 0 in validation is out"),
    (lambda _: iterable(count, test=WIDER), r"inputs of test\['x'\] is .* but the first of train"),
    (lambda _: mixture({"few": EVEN, "many": EVEN}, {"few": 1}), "few, many needs a weight above 0 for each"),
    (lambda _: mixture({"few": EVEN}, {"few": 0}), "few needs a weight above 0 for each"),
    (lambda _: mixture({"a": TEXTS, "b": OTHERS}, {"a": 1, "b": 1}), "the part b of a mixture has another vocabulary"),
    (lambda _: mixture({"mixed": MIXED}, {"mixed": 1}), "the part mixed of a mixture is augmented, mixed or in order"),
    (lambda _: mixture({"few": EVEN, "other": ODD}, {"few": 1, "other": 1}), "each of the inputs of other is float32"),
    (lambda _: data.subset(EVEN, 5), "num_train is 5, and there are 4 training examples"),
    (lambda _: data.subset(MIXED, 2), "mix subsets of its parts"),
    (lambda _: data.pad_sequences([np.ones((2, 2)), np.ones(2)]), "alike but in length"),
    (lambda _: tiny.fit(tiny.experiment(data=GENERATED, batch_size=4)), "batches of 8 examples, .* batch_size is 4"),
    # Augmentation.
    (lambda _: augmented(data.random_flip(), batch_of(GOOD[0])), r"augments images .* shape \(5, 2\)"),
    (lambda _: augmented(data.random_shift(4)), r"random_shift\(4\) needs images larger than 4 .* 4×4"),
    (lambda _: augmented(data.cutout(4)), r"cutout\(4\) needs images larger than 4 .* 4×4"),
    (lambda _: augmented(data.random_flip(fields=("image",))), "random_flip finds no array 'image' .*'inputs'"),
    (lambda _: augmented(data.color_jitter(hue=0.1), batch_of(np.zeros((1, 4, 4, 1)))), "needs 3 channels, .* have 1"),
    (lambda _: augmented(data.mixup(3), TREES), "labels or of floats: these are a dict"),
    # Files.
    (lambda folder: data.table(folder / "nowhere.csv", target="kind"), "nowhere.csv cannot be read: No such file"),
    (lambda folder: data.text_folder(pipe(folder), SHORT), r"odd\.txt is not a regular file"),
    (lambda folder: data.image_folder(write_all(folder, PICTURE), (2, 2), test=0.5), "has train/: give .* as folders"),
    *((lambda folder, size=size: data.image_folder(folder, size), SIZE) for size in (32, (32,), (0, 4), (4.0, 4))),
    (lambda folder: data.read_image(folder / "a.png", (4, 4)), r"a\.png does not exist"),
    (lambda folder: data.char_corpus(folder / "tale.txt"), "tale.txt cannot be read: No such file"),
    (lambda folder: data.cifar10(folder), r"cifar-10-binary\.tar\.gz of cifar10 is not in .*https://www\.cs\.toronto"),
    (lambda folder: data.sms_spam(data_dir=folder), "lacks SMSSpamCollection.*: get .* from the UCI .* set JAXNN_DATA"),
    (lambda folder: data.ptb(data_dir=folder), r"lacks ptb\.train\.txt, ptb\.valid\.txt, ptb\.test\.txt, .* take"),
    (lambda folder: data.cats_vs_dogs(folder), r"cats_vs_dogs lacks train, .* as train/cats/\*\.jpg"),
    # Windows of texts.
    (lambda folder: data.char_corpus(tale(folder, "")), "train of tale has 0 characters, too few for a window of 64"),
    (lambda folder: data.char_corpus(tale(folder, "ab" * 320), targets="next"), "'next': .*known are 'all', 'last'"),
    (lambda folder: data.word_corpus({"test": folder / "tale.txt"}), "path has no 'train' split"),
    (lambda folder: data.word_corpus({"train": tale(folder, "a"), "valid": ""}), "no split 'valid': did you mean"),
]
SETTINGS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda _: data.with_augmentation(data.digits(), data.random_flip), r"an augmentation .* not random_flip\(\*"),
    (lambda _: arrays(GOOD, num_classes=0), "num_classes must be an integer >= 1, not 0"),
    (lambda _: data.split_off_validation(PAIR, -1), "num_validation, .* must be an integer >= 0, not -1"),
    (lambda _: data.padded_indices(7, 0.5), r"batch_size must be an integer >= 1, not 0\.5"),
    (lambda _: data.iris(seed=-1), "seed must be an integer >= 0, not -1"),
    (lambda _: data.stream(Counting(), num_workers=-1), "num_workers must be an integer >= 0, not -1"),
    (lambda _: Tokenizer(unit="word"), "Tokenizer: unit is 'word', and must be one of words, characters"),
    (lambda _: Tokenizer(vocabulary_size=2), "Tokenizer: vocabulary_size must be an integer >= 3, not 2"),
    (lambda _: Tokenizer(max_ngrams=-1), "Tokenizer: max_ngrams must be an integer >= 0, not -1"),
    (lambda _: data.char_corpus("tale.txt", 0), "char_corpus: length must be an integer >= 1, not 0"),
    (lambda _: data.char_corpus("tale.txt", stride=0), "char_corpus: stride must be an integer >= 1, not 0"),
    (lambda folder: data.word_corpus(tale(folder, "a"), 4, 1), "vocabulary_size must be an integer >= 2, not 1"),
    (lambda _: data.generated(lambda key: None), r"needs a function make_batch\(key, step\), not <lambda>\(key\)"),
    (lambda _: iterable([(1.0, 0)]), r"needs a function train\(seed, start\) .*, not a list"),
    (lambda _: data.mixup(3, alpha=0), "mixup: alpha must be a number > 0, not 0"),
    (lambda _: data.cutmix(0), r"cutmix\(num_classes\) must be an integer >= 1"),
    *(
        (lambda _, make=make, bad=bad: make(bad), rf"{make.__name__}\(.*\) must be an integer >= 1, not {bad}")
        for make in (data.random_shift, data.cutout)
        for bad in (0, 1.5, True)
    ),
    (lambda _: augmented(lambda key, batch: np.ones(3)), r"returned a ndarray: it must be a function \(key, batch\)"),
    (lambda folder: data.image_folder(folder, (4, 5), num_workers=2), "set stream=True, or .*with_augmentation"),
    (lambda folder: data.image_folder(folder, (4, 5), augment=noise), "set stream=True, or .*with_augmentation"),
]
GROUPS: list[tuple[type[Exception], Callable[[Path, Any], Any], list[Any]]] = [
    (DataError, lambda _, given: arrays(**given), ARRAYS),
    (DataError, lambda _, given: data.stream(**given), READERS),
    (DataError, table, TABLES),
    (DataError, lambda _, given: data.learn_bins(np.array(given)), BINS),
    (DataError, read_csv, CSV),
    (DataError, lambda folder, files: data.text_folder(write_all(folder / "films", files), SHORT), TEXT_FOLDERS),
    (DataError, lambda folder, call: call(folder), CALLS),
    (ConfigError, lambda folder, call: call(folder), SETTINGS),
]


@pytest.mark.parametrize(
    ("error", "load", "given", "words"),
    [pytest.param(error, load, *row, id=row[-1]) for error, load, rows in GROUPS for row in rows],
)
def test_bad_data_are_named_in_one_line(error, load, given, words, tmp_path, monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY"):  # nothing is downloaded
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with pytest.raises(error, match=words) as caught:
        load(tmp_path, given)
    assert "\n" not in str(caught.value)
