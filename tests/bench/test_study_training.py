"""The networks of the articles: those of the bench are the scripts', of the published sizes; so are their figures."""

import dataclasses
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from articles import news_bag
from articles.studies import cats_vs_dogs, keras_scripts, networks, text
from articles.studies.study_training import network, run_time, step_time, training_call, training_cases

from jaxnn import data
from jaxnn.bench import Bench, Quantity, Row, Rows
from jaxnn.nn import unbox
from jaxnn.types import DataError, Splits
from tests import shell, tiny

# Of each network: parameters, as published or as its own code says; shape of its sequences or pictures, size of the
# vocabulary or 0, number of labels.
NETWORKS: dict[str, tuple[int, tuple[int, ...], int, int]] = {
    "mnist_mlp": (669_706, (28, 28, 1), 0, 10),
    "mnist_cnn": (1_199_882, (28, 28, 1), 0, 10),
    "cifar10_cnn": (1_250_858, (32, 32, 3), 0, 10),
    "imdb_lstm": (2_658_945, (100,), 20_000, 2),
    "imdb_fasttext": (60_151_751, (400,), 20_000, 2),
    "lstm_text_generation": (91_047, (40,), 39, 39),
    "text_generator": (444_546, (40,), 39, 39),
    "fcn5": (14_205_962, (28, 28, 1), 0, 10),
    "alexnet_r": (85_098, (32, 32, 3), 0, 10),
    "resnet56": (855_770, (32, 32, 3), 0, 10),
    "ptb_lstm": (6_180_624, (32,), 10_000, 10_000),
    "cats_and_dogs": (1_994_305, (150, 150, 3), 0, 2),
    "news_bag": (1_280_260, (64,), 20_000, 4),
    "news_lstm": (2_659_332, (64,), 20_000, 4),
}
SCRIPTS = shell.ROOT / "experiments" / "articles"


def made_up(name: str, num_examples: int) -> Splits:
    """Random data in the shape of a workload's own."""
    _, shape, tokens, classes = NETWORKS[name]
    random = np.random.default_rng(0)
    inputs = random.integers(0, tokens or 256, (num_examples, *shape), np.int32 if tokens else np.uint8)
    labels = random.integers(0, classes, inputs.shape if name == "ptb_lstm" else num_examples, np.int32)
    return data.arrays(train=(inputs, labels), name=name)


def test_scripts_fit_a_page_and_state_their_claim() -> None:
    files = {path.stem: path.read_text().splitlines() for path in SCRIPTS.glob("*.py")}
    assert set(files) == set(NETWORKS)
    for lines in files.values():
        assert len(lines) <= 40 and [line.split()[0] for line in lines[2:5]] == ["Claim", "Command", "Seen"]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_published_number_of_parameters(name: str) -> None:
    task = network(name).task(network(name).config)
    source = made_up(name, 2).train
    batch = source.as_batch(source.read(np.arange(2)))
    params, _ = jax.eval_shape(lambda key: task.init(key, batch), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(unbox(params))) == NETWORKS[name][0]


# 4 steps of 128 examples took half a second: 1024 examples a second, an eighth of a second each.
ROW = Row({"network": "mnist_mlp", "batch_size": 128}, (0.5, 0.5), 4 * 128, "examples")
WHOLE = Row({"network": "mnist_mlp", "run": "whole"}, observed={"run_seconds": 1500.0, "test_accuracy": 0.98})


def test_the_time_of_a_run_is_its_number_of_steps_times_that_of_one() -> None:
    assert step_time(ROW) == Quantity(0.125, 0.125, 0.125, "s")
    assert run_time(ROW) == Quantity(9_380 / 8, 9_380 / 8, 9_380 / 8, "s")
    assert step_time(ROW._replace(seconds=())) is None


def test_a_script_stands_beside_what_its_article_says() -> None:
    time, accuracy = keras_scripts.STUDY.findings(Rows([ROW, WHOLE]))
    assert time.article == "K80 64.5 s, P100 55.3 s, 16 CPUs 79.2 s, 32 CPUs 66 s"
    assert time.quantity == run_time(ROW) and time.note == "a run from start to end took 25 min"
    assert accuracy.quantity == Quantity(0.98, 0.98, 0.98, "") and accuracy.article == "accuracy 0.982"
    time, accuracy = keras_scripts.STUDY.findings(Rows([ROW]))  # only timed
    assert time.quantity == run_time(ROW) and time.note == "" and accuracy.quantity is None
    assert set(keras_scripts.SCRIPTS) <= set(NETWORKS) and set(networks.BATCH_SIZES) <= set(NETWORKS)


def test_cats_and_dogs_are_compared_over_devices() -> None:
    row = Row({"network": "cats_and_dogs", "batch_size": 150}, (2.0,), 150, "examples")
    columns = {"CPU, Chip": Rows([row]), "GPU, Chip": Rows([row._replace(seconds=(0.1,))])}
    (told,) = cats_vs_dogs.STUDY.conclude(columns)
    assert told.startswith("GPU, Chip is 20× as fast as CPU, Chip; in the article")
    batch, epochs, accuracy = cats_vs_dogs.STUDY.findings(columns["GPU, Chip"])
    assert batch.quantity == Quantity(0.1, 0.1, 0.1, "s") and accuracy.quantity is None
    assert epochs.quantity is not None and epochs.quantity.median == pytest.approx(26.7)


def test_all_are_timed_before_the_first_is_trained_to_its_end() -> None:
    bench = Bench({"cpu": jax.devices()[0]}, text.STUDY.full)
    cases = [case for group in training_cases(bench) for case in group]
    assert [(case.what["network"], case.observe is not None) for case in cases] == [
        ("news_bag", False),
        ("news_lstm", False),
        ("news_bag", True),
        ("news_lstm", True),
    ]


def test_a_whole_run_tells_what_it_reached_and_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    train = made_up("news_bag", 64).train
    short = dataclasses.replace(network("news_bag").replace(num_steps=3), data=lambda _: Splits(train, train))
    monkeypatch.setattr(news_bag, "experiment", short)
    bench = Bench({"cpu": jax.devices()[0]}, dataclasses.replace(text.STUDY.full, networks=("news_bag",)))
    _, (whole,) = training_cases(bench)
    assert whole.observe is not None
    observed = whole.observe()
    assert 0 <= float(observed["test_accuracy"] or 0) <= 1 and float(observed["run_seconds"] or 0) > 0


def test_an_interrupted_run_reached_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def data_of(_: Any) -> Splits:
        # Taken by the run, which ends at its next window as if it were over.
        signal.raise_signal(signal.SIGTERM)
        return made_up("news_bag", 64)

    monkeypatch.setattr(
        news_bag, "experiment", dataclasses.replace(network("news_bag").replace(num_steps=30), data=data_of)
    )
    bench = Bench({"cpu": jax.devices()[0]}, dataclasses.replace(text.STUDY.full, networks=("news_bag",)))
    _, (whole,) = training_cases(bench)
    assert whole.observe is not None
    with pytest.raises(KeyboardInterrupt):
        whole.observe()


def test_data_that_are_not_there_are_a_reason_and_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXNN_DATA", str(tmp_path))
    bench = Bench({"cpu": jax.devices()[0]}, cats_vs_dogs.QUICK)
    ((case,),) = training_cases(bench)
    with pytest.raises(DataError, match="cats_vs_dogs"):
        assert case.begin is not None
        case.begin()


def test_a_training_call_continues_where_the_one_before_ended() -> None:
    def losses(num_steps: int, times: int) -> list[float]:
        train, _, _ = training_call(tiny.experiment(), tiny.splits(), "cpu", num_steps)
        return [float(train().sums["loss"]) for _ in range(times)]

    parts = losses(5, 3)
    assert sum(parts) == pytest.approx(losses(15, 1)[0], rel=1e-6) and parts[2] < parts[0]


@pytest.mark.slow
def test_text_classifiers_are_timed_on_the_real_news(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXNN_DATA", str(data_dir))
    bench = Bench({"cpu": jax.devices()[0]}, text.QUICK)
    for (case,) in training_cases(bench):
        assert case.begin is not None
        call, work, _ = case.begin()
        assert work == 2 * 32
        call()
