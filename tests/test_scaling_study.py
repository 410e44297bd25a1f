"""A study of scaling from its options to its record: small, but measured for real."""

from __future__ import annotations

import math
import re
import types
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxnn as jn
from jaxnn.cli import scaling as cli
from jaxnn.scaling.options import ScalingOptions, powers_of_two
from jaxnn.scaling.timing import Contender, time_in_turn
from tests import processes, shell, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

SHORT: dict[str, Any] = {"rounds": 2, "seconds": 0.0, "steps_per_call": 2, "predict": (8,), "progress": "none"}


@pytest.fixture(scope="module")
def study() -> jn.ScalingStudy:
    return jn.scaling(tiny.experiment(), devices=(1, 4), **SHORT)


def test_a_study_agrees_with_itself(study: jn.ScalingStudy) -> None:
    one, four = study.points()
    assert (one.num_devices, one.rows, one.speedup, one.efficiency) == (1, 8, 1.0, 1.0)
    assert (four.num_devices, four.rows) == (4, 2)
    assert four.examples_per_second == pytest.approx(8 / four.seconds)
    assert four.least <= four.seconds <= four.most and four.efficiency == pytest.approx(four.speedup / 4)
    assert [point.rows for point in study.points("weak")] == [2, 2]
    # The batch on the most devices is one program, whichever way it is come to.
    assert study.points("weak")[1].seconds == four.seconds
    assert study.link is not None and min(study.link) >= 0 < max(study.link)
    assert [one.num_devices for one in study.predictions()] == [8]


def test_a_study_is_written_and_drawn(study: jn.ScalingStudy, tmp_path: Path) -> None:
    study.save(tmp_path / "there" / "scaling.v1")
    written = tiny.read(tmp_path / "there", "scaling.v1.json")
    assert written["config"]["batch_size"] == 8 and written["machine"]["told"].startswith("4 simulated devices on ")
    assert [point["num_devices"] for point in written["strong"]] == [1, 4]
    assert written["strong"][1]["seconds"] == study.points()[1].seconds
    assert written["predicted"]["weak"][0]["seconds"] == study.predict(8, "weak").seconds
    assert {len(timing["seconds"]) for timing in written["timings"]} == {2}
    assert written["collectives"][0]["of_a_step"][0]["kind"] == "all-reduce"
    assert (tmp_path / "there" / "scaling.v1.png").read_bytes().startswith(b"\x89PNG")
    panels = study.plot().axes
    assert [axes.get_title() for axes in panels] == [
        "strong scaling: speed-up",
        "weak scaling: efficiency",
        "share of a step lost to spreading it",
    ]


def test_a_study_is_a_table(study: jn.ScalingStudy) -> None:
    lines = str(study).splitlines()
    strong = lines.index("strong scaling: a batch of 8 shared by all devices")
    assert lines[strong + 2].split()[:2] == ["devices", "each"]
    assert [line.split()[:2] for line in lines[strong + 3 : strong + 6]] == [["1", "8"], ["4", "2"], ["8", "1"]]
    assert re.search(
        r"^collectives of a step on 4 devices: [\d.]+ all-reduces? of \d+ B in all;", str(study), re.MULTILINE
    )
    assert study._repr_html_().startswith("<pre>points, strategy data: 4 simulated devices")


def test_one_device_has_nothing_to_say_to_another() -> None:
    alone = jn.scaling(tiny.experiment(), devices=1, **SHORT)
    assert alone.link is None and alone.reductions == () and alone.predictions() == []
    assert "nothing to tell of collectives" in str(alone)
    assert [axes.get_title() for axes in alone.plot().axes][0] == "strong scaling: speed-up"


def test_everything_is_timed_in_turn_and_begins_anew() -> None:
    order: list[str] = []

    def contender(name: str) -> Contender:
        def begin() -> Any:
            order.append(name)
            return lambda: jax.numpy.zeros(())

        return Contender(begin, 4)

    said: list[str] = []
    found = time_in_turn({name: contender(name) for name in "abcd"}, 2, 0.0, said.append)
    assert "".join(order) == "abcd" + "cdab"
    assert len(said) == 2 and said[1].startswith("round 2 of 2: 4 programs in ")
    assert all(0 < one.median < 1 and math.isfinite(one.work) for one in found.values())


# Options and mistakes.


def test_options_are_put_in_order() -> None:
    assert ScalingOptions(devices=(4, 1, 4)).devices == (1, 4)
    assert powers_of_two(1) == (1,) and powers_of_two(8) == (1, 2, 4, 8) and powers_of_two(6) == (1, 2, 4, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": (1, 8)}, r"devices is 8, and JAX has 4 cpu devices here"),
        ({"devices": (1, 3)}, r"batch_size is 8, which 3 devices cannot share evenly: .* are 6 and 9"),
        ({"devices": (0, 1)}, r"devices is 0, and must be a whole number of at least 1"),
        ({"devices": ()}, r"devices is empty: give the numbers"),
        ({"strategy": "auto"}, r"strategy is 'auto', and must be one of data, fsdp, pmap"),
        ({"rounds": 0}, r"rounds is 0, and must be"),
        ({"device": "gpu"}, r"device is 'gpu', which JAX cannot open here"),
        ({"device_count": 2}, r"there is no run option 'device_count': did you mean"),
    ],
)
def test_what_cannot_be_is_said_before_data_are_read(options: dict[str, Any], message: str) -> None:
    def unread(config: Any) -> Any:
        raise AssertionError("data were read")

    with pytest.raises(jn.ConfigError, match=message):
        jn.scaling(jn.Experiment(tiny.Config(), unread, unread, unread), **options)


def test_a_place_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    def unread(config: Any) -> Any:
        raise AssertionError("data were read")

    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(jn.RecordError, match="file cannot be written"):
        jn.scaling(jn.Experiment(tiny.Config(), unread, unread, unread), save=tmp_path / "file" / "study")


def test_more_on_each_device_than_there_is_is_refused_by_its_own_name() -> None:
    with pytest.raises(jn.ConfigError, match=r"batch_per_device is 30, so 2 devices have 60 .* there are 37: give 18"):
        jn.scaling(tiny.experiment(), devices=(1, 2), batch_per_device=30, progress="none")


# The command line.


def test_every_script_has_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = "scaling --devices 1 2 --batch-size 4 --rounds 1 --seconds 0 --steps-per-call 1 --predict 4 --save"
    found = jn.main(tiny.experiment(), [*words.split(), str(tmp_path / "saved")])
    said = capsys.readouterr().out
    assert isinstance(found, jn.ScalingStudy)
    assert said.startswith("scaling: the CPU stands for 4 devices, which share its cores\n")
    assert "round 1 of 1" in said and str(found) in said
    assert tiny.read(tmp_path, "saved.json")["config"]["batch_size"] == 4


def test_a_script_may_have_it_as_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    def main(arguments: list[str]) -> Any:
        return jn.main(tiny.experiment(), arguments, command="scaling")

    assert "devices is 8, and JAX has 4 cpu devices" in shell.fails(
        capsys, main, "--progress", "none", "--devices", "1", "8"
    )


@pytest.mark.parametrize(
    ("options", "platform", "count", "expected"),
    [
        ({}, "gpu", 1, ("cpu", (1, 2, 4, 8))),
        ({"devices": (1, 2)}, "gpu", 1, ("cpu", (1, 2))),
        ({}, "gpu", 4, (None, None)),
        ({"devices": 1}, "gpu", 1, (None, (1,))),
        ({"device": "gpu"}, "gpu", 1, ("gpu", None)),
        ({}, "cpu", 8, (None, None)),
    ],
)
def test_the_cpu_stands_in_for_what_is_not_there(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], platform: str, count: int, expected: tuple[Any, Any]
) -> None:
    found = [types.SimpleNamespace(platform=platform)] * count
    monkeypatch.setattr(cli, "find_devices", lambda device: found)
    chosen = cli.with_devices(ScalingOptions(**options))
    assert (chosen.device, chosen.devices) == expected


# Several processes.


@pytest.mark.slow
def test_processes_measure_together_and_one_prints() -> None:
    done = processes.run(
        f"""
        from tests import tiny
        from jaxnn.cli.scaling import run_scaling
        from jaxnn.scaling import ScalingOptions
        study = run_scaling(tiny.experiment(), ScalingOptions(**{SHORT}))
        say([point.num_devices for point in study.points()], study.machine.shared_cores is not None)
        """
    )
    assert [process.status for process in done] == [0, 0], done
    leader, other = (process.out for process in done)
    assert "2 simulated devices of 2 processes on" in leader and "strong scaling" not in other
    assert all("[1, 2] True" in out for out in (leader, other))
