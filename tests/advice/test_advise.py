"""`jn.advise`: its recommendation from measurements made by hand, and measurements on this machine."""

import dataclasses
from typing import Any

import pytest

import jaxnn as jn
from jaxnn.advice import Advice, BatchSizePlan, DeviceFigures
from jaxnn.engine import Trial
from tests import tiny

SIZES = (8, 32, 128, 512)
PARTS = {"call": 6e-4, "forward": 1e-4, "backward": 2e-4, "update": 1e-4}


def figures(*rates: float, members: tuple[float, ...] = ()) -> DeviceFigures:
    """Examples/s at `SIZES`, member-steps/s of 1, 4, 16, … members."""
    trials = tuple(Trial(size, size / rate, rate, 0) for size, rate in zip(SIZES, rates, strict=True))
    smallest = next(trial.size for trial in trials if trial.per_second >= 0.9 * max(rates))
    vmapped = tuple(Trial(4**power, 1.0, rate, 0) for power, rate in enumerate(members))
    return DeviceFigures("Chip", BatchSizePlan(trials, smallest, None), PARTS, vmapped)


CPU, FAST_GPU = figures(1000.0, 2000.0, 2000.0, 2000.0), figures(100.0, 400.0, 3000.0, 12000.0)


def test_the_faster_device_at_the_batch_size_is_recommended():
    slow = figures(10.0, 20.0, 30.0, 40.0)
    for batch_size, gpu, best in (
        (32, FAST_GPU, "the CPU: 5.0 times as fast as the GPU at a batch size of 32. A batch size of 32 fills it."),
        (128, FAST_GPU, "the GPU: 1.5 times as fast as the CPU at a batch size of 128. A batch size of 512"),
        (32, slow, "the CPU: 100.0 times as fast"),
    ):
        assert f"Train on {best}" in str(Advice("digits", batch_size, {"cpu": CPU, "gpu": gpu}, ""))
    found = [str(Advice("digits", size, {"cpu": CPU, "gpu": FAST_GPU}, "")).splitlines()[-1] for size in (32, 128)]
    assert found == ["The GPU is faster at batch sizes 128, 512.", "The CPU is faster at batch sizes 8, 32."]


def test_devices_are_compared_at_the_largest_batch_size_that_fits_on_all():
    small = CPU._replace(batch_sizes=BatchSizePlan(CPU.batch_sizes.trials[:2], 32, "128 cannot be run: full"))
    found = Advice("digits", 128, {"cpu": small, "gpu": FAST_GPU}, "")
    assert found.compared == 32 and found.best == "cpu" and "5.0 times as fast as the GPU" in str(found)
    assert "The GPU is faster at no size measured." in str(found)
    assert "On the CPU, batch size 128 cannot be run: full." in str(found)


def test_the_table_has_all_measurements_and_why_there_is_no_gpu():
    members = figures(1000.0, 2000.0, 2000.0, 2000.0, members=(50.0, 200.0)).members
    text = repr(Advice("digits", 32, {"cpu": CPU._replace(members=members)}, "No GPU."))
    for line in ("digits, batch size 32 Chip", "batch size 128 2,000 examples/s", "4 members 200 member-steps/s"):
        assert line in " ".join(text.split())
    assert "1 ms: call 60%, forward 10%, backward 20%, update 10%" in text
    assert "Train on the CPU: the only device measured. A batch size of 32 fills it. No GPU." in text


@pytest.mark.slow
def test_an_experiment_is_measured_on_this_machine(capsys, monkeypatch):
    monkeypatch.setattr(jn.advice, "FACTORS", (0.0625, 0.25, 1.0, 16.0))  # of 8: none, 2, 8, and 128 of 37 examples
    reads: list[int] = []
    experiment: Any = tiny.experiment()
    counted = dataclasses.replace(experiment, data=lambda config: (reads.append(1), experiment.data(config))[1])
    found = jn.advise(counted, members=2)
    assert list(found.devices) == ["cpu"] and found.best == "cpu" and len(reads) == 1 and "GPU" in found.absent
    cpu = found.devices["cpu"]
    assert min(cpu.parts.values()) >= 0 and cpu.parts["call"] > 0 and sum(cpu.parts.values()) < 1
    assert {trial.size for trial in cpu.batch_sizes.trials} == {2, 8} and len(cpu.members) >= 1
    assert "advise: CPU" in capsys.readouterr().out and "Train on the CPU" in str(found)


def test_bad_options_are_errors():
    experiment = tiny.experiment()
    for call, error, words in (
        (lambda: jn.advise(experiment, devices=("tpu",)), jn.ConfigError, "tpu.*cpu"),
        (lambda: jn.advise(experiment, members=0), jn.ConfigError, "members"),
        (lambda: jn.advise(tiny.experiment(batch_size=512)), jn.DataError, "512"),
    ):
        with pytest.raises(error, match=words):
            call()
