"""The points of a sweep, from Python and from flags of many values; errors of one line."""

import dataclasses
import math
import signal
import sys
from types import SimpleNamespace
from typing import Any, Literal

import jax
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.cli import parse_sweep as parse
from jaxnn.observe import cpu_count
from tests import shell, tiny


def test_grids_lists_and_sums():
    points = jn.grid(a=[1, 2], b=["x", "y", "z"])
    assert [tuple(point.values()) for point in points] == [(1, "x"), (1, "y"), (1, "z"), (2, "x"), (2, "y"), (2, "z")]
    assert list(jn.search.zip(a=[1, 2], b=[3, 3])) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    joined = jn.grid(a=[1, 2]) + jn.grid(a=[2, 4])
    assert [point["a"] for point in joined] == [1, 2, 4] and joined.values("a") == (1, 2, 4)
    plain = jn.grid(a=np.array([0.5, 1.5]), b=jax.numpy.arange(2))
    assert all(type(value) in (int, float) for point in plain for value in point.values())


def test_draws_follow_the_key_and_their_distributions():
    axes = {
        "rate": jn.search.log_uniform(1e-4, 1e-1),
        "drop": jn.search.uniform(0.2, 0.6),
        "width": jn.search.integers(3, 5),
        "kind": jn.search.choice(["a", "b"]),
    }
    points, again, other = (jn.search.random(400, key, **axes) for key in (7, 7, 8))
    assert points == again != other
    drawn = {name: np.array([point[name] for point in points]) for name in axes}
    assert drawn["drop"].min() >= 0.2 and drawn["drop"].max() <= 0.6
    assert set(drawn["width"]) == {3, 4, 5} and set(drawn["kind"]) == {"a", "b"}
    # A third of the logarithms is in each decade: 133 of 400, give or take three standard deviations of 9.4.
    decades = np.histogram(np.log10(drawn["rate"]), bins=[-4, -3, -2, -1])[0]
    assert decades.sum() == 400 and all(105 < count < 162 for count in decades)


def test_draws_of_narrow_ranges_are_within_them_and_differ():
    for low, high, of in ((0.9999991, 0.9999999, jn.search.uniform), (0.12345649, 0.1234566, jn.search.log_uniform)):
        drawn = [point["rate"] for point in jn.search.random(500, 0, rate=of(low, high))]
        assert low <= min(drawn) < max(drawn) <= high and len({*drawn}) == 500


def test_scale_of_an_axis():
    cases: list[tuple[str, list[object], str]] = [
        ("rate", [1e-4, 1e-3, 1e-2], "log"),
        ("width", [16, 32, 64, 128, 256], "log"),
        ("drop", [0.1, 0.2, 0.3], "linear"),
        ("drop", [0.0, 0.5, 50.0], "linear"),  # zero has no logarithm
        ("steps", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "linear"),  # ten times as much, but evenly spaced
        ("seed", [1, 10, 100], "nominal"),
        ("model.seed", [1, 10, 100], "nominal"),
        ("kind", ["a", "b"], "nominal"),
        ("norm", [True, False], "nominal"),
    ]
    assert [jn.grid(**{name: values}).scales[name] for name, values, _ in cases] == [scale for *_, scale in cases]


UNIFORM: Any = jn.search.uniform(0, 1)
ERRORS: dict[str, Any] = {
    "grid needs at least one axis": lambda: jn.grid(),
    "'rate' of grid is empty": lambda: jn.grid(rate=[]),
    "'rate' of grid is 0.1, .*write rate=.0.1.": lambda: jn.grid(rate=0.1),  # type: ignore[arg-type]
    "'seed' of grid holds 0 twice": lambda: jn.grid(seed=[0, 1, 0]),
    "'rate' of grid holds an array of shape .2,.": lambda: jn.grid(rate=np.ones((2, 2))),
    "is a distribution: .*jn.search.random": lambda: jn.grid(rate=UNIFORM),
    "zip needs axes of one length, but a has 2, b has 1": lambda: jn.search.zip(a=[1, 2], b=[1]),
    "cannot be joined: give 'a' to both": lambda: jn.grid(a=[1]) + jn.grid(b=[1]),
    "num must be an integer >= 1, not 0": lambda: jn.search.random(0, 0, a=UNIFORM),
    "random: key must be an integer >= 0, not -1": lambda: jn.search.random(3, -1, a=UNIFORM),
    "the dict of them is empty": lambda: jn.sweep(tiny.experiment(), {}),
    "the point 'a' is 3: give its fields": lambda: jn.sweep(tiny.experiment(), {"a": 3}),  # type: ignore[dict-item]
    "and the config a field 'name'": lambda: jn.search.Points.named({"a": {}}, SimpleNamespace(name=3)),
    "uniform goes from 0 to inf": lambda: jn.search.uniform(0, math.inf),
    "log_uniform goes from 0, which has no logarithm": lambda: jn.search.log_uniform(0, 1),
    "integers needs two integers, not 0.5": lambda: jn.search.integers(0.5, 2),  # type: ignore[arg-type]
    "nothing to choose from": lambda: jn.search.choice([]),
    "choice holds 1 twice": lambda: jn.search.choice([1, 2, 1]),
    "choice has 'adam', no list": lambda: jn.search.choice("adam"),
    "stay below 2": lambda: jn.search.integers(1, 10**21),
    "difference is no float": lambda: jn.search.uniform(-1.7e308, 1.7e308),
    "halving needs points": lambda: jn.search.halving([{"a": 1}]),
    "halving: eta must be an integer >= 2, not 1": lambda: jn.search.halving(jn.grid(a=[1]), 1),
    "halving's min_fraction is 0": lambda: jn.search.halving(jn.grid(a=[1]), min_fraction=0),
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors_name_the_value_and_the_fix(words):
    with pytest.raises(jn.ConfigError, match=words):
        ERRORS[words]()


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
    words = [*flags.split(), *"--combine zip --search halving --eta 3 --vmap-size 7".split()]
    values, _, design, options = parse(with_config(Config()), words)
    assert values == {
        **{"learning_rate": [0.001, 2.0], "model.features": [(8, 8), (16,)], "model.dropout": [0.5]},
        **{"kind": ["a", "b"], "clip": [None, 0.5], "norm": [True, False]},
    }
    assert (design.combine, design.search, design.eta, options.vmap_size) == ("zip", "halving", 3, 7)


def test_key_is_that_of_draws_and_of_a_searcher_that_is_given_points():
    points = jn.grid(seed=[0, 1])
    _, _, design, _ = parse(with_config(Config()), "--search extrapolated --key 3 --seed 0 1".split())
    assert design.searched(points, None).settings["key"] == 3


def test_points_are_those_of_the_flags_or_of_the_script_overridden():
    points = jn.grid(learning_rate=[0.1, 0.2], seed=[0, 1])
    short = ("--num-steps", 10, "--no-record")
    found = sweep(*short, points=points)
    assert [member.point for member in found.members] == list(points) and found.members[0].step == 10
    halving = "--search", "halving", "--eta", 2
    halved = sweep(*short, "--learning-rate", 0.3, 0.4, "--seed", 3, 4, *halving, points=points)
    assert [tuple(member.point.values()) for member in halved.members] == [(0.3, 3), (0.3, 4), (0.4, 3), (0.4, 4)]
    assert {member.status for member in halved.members} == {"finished", "pruned"}
    run = jn.main(tiny.experiment(), ["run", "--no-record", *QUICK[:-2]], points=points)
    assert isinstance(run, jn.Run) and run.summary.step == 20


def test_interrupted_sweep_exits_75_and_resume_needs_no_points(tmp_path, monkeypatch, capsys):
    signals = [signal.SIGINT]
    writer = SimpleNamespace(write=lambda lines: signals and signal.raise_signal(signals.pop()))
    monkeypatch.setitem(sys.modules, "ending", SimpleNamespace(writer=writer))
    points = {"slow": jn.grid(learning_rate=[0.01], seed=[0, 1]), "usual": jn.grid(seed=[0, 1])}
    ending = ("--run-dir", tmp_path / "sweep", "--writers", "ending:writer")
    shell.fails(capsys, lambda given: sweep(*given, points=points), *ending, status=75)
    # The word is not needed: the directory shows what it holds.
    found = sweep("--resume", tmp_path / "sweep", "--writers")
    assert [member.step for member in found.members] == [20] * 4
    # Names decide the learning rate, which is therefore no setting of its own.
    assert [row.point for row in found.group().rows] == [{"name": "slow"}, {"name": "usual"}]
    assert found.select(name="usual").members[0].fields["learning_rate"] == tiny.Config().learning_rate


WRONG_FLAGS = {
    "sweep": "nothing to sweep: give a field several values, as in --seed 0 1 2 3, or a --space",
    "sweep --seed 0 1 --combine zip --batch-size 4 8 9": "zip needs axes of one length",
    "sweep --resume nowhere": "holds no record",
    "sweep --seed --learning-rate 1 2": "--seed has no value",
    "sweep --features 8,x 16": "--model.features '8,x' is no value of tuple[int, ...].",
    "sweep --seed 0 1": "Clashing has a field 'vmap_size', which is an option's name",
    "sweep --seed 0 1 --device gpu": "device is 'gpu', which JAX cannot open here",
}


@pytest.mark.parametrize("command", WRONG_FLAGS)
def test_wrong_flags_are_named_in_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = CLASHING() if "Clashing" in WRONG_FLAGS[command] else Config()
    error = shell.fails(capsys, lambda given: jn.main(with_config(config), given), *command.split())
    assert error.startswith("error: ") and WRONG_FLAGS[command] in error and not list(tmp_path.iterdir())


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
