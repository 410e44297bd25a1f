"""What is printed before the first step: the device, slow stages, implementations, and a hint about convolutions."""

import dataclasses
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import flax.linen as linen
import jax
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.engine import programs_of
from jaxnn.run import speed_hint
from tests import tiny


@pytest.mark.parametrize("swept", [False, True])
def test_device_is_printed_first_and_a_slow_stage_announced(swept: bool, capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []

    def load(config: Any) -> jn.Splits:
        deadline = time.monotonic() + 60
        printed.append(capsys.readouterr().out)
        while "loading the data" not in "".join(printed) and time.monotonic() < deadline:
            time.sleep(0.05)
            printed.append(capsys.readouterr().out)
        return tiny.splits()

    experiment, how = dataclasses.replace(tiny.experiment(), data=load), {**tiny.HOW, "progress": "plain"}
    if swept:
        jn.sweep(experiment, jn.grid(seed=[0, 1]), vmap_size=2, devices=1, record=False, **how)
    else:
        tiny.fit(experiment, progress="plain")
    assert "device " in printed[0] and "loading the data" not in printed[0]
    assert "loading the data" in "".join(printed), "not announced while it lasted"
    assert "device " not in capsys.readouterr().out


SLOW = {1: 0.0712, 2: 0.95}


def hint(measured: dict[int, float], num_convolutions: int = 2, steps_per_call: int = 1, **used: str) -> str:
    """The hint, if any, after these seconds per step were measured for each number of steps per call."""
    programs = types.SimpleNamespace(
        plain_convolutions=num_convolutions,
        implementations={name: [one] for name, one in used.items()},
        layout=types.SimpleNamespace(num_devices=1),
    )
    plan = types.SimpleNamespace(steps_per_call=steps_per_call)
    trainer: Any = types.SimpleNamespace(plan=plan, seconds_per_step=measured, programs=programs)
    return speed_hint(trainer) or ""


def test_convolution_hint_gives_the_measured_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hint(SLOW).startswith("2 convolutions are not jaxnn's")
    assert "71.2 ms a step alone, 950 ms in a loop" in hint(SLOW) and "use jn.nn.Conv" in hint(SLOW)
    assert hint(SLOW, 1).startswith("1 convolution is not jaxnn's") and hint(SLOW, 0) == ""
    assert "not measured here" in hint({}, steps_per_call=16)
    for measured in (
        {1: 0.071, 2: 0.072, 16: 0.06},
        {1: 0.071, 2: 0.1},  # 1.4 times
        {},  # no loop: single steps were requested
        {1: 0.071},  # no loop: a window of one step
    ):
        assert hint(measured) == ""
    monkeypatch.setattr(jax, "local_devices", lambda backend: [types.SimpleNamespace(platform="gpu")])
    assert hint(SLOW) == "" == hint(SLOW, 0, convolution="channels_last")


def test_slow_implementations_are_a_hint_to_install_the_native_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXNN_NATIVE", raising=False)
    monkeypatch.setitem(sys.modules, "jaxnn_onednn", None)
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(machine="x86_64"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert "but the package jaxnn-onednn is not installed: make onednn" in hint(SLOW, 0, convolution="channels_last")
    assert "jaxnn-onednn is not installed" in hint({1: 0.002}, 0, trees="histograms")
    assert hint({1: 0.002}, 0, convolution="channels_last") == hint(SLOW, 0, convolution="onednn") == ""
    monkeypatch.setenv("JAXNN_NATIVE", "off")
    assert hint(SLOW, 0, convolution="channels_last") == ""
    for value, words in (("on", "JAXNN_NATIVE is on, but .* not installed: make"), ("of", "'of': choose auto, on or")):
        monkeypatch.setenv("JAXNN_NATIVE", value)
        with pytest.raises(jn.ConfigError, match=words):
            hint(SLOW, 0, convolution="channels_last")
    monkeypatch.delenv("JAXNN_NATIVE")
    monkeypatch.setitem(sys.modules, "jaxnn_onednn", types.ModuleType("installed"))
    assert hint(SLOW, 0, convolution="channels_last") == ""


def test_implementations_are_reported_and_recorded(
    whole: jn.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def apply(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        with jax.named_scope("jaxnn.attention.math"):
            return tiny.apply(params, inputs)

    run = tiny.fit(tiny.experiment(model=(tiny.init, apply), num_steps=5), tmp_path / "run", progress="plain")
    assert tiny.read(run.dir)["implementations"] == {"attention": ["math"]}
    assert "\n  implementations  attention math\n" in capsys.readouterr().out
    assert tiny.read(whole.dir)["implementations"] == {}
    tiny.fit(tiny.experiment(), resume=whole.dir, progress="plain")
    assert "implementations" not in capsys.readouterr().out


def test_step_is_traced_once_for_all_reports() -> None:
    traces = []

    def counted(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        traces.append(inputs)
        return tiny.apply(params, inputs)

    programs = programs_of(tiny.experiment(model=(tiny.init, counted)), tiny.splits()._replace(test=None))
    before = len(traces)
    assert programs.product_dtypes == {"float32": 2} and programs.implementations == {}
    assert programs.plain_convolutions == 0 and programs.fingerprint()["evaluation"] is None
    assert len(traces) == before


def test_flax_convolutions_are_measured_in_a_loop_of_two_steps(tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal(size=(37, 4, 4, 1)).astype(np.float32), tiny.points(37)[1]
    model = linen.Sequential([linen.Conv(3, (3, 3), use_bias=False), lambda hidden: hidden.mean((1, 2))])
    experiment = tiny.experiment(data=jn.data.arrays(images), model=model, num_steps=2)
    run = tiny.fit(experiment, tmp_path / "run", steps_per_call=None, report_every=2)
    expected = ["1", "2"] if jax.default_backend() == "cpu" else ["2"]
    assert list(tiny.read(run.dir)["seconds_per_step_measured"]) == expected
