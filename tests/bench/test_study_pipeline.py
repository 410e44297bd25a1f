"""The study of how photographs reach the device: the same batches in every form, and a verdict on the waiting."""

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from articles.studies import pipeline
from PIL import Image

from jaxnn.bench import Quantity, Row, Rows, bench
from jaxnn.data import cats_vs_dogs
from jaxnn.types import ConfigError, DataError

TINY = pipeline.Settings(8, (2,), batch_size=4, num_workers=0, steps=3, rounds=2, seconds=0.0)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data directory with ten pictures of noise, five of them of cats."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(10):
            file = folder / "cats_vs_dogs" / split / ("cats" if number < 5 else "dogs") / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (12, 10, 3), np.uint8)).save(file)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JAXNN_DATA", str(folder))
        yield folder


def row(form: str, seconds: float, waited: float | None, workers: int = 0) -> Row:
    """Timed twice, the second time on a machine that is half as fast."""
    observed = {} if waited is None else {"waited": waited, "workers": workers}
    return Row({"form": form}, (seconds, 2 * seconds), 100.0, "examples", observed)


def test_every_form_trains_on_the_same_batches(photographs: Path) -> None:
    losses = {}
    for form in pipeline.FORMS:
        training = pipeline.FedTraining(form, TINY, "cpu")
        training()
        training()
        losses[form] = training.losses
        training.end()
    resident = losses.pop("resident")
    assert len(resident) == len(set(resident)) == 2
    for found in losses.values():
        np.testing.assert_allclose(found, resident, rtol=1e-5)


def test_it_tells_the_share_waited_and_the_workers(photographs: Path) -> None:
    training = pipeline.FedTraining("naive", TINY, "cpu")
    for _ in range(2):
        training()
    told = training.end()
    assert 0 < float(told["waited"]) < 1 and told["workers"] == 0  # type: ignore[arg-type]


def test_what_is_decoded_in_the_loop_is_what_threads_decode(photographs: Path) -> None:
    source = cats_vs_dogs(photographs, (8, 8), num_workers=0).train
    naive = pipeline.open_source("naive", TINY)
    indices = np.array([7, 0, 3])
    for found, expected in zip(naive.read(indices), source.read(indices), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_without_grain_resident_photographs_are_left(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for form in ("prefetched", "naive"):
        with pytest.raises(ConfigError, match="Grain, which is not installed"):
            pipeline.open_source(form, TINY)
    assert pipeline.open_source("resident", TINY).examples is not None


def test_a_tenth_of_the_time_is_the_verdict() -> None:
    assert pipeline.waited(row("naive", 1.0, 0.25)) == Quantity(25.0, 25.0, 25.0, "%")
    assert pipeline.verdict(row("naive", 1.0, 0.1)) == "input-bound"
    assert pipeline.verdict(row("naive", 1.0, 0.09)) == "not input-bound"
    assert pipeline.verdict(row("naive", 1.0, None)) == "" and pipeline.waited(row("naive", 1.0, None)) is None


def test_forms_are_compared_with_resident_data() -> None:
    rows = Rows([row("resident", 1.0, 0.0), row("prefetched", 1.25, 0.01, workers=3), row("naive", 4.0, 0.7)])
    assert pipeline.relative_rate(rows, rows[1]) == Quantity(0.8, 0.8, 0.8, "")
    assert pipeline.STUDY.conclude({"CPU, Chip": rows}) == [
        "CPU, Chip: with photographs prefetched by workers (3) training is 0.8× as fast as with resident ones, "
        "not input-bound.",
        "CPU, Chip: with photographs decoded in the step loop training is 0.25× as fast as with resident ones, "
        "input-bound.",
    ]


STUDY = dataclasses.replace(pipeline.STUDY, quick=TINY)


def test_the_page_has_every_form(photographs: Path, tmp_path: Path) -> None:
    found = bench(STUDY, devices=("cpu",), quick=True, out=tmp_path, say=lambda line: None)
    (rows,) = found["pipeline"].rows.values()
    assert [one.what["form"] for one in rows] == list(pipeline.FORMS)
    assert all(len(one.seconds) == 2 and one.work == 12 and not one.missing for one in rows)
    page = (tmp_path / "results.md").read_text()
    assert "| A11 | photographs prefetched by workers | – | " in page and " examples/s" in page
    assert "| A11 | photographs decoded in the step loop: share of the time waited for them | – | " in page


def test_without_photographs_the_page_says_where_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXNN_DATA", str(tmp_path))
    with pytest.raises(DataError, match="cats_vs_dogs lacks train"):
        pipeline.open_source("resident", TINY)
    bench(STUDY, devices=("cpu",), quick=True, out=tmp_path, say=lambda line: None)
    page = (tmp_path / "results.md").read_text()
    assert "| A11 | photographs on the device | – | not measured |" in page
    assert f"resident, prefetched, naive ({tmp_path / 'cats_vs_dogs'} lacks train" in page
