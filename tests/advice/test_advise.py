"""Advice: which device, from where on, what fills it; on made-up figures by hand, and measured on what is here."""

import dataclasses
from typing import Any

import pytest

import jaxnn as jn
from jaxnn.advice import Advice, BatchSizePlan, DeviceFigures, StepParts
from jaxnn.engine import Trial
from tests import tiny

SIZES = (8, 32, 128, 512)


def figures(rates: tuple[float, ...], members: tuple[float, ...] = ()) -> DeviceFigures:
    """Examples/s at `SIZES`, member-steps/s of 1, 4, 16, … members; a step of 1 ms."""
    trials = tuple(Trial(size, size / rate, rate, 0) for size, rate in zip(SIZES, rates, strict=True))
    smallest = next(trial.size for trial in trials if trial.per_second >= 0.9 * max(rates))
    side_by_side = tuple(Trial(4**power, 1.0, rate, 0) for power, rate in enumerate(members))
    parts = StepParts(6e-4, 1e-4, 2e-4, 1e-4)
    return DeviceFigures("Chip", BatchSizePlan(trials, smallest, None), parts, side_by_side)


def advice(batch_size: int = 32, absent: str = "", **devices: DeviceFigures) -> Advice:
    return Advice("digits", batch_size, devices, absent)


CPU_RATES = (1000.0, 2000.0, 2000.0, 2000.0)
CPU = figures(CPU_RATES)


@pytest.mark.parametrize(
    ("batch_size", "gpu", "sentences"),
    [
        (
            32,
            (100.0, 400.0, 3000.0, 12000.0),
            "Train on the CPU: 5.0 times as fast as the GPU at a batch size of 32. A batch size of 32 fills it.\n"
            "The GPU is faster at batch sizes 128, 512.",
        ),
        (
            128,
            (100.0, 400.0, 3000.0, 12000.0),
            "Train on the GPU: 1.5 times as fast as the CPU at a batch size of 128. A batch size of 512 fills it.\n"
            "The CPU is faster at batch sizes 8, 32.",
        ),
        (
            32,
            (10.0, 20.0, 30.0, 40.0),
            "Train on the CPU: 100.0 times as fast as the GPU at a batch size of 32. A batch size of 32 fills it.\n"
            "The GPU is faster at no size tried.",
        ),
    ],
    ids=["small", "large", "never"],
)
def test_the_faster_device_at_the_batch_size_is_advised(
    batch_size: int, gpu: tuple[float, ...], sentences: str
) -> None:
    told = str(advice(batch_size, cpu=CPU, gpu=figures(gpu)))
    assert told.endswith(f"\n\n{sentences}")


def test_devices_are_compared_at_the_largest_batch_size_that_fits_on_all() -> None:
    small = CPU._replace(batch_sizes=BatchSizePlan(CPU.batch_sizes.trials[:2], 32, "128 cannot be run: full"))
    found = advice(128, cpu=small, gpu=figures((100.0, 400.0, 3000.0, 12000.0)))
    assert found.compared == 32 and found.best == "cpu" and found.speedup("cpu", "gpu") == 5.0
    assert found.faster("gpu", "cpu") == []


def test_the_table_has_each_figure_and_why_there_is_no_other_device() -> None:
    told = str(advice(32, "JAX has no GPU here.", cpu=CPU._replace(members=figures(CPU_RATES, (50.0, 200.0)).members)))
    for line in ("digits, batch size 32  Chip", "batch size 128         2,000 examples/s", "4 members  200 member-"):
        assert " ".join(line.split()) in " ".join(told.split())
    assert "1 ms: call 60%, forward 10%, backward 20%, update 10%" in told
    assert "Train on the CPU: it is all that was measured. A batch size of 32 fills it. JAX has no GPU here." in told


@pytest.mark.slow
def test_an_experiment_is_measured_on_what_is_here_and_nothing_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    reads: list[int] = []
    experiment: Any = tiny.experiment()
    counted = dataclasses.replace(experiment, data=lambda config: (reads.append(1), experiment.data(config))[1])
    found = jn.advise(counted, members=4)
    assert list(found.devices) == ["cpu"] and found.best == "cpu" and len(reads) == 1
    cpu = found.devices["cpu"]
    assert min(cpu.parts) >= 0 and cpu.parts.call > 0 and sum(cpu.parts) < 1
    assert {trial.size for trial in cpu.batch_sizes.trials} <= {2, 8, 32} and len(cpu.members) >= 1
    assert "advise: CPU" in capsys.readouterr().out and "Train on the CPU" in str(found)


def test_bad_options_are_clear_errors() -> None:
    with pytest.raises(jn.ConfigError, match="devices asks for tpu, which is not there: JAX has cpu here"):
        jn.advise(tiny.experiment(), devices=("tpu",))
    with pytest.raises(jn.ConfigError, match="members"):
        jn.advise(tiny.experiment(), members=0)
    with pytest.raises(jn.DataError, match="a batch of 512 is larger than the set of"):
        jn.advise(tiny.experiment(batch_size=512))


def test_a_device_that_was_not_asked_for_is_not_missing() -> None:
    found = jn.advise(tiny.experiment(num_steps=20), devices=("cpu",), members=1, progress="none")
    assert found.absent == "" and found.devices["cpu"].members == ()
