"""A run resumes on other devices: options that are given replace those of the record, and the change is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import pytest

import jaxnn as jn
from jaxnn.engine import RunOptions, recorded_options
from jaxnn.record import config_json
from jaxnn.run._resume import continued_options
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

GRID = "data=2,model=2"


class Split(nn.Module):
    """A layer that a mesh with the axis ``model`` splits, and one that it does not."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        init = jn.nn.partitioned(nn.initializers.lecun_normal(), (None, "model"))
        return jn.nn.Dense(3)(nn.tanh(jn.nn.Dense(8, kernel_init=init)(inputs)))


def split(num_steps: int) -> jn.Experiment[Any]:
    return tiny.experiment(model=Split(), num_steps=num_steps)


def continued(recorded: dict[str, Any], **given: Any) -> dict[str, Any]:
    """The explicit options of a run with ``recorded`` options that is resumed with ``given`` ones."""
    example = tiny.experiment()
    before = {"config": config_json(example.config), "options": recorded_options(RunOptions(**recorded))}
    options = continued_options(example, RunOptions(resume=Path("there"), **given), before)
    return {name: value for name, value in options.explicit().items() if name != "resume"}


@pytest.mark.parametrize(
    ("recorded", "given", "expected"),
    [
        # Nothing is asked for: all is kept.
        ({"devices": 4, "strategy": "fsdp"}, {}, {"devices": 4, "strategy": "fsdp"}),
        ({"mesh": GRID, "strategy": "fsdp"}, {}, {"mesh": GRID, "strategy": "fsdp"}),
        # A number of devices: a mesh of another number goes.
        ({"mesh": GRID}, {"devices": 2}, {"devices": 2}),
        ({"mesh": GRID}, {"devices": 1}, {"devices": 1}),
        ({"mesh": GRID, "devices": 4, "strategy": "fsdp"}, {"devices": 2}, {"devices": 2, "strategy": "fsdp"}),
        ({"mesh": GRID}, {"devices": 4}, {"mesh": GRID, "devices": 4}),
        ({"mesh": GRID}, {"devices": "all"}, {"mesh": GRID, "devices": "all"}),
        ({"mesh": "data=2"}, {"devices": "all"}, {"devices": "all"}),
        ({"devices": 4, "strategy": "pmap"}, {"devices": 2}, {"devices": 2, "strategy": "pmap"}),
        # A mesh: the number of devices goes, and pmap, which knows the axis data alone.
        ({"devices": 2, "strategy": "fsdp"}, {"mesh": "data=4"}, {"mesh": "data=4", "strategy": "fsdp"}),
        ({"devices": 2, "strategy": "fsdp"}, {"mesh": GRID}, {"mesh": GRID, "strategy": "fsdp"}),
        ({"mesh": GRID, "devices": "all"}, {"mesh": "data=2"}, {"mesh": "data=2"}),
        ({"devices": 4, "strategy": "pmap"}, {"mesh": GRID}, {"mesh": GRID}),
        ({"devices": 4, "strategy": "pmap"}, {"mesh": "data=2"}, {"mesh": "data=2", "strategy": "pmap"}),
        ({"devices": 2}, {"mesh": GRID, "devices": 4}, {"mesh": GRID, "devices": 4}),
        # A strategy: the number of devices stays.
        ({"mesh": GRID}, {"strategy": "pmap"}, {"devices": 4, "strategy": "pmap"}),
        ({"mesh": GRID}, {"strategy": "pmap", "devices": 2}, {"devices": 2, "strategy": "pmap"}),
        ({"mesh": "data=2"}, {"strategy": "pmap"}, {"mesh": "data=2", "strategy": "pmap"}),
        ({"mesh": GRID}, {"strategy": "fsdp"}, {"mesh": GRID, "strategy": "fsdp"}),
        ({"devices": 2, "strategy": "fsdp"}, {"strategy": "data"}, {"devices": 2, "strategy": "data"}),
        ({"devices": 2, "strategy": "fsdp"}, {"strategy": "auto"}, {"devices": 2, "strategy": "fsdp"}),
        # A mesh needs no number beside it: `all` may be another one here.
        ({"mesh": "data=2", "devices": "all"}, {}, {"mesh": "data=2"}),
    ],
)
def test_what_is_asked_for_drops_what_the_record_says_against_it(
    recorded: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert continued(recorded, **given) == expected


@pytest.mark.parametrize(
    ("recorded", "used"),
    [({"devices": 8}, "devices=8"), ({"mesh": "data=4,model=2", "devices": 8}, "mesh data=4,model=2")],
)
def test_devices_of_the_record_that_are_not_here_are_named_as_the_records(recorded: dict[str, Any], used: str) -> None:
    message = rf"the run in there used {used}: give --devices 4 .* only 4 CPU devices are available"
    with pytest.raises(jn.ConfigError, match=message):
        continued(recorded)
    with pytest.raises(jn.ConfigError, match=message):
        continued(recorded, strategy="pmap" if "mesh" not in recorded else "fsdp")
    assert continued(recorded, devices=4) == {"devices": 4}


def test_devices_of_the_record_that_processes_cannot_share_are_named_as_the_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(jn.ConfigError, match="there used devices=2: give --devices 4 .* 2 processes have 4"):
        continued({"devices": 2})
    assert continued({"devices": "all"}) == {"devices": "all"}


def test_run_resumes_from_a_mesh_to_fewer_devices_and_to_another_mesh(tmp_path: Path) -> None:
    path = tmp_path / "run"
    tiny.fit(split(10), path, mesh=GRID)
    tiny.fit(split(20), resume=path, devices=2)
    last = tiny.fit(split(30), resume=path, mesh="data=4")
    assert last.summary.metrics == pytest.approx(tiny.fit(split(30)).summary.metrics, rel=1e-4)
    changes = [resumed["changed"][0] for resumed in tiny.read(path)["resumed"]]
    assert changes == ["the layout data data=2,model=2 → data data=2", "the layout data data=2 → data data=4"]


def test_another_kind_of_device_is_among_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    tiny.fit(tiny.experiment(num_steps=10), path)
    facts = tiny.read(path)
    facts["devices"] |= {"backend": "gpu", "devices": [{"platform": "gpu", "kind": "NVIDIA H100"}]}
    (path / "run.json").write_text(json.dumps(facts))
    tiny.fit(tiny.experiment(num_steps=20), resume=path, progress="plain")
    expected = "after step 10, not bit for bit, since these changed: the device NVIDIA H100 → cpu"
    assert expected in capsys.readouterr().out
    tiny.fit(tiny.experiment(num_steps=30), resume=path, device="cpu")
    assert [resumed["changed"] for resumed in tiny.read(path)["resumed"]] == [["the device NVIDIA H100 → cpu"], []]


def test_run_with_device_cpu_counts_as_one_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "run"
    tiny.fit(tiny.experiment(num_steps=10), path, device="cpu")
    facts = tiny.read(path)
    facts["devices"] |= {"backend": "gpu", "devices": [{"platform": "gpu", "kind": "NVIDIA H100"}]}
    (path / "run.json").write_text(json.dumps(facts))
    tiny.fit(tiny.experiment(num_steps=20), resume=path)
    assert tiny.read(path)["resumed"][0]["changed"] == []
