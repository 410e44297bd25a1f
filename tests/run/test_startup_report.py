"""What is printed before the first step: the device, slow stages, implementations, and a hint about convolutions."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Callable
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

# The steps per call, and the seconds per step that were measured for each number.
type Choice = tuple[int, dict[int, float]]
SLOW: Choice = (1, {1: 0.0712, 2: 0.95})


def fit(experiment: jn.Experiment[Any]) -> object:
    return tiny.fit(experiment, progress="plain")


def sweep(experiment: jn.Experiment[Any]) -> object:
    how = {**tiny.HOW, "progress": "plain"}
    return jn.sweep(experiment, jn.grid(seed=[0, 1]), vmap_size=1, devices=1, record=False, **how)


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("train", [fit, sweep])
def test_device_is_printed_first_and_a_slow_stage_announced(
    train: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def load(config: Any) -> jn.Splits:
        deadline = time.monotonic() + 60
        printed.append(capsys.readouterr().out)
        while "loading the data" not in "".join(printed) and time.monotonic() < deadline:
            time.sleep(0.05)
            printed.append(capsys.readouterr().out)
        return tiny.splits()

    train(dataclasses.replace(tiny.experiment(), data=load))
    assert "device " in printed[0] and "loading the data" not in printed[0]
    assert "loading the data" in "".join(printed), "not announced while it lasted"
    assert "device " not in capsys.readouterr().out


def hint(choice: Choice, num_convolutions: int = 2) -> str | None:
    steps_per_call, seconds_per_step = choice
    trainer: Any = types.SimpleNamespace(
        plan=types.SimpleNamespace(steps_per_call=steps_per_call),
        seconds_per_step=seconds_per_step,
        programs=types.SimpleNamespace(plain_convolutions=num_convolutions),
    )
    return convolution_hint(trainer)


def test_convolution_hint_gives_the_measured_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_report, "platform", lambda: "cpu")
    found = hint(SLOW)
    assert found is not None and found.startswith("2 convolutions are not jaxnn's")
    assert "71.2 ms a step alone, 950 ms in a loop" in found and "use jn.nn.Conv" in found
    assert (hint(SLOW, 1) or "").startswith("1 convolution is not jaxnn's")
    assert "not measured here" in (hint((16, {})) or "")
    for choice, num_convolutions in (
        (SLOW, 0),
        ((16, {1: 0.071, 2: 0.072, 16: 0.06}), 2),
        ((1, {1: 0.071, 2: 0.1}), 2),  # 1.4 times
        ((1, {}), 2),  # no loop: single steps were requested
        ((1, {1: 0.071}), 2),  # no loop: a window of one step
    ):
        assert hint(choice, num_convolutions) is None
    monkeypatch.setattr(_report, "platform", lambda: "gpu")
    assert hint(SLOW) is None


@pytest.mark.usefixtures("compiled_once")
def test_implementations_are_reported_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def apply(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        with jax.named_scope("jaxnn.attention.math"):
            return tiny.apply(params, inputs)

    for model, expected in (((tiny.init, apply), {"attention": ["math"]}), (tiny.MODEL, {})):
        run = tiny.fit(tiny.experiment(model=model), tmp_path / str(len(expected)), progress="plain")
        assert tiny.read(run.dir)["implementations"] == expected
        assert ("\n  implementations  attention math\n" in capsys.readouterr().out) == bool(expected)


def test_step_is_traced_once_for_all_reports() -> None:
    traces = []

    def counted(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        traces.append(inputs)
        return tiny.apply(params, inputs)

    experiment = tiny.experiment(model=(tiny.init, counted))
    programs = programs_of(experiment, tiny.splits()._replace(test=None))
    before = len(traces)
    assert programs.product_dtypes == {"float32": 2}
    assert programs.implementations == {} and programs.plain_convolutions == 0
    assert programs.fingerprint()["evaluation"] is None
    assert len(traces) == before


def test_flax_convolutions_are_measured_in_a_loop_of_two_steps(tmp_path: Path) -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, images: jax.Array) -> jax.Array:
            return linen.Conv(3, (3, 3))(images).mean((1, 2))

    rng = np.random.default_rng(0)
    images = rng.normal(size=(37, 4, 4, 1)).astype(np.float32), rng.integers(0, 3, 37)
    experiment = tiny.experiment(data=jn.data.arrays(images), model=Net(), optimizer=lambda config: optax.sgd(0.1))
    run = tiny.fit(experiment, tmp_path / "run", steps_per_call=None, report_every=10, eval_every=0)
    measured = tiny.read(run.dir)["seconds_per_step_measured"]
    if jax.default_backend() == "cpu":
        assert list(measured)[:2] == ["1", "2"]
    assert jnp.isfinite(run.final["train_loss"])
