"""What the model of scaling says, held against numbers computed by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn.scaling.cases import Case, Sizes, message_sizes
from jaxnn.scaling.collectives import Collective
from jaxnn.scaling.cost import Link, Reduction, fit_link, relative_errors, ring
from jaxnn.scaling.machine import Machine
from jaxnn.scaling.timing import Timing

GPUS = Machine("gpu", "a GPU", 4, 1, 16, None, 0.2, "0")
CORES = GPUS._replace(platform="cpu", shared_cores=2)
SUMS = (Collective("all-reduce", 1.0, 8e6),)


def timing(milliseconds: float) -> Timing:
    """Three rounds, the second as told, the cores as long as the clock."""
    seconds = tuple(1e-3 * milliseconds * disturbed for disturbed in (0.5, 1.0, 2.0))
    return Timing(seconds, seconds)


def study(machine: Machine = GPUS, **fields: Any) -> jn.ScalingStudy:
    """A batch of 48 on 1, 2 and 4 devices: one takes 8 ms a step and 1 ms an example; 8 MB are summed."""
    sizes = Sizes((1, 2, 4), 48, 12)
    alone = {Case(1, rows): timing(8 + rows) for rows in (48, 24, 12, 6)}
    both = {Case(2, 24): timing(40), Case(4, 12): timing(36), Case(2, 12): timing(30)}
    silent = {Case(2, 24, True): timing(32), Case(4, 12, True): timing(18), Case(2, 12, True): timing(20)}
    made = jn.ScalingStudy(
        name="by hand",
        config={},
        strategy="data",
        machine=machine,
        sizes=sizes,
        predict_for=(8,),
        steps_per_call=1,
        parameter_bytes=8_000_000,
        timings={**alone, **both, **silent},
        collectives=dict.fromkeys(both, SUMS),
        reductions=(Reduction(2, 8_000_000, 0.01), Reduction(4, 8_000_000, 0.02)),
        link=Link(1e-3, 1e-9),
    )
    return dataclasses.replace(made, **fields)


# α–β.


def test_a_ring_sends_what_it_must() -> None:
    assert ring("all-reduce", 4) == (6, 1.5)
    assert ring("all-gather", 4) == ring("reduce-scatter", 4) == (3, 0.75)
    assert ring("collective-permute", 4) == (1, 1.0)
    assert {ring(kind, 1) for kind in ("all-reduce", "all-gather", "collective-permute")} == {(0, 0.0)}


@pytest.mark.parametrize("turns", [1.0, 4.0])
def test_latency_and_bandwidth_are_recovered_from_noisy_times(turns: float) -> None:
    true, noise = Link(20e-6, 1 / 5e9), np.random.default_rng(0)
    timed = [Reduction(n, size, 1.0, turns) for n in (2, 4, 8) for size in message_sizes(2**24)]
    exact = [one._replace(seconds=one.predicted(true)) for one in timed]
    assert tuple(fit_link(exact) or ()) == pytest.approx(tuple(true))
    noisy = [one._replace(seconds=one.seconds * noise.uniform(0.9, 1.1)) for one in exact]
    found = fit_link(noisy)
    assert found is not None and tuple(found) == pytest.approx(tuple(true), rel=0.1)
    assert 0.05 < max(map(abs, relative_errors(found, noisy))) < 0.2
    assert fit_link([]) is None


def test_neither_is_below_nothing() -> None:
    # A thousand bytes more take less time: no β explains it.
    found = fit_link([Reduction(2, 1000, 2e-5), Reduction(2, 2000, 1e-5)])
    assert found is not None and found.seconds_per_byte == 0 and 0 < found.latency_seconds < 1e-5
    assert str(found).endswith("no time a byte")


# Predictions.


def test_a_prediction_is_one_devices_step_and_the_collectives() -> None:
    # 8 devices: 6 examples each, 14 ms; 14 messages of 1 ms; 7/4 of 8 MB at 1 GB/s, 14 ms. One device: 56 ms.
    strong = study().predict(8)
    assert (strong.rows, strong.compute_seconds) == (6, pytest.approx(0.014))
    assert strong.collective_seconds == pytest.approx(0.014 + 0.014)
    assert strong.speedup == pytest.approx(56 / 42) and strong.efficiency == pytest.approx(56 / 42 / 8)
    assert strong.share == pytest.approx(28 / 42)
    # 12 examples each take 20 ms, and 8 × 12 in 48 ms are so many times 12 in 20 ms.
    weak = study().predict(8, "weak")
    assert (weak.rows, weak.seconds) == (12, pytest.approx(0.048))
    assert weak.speedup == pytest.approx(8 * 20 / 48)
    assert weak.examples_per_second == pytest.approx(96 / 0.048)


def test_between_measured_numbers_of_examples_a_line_is_drawn() -> None:
    assert study().predict(3).compute_seconds == pytest.approx(0.024)
    assert study().predict(1) == study().predict(1, link=Link(9.0, 9.0))
    assert study().predict(1).seconds == pytest.approx(0.056)


def test_shared_cores_take_turns() -> None:
    # 8 devices' 14 ms on 2 cores take 56; their bytes wait for each other too, their messages do not.
    shared = study(CORES).predict(8)
    assert shared.compute_seconds == pytest.approx(0.056)
    assert shared.collective_seconds == pytest.approx(0.014 + 4 * 0.014)
    # Two devices have a core each.
    assert study(CORES).predict(2) == study().predict(2)


def test_a_cluster_with_another_link_shares_no_cores() -> None:
    cluster = study(CORES).predict(8, link=Link(0.0, 2e-9))
    assert cluster.compute_seconds == pytest.approx(0.014)
    assert cluster.collective_seconds == pytest.approx(0.028)


def test_what_cannot_be_predicted_is_said() -> None:
    for arguments, message in {
        (5,): r"batch_size is 48, which 5 devices cannot share evenly: .* 45 and 50",
        (16,): r"3 examples a device is outside of what one device was timed with, 6 to 48: name .* in predict",
        (0,): r"num_devices is 0, and must be a whole number of at least 1",
        (8, "strange"): r"kind is 'strange', and must be one of strong, weak",
    }.items():
        with pytest.raises(jn.ConfigError, match=message):
            study().predict(*arguments)
    with pytest.raises(jn.ConfigError, match="nothing was learnt of collectives on one device"):
        study(link=None, sizes=Sizes((1,), 48, 48)).predict(2)


# What is told of a study.


def test_points_are_compared_within_a_round() -> None:
    one, two, four = study().points()
    assert (one.speedup, one.efficiency, one.share, one.predicted) == (1.0, 1.0, None, None)
    # 56 ms on one device, 40 on two, of which 32 are left without collectives.
    assert two.speedup == pytest.approx(56 / 40) and two.efficiency == pytest.approx(0.7)
    assert two.share == pytest.approx(0.2) and four.share == pytest.approx(0.5)
    assert (two.least, two.seconds, two.most) == pytest.approx((0.02, 0.04, 0.08))
    # Predicted: 32 ms, 2 messages of 1 ms and 8 MB at 1 GB/s.
    assert two.predicted is not None and two.error == pytest.approx(42 / 40 - 1)
    weak = study().points("weak")[1]
    assert weak.speedup == pytest.approx(2 * 20 / 30) and weak.examples_per_second == pytest.approx(24 / 0.03)


def test_rounds_that_were_disturbed_as_a_whole_do_not_change_a_speed_up() -> None:
    slow = study()
    timings = {
        case: Timing((*one.seconds[:1], 9 * one.seconds[1], 1.0), one.seconds) for case, one in slow.timings.items()
    }
    again = dataclasses.replace(slow, timings=timings)
    assert again.points()[1].speedup == pytest.approx(slow.points()[1].speedup)


def test_only_what_can_share_the_batch_is_predicted() -> None:
    sizes = Sizes((1, 2, 4), 48, 12)
    assert [one.num_devices for one in study(predict_for=(2, 8, 10)).predictions()] == [8]
    assert [one.num_devices for one in study(predict_for=(8, 10)).predictions("weak")] == [8, 10]
    cases = sizes.cases((8, 10))
    assert {case.rows for case in cases if case.num_devices == 1} == {48, 24, 12, 6}
    assert len(set(cases)) == len(cases) and Case(4, 12, True) in cases and Case(2, 12) in cases
    assert study(link=None).predictions() == []


def test_simulated_devices_are_called_so() -> None:
    told = str(study(CORES))
    assert "One by itself keeps 1.0 cores busy with 48 examples, 1.0 with 12." in told
    assert "4 simulated devices on 2 CPU cores" in told and "not of a cluster" in told
    assert "simulated" not in str(study()) and "not of a cluster" not in str(study())
    assert (
        "busy, with a load of 9.0 on 16 cores" in str(study(GPUS._replace(load=9.0))) and "machine was busy" not in told
    )
    (title,) = [text.get_text() for text in [study(CORES).plot()._suptitle]]  # type: ignore[attr-defined]
    assert "of this machine, not of a cluster" in title
