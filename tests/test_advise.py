"""Advice: which device, from where on, what fills it; on made-up figures by hand, and measured on what is here."""

import dataclasses
from typing import Any

import pytest
from jaxnn.advise.advice import Advice, DeviceFigures
from jaxnn.advise.advise import _sizes
from jaxnn.advise.parts import StepParts
from jaxnn.sweeps.engine.batch_size import BatchSizePlan
from jaxnn.sweeps.engine.probing import Trial

import jaxnn as jn
from tests import tiny

SIZES = (8, 32, 128, 512)


def figures(rates: tuple[float, ...], widths: tuple[float, ...] = (), parts: StepParts | None = None) -> DeviceFigures:
    """Examples a second at `SIZES`, member-steps a second of 1, 4, 16, … members."""
    trials = tuple(Trial(size, size / rate, rate, 0) for size, rate in zip(SIZES, rates, strict=True))
    smallest = next(trial.size for trial in trials if trial.per_second >= 0.9 * max(rates))
    members = tuple(Trial(4**power, 1.0, rate, 0) for power, rate in enumerate(widths))
    parts = parts or StepParts(1e-4, 2e-4, 4e-4, 3e-4)
    return DeviceFigures("Chip", BatchSizePlan(trials, smallest, None), parts, members)


def advice(batch_size: int = 32, absent: str = "", **devices: DeviceFigures) -> Advice:
    return Advice("digits", batch_size, devices, absent)


CPU = figures((1000.0, 2000.0, 2000.0, 2000.0))


def test_a_small_task_is_better_off_on_the_cpu_and_it_says_from_where_on_not() -> None:
    found = advice(32, cpu=CPU, gpu=figures((100.0, 400.0, 3000.0, 12000.0)))
    assert found.best == "cpu" and found.speedup("cpu", "gpu") == 5.0 and found.crossover("gpu", "cpu") == 128
    told = str(found)
    assert "Train on the CPU: 5.0 times as fast as the GPU at this batch size." in told
    assert "The GPU is faster from a batch size of 128 on, the CPU below." in told


def test_a_large_task_is_better_off_on_the_gpu_and_it_says_what_fills_it() -> None:
    told = str(advice(128, cpu=CPU, gpu=figures((100.0, 400.0, 3000.0, 12000.0), (50.0, 200.0, 750.0))))
    assert "Train on the GPU: 1.5 times as fast as the CPU at this batch size." in told
    assert "The GPU is filled by a batch size of 512: 4.0 times the examples a second." in told
    assert "A sweep of 16 members side by side does 15.0 times the steps of one on the GPU." in told


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ((10.0, 20.0, 30.0, 40.0), "The GPU is faster at no batch size tried, 8 to 512: the task does not fill it."),
        ((1e4, 2e4, 3e4, 4e4), "The GPU is faster at every batch size tried, 8 to 512."),
        # One that was faster by chance at a small size does not count.
        ((1100.0, 1900.0, 3000.0, 4000.0), "The GPU is faster from a batch size of 128 on, the CPU below."),
    ],
)
def test_the_crossover_is_where_it_stays_faster(rates: tuple[float, ...], told: str) -> None:
    assert told in str(advice(32, cpu=CPU, gpu=figures(rates)))


def test_devices_are_compared_at_the_largest_batch_size_that_fits_on_all() -> None:
    small = CPU._replace(batch_sizes=BatchSizePlan(CPU.batch_sizes.trials[:2], 32, "128 cannot be run: full"))
    found = advice(128, cpu=small, gpu=figures((100.0, 400.0, 3000.0, 12000.0)))
    assert found.compared == 32 and found.speedup("cpu", "gpu") == 5.0
    told = str(found)
    assert "5.0 times as fast as the GPU at a batch size of 32." in told
    assert "2,000 examples/s; of 32, for 128 cannot be run: full" in told


def test_devices_that_are_alike_are_told_so() -> None:
    told = str(advice(32, cpu=CPU, gpu=figures((900.0, 2100.0, 2100.0, 2100.0))))
    assert "GPU and CPU are alike at this batch size: take the one that is free." in told


def test_of_one_device_it_says_why_there_is_no_other() -> None:
    told = str(advice(32, "JAX has no GPU here.", cpu=CPU))
    assert "Train on the CPU: it is all that was measured. JAX has no GPU here." in told
    assert "A batch size of 32 fills the CPU: larger ones are hardly faster." in told


def test_shares_of_a_step_add_up_and_a_dear_call_is_named() -> None:
    parts = StepParts(6e-4, 1e-4, 2e-4, 1e-4)
    assert parts.step == pytest.approx(1e-3) and parts.shares()["call"] == pytest.approx(0.6)
    told = str(advice(32, cpu=figures((1.0, 1.0, 1.0, 1.0), parts=parts)))
    assert "1 ms by itself: call 60%, forward 10%, backward 20%, update 10%" in told
    assert "A call costs 60% of a step made by itself" in told


def test_batch_sizes_to_try_go_both_ways_and_have_the_configs_own() -> None:
    assert _sizes(128, 10**6) == [8, 32, 128, 512, 2048, 8192, 32768, 131072]
    assert _sizes(3, 20) == [3, 12] and _sizes(5, 5) == [1, 5]


@pytest.mark.slow
def test_an_experiment_is_measured_on_what_is_here_and_nothing_is_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads: list[int] = []
    experiment: Any = tiny.experiment()
    counted = dataclasses.replace(experiment, data=lambda config: (reads.append(1), experiment.data(config))[1])
    found = jn.advise(counted, members=4)
    assert list(found.devices) == ["cpu"] and found.best == "cpu" and len(reads) == 1
    cpu = found.devices["cpu"]
    assert min(cpu.parts) >= 0 and cpu.parts.call > 0 and cpu.parts.step < 1
    assert {trial.size for trial in cpu.batch_sizes.trials} <= {2, 8, 32} and len(cpu.widths) >= 1
    assert "advise: CPU" in capsys.readouterr().out and "Train on the CPU" in str(found)


def test_bad_options_are_sentences() -> None:
    with pytest.raises(jn.ConfigError, match="devices asks for tpu, which is not there: JAX has cpu here"):
        jn.advise(tiny.experiment(), devices=("tpu",))
    with pytest.raises(jn.ConfigError, match="members"):
        jn.advise(tiny.experiment(), members=0)
    with pytest.raises(jn.DataError, match="a batch of 512 is larger than the set of"):
        jn.advise(tiny.experiment(batch_size=512))


def test_a_device_that_was_not_asked_for_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = str(jn.advise(tiny.experiment(num_steps=20), devices=("cpu",), members=1, progress="none"))
    assert "it is all that was measured.\n" in told and "no GPU" not in told
