"""Collectives are read from the program that XLA made: which, how often, and how many bytes."""

from __future__ import annotations

from typing import Any

import optax
import pytest

import jaxnn as jn
from jaxnn.observe import nbytes
from jaxnn.scaling.cases import Case
from jaxnn.scaling.collectives import Collective, array_bytes, read_collectives
from jaxnn.scaling.options import ScalingOptions
from jaxnn.scaling.programs import Workshop
from tests import tiny

# Loss, accuracy and the number of examples, 4 bytes each, are summed over the devices besides.
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


def wide(**fields: Any) -> jn.Experiment[Any]:
    """Layers whose parameters four devices can share."""
    return tiny.experiment(
        task=lambda config: jn.tasks.classification(jn.models.MLP((64, 32, 3))),
        optimizer=lambda config: optax.adam(config.learning_rate),
        **fields,
    )


def workshop(strategy: Any, steps_per_call: int = 1) -> Workshop:
    options = ScalingOptions(strategy=strategy, steps_per_call=steps_per_call)
    return Workshop(wide(), tiny.splits(), options)


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


@pytest.mark.parametrize(("strategy", "steps_per_call"), [("data", 1), ("data", 4), ("pmap", 4)])
def test_a_step_sums_as_many_bytes_as_there_are_parameters(strategy: str, steps_per_call: int) -> None:
    shop = workshop(strategy, steps_per_call)
    shop.step(Case(4, 2))
    (found,) = shop.collectives[Case(4, 2)]
    assert shop.parameter_bytes == nbytes(tiny.fit(wide(num_steps=1)).state.params) == 4 * (3 * 64 + 64 * 32 + 96 + 99)
    assert found.kind == "all-reduce"
    assert 0 <= found.num_bytes - shop.parameter_bytes <= SCALARS


def test_a_sharded_state_is_gathered() -> None:
    shop = workshop("fsdp")
    shop.step(Case(2, 16))
    found = {one.kind: one.num_bytes for one in shop.collectives[Case(2, 16)]}
    # How XLA goes about it differs from platform to platform: but no device has whole parameters to start with.
    assert found["all-gather"] > 0 and sum(found.values()) >= shop.parameter_bytes


def test_one_device_and_devices_by_themselves_have_none() -> None:
    shop = workshop("data", 4)
    for case in (Case(1, 8), Case(4, 2, alone=True)):
        shop.step(case)
        assert shop.collectives[case] == ()
