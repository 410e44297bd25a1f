"""The study of several devices: efficiencies by hand, equal losses, and what to do where there is one device alone."""

import dataclasses
from pathlib import Path

import jax
import pytest
from articles.studies import scaling

from jaxnn.bench import Bench, Quantity, Row, Rows, bench
from tests.benched import measured_rows

TINY = scaling.Settings(("shared",), shared=8, each=2, blocks=((2,),), dense=(), size=4, steps=2, rounds=2, seconds=0.0)


def row(batch: str, devices: int, work: float, seconds: tuple[float, ...], **observed: float) -> Row:
    return Row({"batch": batch, "devices": devices}, seconds, work, "examples", observed)


def test_efficiency_is_the_speedup_in_a_round_over_the_number_of_devices() -> None:
    # One batch for all: 2 and 4 times as fast. A batch for each: four times the work in the same time, or in twice.
    rows = Rows(
        [
            row("shared", 1, 100, (1.0, 2.0)),
            row("shared", 4, 100, (0.5, 0.5)),
            row("each", 1, 100, (1.0, 2.0)),
            row("each", 4, 400, (1.0, 4.0)),
        ]
    )
    assert scaling.efficiency(rows, rows[0]) is None
    assert scaling.efficiency(rows, rows[1]) == Quantity(0.75, 0.5, 1.0, "")
    assert scaling.efficiency(rows, rows[3]) == Quantity(0.75, 0.5, 1.0, "")


def test_findings_tell_of_efficiency_and_of_simulated_devices() -> None:
    rows = Rows([row("shared", 1, 100, (1.0,)), row("shared", 2, 100, (0.8,), cores=2)])
    one, two = scaling.STUDY.findings(rows)
    assert (one.what, one.note, one.article) == ("1 device, one batch for all", "", "")
    assert (two.what, two.article) == ("2 devices, one batch for all", "")
    # 1.25 times as fast on two.
    assert two.note == "efficiency 62 %, simulated on 2 cores" and two.quantity == Quantity(125, 125, 125, "examples/s")


def test_it_says_how_far_losses_are_off_and_that_simulated_devices_are_not_fast() -> None:
    rows = Rows(
        [
            row("shared", 1, 100, (1.0,), loss=2.0),
            row("shared", 2, 100, (0.8,), loss=2.002, cores=2),
            row("shared", 4, 100, (0.7,), loss=1.999, cores=2),
        ]
    )
    far, simulated = scaling.STUDY.conclude({"CPU, Chip": rows})
    assert far.endswith("the loss of the first steps is off that on one by 1.0e-03 of it at most.")
    assert "share 2 cores, so that several cannot be faster than one" in simulated
    assert scaling.STUDY.conclude({"GPU, H100": rows[:1] and Rows(rows[:1])}) == []


def test_all_devices_of_a_kind_are_used_and_train_alike(tmp_path: Path) -> None:
    study = dataclasses.replace(scaling.STUDY, quick=TINY)
    found = bench(study, devices=("cpu",), quick=True, out=tmp_path, say=lambda line: None)
    (rows,) = found["scaling"].rows.values()
    assert [one.what["devices"] for one in rows] == [1, 2, 4] and {one.work for one in rows} == {16}
    losses = [float(one.observed["loss"]) for one in rows]  # type: ignore[arg-type]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    page = (tmp_path / "results.md").read_text()
    assert "| A13 | 2 devices, one batch for all | – | " in page
    assert "| A13 | 4 devices, one batch for all | – | " in page and "; efficiency " in page
    assert "these devices are simulated and share" in page


def test_one_device_alone_is_told_how_to_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    first = jax.devices()[0]
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [first])
    rows = measured_rows(scaling.STUDY, Bench({"cpu": first}, TINY))["cpu"]
    alone, several = rows
    assert alone.seconds and several.what["devices"] == 2 and not several.seconds
    assert several.missing.startswith("JAX has one CPU device here, and makes several of it with JAX_NUM_CPU_DEVICES=4")
    with pytest.raises(scaling.NotMeasured, match="JAX has one GPU device here$"):
        scaling._refuse("gpu")


def test_a_batch_that_devices_cannot_share_is_not_measured() -> None:
    odd = dataclasses.replace(TINY, shared=6)
    rows = measured_rows(scaling.STUDY, Bench({"cpu": jax.devices()[0]}, odd))["cpu"]
    assert [one.missing for one in rows] == ["", "", "4 devices cannot share 6 examples evenly"]
