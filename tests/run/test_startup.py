"""What a run and a sweep print and how they answer signals before their first step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxnn as jn
from tests import shell, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")


def fit(experiment: jn.Experiment[Any], **options: Any) -> object:
    return tiny.fit(experiment, **options)


def sweep(experiment: jn.Experiment[Any], **options: Any) -> object:
    where = {"record": False} if "run_dir" not in options else {}
    return jn.sweep(experiment, jn.grid(seed=[0, 1]), vmap_size=1, devices=1, **{**tiny.HOW, **where, **options})


def loading(action: Callable[[], object]) -> jn.Experiment[Any]:
    """An experiment that does ``action`` while it loads its data."""

    def data(config: Any) -> jn.Splits:
        action()
        return tiny.splits()

    experiment = tiny.experiment()
    return jn.Experiment(experiment.config, data, experiment.task, experiment.optimizer)


@pytest.mark.parametrize(("train", "seconds"), [(fit, 0.0), (sweep, 2.5)])
def test_the_device_is_printed_before_the_data_are_loaded_and_a_long_stage_is_announced(
    train: Callable[..., object], seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    before: list[str] = []

    def load() -> None:
        before.append(capsys.readouterr().out)
        time.sleep(seconds)

    train(loading(load), progress="plain")
    assert "device " in before[0] and "loading the data" not in before[0]
    after = capsys.readouterr().out
    assert ("loading the data" in after) == (seconds > 2) and "device " not in after


@pytest.mark.parametrize("train", [fit, sweep])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_stops_at_once_and_leaves_nothing(
    train: Callable[..., object], signum: signal.Signals, tmp_path: Path
) -> None:
    handler = signal.getsignal(signum)
    with pytest.raises(KeyboardInterrupt):
        train(loading(lambda: signal.raise_signal(signum)), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists() and signal.getsignal(signum) == handler


# SIGTERM is a scheduler's: it may start the run again.
@pytest.mark.parametrize(
    ("command", "signum", "status"),
    [
        ([], signal.SIGINT, 130),
        ([], signal.SIGTERM, 75),
        (["sweep", "--seed", "0", "1"], signal.SIGINT, 130),
    ],
)
def test_a_script_that_is_interrupted_before_its_first_step_says_so(
    command: list[str], signum: signal.Signals, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = loading(lambda: signal.raise_signal(signum))
    words = [*command, "--no-record", "--progress", "none"]
    said = shell.fails(capsys, lambda arguments: jn.main(experiment, arguments), *words, status=status)
    assert said.startswith("interrupted before")


def test_a_resumed_script_that_is_interrupted_early_can_be_resumed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.fit(tiny.experiment(num_steps=5), tmp_path / "run")
    experiment = loading(lambda: signal.raise_signal(signal.SIGTERM))
    words = ["--resume", tmp_path / "run", "--num-steps", 20, "--progress", "none"]
    said = shell.fails(capsys, lambda arguments: jn.main(experiment, arguments), *words, status=75)
    assert f"--resume {tmp_path / 'run'}" in said


# A network that XLA compiles for the longer the deeper it is, and computes for the longer the more loops it has.
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
    jn.main(tiny.experiment(model=(tiny.init, apply), num_steps=1_000_000))
"""


def interrupted(folder: Path, flags: list[str], wait_for: str, *pauses: float, depth: int = 0, loops: int = 0) -> Any:
    """A script that gets SIGINT after each pause once it prints ``wait_for``: status, seconds to its end, errors."""
    (folder / "slow.py").write_text(SLOW.format(depth=depth, loops=loops))
    variables = {**os.environ, "PYTHONPATH": str(shell.ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, str(folder / "slow.py"), *flags, "--progress", "plain"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=variables, cwd=folder, **pipes) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert any(wait_for in line for line in process.stdout)
            for pause in pauses:
                time.sleep(pause)
                process.send_signal(signal.SIGINT)
            sent = time.monotonic()
            process.wait(60)
            return process.returncode, time.monotonic() - sent, process.stderr.read()
        finally:
            process.kill()


MEMORY = """
import resource, sys
import jax
import jaxnn as jn
from tests import tiny

jax.config.update("jax_num_cpu_devices", 2)
jax.devices()
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 3 * 2**30, resource.RLIM_INFINITY))
model = jn.models.MLP((6_000, 6_000, 3))
jn.main(tiny.experiment(model=model), ["sweep", "--seed", *map(str, range(16)), "--no-record"])
"""


def test_a_script_that_is_interrupted_while_it_imports_jaxnn_says_so(tmp_path: Path) -> None:
    # A stand-in for JAX's own modules, which are imported for seconds.
    (tmp_path / "optax.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = shell.python("-c", "import jaxnn; jaxnn.fit", PYTHONPATH=f"{tmp_path}{os.pathsep}{shell.ROOT}")
    assert (done.returncode, done.stderr) == (130, "interrupted while importing jaxnn\n")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "sweep --seed 0 1"])
def test_a_reader_that_leaves_stops_a_run_after_its_window(tmp_path: Path, words: str) -> None:
    (tmp_path / "slow.py").write_text(SLOW.format(depth=0, loops=0))
    flags = "--no-record --progress plain --steps-per-call 100 --report-every 100"
    command = f"{sys.executable} slow.py {words} {flags} | sed '/^ *step/q'"
    variables = {**os.environ, "PYTHONPATH": str(shell.ROOT)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=120)
    assert done.stderr == "standard output was closed: stopping after the current window\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_a_sweep_that_does_not_fit_in_the_address_space_ends_with_one_line() -> None:
    done = shell.python("-c", MEMORY, JAX_ENABLE_COMPILATION_CACHE="false")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ") and "member" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [[], ["sweep", "--seed", "0", "1", "--devices", "1"]])
def test_a_signal_during_a_long_compilation_ends_a_script_at_once(command: list[str], tmp_path: Path) -> None:
    flags = [*command, "--run-dir", str(tmp_path / "run")]
    status, seconds, errors = interrupted(tmp_path, flags, "compiling the program", 0.5, depth=1_000)
    assert (status, errors.count("\n")) == (130, 1) and errors.startswith("interrupted before"), errors
    assert seconds < 10 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_second_signal_ends_a_script_at_once_while_a_call_is_computed(tmp_path: Path) -> None:
    flags = ["--no-record", "--steps-per-call", "1000", "--report-every", "1000", "--eval-every", "0"]
    status, seconds, errors = interrupted(tmp_path, flags, "steps per call", 5.0, 1.0, loops=100_000)
    assert status == 130 and "Traceback" not in errors and seconds < 10, errors
    assert "stopping after the current window" in errors and "interrupted at once" in errors
