"""The scaling study: collectives of a program, latency and bandwidth of a link, predictions."""

from typing import Any

import numpy as np
import pytest
from articles.studies import study_scaling as scaling
from articles.studies.scaling import STUDY
from articles.studies.study_collectives import (
    Collective,
    Link,
    Reduction,
    array_bytes,
    fit_link,
    read_collectives,
    ring,
)

from jaxnn.bench import Row, Rows

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


def test_collectives_of_a_compiled_program() -> None:
    assert array_bytes("f32[128,3]{1,0}") == 4 * 128 * 3
    assert array_bytes("(bf16[2]{0}, /*index=1*/pred[], s4[3], u32[2,0]{1,0:T(8,128)}, token[])") == 4 + 1 + 1.5
    assert array_bytes("f8e4m3fn[5]") == 5 and array_bytes("c64[2]") == 16
    # In two steps, the loop reduces 4 × (8·4 + 6·2) bytes, the branch gathers 16·4, and 4 devices scatter 32.
    assert read_collectives(PROGRAM, num_devices=4, num_steps=2) == (
        Collective("all-reduce", 2, 88),
        Collective("all-gather", 0.5, 32),
        Collective("reduce-scatter", 0.5, 16),
    )
    assert ring("all-reduce", 4) == (6, 1.5) and ring("collective-permute", 4) == (1, 1.0)
    assert ring("all-gather", 4) == ring("reduce-scatter", 4) == (3, 0.75)
    assert {ring(kind, 1) for kind in ("all-reduce", "all-gather", "collective-permute")} == {(0, 0.0)}


@pytest.mark.parametrize("turns", [1.0, 4.0])
def test_fit_link_recovers_latency_and_bandwidth_from_noisy_times(turns: float) -> None:
    true, noise = Link(20e-6, 1 / 5e9), np.random.default_rng(0)
    timed = [Reduction(n, size, 1.0, turns) for n in (2, 4, 8) for size in (2**12, 2**16, 2**20, 2**24)]
    exact = [one._replace(seconds=one.predicted(true)) for one in timed]
    assert tuple(fit_link(exact) or ()) == pytest.approx(tuple(true))
    found = fit_link([one._replace(seconds=one.seconds * noise.uniform(0.9, 1.1)) for one in exact])
    assert found is not None and tuple(found) == pytest.approx(tuple(true), rel=0.1)
    assert fit_link([]) is None
    # Larger messages that take less time: neither parameter becomes negative.
    found = fit_link([Reduction(2, 1000, 2e-5), Reduction(2, 2000, 1e-5)])
    assert found is not None and found.seconds_per_byte == 0 and 0 < found.latency_seconds < 1e-5


def row(batch: str, devices: int, work: float, seconds: tuple[float, ...], alone: bool = False, **observed: Any) -> Row:
    what = {"batch": batch, "devices": devices, "rows": int(work) // devices, "alone": alone}
    return Row(what, seconds, work, "examples", observed)


def measured() -> Rows:
    """A batch of 48 on 1, 2 and 4 devices: a step takes 8 ms and 1 ms per example; 8 MB are reduced at 1 GB/s."""
    sums = {"all-reduce runs": 1.0, "all-reduce num_bytes": 8e6, "loss": 2.0}

    def reduction(devices: int, size: float) -> Row:
        seconds = scaling.REDUCTIONS * Reduction(devices, int(size), 1.0).predicted(Link(1e-3, 1e-9))
        return Row({"message": int(size), "devices": devices}, (seconds,), scaling.REDUCTIONS * size, "B")

    return Rows(
        [
            row("shared", 1, 48, (0.056,), loss=2.0),
            row("shared", 2, 48, (0.040,), **sums),
            row("shared", 2, 48, (0.032,), alone=True, loss=2.0),
            row("shared", 4, 48, (0.036,), **sums | {"loss": 2.002}),
            *(row("one", 1, rows, (1e-3 * (8 + rows),), loss=2.0) for rows in (48, 24, 12, 6)),
            *(reduction(devices, size) for devices in (2, 4) for size in (4e3, 8e6)),
        ]
    )


def test_a_prediction_is_the_step_of_one_device_and_the_collectives() -> None:
    # 8 devices: 6 examples each, 14 ms; 14 messages of 1 ms; 7/4 of 8 MB at 1 GB/s, 14 ms.
    assert scaling.predict(measured(), 8) == pytest.approx(0.014 + 0.014 + 0.014)
    assert scaling.predict(measured(), 8, Link(0.0, 2e-9)) == pytest.approx(0.014 + 0.028)
    assert scaling.predict(measured(), 5) is scaling.predict(Rows(measured()[:4]), 8) is None


def test_scaling_conclusions() -> None:
    losses, collectives, link, ahead = STUDY.conclude({"GPU, H100": measured()})
    assert "at most 1.0e-03" in losses and "1 all-reduce of 7.63 MiB" in collectives
    assert "median error 0%" in link and "8: 1.33" in ahead  # 56 / 42
    assert STUDY.conclude({"GPU, H100": Rows(measured()[:1])}) == []
