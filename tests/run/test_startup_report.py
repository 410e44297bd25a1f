"""The startup report: implementations, and a hint about convolutions that are not jaxnn's."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.engine import programs_of
from jaxnn.run import _report
from jaxnn.run._report import convolution_hint
from tests import tiny

# The steps per call, and the seconds per step that were measured of each number.
type Choice = tuple[int, dict[int, float]]


def trainer(choice: Choice, num_convolutions: int = 2) -> Any:
    steps_per_call, seconds_per_step = choice
    return types.SimpleNamespace(
        plan=types.SimpleNamespace(steps_per_call=steps_per_call),
        seconds_per_step=seconds_per_step,
        programs=types.SimpleNamespace(plain_convolutions=num_convolutions),
    )


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_report, "platform", lambda: "cpu")


SLOW: Choice = (1, {1: 0.0712, 2: 0.95})


def test_the_hint_gives_the_cost_that_was_measured_and_the_way_out() -> None:
    assert convolution_hint(trainer(SLOW)) == (
        "2 convolutions are not jaxnn's, and slow in a loop on a CPU (71.2 ms a step alone, 950 ms in a loop): use "
        "jn.nn.Conv, which has the same parameters, or "
        "flax.linen.Conv(…, conv_general_dilated=jn.nn.conv_general_dilated)"
    )
    assert convolution_hint(trainer(SLOW, 1)).startswith("1 convolution is not jaxnn's")


def test_hint_covers_long_loops_without_a_measurement() -> None:
    assert "not measured here" in convolution_hint(trainer((16, {})))


@pytest.mark.parametrize(
    ("choice", "num_convolutions"),
    [
        (SLOW, 0),
        ((16, {1: 0.071, 2: 0.072, 16: 0.06}), 2),
        ((1, {1: 0.071, 2: 0.1}), 2),  # 1.4 times
        ((1, {}), 2),  # single steps were asked for: no loop, no loss
        ((1, {1: 0.071}), 2),  # a window of one: likewise
    ],
)
def test_no_hint_without_cause(choice: Choice, num_convolutions: int) -> None:
    assert convolution_hint(trainer(choice, num_convolutions)) is None


def test_no_hint_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_report, "platform", lambda: "gpu")
    assert convolution_hint(trainer(SLOW)) is None


def apply(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    with jax.named_scope("jaxnn.attention.math"):
        return tiny.apply(params, inputs)


def test_implementations_are_reported_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny.fit(tiny.experiment(model=(tiny.init, apply)), tmp_path / "run", progress="plain")
    assert tiny.read(run.dir)["implementations"] == {"attention": ["math"]}
    assert "\n  implementations  attention math\n" in capsys.readouterr().out
    plain = tiny.fit(tiny.experiment(), tmp_path / "plain", progress="plain")
    assert tiny.read(plain.dir)["implementations"] == {}
    assert "\n  implementations " not in capsys.readouterr().out


def test_step_is_traced_once_for_the_whole_report() -> None:
    traces = []

    def counted(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        traces.append(inputs)
        return tiny.apply(params, inputs)

    experiment = tiny.experiment(model=(tiny.init, counted))
    splits = experiment.data(experiment.config)._replace(test=None)
    programs = programs_of(experiment, splits)
    before = len(traces)
    assert programs.product_dtypes == {"float32": 2}
    assert programs.implementations == {} and programs.plain_convolutions == 0
    assert programs.fingerprint()["evaluation"] is None
    assert len(traces) == before, "making the totals has traced the step already"


class Net(linen.Module):
    """A classifier of images of one channel by a convolution that is Flax's own."""

    @linen.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        return linen.Conv(3, (3, 3))(images).mean((1, 2))


def test_flax_convolutions_are_tried_in_a_loop_of_two_steps_only(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(37, 4, 4, 1)).astype(np.float32), rng.integers(0, 3, 37)
    experiment = tiny.experiment(data=jn.data.arrays(images), model=Net(), optimizer=lambda config: optax.sgd(0.1))
    run = tiny.fit(experiment, tmp_path / "run", steps_per_call=None, report_every=10, eval_every=0)
    tried = tiny.read(run.dir)["seconds_per_step_measured"]
    if jax.default_backend() == "cpu":
        assert list(tried)[:2] == ["1", "2"]
    assert jnp.isfinite(run.final["train_loss"])
