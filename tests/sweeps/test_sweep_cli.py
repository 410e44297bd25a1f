"""``experiment.py sweep``: flags of many values, points of the script, and errors of one line."""

import dataclasses
import signal
import sys
from types import SimpleNamespace
from typing import Any, Literal

import pytest

import jaxnn as jn
from jaxnn.cli import parse_sweep as parse
from jaxnn.observe import cpu_count
from tests import shell, tiny

QUICK = ["--progress", "none", "--steps-per-call", "5", "--report-every", "5", "--eval-every", "10", "--vmap-size", "2"]


@dataclasses.dataclass(frozen=True)
class Model:
    features: tuple[int, ...] = (4,)
    dropout: float = 0.1


@dataclasses.dataclass(frozen=True)
class Config(tiny.Config):
    model: Model = Model()
    kind: Literal["a", "b"] = "a"
    clip: float | None = None
    norm: bool = False


CLASHING = dataclasses.make_dataclass("Clashing", [("vmap_size", int, 3)], bases=(tiny.Config,), frozen=True)


def with_config(config: Any) -> jn.Experiment[Any]:
    return dataclasses.replace(tiny.experiment(), config=config)


def sweep(*arguments: object, **how: Any) -> jn.Sweep:
    """The sweep of a script, in this process on one device."""
    found = jn.main(tiny.experiment(), [*map(str, arguments), *QUICK, "--devices", "1"], **how)
    assert isinstance(found, jn.Sweep)
    return found


def test_every_field_takes_several_values():
    flags = "--learning-rate 1e-3 2 --features 8,8 16 --dropout 0.5 --kind a b --clip None 0.5 --norm True False"
    words = [*flags.split(), *"--combine zip --halving 3 --vmap-size 7".split()]
    values, design, options = parse(with_config(Config()), words)
    assert values == {
        **{"learning_rate": [0.001, 2.0], "model.features": [(8, 8), (16,)], "model.dropout": [0.5]},
        **{"kind": ["a", "b"], "clip": [None, 0.5], "norm": [True, False]},
    }
    assert (design.combine, design.halving, options.vmap_size) == ("zip", 3, 7)


def test_points_are_those_of_the_flags_or_of_the_script_overridden():
    points = jn.grid(learning_rate=[0.1, 0.2], seed=[0, 1])
    short = ("--num-steps", 10, "--no-record")
    found = sweep(*short, points=points)
    assert [member.point for member in found.members] == list(points) and found.members[0].step == 10
    halved = sweep(*short, "--learning-rate", 0.3, 0.4, "--seed", 3, 4, "--halving", 2, points=points)
    assert [tuple(member.point.values()) for member in halved.members] == [(0.3, 3), (0.3, 4), (0.4, 3), (0.4, 4)]
    assert {member.status for member in halved.members} == {"finished", "pruned"}
    run = jn.main(tiny.experiment(), ["run", "--no-record", *QUICK[:-2]], points=points)
    assert isinstance(run, jn.Run) and run.summary.step == 20


def test_interrupted_sweep_exits_75_and_resume_needs_no_flags(tmp_path, monkeypatch, capsys):
    signals = [signal.SIGINT]
    writer = SimpleNamespace(write=lambda lines: signals and signal.raise_signal(signals.pop()))
    monkeypatch.setitem(sys.modules, "ending", SimpleNamespace(writer=writer))
    words = ("sweep", "--learning-rate", 0.01, 0.1, "--seed", 0, 1)
    ending = ("--run-dir", tmp_path / "sweep", "--writers", "ending:writer")
    shell.fails(capsys, lambda given: sweep(*given), *words, *ending, status=75)
    # The word is not needed: the directory shows what it holds.
    assert [member.step for member in sweep("--resume", tmp_path / "sweep").members] == [20] * 4


ERRORS = {
    "sweep": "nothing to sweep: give a field several values, as in --seed 0 1 2 3.",
    "sweep --seed 0 1 --combine zip --batch-size 4 8 9": "zip needs axes of one length",
    "sweep --resume nowhere": "holds no sweep",
    "sweep --seed --learning-rate 1 2": "--seed has no value",
    "sweep --seed 0 x": "Error parsing --seed",
    "sweep --features 8,x 16": "--model.features '8,x' is no value of tuple[int, ...].",
    "sweep --seed 0 1": "Clashing has a field 'vmap_size', which is an option's name",
    "sweep --seed 0 1 --device gpu": "device is 'gpu', which JAX cannot open here",
}


@pytest.mark.parametrize("command", ERRORS)
def test_errors_are_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = CLASHING() if "Clashing" in ERRORS[command] else Config()
    error = shell.fails(capsys, lambda given: jn.main(with_config(config), given), *command.split())
    assert error.startswith("error: ") and ERRORS[command] in error and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_sweeping_process_makes_each_core_a_device_and_opens_no_other():
    probe = (
        "import jax; from jaxnn.cli import use_all_cores; use_all_cores()\n"
        "print(len(jax.devices('cpu')))\n"
        "use_all_cores()  # a backend runs already: nothing happens\n"
    )
    for variables, expected in (({}, min(cpu_count(), 16)), ({"JAX_NUM_CPU_DEVICES": "3"}, 3)):
        done = shell.python("-c", probe, **variables)
        assert done.stdout.strip() == str(expected), done.stderr
    script = (
        "import jax, jaxnn as jn\n"
        "from tests import tiny\n"
        "words = 'sweep --seed 0 1 --num-steps 2 --device cpu --no-record --progress none --vmap-size 1'\n"
        "found = jn.main(tiny.experiment(), [*words.split(), '--steps-per-call', '1'])\n"
        "print(found.status, jax.config.jax_platforms, jax.config.jax_default_device)\n"
    )
    done = shell.python("-c", script)
    assert done.stdout.strip() == "finished cpu None", done.stderr
