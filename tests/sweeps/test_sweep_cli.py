"""``experiment.py sweep`` and ``plan``: flags of many values, and one sentence for each mistake."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest

import jaxnn as jn
from jaxnn.advice import BatchSizePlan
from jaxnn.cli import parse_sweep as parse
from tests import shell, tiny

QUICK = ["--progress", "none", "--steps-per-call", "5", "--report-every", "5", "--eval-every", "10", "--vmap-size", "2"]

pytestmark = pytest.mark.usefixtures("compiled_once")


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


def wide() -> jn.Experiment[Config]:
    own = tiny.experiment()
    return jn.Experiment(Config(), own.data, own.task, own.optimizer)


def sweep(*arguments: object, **how: Any) -> jn.Sweep:
    """What a script's sweep gives, in this process."""
    found = jn.main(how.pop("experiment", None) or tiny.experiment(), [*map(str, arguments), *QUICK], **how)
    assert isinstance(found, jn.Sweep)
    return found


def fails(capsys: pytest.CaptureFixture[str], *arguments: object, **how: Any) -> str:
    return shell.fails(capsys, lambda words: sweep(*words), *arguments, **how)


def test_every_field_takes_several_values() -> None:
    flags = "--learning-rate 1e-3 2 --features 8,8 16 --dropout 0.5 --kind a b --clip None 0.5 --norm True False"
    values, design, options = parse(wide(), [*flags.split(), *"--combine zip --halving 3 --vmap-size 7".split()])
    assert values == {
        "learning_rate": [0.001, 2.0],
        "model.features": [(8, 8), (16,)],
        "model.dropout": [0.5],
        "kind": ["a", "b"],
        "clip": [None, 0.5],
        "norm": [True, False],
    }
    assert (design.combine, design.halving, options.vmap_size) == ("zipped", 3, 7)


def test_several_values_are_swept_and_one_is_set(tmp_path: Path) -> None:
    found = sweep("sweep", "--seed", 0, 1, "--learning-rate", 0.2, "--run-dir", tmp_path / "sweep")
    assert [axis.name for axis in found.axes] == ["seed"] and len(found.members) == 2
    assert {member.config["learning_rate"] for member in found.members} == {0.2}
    alone = tiny.fit(tiny.experiment(seed=1, learning_rate=0.2))
    assert found.members[1].final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-5)


def test_a_script_may_have_points_of_its_own() -> None:
    points = jn.grid(learning_rate=[0.1, 0.2], seed=[0, 1])
    assert len(sweep("--no-record", "--num-steps", 10, points=points).members) == 4
    # What is given for a field takes the place of its values in them.
    found = sweep("--no-record", "--seed", 3, "--batch-size", 4, 8, "--halving", 2, points=points)
    assert [tuple(m.point.values()) for m in found.members] == [(r, b, 3) for r in (0.1, 0.2) for b in (4, 8)]
    assert {m.status for m in found.members} == {"finished", "pruned"}
    run = jn.main(tiny.experiment(), ["run", "--no-record", "--progress", "none"], points=points)
    assert isinstance(run, jn.Run) and run.summary.step == 20


def test_an_interrupted_sweep_exits_75_and_resume_needs_no_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ending.py").write_text(
        "import signal\nclass Writer:\n    left = 1\n    def write(self, lines):\n        self.left -= 1\n"
        "        if self.left == 0:\n            signal.raise_signal(signal.SIGINT)\nwriter = Writer()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    where = ("--run-dir", tmp_path / "sweep", "--writers", "ending:writer")
    fails(capsys, "sweep", "--seed", 0, 1, 2, *where, status=75)
    # The word is not needed: the directory tells what it holds.
    found = sweep("--resume", tmp_path / "sweep")
    whole = sweep("sweep", "--seed", 0, 1, 2, "--no-record")
    assert [m.final for m in found.members] == [m.final for m in whole.members]


def test_plan_tells_how_fast_each_batch_size_is(capsys: pytest.CaptureFixture[str]) -> None:
    plan = jn.main(tiny.experiment(), ["plan", "--batch-size", "4", "16", "--learning-rate", "0.5"])
    assert isinstance(plan, BatchSizePlan) and "examples/s" in capsys.readouterr().out
    error = shell.fails(capsys, lambda words: jn.main(tiny.experiment(), words), "plan", "--seed", 0, 1)
    assert error == "error: plan takes several values for --batch-size alone, not for --seed."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sweep"], "nothing to sweep: give a field several values, as in --seed 0 1 2 3."),
        (["sweep", "--seed", "3"], "nothing to sweep"),
        (["sweep", "--seed", "0", "0"], "the axis 'seed' of grid holds 0 twice"),
        (
            ["sweep", "--seed", "0", "1", "--combine", "zipped", "--batch-size", "4", "8", "9"],
            "zipped needs axes of one",
        ),
        (["sweep", "--seed", "0", "1", "--halving", "1"], "halving's eta is 1"),
        (["sweep", "--batch-size", "64", "99"], "no member of the sweep can be run"),
        (["sweep", "--resume", "nowhere"], "holds no sweep"),
        (["sweep", "--seed", "0", "x"], "Error parsing --seed"),
    ],
)
def test_mistakes_are_sentences(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in fails(capsys, *arguments)


def test_a_word_that_is_no_value_of_its_field_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def run(words: list[str]) -> object:
        return jn.main(wide(), words)

    error = shell.fails(capsys, run, "sweep", "--features", "8,x", "16")
    assert error == "error: --model.features '8,x' is no value of tuple[int, ...]."
    assert "--clip 'much' is no value of" in shell.fails(capsys, run, "sweep", "--clip", "much", "1")


def test_a_field_named_like_an_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclasses.dataclass(frozen=True)
    class Clashing(tiny.Config):
        vmap_size: int = 3

    own = tiny.experiment()
    clashing = jn.Experiment(Clashing(), own.data, own.task, own.optimizer)
    error = shell.fails(capsys, lambda words: jn.main(clashing, words), "sweep", "--seed", "0", "1")
    assert "the config Clashing has a field 'vmap_size', which is an option's name" in error


@pytest.mark.parametrize(("told", "expected"), [({}, "all"), ({"JAX_NUM_CPU_DEVICES": "3"}, "3")])
def test_each_core_is_a_device_unless_jax_was_told_otherwise(told: dict[str, str], expected: str) -> None:
    probe = (
        "import jax\n"
        "from jaxnn.cli import MOST_DEVICES, use_all_cores\n"
        "from jaxnn.observe import cpu_count\n"
        "use_all_cores()\n"
        "count = len(jax.devices('cpu'))\n"
        "print('all' if count == min(cpu_count(), MOST_DEVICES) else count)\n"
        "use_all_cores()  # a backend runs already: nothing happens\n"
    )
    done = shell.python("-c", probe, **told)
    assert done.stdout.strip() == expected, done.stderr


def test_a_sweep_on_the_cpu_opens_nothing_else() -> None:
    script = (
        "import jax, jaxnn as jn\n"
        "from tests import tiny\n"
        "words = 'sweep --seed 0 1 --num-steps 2 --device cpu --no-record --progress none --vmap-size 1'\n"
        "found = jn.main(tiny.experiment(), [*words.split(), '--steps-per-call', '1'])\n"
        "print(found.status, jax.config.jax_platforms, jax.config.jax_default_device)\n"
    )
    done = shell.python("-c", script)
    assert done.stdout.strip() == "finished cpu None", done.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--device gpu", "device is 'gpu', which JAX cannot open here"),
        ("--devices 9", "requested 9 devices, but only 4 CPU devices are available"),
        ("--mesh data=3", "batch_size is 8, which 3 devices cannot share evenly"),
    ],
)
def test_what_devices_cannot_do_is_the_only_thing_said(
    flags: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = shell.fails(
        capsys, lambda words: jn.main(tiny.experiment(), words), *"sweep --seed 0 1".split(), *flags.split()
    )
    assert error.startswith("error: ") and sentence in error
    assert not list(tmp_path.iterdir())
