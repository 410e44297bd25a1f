"""Scripts in processes of their own that are killed, interrupted or cut off from their output, for real."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import pytest

import jaxnn as jn
from tests import processes, shell, tiny
from tests.record.files import untimed

pytestmark = pytest.mark.slow

DEADLINE = 120.0
NUM_REPORTS = 30
FLAGS = ("--num-steps", 30_000, "--report-every", 1000, "--checkpoint-every", 2000, "--steps-per-call", 500)


def command(script: Path, *flags: object) -> list[object]:
    return [sys.executable, script, *flags, "--progress", "plain"]


def num_reports(path: Path) -> int:
    file = path / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_killed_and_interrupted_run_equals_an_undisturbed_one(tmp_path):
    path, undisturbed, draw = tmp_path / "run", tmp_path / "undisturbed", random.Random(0)

    def run(path: Path, until: Callable[[], bool] = lambda: False, signum: int = 0) -> tuple[int, str]:
        """Starts or resumes the run in ``path`` and sends a signal; returns the exit status and what it printed."""
        where = ("--resume", path) if (path / "run.json").exists() else ("--run-dir", path, *FLAGS)
        script = command(shell.ROOT / "tests" / "several.py", 1, *where)
        with processes.started([script], JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled")) as running:
            deadline = time.monotonic() + DEADLINE
            while signum and running.processes[0].poll() is None and not until():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            if signum:
                running.signal(0, signum)
            (done,) = running.finish(DEADLINE)
        return done.status, done.out

    assert run(undisturbed)[0] == 0
    # The directory exists, and its record is still empty.
    assert run(path, (path / ".lock").exists, signal.SIGKILL)[0] == -signal.SIGKILL
    killed, interrupted = sorted(draw.sample(range(2, 22), 2))
    assert run(path, lambda: num_reports(path) >= killed, signal.SIGKILL)[0] == -signal.SIGKILL
    status, printed = run(path, lambda: num_reports(path) >= interrupted, signal.SIGINT)
    assert status == 75 and f"--resume {path}" in printed
    assert tiny.read(path)["status"] == "interrupted" and num_reports(path) < NUM_REPORTS
    assert run(path)[0] == 0 and tiny.read(path)["status"] == "finished"
    assert untimed(path) == untimed(undisturbed) and num_reports(path) == NUM_REPORTS
    resumed = tiny.read(path)["resumed"]
    assert resumed[-1]["step"] > 0 and all(entry["changed"] == [] for entry in resumed)
    chex.assert_trees_all_equal(jn.load_checkpoint(path), jn.load_checkpoint(undisturbed))


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
    jn.main(tiny.experiment(model=(tiny.init, apply), num_steps=1_000_000))
"""


def interrupted(folder: Path, flags: list[str], wait_for: str, *pauses: float, depth: int = 0, loops: int = 0) -> Any:
    """A script that gets SIGINT after each pause once it prints ``wait_for``: status, seconds to its end, errors."""
    (folder / "slow.py").write_text(SLOW.format(depth=depth, loops=loops))
    slow = command(folder / "slow.py", *flags)
    with processes.started([slow], JAX_ENABLE_COMPILATION_CACHE="false") as running:
        running.wait_for(wait_for, seconds=DEADLINE)
        for pause in pauses:
            time.sleep(pause)
            running.signal(0, signal.SIGINT)
        sent = time.monotonic()
        (done,) = running.finish()
        return done.status, time.monotonic() - sent, done.err


def test_signal_during_a_long_compilation_ends_a_script_at_once(tmp_path):
    flags = ["--run-dir", str(tmp_path / "run")]
    status, seconds, errors = interrupted(tmp_path, flags, "compiling the program", 0.5, depth=1_000)
    assert (status, errors.count("\n")) == (130, 1) and errors.startswith("interrupted before"), errors
    assert seconds < 10 and not (tmp_path / "run").exists()


def test_second_signal_ends_a_script_at_once_while_a_call_is_computed(tmp_path):
    flags = ["--no-record", "--steps-per-call", "1000", "--report-every", "1000", "--eval-every", "0"]
    status, seconds, errors = interrupted(tmp_path, flags, "steps per call", 5.0, 1.0, loops=100_000)
    assert status == 130 and "Traceback" not in errors and seconds < 10, errors
    assert "stopping after the current window" in errors and "interrupted at once" in errors


# A garbage collection during the import gets the signal: Python drops exceptions that are raised in its callbacks.
IN_COLLECTION = """
import gc, os, signal, sys
sent = []
def collected(phase, info):
    if not sent and "jaxnn.run" in sys.modules:
        sent.append(1)
        os.kill(os.getpid(), signal.SIGINT)
gc.callbacks.append(collected)
gc.set_threshold(50)
import jaxnn
jaxnn.fit
print("still here")
"""


def test_signal_during_the_import_of_jaxnn_ends_a_script(tmp_path):
    # A stand-in for JAX's modules, which take seconds to import.
    (tmp_path / "optax.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    # With a flag it is a new interpreter, which has not imported JAX.
    done = shell.python("-u", "-c", "import jaxnn; jaxnn.fit", PYTHONPATH=f"{tmp_path}{os.pathsep}{shell.ROOT}")
    assert (done.returncode, done.stderr) == (130, "interrupted while importing jaxnn\n")
    done = shell.python("-u", "-c", IN_COLLECTION)
    assert (done.returncode, done.stdout) == (130, "") and "interrupted while importing jaxnn" in done.stderr


def test_closed_standard_output_stops_a_run_and_a_sweep_after_their_window(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW.format(depth=0, loops=0))
    flags = "--no-record --progress plain --steps-per-call 100 --report-every 100"
    lines = [
        f"{sys.executable} {tmp_path}/slow.py {words} {flags} | sed '/^ *step/q'" for words in ("", "sweep --seed 0 1")
    ]
    with processes.started([("sh", "-c", line) for line in lines]) as running:
        for done in running.finish(DEADLINE):
            assert done.err == "standard output was closed: stopping after the current window\n"
