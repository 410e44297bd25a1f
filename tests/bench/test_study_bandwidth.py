"""The study of memory: bytes are counted, results go to memory that is there."""

from pathlib import Path

import jax
import numpy as np
import pytest
from articles.studies.bandwidth import OPERATIONS, STUDY, Settings, make_call

from jaxnn.bench import Row, Rows
from tests.benched import cases_of, page_of, row, two_devices

TINY = Settings((64, 256), largest_on_cpu=256, rounds=2, seconds=0.0)
VECTOR = np.random.default_rng(0).random(16, np.float32)


@pytest.mark.parametrize(("name", "expected"), [("copy", VECTOR), ("scale", 1.5 * VECTOR), ("sum", VECTOR.sum())])
def test_each_call_computes_it_where_the_vector_lies(name: str, expected: np.ndarray) -> None:
    device = jax.devices()[1]
    call = make_call(OPERATIONS[name], 64, device)
    for _ in range(3):
        result = call()
        assert result.devices() == {device}
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["copy", "scale"])
def test_a_result_goes_to_the_memory_of_the_one_before(name: str) -> None:
    call = make_call(OPERATIONS[name], 2**16, jax.devices()[0])
    places = [call().unsafe_buffer_pointer() for _ in range(4)]
    assert len(set(places)) == 1


def test_bytes_read_and_written_are_counted() -> None:
    cases = cases_of(STUDY, two_devices(Settings((64, 256, 1024), largest_on_cpu=256)))
    # 256 bytes: copied and scaled they are read and written, summed they are read.
    assert {case.what["operation"]: case.work for case in cases if case.what["size"] == 256} == {
        "copy": 512,
        "scale": 512,
        "sum": 256,
    }
    assert {case.unit for case in cases} == {"B"}
    assert {case.device for case in cases if case.what["size"] == 1024} == {"gpu"}


MIB = 2**20


def measured(rates: dict[tuple[str, int], float]) -> Rows:
    return Rows(row(1.0, rate, "B", operation=name, size=size) for (name, size), rate in rates.items())


def test_the_peak_is_the_best_of_all_and_the_largest_vectors_are_told_beside_it() -> None:
    rows = measured(
        {("copy", MIB): 5e9, ("copy", 2 * MIB): 8e9, ("copy", 4 * MIB): 2e9, ("sum", MIB): 4e9, ("sum", 4 * MIB): 3e9}
    )
    peak, copied, summed = STUDY.findings(
        Rows([*rows, Row({"operation": "sum", "size": 9 * MIB}, missing="no memory")])
    )
    assert peak.what == "peak: the best of all" and peak.quantity is not None and peak.quantity.median == 8e9
    assert copied.quantity is not None and copied.quantity.median == 2e9 and copied.note == "4 MiB, 25% of the peak"
    assert summed.quantity is not None and summed.quantity.median == 3e9 and summed.note == "4 MiB, 38% of the peak"


def test_memories_are_compared_by_their_largest_vectors() -> None:
    cpu = measured({("copy", 1): 1e12, ("copy", 100): 1e10, ("sum", 100): 1e10})
    gpu = measured({("copy", 1): 1e6, ("copy", 1000): 1e12})
    assert STUDY.conclude({"CPU, a": cpu, "GPU, b": gpu}) == [
        "Bytes a second of GPU, b over those of CPU, a, of the largest vectors: copy 100×."
    ]
    assert STUDY.conclude({"CPU, a": cpu}) == []


def test_the_page_tells_it(tmp_path: Path) -> None:
    page = page_of(STUDY, TINY, tmp_path)
    assert "## bandwidth (A19)" in page and "| A19 | peak: the best of all | – | " in page
    for name in OPERATIONS:
        assert f"| A19 | {name} of the largest vector | – | " in page
