"""The study of a convolution: four ways, the same numbers."""

from pathlib import Path

import jax
import numpy as np
import pytest
from articles.studies import convolution
from articles.studies.convolution import FILTER, FORMS, STUDY, Settings

from jaxnn.bench import Row, Rows
from tests.benched import cases_of, measured_rows, page_of, row, two_devices

TINY = Settings((5, 12), largest_loop=5, largest_on_cpu=12, compared_size=12, rounds=2, seconds=0.0)


@pytest.mark.parametrize("form", FORMS)
def test_a_position_is_the_sum_of_nine_products(form: str) -> None:
    # Rows 0 1 2 3, 4 5 6 7, …: at the first position .6·1 − .1·2 + .5·4 − .4·6 + .2·8 − .7·9 − 1·10 = −14.7, and the
    # filter's numbers sum to 0, so that each step to the side or down, which adds 1 or 4 to all nine, changes nothing.
    picture = np.arange(16, dtype=np.float32).reshape(4, 4)
    assert FILTER.sum() == pytest.approx(0, abs=1e-6)
    found = np.asarray(convolution.make_call(form, picture, jax.devices()[0])())
    np.testing.assert_allclose(found, np.full((2, 2), -14.7), rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_every_way_computes_the_same(form: str) -> None:
    picture = convolution.make_picture(19)
    exact = convolution.exact(picture)
    by_hand = (FILTER.astype(float) * picture[4:7, 9:12]).sum()
    assert exact.shape == (17, 17) and exact[4, 9] == pytest.approx(by_hand, rel=1e-12)
    found = np.asarray(convolution.make_call(form, picture, jax.devices()[0])())
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


def test_the_picture_is_filtered_where_it_lies() -> None:
    device = jax.devices()[1]
    assert convolution.make_call("XLA", convolution.make_picture(5), device)().devices() == {device}


def test_positions_are_counted_and_loops_and_large_pictures_left_to_those_who_can() -> None:
    cases = cases_of(STUDY, two_devices(Settings((5, 12, 40), largest_loop=5, largest_on_cpu=12)))
    told = [(case.device, case.what["form"]) for case in cases if case.what["size"] == 5]
    assert told == [("cpu", form) for form in FORMS] + [("gpu", form) for form in FORMS[1:]]
    assert [case.what["form"] for case in cases if case.what["size"] == 12 and case.device == "cpu"] == [*FORMS[1:]]
    assert {case.device for case in cases if case.what["size"] == 40} == {"gpu"}
    assert {case.work for case in cases} == {9, 100, 38**2} and {case.unit for case in cases} == {"positions"}


def test_the_error_is_told_where_sizes_are_compared() -> None:
    rows = measured_rows(STUDY, two_devices(TINY))["gpu"]
    errors = {row.what["form"]: row.observed["error"] for row in rows if row.observed}
    assert list(errors) == list(FORMS[1:]) and all(0 < float(error or 0) < 1e-6 for error in errors.values())
    assert all("off by" in finding.note for finding in STUDY.findings(rows))


def test_a_wrong_result_has_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    flipped = {"XLA": lambda picture, weights: convolution.filter_by_xla(picture, weights[::-1])}
    monkeypatch.setattr(convolution, "COMPILED", flipped)
    error = convolution.relative_error("XLA", convolution.make_picture(6), jax.devices()[0])["error"]
    assert float(error or 0) > 0.1


def test_each_column_is_compared_with_the_one_loop() -> None:
    loop = [row(1.0, 4.0, "positions", form="Python loop", size=4), row(1.0, 5.0, "positions", form="Python loop")]
    cpu = Rows([*loop, row(1.0, 50.0, "positions", form="vmap"), row(1.0, 400.0, "positions", form="XLA")])
    gpu = Rows([row(0.5, 5000.0, "positions", form="XLA"), Row({"form": "im2col"}, missing="no memory")])
    assert STUDY.conclude({"CPU, a": cpu, "GPU, b": gpu}) == [
        "CPU, a: positions a second over those of the Python loop: vmap 10×, XLA 80×.",
        "GPU, b: positions a second over those of the Python loop: XLA 2,000×.",
    ]
    assert STUDY.conclude({"GPU, b": gpu}) == []


def test_the_page_tells_it(tmp_path: Path) -> None:
    page = page_of(STUDY, TINY, tmp_path)
    assert "## convolution (A2)" in page and "positions a second over those of the Python loop: vmap" in page
    for form in FORMS:
        assert f"| A2 | {form}, at its best size | – | " in page
