"""The study of several devices: collectives and α–β by hand, efficiencies and predictions, equal losses."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from articles.studies import study_scaling as scaling
from articles.studies.scaling import STUDY, PictureSettings, picture_cnn
from articles.studies.study_collectives import (
    Collective,
    Link,
    Reduction,
    array_bytes,
    fit_link,
    read_collectives,
    ring,
)

from jaxnn.bench import Bench, Quantity, Row, Rows, bench
from jaxnn.observe import nbytes
from tests.benched import measured_rows

TINY = PictureSettings(8, 2, (8,), 2, 2, 2, 0.0, blocks=((2,),), dense=(), size=4)
# Loss, accuracy and the number of examples, 4 bytes each, are summed over the devices as well.
SCALARS = 12
PROGRAM = """
HloModule jit_train, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-reduce.1 = (f32[8]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce(%x, %y), channel_id=1, to_apply=%add
  %gathered = f32[8]{0} get-tuple-element(%all-reduce.1), index=0
}

%inner (x: f32[4]) -> f32[16] {
  %ag-start = (f32[4]{0}, f32[16]{0}) all-gather-start(%x), dimensions={0}
  ROOT %ag-done = f32[16]{0} all-gather-done(%ag-start)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]{0}) while(%p), condition=%done, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %asked = f32[16]{0} conditional(%p), branch_computations={%inner, %add}, metadata={op_name="all-gather(x)"}
  %rs-start = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%x), dimensions={0}, to_apply=%add
  ROOT %rs-done = f32[2]{0} reduce-scatter-done(%rs-start), metadata={op_name="jit(train)/all-reduce(x)"}
}
"""


# --- collectives ---


def test_shapes_have_bytes() -> None:
    assert array_bytes("f32[128,3]{1,0}") == 4 * 128 * 3
    assert array_bytes("(bf16[2]{0}, /*index=1*/pred[], s4[3], u32[2,0]{1,0:T(8,128)}, token[])") == 4 + 1 + 1.5
    assert array_bytes("f8e4m3fn[5]") == 5 and array_bytes("c64[2]") == 16


def test_loops_branches_and_pairs_are_followed() -> None:
    # The loop runs 4 × (8·4 + 6·2) bytes, the branch gathers 16·4, and 2·4 are left of 4 devices' 32: in two steps.
    assert read_collectives(PROGRAM, num_devices=4, num_steps=2) == (
        Collective("all-reduce", 2, 88),
        Collective("all-gather", 0.5, 32),
        Collective("reduce-scatter", 0.5, 16),
    )


def test_a_step_sums_as_many_bytes_as_there_are_parameters() -> None:
    experiment = picture_cnn(TINY)
    splits = experiment.data(experiment.config)
    batch = splits.train.as_batch(splits.train.read(np.arange(2)))
    params, _ = jax.eval_shape(experiment.task(experiment.config).init, jax.random.key(0), batch)
    steps = {
        (count, alone): scaling.make_step(experiment, splits, jax.devices()[:count], 8 // count, 2, alone)
        for count, alone in ((1, False), (4, False), (4, True))
    }
    (found,) = steps[4, False].collectives
    assert found.kind == "all-reduce" and 0 <= found.num_bytes - nbytes(params) <= SCALARS
    assert steps[1, False].collectives == steps[4, True].collectives == ()


# --- α–β ---


def test_a_ring_sends_what_it_must() -> None:
    assert ring("all-reduce", 4) == (6, 1.5)
    assert ring("all-gather", 4) == ring("reduce-scatter", 4) == (3, 0.75)
    assert ring("collective-permute", 4) == (1, 1.0)
    assert {ring(kind, 1) for kind in ("all-reduce", "all-gather", "collective-permute")} == {(0, 0.0)}


@pytest.mark.parametrize("turns", [1.0, 4.0])
def test_latency_and_bandwidth_are_recovered_from_noisy_times(turns: float) -> None:
    true, noise = Link(20e-6, 1 / 5e9), np.random.default_rng(0)
    timed = [Reduction(n, size, 1.0, turns) for n in (2, 4, 8) for size in (2**12, 2**16, 2**20, 2**24)]
    exact = [one._replace(seconds=one.predicted(true)) for one in timed]
    assert tuple(fit_link(exact) or ()) == pytest.approx(tuple(true))
    found = fit_link([one._replace(seconds=one.seconds * noise.uniform(0.9, 1.1)) for one in exact])
    assert found is not None and tuple(found) == pytest.approx(tuple(true), rel=0.1)
    assert fit_link([]) is None


def test_neither_is_negative() -> None:
    # A thousand bytes more take less time: no β explains it.
    found = fit_link([Reduction(2, 1000, 2e-5), Reduction(2, 2000, 1e-5)])
    assert found is not None and found.seconds_per_byte == 0 and 0 < found.latency_seconds < 1e-5


# --- findings ---


def row(batch: str, devices: int, work: float, seconds: tuple[float, ...], alone: bool = False, **observed: Any) -> Row:
    what = {"batch": batch, "devices": devices, "rows": int(work) // devices, "alone": alone}
    return Row(what, seconds, work, "examples", observed)


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


def measured(**observed: Any) -> Rows:
    """A batch of 48 on 1, 2 and 4 devices: one takes 8 ms and 1 ms an example; 8 MB are summed at 1 GB/s."""
    sums = {"all-reduce runs": 1.0, "all-reduce num_bytes": 8e6, "loss": 2.0, **observed}

    def reduction(devices: int, size: float) -> Row:
        one = Reduction(devices, int(size), 1.0, scaling._turns(devices, observed.get("shared_cores")))
        seconds = scaling.REDUCTIONS * one.predicted(Link(1e-3, 1e-9))
        return Row({"message": int(size), "devices": devices}, (seconds,), scaling.REDUCTIONS * size, "B", observed)

    one = {"loss": 2.0, **observed}
    return Rows(
        [
            row("shared", 1, 48, (0.056,), **one),
            row("shared", 2, 48, (0.040,), **sums),
            row("shared", 2, 48, (0.032,), alone=True, **one),
            row("shared", 4, 48, (0.036,), **sums | {"loss": 2.002}),
            *(row("one", 1, rows, (1e-3 * (8 + rows),), **one) for rows in (48, 24, 12, 6)),
            *(reduction(devices, size) for devices in (2, 4) for size in (4e3, 8e6)),
        ]
    )


def test_a_prediction_is_the_step_of_one_device_and_the_collectives() -> None:
    # 8 devices: 6 examples each, 14 ms; 14 messages of 1 ms; 7/4 of 8 MB at 1 GB/s, 14 ms.
    assert scaling.predict(measured(), 8) == pytest.approx(0.014 + 0.014 + 0.014)
    assert scaling.predict(measured(), 8, Link(0.0, 2e-9)) == pytest.approx(0.014 + 0.028)
    # Cores that devices share have the work of all to do, and move their bytes by turns.
    shared = measured(shared_cores=2, busy_cores=1.0)
    assert scaling.predict(shared, 8) == pytest.approx(0.056 + 0.014 + 4 * 0.014)
    assert scaling.predict(shared, 8, Link(0.0, 2e-9)) == pytest.approx(0.014 + 0.028)
    assert scaling.predict(measured(), 5) is scaling.predict(Rows(measured()[:4]), 8) is None


def test_findings_name_efficiency_collectives_and_the_error_of_the_prediction() -> None:
    one, two, four = STUDY.findings(measured(shared_cores=2, busy_cores=1.0))
    assert (one.what, one.note) == ("1 device, one batch for all", "simulated on 2 cores")
    # 56 over 40 ms on two devices; 32 ms without collectives; predicted 32 + 2 + 8 ms.
    assert two.note == "efficiency 70%, 20% in collectives, predicted time +5%, simulated on 2 cores"
    assert four.what == "4 devices, one batch for all"


def test_conclusions_name_losses_collectives_link_and_predictions() -> None:
    off, collectives, link, ahead = STUDY.conclude({"GPU, H100": measured()})
    assert "off that on one by 1.0e-03" in off and "1 all-reduce of 7.63 MiB" in collectives
    assert "off by 0% (median)" in link and "8: 1.33" in ahead  # 56 / 42
    *_, simulated = STUDY.conclude({"CPU, Chip": measured(shared_cores=2, busy_cores=1.9)})
    assert "share 2 cores, of which one device keeps 1.9 busy" in simulated
    assert STUDY.conclude({"GPU, H100": Rows(measured()[:1])}) == []


# --- the study ---


@pytest.mark.slow
def test_all_devices_of_a_kind_are_used_and_train_alike(tmp_path: Path) -> None:
    study = scaling.make_study(picture_cnn, full=TINY, claims=("A13",))
    (rows,) = bench(study, devices=("cpu",), out=tmp_path, say=lambda line: None)["scaling"].rows.values()
    shared = rows.where(batch="shared", alone=False)
    assert [one.what["devices"] for one in shared] == [1, 2, 4] and {one.work for one in shared} == {16}
    losses = [float(one.observed["loss"] or 0) for one in shared]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    assert [one.missing for one in rows if one.missing] == []
    page = (tmp_path / "results.md").read_text()
    assert "| A13 | 4 devices, one batch for all | – | " in page and "; efficiency " in page
    assert "these devices are simulated and share" in page and "predicted speed-up" in page


@pytest.mark.slow
def test_one_device_alone_says_how_to_make_several(monkeypatch: pytest.MonkeyPatch) -> None:
    first = jax.devices()[0]
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [first])
    rows = measured_rows(STUDY, Bench({"cpu": first}, TINY))["cpu"]
    assert rows[0].seconds and rows[-1].what["devices"] == 2 and not rows[-1].seconds
    assert "JAX_NUM_CPU_DEVICES=4" in rows[-1].missing


def test_a_batch_larger_than_the_data_is_not_measured() -> None:
    experiment = picture_cnn(TINY)
    with pytest.raises(scaling.NotMeasured, match="more than the 8 of the data"):
        scaling.make_step(experiment, experiment.data(experiment.config), jax.devices()[:1], 9, 2, False)
