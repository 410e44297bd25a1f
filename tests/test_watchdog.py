"""A watchdog says where a run stands when nothing gets done, is quiet while it goes on, and ends with it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxnn.loop import watchdog
from jaxnn.loop.watchdog import Flight, Stall, Watch, spoken

import jaxnn as jn
from jaxnn.checkpoints import Checkpoints
from jaxnn.observe import Clock
from jaxnn.types import ConfigError
from tests import tiny

# Seconds: what is a stall, and how long things hang in these tests.
BOUND, HANG = 0.2, 0.7


# --- what it makes of what it sees ---


class Result:
    """An array that is ready when told."""

    def __init__(self, ready: bool = False) -> None:
        self.ready = ready

    def is_ready(self) -> bool:
        return self.ready


class Scene:
    """A run that stands still until told, looked at by a watch with a bound of 100 seconds."""

    def __init__(self, step: int = 0) -> None:
        self.time = 1000.0
        self.clock, self.flight = Clock(lambda: self.time), Flight()
        self.flight.start(step)
        self.watch = Watch(self.clock, self.flight, 100.0)

    def dispatch(self, step: int, *, ready: bool = False) -> Result:
        result = Result(ready)
        self.flight.begun = step
        self.flight.dispatched(step, result)
        return result

    def look_after(self, seconds: float) -> list[str]:
        self.time += seconds
        return self.watch.look()


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ("data", "for data"),
        ("checkpoint", "for a checkpoint to be written"),
        ("evaluation", "for the evaluation"),
        ("compile", "for a program to be compiled"),
        ("record", "for the record to be written"),
        ("train", "for this process itself"),
        ("barrier", "for barrier"),
    ],
)
def test_the_span_it_hangs_in_is_named_in_plain_words(span: str, words: str) -> None:
    scene = Scene(1200)
    with scene.clock.span("train"), scene.clock.span(span):
        assert scene.look_after(99.0) == []
        assert scene.look_after(2.0) == [f"nothing finished for 1 min 41 s: waiting {words} (after step 1,200)"]
    assert scene.flight.stalls == [Stall(span, 1200, 101.0)]


def test_in_the_loop_it_is_the_device_that_has_calls_to_finish() -> None:
    scene = Scene(1200)
    with scene.clock.span("train"):
        scene.dispatch(1250, ready=True)
        scene.dispatch(1300)
        scene.flight.begun = 1301  # being dispatched
        scene.look_after(1.0)
        assert scene.look_after(100.0) == [
            "nothing finished for 1 min 40 s: waiting for the device to finish steps 1,251 to 1,301"
        ]
    assert scene.flight.stalls == [Stall("device", 1250, 100.0)]


def test_it_says_so_again_each_time_the_wait_has_doubled_and_once_that_it_is_over() -> None:
    scene = Scene(7)
    with scene.clock.span("data"):
        spoken_at = [seconds for seconds in range(1, 1001) if scene.look_after(1.0)]
        assert spoken_at == [100, 200, 400, 800]
        assert scene.flight.stalls == [Stall("data", 7, 1000.0)], "one stall, as long as it was seen to be"
    scene.time += 0.5
    assert scene.watch.look() == ["the wait for data (after step 7) is over, after 16 min 40 s"]
    assert scene.look_after(1.0) == []
    assert scene.flight.stalls == [Stall("data", 7, 1000.0)]


def test_a_second_stall_is_another_with_the_whole_bound_before_it() -> None:
    scene = Scene()
    with scene.clock.span("data"):
        assert scene.look_after(399.0)
    with scene.clock.span("evaluation"):
        scene.look_after(1.0)
        assert scene.look_after(98.0) == []
        assert scene.look_after(1.0) == ["nothing finished for 1 min 40 s: waiting for the evaluation (after step 0)"]
    assert [(stall.where, stall.seconds) for stall in scene.flight.stalls] == [("data", 399.0), ("evaluation", 100.0)]


def test_the_callers_own_time_and_that_outside_a_run_are_nobodys_business() -> None:
    scene = Scene()
    assert scene.look_after(1000.0) == []
    with scene.clock.span("train"), scene.clock.span("caller"):
        assert scene.look_after(1000.0) == []
    assert scene.flight.stalls == []


def test_a_long_window_is_alive_as_long_as_its_calls_get_done() -> None:
    # The host has dispatched many calls and waits for all: it does nothing, and yet things go on.
    scene = Scene()
    with scene.clock.span("train"):
        results = [scene.dispatch(step) for step in range(1, 201)]
        for number, result in enumerate(results, 1):
            assert scene.look_after(99.0) == []
            result.ready = True
            assert scene.flight.done == number
        assert scene.look_after(1.0) == []
    assert scene.flight.stalls == []


def test_calls_that_are_done_are_let_go_and_what_they_did_is_not_forgotten() -> None:
    flight = Flight()
    for step in range(1, 1001):
        flight.dispatched(step, Result(ready=True))
    assert len(flight._calls) <= watchdog.MANY_CALLS
    assert flight.done == 1000
    flight.start(3)  # a sweep's next block
    assert (flight.begun, flight.done) == (3, 3)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.21, "0.2 s"), (12.4, "12 s"), (59.7, "1 min 0 s"), (300.0, "5 min 0 s"), (7530.0, "2 h 5 min")],
)
def test_durations_are_spoken(seconds: float, words: str) -> None:
    assert spoken(seconds) == words


# --- in runs ---


def dogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "watchdog"]


@pytest.fixture(autouse=True)
def no_watchdog_left() -> Iterator[None]:
    yield
    assert dogs() == [], "a watchdog outlived its run"


class Slow:
    """A split like another that hangs when the batches of a step are asked for."""

    def __init__(self, source: Any, step: int, hang: Any) -> None:
        self._source, self._step, self._hang = source, step, hang

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def order(self, seed: Any, steps: Any, batch_size: int) -> Any:
        if self._step in np.asarray(steps):
            self._hang()
        return self._source.order(seed, steps, batch_size)


def slow_data(step: int, hang: Any = lambda: time.sleep(HANG)) -> jn.Experiment[tiny.Config]:
    splits = tiny.splits()
    return tiny.experiment(data=splits._replace(train=Slow(splits.train, step, hang)))


def hanging_when(condition: jax.Array) -> jax.Array:
    """Nothing, after a while on the device where ``condition`` holds."""

    def hang(condition: Any) -> np.ndarray:
        time.sleep(HANG if condition else 0.0)
        return np.zeros((), np.float32)

    return jax.pure_callback(hang, jax.ShapeDtypeStruct((), jnp.float32), condition)


def slow_step(step: int) -> jn.Experiment[tiny.Config]:
    """The tiny experiment with a device that takes its time for the update of one step."""

    def update(updates: Any, state: jax.Array, params: Any = None) -> tuple[Any, jax.Array]:
        late = hanging_when(state + 1 == step)
        return jax.tree.map(lambda leaf: leaf + late, updates), state + 1

    slow = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    return tiny.experiment(optimizer=lambda config: optax.chain(optax.sgd(config.learning_rate), slow))


def slow_evaluation() -> jn.Experiment[tiny.Config]:
    """The tiny experiment with a model that takes its time for the batches of evaluations, of 16 examples."""

    def apply(params: Any, inputs: jax.Array) -> jax.Array:
        outputs = tiny.apply(params, inputs)
        return outputs + hanging_when(jnp.bool_(True)) if len(inputs) == 16 else outputs

    return tiny.experiment(model=(tiny.init, apply))


def stalls_at(run: jn.Run, where: str) -> list[Stall]:
    """Those that are no hiccup of a busy machine."""
    return [stall for stall in run.summary.stalls if stall.where == where and stall.seconds > 0.7 * HANG]


def test_a_source_that_hangs_is_waiting_for_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tiny.fit(slow_data(12), tmp_path / "run", resident=False, stall_after=BOUND, progress="plain")
    (stall,) = stalls_at(run, "data")
    assert stall.step == 10
    told = capfd.readouterr().err
    assert re.search(r"^nothing finished for \d\.\d s: waiting for data \(after step 10\)$", told, re.M)
    assert len(re.findall(r"^the wait for data \(after step 10\) is over, after \d\.\d s$", told, re.M)) == 1
    recorded = tiny.read(tmp_path / "run")["summary"]["stalls"]
    assert {"where": "data", "step": 10, "seconds": stall.seconds} in recorded
    assert re.fullmatch(r"(once|\d times), \d\.\d s in all \(.*data.*\)", dict(run.summary.rows())["stalled"])
    assert run.summary.status == "finished"


@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_a_step_that_hangs_is_waiting_for_the_device(steps_per_call: int, capfd: pytest.CaptureFixture[str]) -> None:
    run = tiny.fit(slow_step(8), steps_per_call=steps_per_call, stall_after=BOUND, progress="plain")
    (stall,) = stalls_at(run, "device")
    assert 5 <= stall.step < 8
    assert re.search(r"waiting for the device to finish steps? [678]\b", capfd.readouterr().err)


def test_an_evaluation_that_hangs_is_waiting_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    run = tiny.fit(slow_evaluation(), stall_after=BOUND, progress="plain")
    assert [stall.step for stall in stalls_at(run, "evaluation")] == [10, 20]
    assert "waiting for the evaluation (after step 10)" in capfd.readouterr().err


@pytest.mark.parametrize("part", ["save", "close"])
def test_a_disk_that_hangs_is_waiting_for_a_checkpoint_at_the_end_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = getattr(Checkpoints, part)

    def hang(self: Checkpoints, *args: Any, **options: Any) -> None:
        time.sleep(HANG)
        whole(self, *args, **options)

    monkeypatch.setattr(Checkpoints, part, hang)
    run = tiny.fit(tiny.experiment(), tmp_path / "run", stall_after=BOUND, progress="plain")
    assert 20 in [stall.step for stall in stalls_at(run, "checkpoint")]
    assert "waiting for a checkpoint to be written (after step 20)" in capfd.readouterr().err
    assert "checkpoint" in {stall["where"] for stall in tiny.read(tmp_path / "run")["summary"]["stalls"]}


def test_a_resumed_run_that_hangs_at_once_stands_where_it_goes_on(tmp_path: Path) -> None:
    tiny.fit(tiny.experiment(num_steps=10), tmp_path / "run")
    run = tiny.fit(slow_data(12), resume=tmp_path / "run", resident=False, stall_after=BOUND)
    assert [stall.step for stall in stalls_at(run, "data")] == [10]


def test_a_healthy_run_says_nothing_and_notes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = []
    data = slow_data(5, lambda: seen.extend(dogs()))
    run = tiny.fit(data, tmp_path / "run", resident=False, stall_after=30.0, progress="plain")
    assert len(seen) == 1, "nobody looked on"
    assert run.summary.stalls == () and tiny.read(tmp_path / "run")["summary"]["stalls"] == []
    assert "stalled" not in dict(run.summary.rows())
    assert capfd.readouterr().err == ""


def test_where_nothing_is_to_be_printed_stalls_are_noted_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    run = tiny.fit(slow_data(12), resident=False, stall_after=BOUND, progress="none")
    assert len(stalls_at(run, "data")) == 1
    assert capfd.readouterr().err == ""


def test_in_an_iteration_the_callers_time_is_its_own_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    options = {**tiny.HOW, "progress": "plain", "record": False, "resident": False}
    iteration = jn.iterate(slow_data(12), stall_after=BOUND, **options)
    for _ in iteration:
        time.sleep(2 * BOUND)
    assert [stall.step for stall in stalls_at(iteration.run, "data")] == [10]
    assert "caller" not in {stall.where for stall in iteration.run.summary.stalls}
    assert capfd.readouterr() == ("", "")


def test_an_iteration_that_is_broken_off_has_nobody_look_on() -> None:
    iteration = jn.iterate(tiny.experiment(), **tiny.HOW, record=False)
    for _ in iteration:
        assert len(dogs()) == 1
        break
    assert dogs() == []


def test_it_ends_with_a_run_that_fails_and_the_stall_is_on_record(tmp_path: Path) -> None:
    def hang_and_fail() -> None:
        time.sleep(HANG)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        tiny.fit(slow_data(12, hang_and_fail), tmp_path / "run", resident=False, stall_after=BOUND)
    assert dogs() == []
    assert "data" in {stall["where"] for stall in tiny.read(tmp_path / "run")["summary"]["stalls"]}


def test_with_0_nobody_looks_on() -> None:
    seen = []
    tiny.fit(slow_data(5, lambda: seen.append(dogs())), resident=False, stall_after=0)
    assert seen == [[]]


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "5", None, True])
def test_a_bound_that_is_no_number_of_seconds_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="stall_after is .*, and must be a number of seconds, 0 or more"):
        jn.RunOptions(stall_after=wrong)


def test_each_process_of_several_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    clock = Clock()
    with watchdog.watching(clock, Flight(), BOUND, aloud=True), clock.span("data"):
        time.sleep(HANG)
    assert re.match(r"process 3: nothing finished for \d\.\d s: waiting for data", capsys.readouterr().err)


def test_a_line_stands_above_the_bar_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(force_terminal=True, width=100)
    clock = Clock()
    with Live("the bar", console=console, transient=True), clock.span("data"):
        with watchdog.watching(clock, Flight(), BOUND, aloud=True):
            time.sleep(HANG)
    out, err = capsys.readouterr()
    assert re.search(r"nothing finished for \d\.\d s: waiting for data \(after step 0\)", out) and err == ""


def test_a_sweep_is_watched_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    points = jn.grid(learning_rate=[0.1, 0.2])
    how = {**tiny.HOW, "progress": "plain", "resident": False, "stall_after": BOUND}
    sweep = jn.sweep(slow_data(12), points, run_dir=tmp_path / "sweep", width=2, **how)
    assert sweep.status == "finished"
    stalls = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["summary"]["stalls"]
    assert 10 in [stall["step"] for stall in stalls if stall["where"] == "data"]
    assert "waiting for data (after step 10)" in capfd.readouterr().err
