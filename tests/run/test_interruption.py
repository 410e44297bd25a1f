"""Scripts in processes of their own that are interrupted or cut off from their output, for real."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import processes, shell

pytestmark = pytest.mark.slow

DEADLINE = 120.0


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
    slow = sys.executable, folder / "slow.py", *flags, "--progress", "plain"
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
