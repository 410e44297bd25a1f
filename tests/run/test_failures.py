"""Runs that diverge, fail or are interrupted: the record names how, and what was good is kept."""

import dataclasses
import functools
import io
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.record import RecordReader
from jaxnn.types import RecordError, TrainingError
from tests import processes, shell, tiny
from tests.record.files import contents


def exploding(bad_step: int) -> jn.Experiment[tiny.Config]:
    """SGD whose gradient at update ``bad_step`` is NaN: the loss of the step after it is the first bad one."""

    def update(updates: Any, left: jax.Array, params: Any = None) -> tuple[Any, jax.Array]:
        return jax.tree.map(lambda leaf: jnp.where(left == 1, jnp.nan, leaf), updates), left - 1

    # The step is part of the state, so one program serves all steps.
    poison = optax.GradientTransformation(lambda params: jnp.int32(bad_step), update)
    return tiny.experiment(optimizer=lambda config: optax.chain(optax.sgd(0.1), poison), num_steps=40)


def saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())


def test_a_label_of_a_stream_beyond_the_outputs_is_named():
    pytest.importorskip("grain")
    inputs, labels = tiny.points(16)
    labels[3:] = 3  # of a model with three outputs; the first examples are right
    data = jn.data.stream(list(zip(inputs, labels, strict=True)), num_workers=0)
    with pytest.raises(jn.DataError, match=r"the batch of step \d+ does not fit the task: the label 3 of example"):
        tiny.fit(tiny.experiment(data=data), steps_per_call=1)


def test_nonfinite_loss_ends_fit_and_iterate_and_names_the_step(tmp_path):
    path, steps = tmp_path / "run", []
    words = "loss is no longer finite at step 23 of 40.* checkpoint is that of step 20"
    with pytest.raises(TrainingError, match=words):
        tiny.fit(exploding(22), path, checkpoint_every=10)
    for num_resumes in range(2):
        assert saved(path) == [10, 20] and not RecordReader(path).is_locked
        facts, lines = tiny.read(path), RecordReader(path).lines()
        assert facts["status"] == facts["summary"]["status"] == "diverged"
        assert [entry["step"] for entry in facts.get("resumed", ())] == [20] * num_resumes
        assert [line["step"] for line in lines] == [5, 10, 15, 20, 25]
        assert np.isfinite([line["train_loss"] for line in lines]).tolist() == [True] * 4 + [False]
        assert '"train_loss": "nan"' in (path / "metrics.jsonl").read_text().splitlines()[-1]
        with pytest.raises(TrainingError, match="at step 23"):
            tiny.fit(exploding(22), resume=path)

    with pytest.raises(TrainingError, match="at step 23"):
        for report in jn.iterate(exploding(22), run_dir=tmp_path / "iterated", **tiny.HOW):
            steps.append(report.step)
    assert steps == [5, 10, 15, 20] and tiny.read(tmp_path / "iterated")["status"] == "diverged"


def infinite(bad_step: int) -> jn.Experiment[tiny.Config]:
    """A loss that is infinite at one step, with finite gradients."""

    def loss(params: Any, state: Any, *args: Any) -> Any:
        value, (_, metrics) = tiny.TASK.loss(params, {}, *args)
        return value + jnp.where(state["step"] == bad_step, jnp.inf, 0.0), ({"step": state["step"] + 1}, metrics)

    init = lambda *args: (tiny.TASK.init(*args)[0], {"step": jnp.int32(1)})  # noqa: E731
    return tiny.experiment(task=lambda config: tiny.TASK._replace(init=init, loss=loss))


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        # The update of step 20 is bad and its loss, computed before it, is not.
        (exploding(20), "parameters are no longer finite after step 20: .*that of step 10"),
        (infinite(13), "at step 13 of 20: .* of step 10"),
    ],
)
def test_parameters_of_a_diverged_run_are_not_saved_even_if_they_are_finite(experiment, words, tmp_path):
    with pytest.raises(TrainingError, match=words):
        tiny.fit(experiment, tmp_path / "run", checkpoint_every=10)
    assert saved(tmp_path / "run") == [10] and tiny.read(tmp_path / "run")["status"] == "diverged"


def fail() -> None:
    raise ZeroDivisionError("mine")


def interrupt_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("action", "error", "status"),
    [(fail, ZeroDivisionError, "failed"), (interrupt_twice, KeyboardInterrupt, "interrupted")],
)
def test_exception_in_user_code_and_second_signal_end_a_run_at_once(whole, tmp_path, action, error, status):
    path = tmp_path / "run"
    try:
        tiny.fit(tiny.acting(15, action), path, resident=False, checkpoint_every=5)
    except error:  # which is not that of the run within
        facts = tiny.read(path)
        assert facts["status"] == facts["summary"]["status"] == status and not RecordReader(path).is_locked
        assert [line["step"] for line in RecordReader(path).lines()] == [5, 10, 15]
        resumed = tiny.fit(tiny.experiment(), resume=path, resident=False)
    assert tiny.read(path)["status"] == "finished"
    chex.assert_trees_all_equal(resumed.state.params, whole.state.params)


def test_metrics_deleted_during_a_run_are_missed(tmp_path):
    with pytest.raises(RecordError, match="metrics.jsonl was removed or shortened during the run"):
        tiny.fit(tiny.acting(15, (tmp_path / "metrics.jsonl").unlink), tmp_path, resident=False)


@pytest.mark.parametrize("signum", [(signal.SIGTERM,), (signal.SIGHUP,) * 2])  # two are sent for a closed terminal
def test_first_signal_ends_the_window_and_saves(whole, tmp_path, capsys, signum):
    handlers = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)
    run = tiny.fit(tiny.acting(7, lambda: [*map(signal.raise_signal, signum)]), tmp_path / "run", resident=False)
    assert "stopping after the current window" in capsys.readouterr().err
    assert run.summary.status == tiny.read(tmp_path / "run")["status"] == "interrupted"
    assert int(run.state.step) == run.summary.step == 10
    assert saved(tmp_path / "run") == [10] and f"--resume {run.dir}" in repr(run)
    assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)) == handlers
    resumed = tiny.fit(tiny.experiment(), resume=tmp_path / "run", resident=False)
    assert resumed.summary.status == "finished"
    assert resumed.metrics["step"].tolist() == [5, 10, 15, 20]
    chex.assert_trees_all_equal(resumed.state.params, whole.state.params)


def test_interrupted_script_exits_with_75_if_it_can_be_resumed(tmp_path, capsys):
    main = functools.partial(jn.main, tiny.acting(7, lambda: os.kill(os.getpid(), signal.SIGINT)))
    flags = "--steps-per-call 5 --report-every 5 --eval-every 10 --resident False --progress none".split()
    for checkpoint_every, status in (("None", 75), ("0", 130)):
        path = tmp_path / checkpoint_every
        how = "--run-dir", path, "--checkpoint-every", checkpoint_every
        assert "stopping after" in shell.fails(capsys, main, *flags, *how, status=status)
        assert tiny.read(path)["status"] == "interrupted"
        assert (path / "checkpoints" / "10").is_dir() == (status == 75)


def test_a_run_finishes_whatever_standard_output_is(monkeypatch, capsys):
    with open("/dev/full", "w") as full, open(os.devnull, "w") as closed:
        closed.close()
        for out in (io.TextIOWrapper(drawn := io.BytesIO(), "ascii"), full, closed, None):
            monkeypatch.setattr(sys, "stdout", out)
            assert tiny.fit(tiny.experiment(), progress="plain").summary.status == "finished"
    assert b"quartiles \\xb1" in drawn.getvalue()
    assert capsys.readouterr().err.count("standard output cannot be written (No space left on device)") == 1


def test_an_interrupted_run_ends_the_sweep_that_was_to_start_from_it(tmp_path):
    inner = tiny.acting(15, lambda: signal.raise_signal(signal.SIGINT))
    outer = dataclasses.replace(tiny.experiment(), params=lambda config: tiny.fit(inner, resident=False).state)
    with pytest.raises(KeyboardInterrupt):
        jn.sweep(outer, jn.grid(learning_rate=[0.1, 0.2]), run_dir=tmp_path / "sweep", **tiny.HOW)
    assert not (tmp_path / "sweep").exists()


def test_a_run_in_a_thread_catches_no_signal():
    with ThreadPoolExecutor(1) as threads:  # where Python allows no handler
        assert threads.submit(tiny.fit, tiny.experiment(num_steps=5)).result().summary.status == "finished"


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_process_that_a_data_function_forks_keeps_its_own_signals():
    before, found = signal.getsignal(signal.SIGTERM), []

    def fork() -> None:
        if (child := os.fork()) == 0:
            os._exit(signal.getsignal(signal.SIGTERM) == before)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    tiny.fit(tiny.acting(7, fork), resident=False)
    assert found == [True]


def loading(signum: int) -> jn.Experiment[Any]:
    """An experiment that gets a signal while it loads its data."""

    def data(config: Any) -> jn.Splits:
        signal.raise_signal(signum)
        return tiny.splits()

    return dataclasses.replace(tiny.experiment(), data=data)


# SIGTERM is a scheduler's: it may start the run again.
SCRIPTS = [
    ("--no-record", signal.SIGINT, 130, "interrupted before"),
    ("--no-record", signal.SIGTERM, 75, "interrupted before"),
    ("sweep --seed 0 1 --no-record", signal.SIGINT, 130, "interrupted before"),
    ("--resume RUN --num-steps 30", signal.SIGTERM, 75, "--resume RUN"),
]


def test_signal_before_the_first_step_leaves_nothing(whole, tmp_path, capsys):
    points, before = jn.grid(seed=[0, 1]), contents(whole.dir)
    for signum in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(signum)
        with pytest.raises(KeyboardInterrupt):
            tiny.fit(loading(signum), tmp_path / "run")
        with pytest.raises(KeyboardInterrupt):
            jn.sweep(loading(signum), points, run_dir=tmp_path / "sweep", **tiny.HOW)
        assert not list(tmp_path.iterdir()) and signal.getsignal(signum) == handler
    for command, signum, status, words in SCRIPTS:
        arguments = f"{command} --progress none".replace("RUN", str(whole.dir)).split()
        main = functools.partial(jn.main, loading(signum))
        assert words.replace("RUN", str(whole.dir)) in shell.fails(capsys, main, *arguments, status=status)
    assert contents(whole.dir) == before


# XLA compiles it for longer the deeper it is, and computes it for longer the more loops it has.
SLOW = """
import jax, jax.numpy as jnp
import jaxnn as jn
from tests import tiny

def apply(params, inputs):
    values = inputs
    for _ in range({depth}):
        values = jnp.sort(jnp.sin(values @ params["kernel"]), axis=-1)[:, ::-1]
    start = jax.lax.stop_gradient(values)
    again = jax.lax.fori_loop(0, {loops}, lambda _, value: jnp.sort(jnp.sin(value), axis=-1), start)
    return tiny.apply(params, values + 0.0 * again)

if __name__ == "__main__":
    {start}(tiny.experiment(model=(tiny.init, apply), num_steps=1_000_000))
"""


def interrupted(folder: Path, flags: list[str], wait_for: str, *pauses: float, signum: int = 2, **slow: Any) -> Any:
    """A script that gets a signal after each pause once it prints ``wait_for``: status, seconds to its end, errors."""
    (folder / "slow.py").write_text(SLOW.format(**{"depth": 0, "loops": 0, "start": "jn.main"} | slow))
    command = sys.executable, folder / "slow.py", *flags, "--progress", "plain"
    with processes.started([command], JAX_ENABLE_COMPILATION_CACHE="false") as running:
        running.wait_for(wait_for, seconds=120)
        for pause in pauses:
            time.sleep(pause)
            running.signal(0, signum)
        sent = time.monotonic()
        (done,) = running.finish()
        return done.status, time.monotonic() - sent, done.err


@pytest.mark.slow
def test_signal_during_a_long_compilation_ends_a_script_at_once(tmp_path):
    flags = ["--run-dir", str(tmp_path / "run")]
    status, seconds, errors = interrupted(tmp_path, flags, "compiling the program", 0.5, depth=1_000)
    assert (status, errors.count("\n")) == (130, 1) and errors.startswith("interrupted before"), errors
    assert seconds < 10 and not (tmp_path / "run").exists()
    start = "(lambda given: jn.fit(given, record=False, progress='plain'))"  # a caller's script ends as Python's do
    status, seconds, errors = interrupted(tmp_path, [], "compiling the program", 0.5, depth=1_000, start=start)
    assert status == 130 and errors.endswith("KeyboardInterrupt\n") and seconds < 10, errors


@pytest.mark.slow
def test_second_signal_ends_a_script_at_once_while_a_call_is_computed(tmp_path):
    flags = ["--no-record", "--steps-per-call", "1000", "--report-every", "1000", "--eval-every", "0"]
    status, seconds, errors = interrupted(tmp_path, flags, "steps per call", 5.0, 1.0, loops=100_000)
    assert status == 130 and "Traceback" not in errors and seconds < 10, errors
    assert "stopping after the current window" in errors and "interrupted at once" in errors


# C code that no signal interrupts: a mutex is locked twice.
STUCK = """
import ctypes, dataclasses, jaxnn as jn
from tests import tiny
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
stuck = lambda config: (print("stuck", flush=True), lock(mutex), lock(mutex))
jn.fit(dataclasses.replace(tiny.experiment(), data=stuck), record=False)
"""


@pytest.mark.slow
def test_second_signal_ends_a_callers_process_in_a_call_that_never_ends(tmp_path):
    start = "(lambda given: jn.fit(given, record=False, progress='plain', steps_per_call=1))"
    never = {"loops": 2_000_000_000, "start": start}
    status, _, errors = interrupted(tmp_path, [], "steps per call", 2.0, 0.5, signum=signal.SIGTERM, **never)
    assert status == 130 and "interrupted at once" in errors and "Traceback" not in errors
    with processes.started([(sys.executable, "-c", STUCK)]) as running:
        running.wait_for("stuck")
        for pause in (0.0, 3.0):  # the first does not end it, since its caller may have more to lose
            time.sleep(pause)
            running.signal(0, signal.SIGINT)
        (done,) = running.finish(20)
    assert done.status == 130 and "press Ctrl-C again to end the process" in done.err


@pytest.mark.parametrize(("room", "named"), [(95, r"parameters 48 B, the optimizer state 48 B\)"), (150, "temporary")])
def test_training_that_cannot_fit_is_refused_before_it_is_allocated(room, named, monkeypatch):
    monkeypatch.setattr("jaxnn.observe.available_bytes", lambda device: room)
    with pytest.raises(TrainingError, match=f"training does not fit in memory: .*{named}.* and {room} B are free"):
        tiny.fit(tiny.experiment())


@pytest.mark.slow
def test_closed_standard_output_stops_a_run_and_a_sweep_after_their_window(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW.format(depth=0, loops=0, start="jn.main"))
    flags = "--no-record --progress plain --steps-per-call 100 --report-every 100"
    lines = [
        f"{sys.executable} {tmp_path}/slow.py {words} {flags} | sed '/^ *step/q'" for words in ("", "sweep --seed 0 1")
    ]
    with processes.started([("sh", "-c", line) for line in lines]) as running:
        for done in running.finish(120):
            assert done.err == "standard output was closed: stopping after the current window\n"
