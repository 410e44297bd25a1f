"""A watchdog reports where a run hangs; the device, slow stages and implementations are printed at the start."""

import dataclasses
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn import kernels
from jaxnn._clock import Clock
from jaxnn.engine import Flight, Stall
from jaxnn.record import Checkpoints
from jaxnn.run import Watch, speed_hint, watching
from tests import tiny

# Seconds: what is a stall, and how long these tests hang.
BOUND, HANG = 0.2, 0.7
RATES = jn.grid(learning_rate=[0.1, 0.2])


class Scene:
    """A run whose time is set by hand, checked by a watch."""

    def __init__(self, step: int = 0, bound: float = 100.0) -> None:
        self.time = 1000.0
        self.clock, self.flight = Clock(lambda: self.time), Flight()
        self.flight.start(step)
        self.watch = Watch(self.clock, self.flight, bound)

    def dispatch(self, step: int, *, ready: bool = False) -> types.SimpleNamespace:
        """Dispatches a call; its result is ready once ``is_ready`` says so."""
        result = types.SimpleNamespace(is_ready=lambda: ready)
        self.flight.started = step
        self.flight.dispatched(step, result)
        return result

    def look_after(self, seconds: float) -> list[str]:
        self.time += seconds
        return self.watch.look()


WAITS = {"checkpoint": "for a checkpoint to be written", "train": "for this process itself", "barrier": "for barrier"}
DURATIONS = {0.21: "0.2 s", 12.4: "12 s", 59.7: "1 min 0 s", 300.0: "5 min 0 s", 7530.0: "2 h 5 min"}


def test_open_span_and_duration_of_a_wait_are_reported():
    for span, words in WAITS.items():
        scene = Scene(1200)
        with scene.clock.span("train"), scene.clock.span(span):
            assert scene.look_after(99.0) == []
            assert scene.look_after(2.0) == [f"nothing finished for 1 min 41 s: waiting {words} (after step 1,200)"]
        assert scene.flight.stalls == [Stall(span, 1200, 101.0)]
    for seconds, words in DURATIONS.items():
        scene = Scene(bound=0.2)
        with scene.clock.span("data"):
            assert scene.look_after(seconds) == [f"nothing finished for {words}: waiting for data (after step 0)"]


def test_dispatched_calls_are_waited_for_on_the_device():
    for dispatched, started, words in ((1300, 1301, "steps 1,251 to 1,301"), (1251, 1251, "step 1,251")):
        scene = Scene(1200)
        with scene.clock.span("train"):
            scene.dispatch(1250, ready=True)
            scene.dispatch(dispatched)
            scene.flight.started = started  # the last is being dispatched
            scene.look_after(1.0)
            line = f"nothing finished for 1 min 40 s: waiting for the device to finish {words}"
            assert scene.look_after(100.0) == [line]
        assert scene.flight.stalls == [Stall("device", 1250, 100.0)]


def test_reports_double_in_distance_and_end_with_the_wait():
    scene = Scene(7)
    with scene.clock.span("data"):
        reported_at = [seconds for seconds in range(1, 1001) if scene.look_after(1.0)]
        assert reported_at == [100, 200, 400, 800]
        assert scene.flight.stalls == [Stall("data", 7, 1000.0)], "one stall, of the full length"
    scene.time += 0.5
    assert scene.watch.look() == ["the wait for data (after step 7) is over, after 16 min 40 s"]
    assert scene.look_after(1.0) == []
    with scene.clock.span("evaluation"):  # a second stall has the full bound before it
        assert scene.look_after(99.0) == []
        assert scene.look_after(1.0) == ["nothing finished for 1 min 40 s: waiting for the evaluation (after step 7)"]
    assert scene.flight.stalls == [Stall("data", 7, 1000.0), Stall("evaluation", 7, 100.0)]


def test_no_stall_in_the_callers_time_or_while_calls_complete():
    scene = Scene()
    assert scene.look_after(1000.0) == []
    with scene.clock.span("train"), scene.clock.span("caller"):
        assert scene.look_after(1000.0) == []
    # Many calls are dispatched and the host waits for all of them, while they complete one by one.
    with scene.clock.span("train"):
        results = [scene.dispatch(step) for step in range(1, 201)]
        for number, result in enumerate(results, 1):
            assert scene.look_after(99.0) == []
            result.is_ready = lambda: True
            assert scene.flight.done == number
        assert scene.look_after(1.0) == []
    assert scene.flight.stalls == []
    scene.flight.start(3)  # a sweep's next block
    assert (scene.flight.started, scene.flight.done) == (3, 3)


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "watchdog"]


@pytest.fixture(autouse=True)
def no_watchdog_left() -> Iterator[None]:
    yield
    assert watchdogs() == [], "a watchdog outlived its run"


def slow_data(action: Callable[[], object] = lambda: None) -> jn.Experiment[tiny.Config]:
    """The tiny experiment; the data of step 12 take ``HANG``, then ``action`` is called."""
    return tiny.acting(12, lambda: (time.sleep(HANG), action()))


def slow_device(step: int) -> jn.Experiment[tiny.Config]:
    """The tiny experiment; one step takes ``HANG`` on the device."""

    def hang(count: Any) -> np.float32:
        time.sleep(HANG if count == step else 0.0)
        return np.float32(0)

    def update(updates: Any, count: jax.Array, params: Any = None) -> tuple[Any, jax.Array]:
        late = jax.pure_callback(hang, jax.ShapeDtypeStruct((), jnp.float32), count + 1)
        return jax.tree.map(lambda leaf: leaf + late, updates), count + 1

    slow = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    return tiny.experiment(optimizer=lambda config: optax.chain(optax.sgd(config.learning_rate), slow), num_steps=10)


def stalls_at(run: jn.Run, where: str) -> list[int]:
    """The steps of the stalls that are no hiccup of a busy machine."""
    return [stall.step for stall in run.summary.stalls if stall.where == where and stall.seconds > 0.7 * HANG]


def test_slow_source_and_disk_are_reported_and_recorded(tmp_path, monkeypatch, capfd):
    close = Checkpoints.close
    monkeypatch.setattr(Checkpoints, "close", lambda *args, **options: (time.sleep(HANG), close(*args, **options)))
    run = tiny.fit(slow_data(), tmp_path / "run", resident=False, stall_after=BOUND, progress="plain")
    assert stalls_at(run, "data") == [10] and 20 in stalls_at(run, "checkpoint") and run.summary.status == "finished"
    errors = capfd.readouterr().err
    assert re.search(r"^nothing finished for \d\.\d s: waiting for data \(after step 10\)$", errors, re.M)
    assert len(re.findall(r"^the wait for data \(after step 10\) is over, after \d\.\d s$", errors, re.M)) == 1
    recorded = tiny.read(tmp_path / "run")["summary"]["stalls"]
    assert {("data", 10), ("checkpoint", 20)} <= {(stall["where"], stall["step"]) for stall in recorded}
    assert re.fullmatch(r"\d times, \d\.\d s in all \(data.*checkpoint.*\)", dict(run.summary.rows())["stalled"])
    once = dataclasses.replace(run.summary, stalls=run.summary.stalls[:1])
    assert re.fullmatch(r"once, \d\.\d s in all \(data\)", dict(once.rows())["stalled"])


def test_slow_device_is_reported(capfd):
    run = tiny.fit(slow_device(8), stall_after=BOUND, progress="plain")
    assert stalls_at(run, "device") == [5]
    assert "waiting for the device to finish steps 6 to 10" in capfd.readouterr().err


def test_watchdog_is_quiet_in_a_healthy_run_and_absent_at_0(capfd):
    seen: list[int] = []
    for stall_after in (30.0, 0):
        data = tiny.acting(5, lambda: seen.append(len(watchdogs())))
        run = tiny.fit(data, resident=False, stall_after=stall_after, progress="plain")
        assert run.summary.stalls == () and "stalled" not in dict(run.summary.rows())
    assert seen == [1, 0] and capfd.readouterr().err == ""


def test_iteration_is_watched_in_silence_without_the_callers_time(tmp_path, capfd):
    def fail() -> None:
        raise ZeroDivisionError("mine")

    path, options = tmp_path / "run", {**tiny.HOW, "progress": "plain", "resident": False, "stall_after": BOUND}
    with pytest.raises(ZeroDivisionError, match="mine"):
        for report in jn.iterate(slow_data(fail), run_dir=path, **options):
            assert len(watchdogs()) == 1
            if report.step == 5:
                time.sleep(2 * BOUND)
    stalls = tiny.read(path)["summary"]["stalls"]
    assert ("data", 10) in {(stall["where"], stall["step"]) for stall in stalls}, "a run that fails records it too"
    assert "caller" not in {stall["where"] for stall in stalls} and capfd.readouterr() == ("", "")


def test_each_process_of_several_reports_for_itself_and_then_its_stacks(monkeypatch, capfd):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    clock, errors, deadline = Clock(), "", time.monotonic() + 60
    with watching(clock, Flight(), 0.1, aloud=True), clock.span("data"):
        while "most recent call first" not in errors and time.monotonic() < deadline:
            time.sleep(0.01)
            errors += capfd.readouterr().err
    first, second, stack = errors.split("\n", 2)
    for line in (first, second):
        assert re.match(r"process 3: nothing finished for \d\.\d s: waiting for data", line)
    assert "test_each_process_of_several" in stack


def test_sweep_is_watched(tmp_path, capfd):
    how = {**tiny.HOW, "progress": "plain", "resident": False, "stall_after": BOUND}
    sweep = jn.sweep(slow_data(), RATES, run_dir=tmp_path / "sweep", vmap_size=2, devices=1, **how)
    assert sweep.status == "finished"
    stalls = tiny.read(tmp_path / "sweep")["summary"]["stalls"]
    assert 10 in [stall["step"] for stall in stalls if stall["where"] == "data"]
    assert "waiting for data (after step 10)" in capfd.readouterr().err


@pytest.mark.parametrize("swept", [False, True])
def test_device_is_printed_first_and_a_slow_stage_announced(swept, capsys):
    printed: list[str] = []

    def load(config: Any) -> jn.Splits:
        deadline = time.monotonic() + 60
        printed.append(capsys.readouterr().out)
        while "loading the data" not in "".join(printed) and time.monotonic() < deadline:
            time.sleep(0.05)
            printed.append(capsys.readouterr().out)
        return tiny.splits()

    experiment, how = dataclasses.replace(tiny.experiment(), data=load), {"progress": "plain", "resident": False}
    if swept:
        jn.sweep(experiment, RATES, record=False, **tiny.MEMBERS | how)
    else:
        tiny.fit(experiment, **how)
    assert "device " in printed[0] and "loading the data" not in printed[0]
    assert "loading the data" in "".join(printed), "not announced while it lasted"
    assert "device " not in capsys.readouterr().out


SLOW = {1: 0.0712, 2: 0.95}


def hint(measured: dict[int, float], num_convolutions: int = 2, steps_per_call: int = 1, without: str = "") -> str:
    """The hint, if any, after these seconds per step, of a step ``without`` the native form of an operation."""
    programs = types.SimpleNamespace(
        traced_step=types.SimpleNamespace(plain_convolutions=num_convolutions),
        reasons={f"{without} without native: {kernels.native_missing()}": False},
        layout=types.SimpleNamespace(num_devices=1),
    )
    plan = types.SimpleNamespace(steps_per_call=steps_per_call)
    trainer: Any = types.SimpleNamespace(plan=plan, seconds_per_step=measured, programs=programs)
    return speed_hint(trainer) or ""


def test_convolution_hint_gives_the_measured_cost(monkeypatch):
    assert hint(SLOW).startswith("2 convolutions are not jaxnn's")
    assert "71.2 ms a step alone, 950 ms in a loop" in hint(SLOW) and "use jn.nn.Conv" in hint(SLOW)
    assert hint(SLOW, 1).startswith("1 convolution is not jaxnn's") and hint(SLOW, 0) == ""
    assert "not measured here" in hint({}, steps_per_call=16)
    for measured in (
        {1: 0.071, 2: 0.072, 16: 0.06},
        {1: 0.071, 2: 0.1},  # 1.4 times
        {},  # no loop: single steps were requested
        {1: 0.071},  # no loop: a window of one step
    ):
        assert hint(measured) == ""
    monkeypatch.setattr(jax, "local_devices", lambda backend: [types.SimpleNamespace(platform="gpu")])
    assert hint(SLOW) == "" == hint(SLOW, 0, without="convolution")


@pytest.mark.needs_cpu
def test_slow_implementations_are_a_hint_to_install_the_native_ones(monkeypatch):
    monkeypatch.delenv("JAXNN_NATIVE", raising=False)
    monkeypatch.setitem(sys.modules, "jaxnn_native", None)
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(machine="x86_64"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert "but the package jaxnn-native is not installed: make native" in hint(SLOW, 0, without="convolution")
    assert "jaxnn-native is not installed" in hint({1: 0.0002}, 0, without="trees")
    assert hint({1: 0.0002}, 0, without="convolution") == hint(SLOW, 0) == ""
    monkeypatch.setenv("JAXNN_NATIVE", "off")
    assert hint(SLOW, 0, without="convolution") == ""
    for value, words in (("on", "JAXNN_NATIVE is on, but .* not installed: make"), ("of", "'of': choose auto, on or")):
        monkeypatch.setenv("JAXNN_NATIVE", value)
        with pytest.raises(jn.ConfigError, match=words):
            hint(SLOW, 0, without="convolution")
    monkeypatch.delenv("JAXNN_NATIVE")
    monkeypatch.setitem(sys.modules, "jaxnn_native", types.SimpleNamespace(abi=lambda: kernels.ABI))
    assert hint(SLOW, 0, without="convolution") == ""


def test_implementations_are_reported_and_recorded(whole, tmp_path, capsys):
    def apply(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        with jax.named_scope("jaxnn.attention.math"):
            return tiny.apply(params, inputs)

    run = tiny.fit(tiny.experiment(model=(tiny.init, apply), num_steps=5), tmp_path / "run", progress="plain")
    assert tiny.read(run.dir)["groups"][0]["implementations"] == {"attention": ["math"]}
    assert "\n  implementations  attention math\n" in capsys.readouterr().out
    assert tiny.read(whole.dir)["groups"][0]["implementations"] == {}
    tiny.fit(tiny.experiment(), resume=whole.dir, progress="plain")
    assert "implementations" not in capsys.readouterr().out


def test_flax_convolutions_are_measured_in_a_loop_of_two_steps(tmp_path):
    images = np.random.default_rng(0).normal(size=(37, 4, 4, 1)).astype(np.float32), tiny.points(37)[1]
    model = linen.Sequential([linen.Conv(3, (3, 3), use_bias=False), lambda hidden: hidden.mean((1, 2))])
    params = {"layers_0": {"kernel": np.ones((3, 3, 1, 3), np.float32)}}
    data = jn.data.arrays(images)
    experiment = tiny.experiment(data=data, model=model, params=lambda config: params, num_steps=2)
    run = tiny.fit(experiment, tmp_path / "run", steps_per_call=None, report_every=2)
    expected = ["1", "2"] if jax.default_backend() == "cpu" else ["2"]
    assert list(tiny.read(run.dir)["groups"][0]["seconds_per_step_measured"]) == expected
