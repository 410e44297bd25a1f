"""The study of latency and throughput, and the knee between them."""

from pathlib import Path

import jax
import numpy as np
import pytest
from articles.studies.latency import NETWORKS, STUDY, Settings, knee, make_call

from jaxnn.bench import Quantity, Row, Rows
from jaxnn.models import num_parameters
from tests.benched import cases_of, page_of, row, two_devices

TINY = Settings((1, 4), largest_cnn_on_cpu=1, rounds=2, seconds=0.0)


def batches(times: dict[int, float], network: str = "MLP") -> list[Row]:
    return [row(seconds, batch, "examples", network=network, batch=batch) for batch, seconds in times.items()]


# --- the knee ---


def test_the_knee_is_the_smallest_batch_of_half_of_the_best_throughput() -> None:
    # 1, 2, 4 and 5 examples a second: half of the best is 2.5.
    found = knee(Rows(batches({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.6})))
    assert found is not None and found.what["batch"] == 4


def test_exactly_half_is_reached_and_the_order_does_not_count() -> None:
    # 4, 2 and 1 a second, the largest batch first.
    found = knee(Rows(batches({4: 1.0, 2: 1.0, 1: 1.0})))
    assert found is not None and found.what["batch"] == 2


def test_a_batch_that_is_slower_than_a_smaller_one_is_no_knee() -> None:
    # 1, 8, 3 and 10 a second.
    found = knee(Rows(batches({1: 1.0, 8: 1.0, 9: 3.0, 20: 2.0})))
    assert found is not None and found.what["batch"] == 8


def test_of_nothing_measured_there_is_no_knee() -> None:
    assert knee(Rows()) is None and knee(Rows([Row({"batch": 1}, missing="no memory")])) is None


# --- what is measured ---


def test_the_networks_are_those_that_are_told() -> None:
    counts = {
        name: num_parameters(model, np.zeros((1, *shape), np.float32)) for name, (model, shape) in NETWORKS.items()
    }
    # 784·512 + 512 + 512·512 + 512 + 512·10 + 10; and 9·32 + 32 + 9·32·64 + 64 + 7·7·64·128 + 128 + 128·10 + 10.
    assert counts == {"MLP": 669_706, "CNN": 421_642}


@pytest.mark.parametrize("name", NETWORKS)
def test_an_answer_does_not_depend_on_the_batch_and_is_given_where_it_is_asked(name: str) -> None:
    device = jax.devices()[1]
    alone, among = (make_call(name, batch, device)() for batch in (1, 3))
    assert alone.shape == (1, 10) and among.shape == (3, 10) and among.devices() == {device}
    np.testing.assert_allclose(among[0], alone[0], rtol=1e-5, atol=1e-6)
    assert np.abs(among[1] - among[0]).max() > 1e-3


def test_examples_are_counted_and_a_cpu_is_spared_large_cnns() -> None:
    cases = cases_of(STUDY, two_devices(TINY))
    told = [(case.what["network"], case.what["batch"], case.device) for case in cases]
    both = ("cpu", "gpu")
    assert told == [("MLP", 1, d) for d in both] + [("MLP", 4, d) for d in both] + [
        *(("CNN", 1, d) for d in both),
        ("CNN", 4, "gpu"),
    ]
    assert all(case.work == case.what["batch"] and case.unit == "examples" for case in cases)


# --- what is told ---


def test_the_table_has_latency_throughput_and_knee() -> None:
    found = {finding.what: finding for finding in STUDY.findings(Rows(batches({1: 0.5, 4: 1.0, 16: 2.0, 64: 16.0})))}
    # 2, 4, 8 and 4 a second.
    assert found["MLP, latency of one example"].quantity == Quantity(0.5, 0.5, 0.5, "s")
    assert found["MLP, best throughput"].quantity == Quantity(8.0, 8.0, 8.0, "examples/s")
    assert found["MLP, best throughput"].note == "batch 16"
    assert found["MLP, latency at its best throughput"].quantity == Quantity(2.0, 2.0, 2.0, "s")
    assert found["MLP, knee: the batch of half of the best throughput"].quantity == Quantity(4, 4, 4, "")
    assert len(found) == 4


def test_it_says_what_a_gpu_buys_and_costs() -> None:
    cpu = Rows(batches({1: 0.001, 10: 0.002, 100: 0.025}))  # 1000, 5000, 4000 a second
    gpu = Rows(batches({1: 0.004, 10: 0.004, 100: 0.005}))  # 250, 2500, 20000 a second
    assert STUDY.conclude({"CPU, a": cpu, "GPU, b": gpu}) == [
        "CPU, a, MLP: a batch of 10 takes 2× as long as one example, and gives 5× as many a second.",
        "GPU, b, MLP: a batch of 100 takes 1.25× as long as one example, and gives 80× as many a second.",
        "MLP on GPU, b against CPU, a: one example takes 4× as long, its best batch gives 4× as many a second as the "
        "CPU's; its answer to the same batch comes sooner from a batch of 100 on.",
    ]
    slow = Rows(batches({1: 0.004, 10: 0.02, 100: 0.25}))  # 250, 500, 400 a second
    traded, bought = STUDY.conclude({"CPU, a": cpu, "GPU, b": slow})[1:]
    assert traded == "GPU, b, MLP: one example at a time already gives half as many a second as any batch."
    assert bought.endswith("comes sooner at no batch that both ran.")


def test_the_page_tells_it(tmp_path: Path) -> None:
    page = page_of(STUDY, TINY, tmp_path)
    assert "## latency (A4)" in page and ", MLP: " in page
    for network in NETWORKS:
        assert f"| A4 | {network}, latency of one example | – | " in page
        assert f"| A4 | {network}, knee: the batch of half of the best throughput | – | " in page
