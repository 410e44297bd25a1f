"""The study of transfers: each is a copy, and the size from which on a device wins is found."""

from pathlib import Path

import jax
import numpy as np
import pytest
from articles.studies.study_devices import cpus_with_gpus, faster_from, shared_sizes
from articles.studies.transfer import (
    DIRECTIONS,
    IN_PLACE,
    OPERATIONS,
    PAGEABLE,
    PINNED,
    STUDY,
    THERE_AND_BACK,
    Settings,
    fetch_again,
    host_array,
    make_computation,
    make_transfer,
    unpinnable,
    unread,
)

from jaxnn.bench import Row, Rows
from tests.benched import cases_of, measured_rows, page_of, row, sized, two_devices

TINY = Settings((64, 256), (8, 16), (2, 4), (1, 2), rounds=2, seconds=0.0)


# --- transfers ---


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_what_goes_to_a_cpu_device_is_copied(size: int) -> None:
    array = host_array(size)
    assert array.ctypes.data % 64 == 16
    there = jax.block_until_ready(jax.device_put(array, jax.devices()[0]))
    before = array.copy()
    array[:] = -1
    np.testing.assert_array_equal(there, before)


def test_what_comes_back_is_a_new_copy_each_time() -> None:
    there = jax.device_put(host_array(100), jax.devices()[0])
    first, second = fetch_again(there), fetch_again(there)
    assert len({first.ctypes.data, second.ctypes.data, there.unsafe_buffer_pointer()}) == 3
    np.testing.assert_array_equal(first, there)
    first[:] = -1
    np.testing.assert_array_equal(second, there)


def test_an_array_that_was_read_before_is_read_anew() -> None:
    there = jax.device_put(host_array(100), jax.devices()[0])
    # Where JAX keeps what a GPU's array was read as; it would be copied once and never again.
    there._npy_value = np.zeros(100, np.float32)  # type: ignore[attr-defined]
    again = unread(there)
    np.testing.assert_array_equal(again, host_array(100))
    assert again.unsafe_buffer_pointer() == there.unsafe_buffer_pointer()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pinned_arrays_change_their_memory_and_no_number(direction: str) -> None:
    device = jax.devices()[1]
    assert unpinnable("cpu", device) == "a CPU's memory is the host's: there is nothing to pin"
    assert unpinnable("gpu", device) == ""
    call = make_transfer(direction, PINNED, 64, device)
    first, second = call(), call()
    kind = device.default_memory().kind if direction == DIRECTIONS[0] else "pinned_host"
    assert first.sharding.memory_kind == kind and first.devices() == {device}
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()
    np.testing.assert_array_equal(second, host_array(16))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pageable_arrays_go_and_come_as_they_are(direction: str) -> None:
    result = make_transfer(direction, PAGEABLE, 64, jax.devices()[1])()
    np.testing.assert_array_equal(result, host_array(16))
    assert isinstance(result, jax.Array if direction == DIRECTIONS[0] else np.ndarray)


# --- computing ---


@pytest.mark.parametrize("form", [IN_PLACE, THERE_AND_BACK])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_computes_the_same_wherever_its_data_lie(name: str, form: str) -> None:
    device = jax.devices()[1]
    arrays = [host_array(*shape) for shape in OPERATIONS[name].shapes(3)]
    result = make_computation(OPERATIONS[name], form, 3, device)()
    assert isinstance(result, np.ndarray) if form == THERE_AND_BACK else result.devices() == {device}
    if name == "convolution":
        # At one place, of one filter: 3×3 windows of 32 channels.
        pictures, filters = arrays
        assert result.shape == (3, 32, 32, 32)
        expected = np.vdot(pictures[2, 4:7, 8:11], filters[..., 17])
        np.testing.assert_allclose(result[2, 5, 9, 17], expected, rtol=1e-5)
    else:
        expected = np.maximum(arrays[0], 0) if name == "relu" else arrays[0] @ arrays[1]
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_only_what_lies_elsewhere_goes_there_and_back() -> None:
    cases = cases_of(STUDY, two_devices(TINY))
    told = {(case.device, case.what["form"]) for case in cases if "operation" in case.what}
    assert told == {("cpu", IN_PLACE), ("gpu", IN_PLACE), ("gpu", THERE_AND_BACK)}
    moved = [case for case in cases if case.what.get("transfer") == "host to device, pinned"]
    assert [(case.device, case.work, case.unit) for case in moved] == [
        ("cpu", 1.0, "call"),  # refused, once
        ("gpu", 64, "B"),
        ("gpu", 256, "B"),
    ]


# --- from which size on ---


def test_the_crossover_is_where_it_is_faster_and_stays_so() -> None:
    slow = sized("size", {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})
    assert faster_from(sized("size", {1: 3.0, 2: 3.0, 4: 3.0, 8: 3.0}), slow, "size") == 4
    # Faster once by chance, and then not: that does not count.
    assert faster_from(sized("size", {1: 0.5, 2: 3.0, 4: 3.0, 8: 3.0}), slow, "size") == 4
    assert faster_from(sized("size", {1: 0.5, 2: 0.5, 4: 0.5, 8: 0.5}), slow, "size") == 1
    assert faster_from(sized("size", {1: 0.5, 2: 0.5, 4: 0.5, 8: 8.0}), slow, "size") is None


def test_only_sizes_that_both_ran_are_compared() -> None:
    first, second = sized("size", {8: 1.0, 2: 1.0, 1: 1.0}), sized("size", {1: 2.0, 4: 9.0, 8: 2.0})
    missing = Rows([*second, Row({"size": 2}, missing="no memory")])
    assert shared_sizes(first, missing, "size") == [1, 8] and faster_from(first, missing, "size") == 1
    assert shared_sizes(first, Rows(), "size") == [] and faster_from(first, Rows(), "size") is None
    labels = ["CPU, a", "CPU, b", "GPU, c", "TPU, d"]
    assert cpus_with_gpus(labels) == [("CPU, a", "GPU, c"), ("CPU, b", "GPU, c")] and cpus_with_gpus(labels[:2]) == []


def relus(times: dict[int, float], form: str = IN_PLACE) -> list[Row]:
    return [row(seconds, operation="relu", form=form, size=size) for size, seconds in times.items()]


CPU = Rows(relus({10: 1.0, 1000: 2.0, 100_000: 30.0}))
GPU = Rows([*relus({10: 1.5, 1000: 1.5, 100_000: 2.0}), *relus({10: 9.0, 1000: 9.0, 100_000: 50.0}, THERE_AND_BACK)])


def test_it_says_from_which_size_on_a_gpu_wins() -> None:
    assert STUDY.conclude({"CPU, a": CPU, "GPU, b": GPU}) == [
        "ReLU: GPU, b is faster than CPU, a from 1,000 elements on where the data lie on it; where they are moved "
        "there and back, at no size up to 100,000 elements."
    ]
    assert STUDY.conclude({"CPU, a": CPU}) == [] == STUDY.conclude({"GPU, b": GPU})


def test_a_cpu_stands_in_both_rows_of_the_table_with_its_time_in_place() -> None:
    in_place, moved = STUDY.findings(CPU)
    assert moved.what == "ReLU, 100,000 elements, data there and back" and moved.note == "in place"
    assert in_place.quantity == moved.quantity and in_place.quantity is not None and in_place.quantity.median == 30.0
    there = [(finding.what, finding.quantity and finding.quantity.median) for finding in STUDY.findings(GPU)]
    assert there == [(in_place.what, 2.0), (moved.what, 50.0)]


def test_of_two_devices_all_is_measured_and_compared() -> None:
    rows = measured_rows(STUDY, two_devices(TINY))
    assert [row.missing for row in rows["gpu"] if row.missing] == []
    assert len(STUDY.findings(rows["gpu"])) == len(STUDY.findings(rows["cpu"])) == 12
    told = STUDY.conclude({"CPU, a": rows["cpu"], "GPU, b": rows["gpu"]})
    assert [sentence.partition(":")[0] for sentence in told] == ["ReLU", "matrix product", "convolution"]


def test_the_page_tells_it(tmp_path: Path) -> None:
    page = page_of(STUDY, TINY, tmp_path)
    assert "## transfer (A16, A17)" in page and "| A16, A17 | host to device, pageable: at its best size | – | " in page
    assert (
        "host to device, pinned, device to host, pinned (a CPU's memory is the host's: there is nothing to pin)."
        in page
    )
    assert "| A17 | convolution, 2 pictures, data in place | – | " in page
