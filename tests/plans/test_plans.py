"""`jn.plan` and `jn.advise`: what is read from compiled programs, bounds, and measurements on this machine."""

import dataclasses
import importlib.metadata
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jaxnn as jn
from jaxnn.advice import Advice, BatchSizePlan, DeviceFigures
from jaxnn.engine import Trial
from jaxnn.nn import BatchNorm, Conv
from jaxnn.observe import Traced, Work
from jaxnn.parallel import SINGLE_DEVICE
from jaxnn.plans import CARDS, StepPlan, card_here, find_card
from jaxnn.types import ConfigError, DataError
from tests import tiny

HLO = """
HloModule jit_step, is_scheduled=true

%gathered (p0: u8[1000,4], p1: s32[8]) -> u8[8,4] {
  %p0 = u8[1000,4]{1,0} parameter(0)
  %p1 = s32[8]{0} parameter(1)
  ROOT %rows = u8[8,4]{1,0} gather(%p0, %p1), offset_dims={1}
}

%written (p0.1: f32[1000,4], p1.1: f32[1,4], p2.1: s32[]) -> f32[1000,4] {
  %p0.1 = f32[1000,4]{1,0} parameter(0)
  %p1.1 = f32[1,4]{1,0} parameter(1)
  %p2.1 = s32[] parameter(2)
  ROOT %update = f32[1000,4]{1,0} dynamic-update-slice(%p0.1, %p1.1, %p2.1, %p2.1)
}

%body (carry: (s32[], f32[16])) -> (s32[], f32[16]) {
  %carry = (s32[], f32[16]{0}) parameter(0)
  %x = f32[16]{0} get-tuple-element(%carry), index=1
  %twice = f32[16]{0} add(%x, %x)
  ROOT %next = (s32[], f32[16]{0}) tuple(%carry, %twice)
}

%condition (carry.1: (s32[], f32[16])) -> pred[] {
  ROOT %less = pred[] compare(%carry.1, %carry.1), direction=LT
}

ENTRY %main (data: u8[1000,4], index: s32[8], table: f32[1000,4]) -> f32[16] {
  %data = u8[1000,4]{1,0} parameter(0)
  %index = s32[8]{0} parameter(1)
  %table = f32[1000,4]{1,0} parameter(2)
  %rows = u8[8,4]{1,0} fusion(%data, %index), kind=kLoop, calls=%gathered
  %call = (f32[1,4]{1,0}, s8[999]{0}) custom-call(%rows), custom_call_target="__cudnn$conv"
  %row = f32[1,4]{1,0} get-tuple-element(%call), index=0
  %place = s32[] constant(3)
  %new = f32[1000,4]{1,0} fusion(%table, %row, %place), kind=kLoop, calls=%written
  %start = (f32[1,4]{1,0}, f32[16]{0}) all-gather-start(%row), replica_groups={{0,1,2,3}}, dimensions={0}
  %done = f32[16]{0} all-gather-done(%start)
  %init = (s32[], f32[16]{0}) tuple(%place, %done)
  %loop = (s32[], f32[16]{0}) while(%init), condition=%condition, body=%body, config={"known_trip_count":{"n":"5"}}
  ROOT %result = f32[16]{0} get-tuple-element(%loop), index=1
}
"""


def test_work_counts_what_kernels_move():
    work = Work.of(HLO)
    rows, place = 8 * 4, 4
    gather = 8 * 4 + rows + rows  # the indices, the rows that are read and written
    convolution = rows + 16
    update = 16 + place + 2 * 16  # the new row, its place, and the row of the table
    collective, loop = 16 + 16 * 4, 5 * 3 * 16 * 4
    assert work.bytes == gather + convolution + update + collective + loop
    assert work.launches == work.alone == 4 + 5
    assert work.calls == {"__cudnn$conv": 1}
    assert work.collectives == {"all-gather": (1, 16 * 4)} and work.sent == 3 / 4 * 16 * 4


@pytest.mark.parametrize(
    ("instruction", "result", "sent"),
    [
        ("((f32[16]{0}), f32[16]{0}) all-reduce-start(%x), replica_groups=[2,4]<=[8]", 64, 2 * 3 / 4 * 64),
        ("f32[16]{0} all-reduce-start(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}", 64, 2 * 3 / 4 * 64),
        ("(f32[16]{0}, f32[16]{0}) all-reduce-start(%x, %x)", 128, 2 * 7 / 8 * 128),
        ("f32[32]{0} all-gather(%x), replica_groups={{0,1},{2,3}}", 128, 64),
        ("(f32[16]{0}, f32[32]{0}) all-gather-start(%x), replica_groups={{0,1},{2,3}}", 128, 64),
        ("((f32[16]{0}), f32[8]{0}) reduce-scatter-start(%x), replica_groups={{0,1}}", 32, 32),
        ("(f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%x)", 64, 64),
    ],
)
def test_collectives_count_their_results_and_what_must_be_sent(instruction, result, sent):
    hlo = "HloModule m, num_partitions=8\n\nENTRY %main (x: f32[16]) -> f32[16] {\n  %x = f32[16]{0} parameter(0)\n"
    work = Work.of(f"{hlo}  ROOT %done = {instruction}\n}}\n")
    assert [size for _, size in work.collectives.values()] == [result] and work.sent == sent
    assert work.bytes == result + 64 * instruction.count("%x") and work.launches == 1


def test_work_is_a_lower_bound():
    lines = [
        "%small (y: f32[16]) -> f32[16] {\n  %y = f32[16]{0} parameter(0)\n  ROOT %n = f32[16]{0} negate(%y)\n}\n",
        "%large (z: f32[16]) -> f32[16] {\n  %z = f32[16]{0} parameter(0)\n  %a = f32[16]{0} negate(%z)",
        "  ROOT %b = f32[16]{0} negate(%a)\n}\n",
        "%read (p: f32[16], q: f32[1], i: s32[]) -> f32[] {\n  %p = f32[16]{0} parameter(0)",
        "  %q = f32[1]{0} parameter(1)\n  %i = s32[] parameter(2)",
        "  %set = f32[16]{0} dynamic-update-slice(%p, %q, %i)\n  ROOT %sum = f32[] reduce(%set, %i)\n}\n",
        "ENTRY %main (x: f32[16], i: s32[]) -> f32[16] {\n  %x = f32[16]{0} parameter(0)\n  %i = s32[] parameter(1)",
        "  %c = f32[16]{0} conditional(%i, %x, %x), true_computation=%large, false_computation=%small",
        "  %d = f32[1]{0} dynamic-slice(%c, %i), dynamic_slice_sizes={1}",
        "  ROOT %e = f32[] fusion(%c, %d, %i), kind=kInput, calls=%read\n}\n",
    ]
    work = Work.of("\n".join(lines))
    # The smaller branch; the slice and its place; an update that is read at once is not written.
    assert work.launches == 3 and work.bytes == 2 * 64 + (2 * 4 + 4) + (64 + 4 + 4 + 4)
    shapes = "(f4e2m1fn[8], u2[8], s1[8], token[], c64[2], f8e4m3fn[3], bf16[2]{0}, pred[3])"
    made = Work.of(f"ENTRY %main () -> f32[] {{\n  ROOT %r = {shapes} rng()\n}}")
    assert made.bytes == 4 + 2 + 1 + 0 + 16 + 3 + 4 + 3


def test_bounds_are_those_of_the_card():
    card, work = CARDS["h100"], Work.of(HLO)
    memory = {"parameters": 3 * 2**30, "temporaries": 2**30}
    used, reasons = {"attention": ["xla"]}, ("attention without cudnn: it has no such mask",)
    plan = StepPlan(card, SINGLE_DEVICE, 8, 1, memory, work, {"bfloat16": 1e12}, used, reasons, 512, card.usable)
    assert plan.bounds["products"] == pytest.approx(1e12 / 989.4e12) and plan.bounds["launches"] == 9 * 7e-6
    assert plan.seconds == plan.bounds["products"] and plan.utilization == 1
    assert plan.peak_bytes == 2**32 and plan.fits
    size, kernels = "4.0 GiB of 59.3 GiB, 75 % of the card: it fits", "9 kernels, 9 outside of CUDA graphs"
    for words in ("NVIDIA H100", size, kernels, "MFU 100%, limited by products", "512", "attention xla", *reasons):
        assert words in repr(plan)
    full = plan._replace(memory={"parameters": 70 * 2**30})
    assert not full.fits and "it does not fit" in repr(full)
    assert plan._replace(products={"float32": 1e12}).seconds == pytest.approx(1e12 / 494.7e12)


@pytest.mark.parametrize(
    ("middle", "alone"),
    [
        ("negate(%x)", 0),
        ('custom-call(%x), custom_call_target="__cublas$gemm"', 0),
        ('custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"', 0),
        ('custom-call(%x), custom_call_target="__cudnn$convForward"', 0),
        ('custom-call(%x), custom_call_target="cudnn_rnn_ffi"', 1 + 4),
        ("all-reduce(%x)", 1 + 4),
    ],
)
def test_what_breaks_a_graph_leaves_its_short_ends_outside(middle, alone):
    kernels = [*["negate(%x)"] * 5, middle, *["negate(%x)"] * 4]
    body = "\n".join(f"  %k{number} = f32[16]{{0}} {kernel}" for number, kernel in enumerate(kernels))
    work = Work.of(f"ENTRY %main (x: f32[16]) -> f32[16] {{\n  %x = f32[16]{{0}} parameter(0)\n{body}\n}}\n")
    assert work.launches == 10 and work.alone == alone


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA H100 PCIe"])
def test_a_gpu_at_hand_is_bounded_by_memory_and_launches(kind, monkeypatch):
    monkeypatch.setattr(jnp, "ones", lambda *_, **__: None)
    monkeypatch.setattr(Trial, "measure", lambda *_: Trial(1, 1e-3, 1e3, 0))
    stats = {"bytes_limit": 8 * 2**30, "bytes_in_use": 2 * 2**30}
    chip = Mock(platform="gpu", compute_capability="9.0", device_kind=kind, memory_stats=lambda: stats)
    card = card_here(chip)
    assert card == CARDS["h200"] if kind == "NVIDIA H200" else card.is_measured and card.memory == 6 * 2**30
    plan = StepPlan(card, SINGLE_DEVICE, 8, 1, {}, Work.of(HLO), {"bfloat16": 1e12}, {}, (), None, 6.0 * 2**30)
    assert {*plan.bounds} >= {"products", "memory", "launches"}
    room = "6.0 GiB, available here" if card.is_measured else "6.0 GiB, 4 % of the card"
    assert room in repr(plan) and "outside of CUDA graphs" in repr(plan)
    # All of a peak that is measured would always be reached.
    assert ("MFU" in repr(plan)) != card.is_measured


def flops_of(function: Any, *shapes: tuple[int, ...]) -> float:
    arrays = (jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    return sum(Traced(function, *arrays).product_flops().values())


def test_operations_of_products_are_exact():
    assert flops_of(jnp.matmul, (3, 5, 7), (3, 7, 11)) == 2 * 3 * 5 * 7 * 11
    scan = lambda x: jax.lax.scan(lambda carry, _: (carry @ carry, None), x, length=6)[0]  # noqa: E731
    assert flops_of(scan, (4, 4)) == 6 * 2 * 4**3
    assert flops_of(lambda x: jax.lax.cond(True, lambda: x @ x, lambda: x), (4, 4)) == 0

    def unused(x: jax.Array) -> jax.Array:  # of both carries and both results, only one is returned
        step = lambda carry, _: ((carry[0] @ carry[0], carry[1] @ x), x @ x)  # noqa: E731
        return jax.jit(lambda x: jax.lax.scan(step, (x, x), length=3))(x)[0][0]

    assert flops_of(unused, (4, 4)) == 3 * 2 * 4**3
    mixed = lambda x: (x @ x).astype("bfloat16") @ jnp.ones((4, 4), "bfloat16")  # noqa: E731
    assert Traced(mixed, np.ones((4, 4), np.float32)).product_flops() == {"float32": 128, "bfloat16": 128}
    for implementation in ("xla", "channels_last"):
        layer = Conv(8, (3, 3), strides=2, implementation=implementation)
        images = jax.ShapeDtypeStruct((4, 10, 10, 3), np.float32)
        params = jax.eval_shape(layer.init, jax.random.key(0), images)
        loss = lambda params, images, layer=layer: layer.apply(params, images).sum()  # noqa: E731
        forward = 2 * 4 * 5 * 5 * 9 * 3 * 8
        assert sum(Traced(loss, params, images).product_flops().values()) == pytest.approx(forward)
        step = jax.value_and_grad(loss)
        assert sum(Traced(step, params, images).product_flops().values()) == pytest.approx(2 * forward)
        members = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape), leaf.dtype), (params, images))
        assert sum(Traced(jax.vmap(step), *members).product_flops().values()) == pytest.approx(3 * 2 * forward)


@pytest.mark.slow
@pytest.mark.needs_cpu
def test_plan_of_the_machine_at_hand_counts_state_and_products():
    experiment = tiny.experiment(batch_size=8)
    one = jn.plan(experiment, largest=True)
    two = jn.plan(experiment, devices=2, strategy="fsdp", members=1)
    assert one.memory["parameters"] == one.memory["optimizer state"] == 4 * (3 * 3 + 3)
    # Forward, and the gradient of the kernel.
    assert one.flops == 2 * two.flops == 2 * (2 * 8 * 3 * 3)
    assert one.largest == tiny.NUM_TRAIN, "all examples fit"
    assert one.fits and one.batch_size == 8 and one.seconds > 0 and one.layout.num_devices == 1
    assert two.layout.num_devices == 2 and "all-reduce" in two.work.collectives
    assert one.reasons == ()
    model = linen.Sequential([BatchNorm(use_running_average=False, force_float32_reductions=False), linen.Dense(3)])
    normalized = jn.plan(tiny.experiment(batch_size=8, task=lambda config: jn.tasks.classification(model)))
    assert normalized.implementations == {"normalization": ["xla"]}
    names = ("native", "custom_vjp")
    assert normalized.reasons == tuple(f"normalization without {n}: it always sums in float32 or wider" for n in names)
    # The gradient of this layer's inputs is traced by its implementation, and not computed.
    many = jn.plan(tiny.experiment(batch_size=8, model=jn.models.MLP((3,))), members=4)
    assert many.memory["parameters"] == 4 * one.memory["parameters"] and many.flops == 4 * one.flops


def test_a_card_is_read_from_a_file(tmp_path):
    card, path = CARDS["t4"], tmp_path / "card.toml"
    fields = card._asdict().items()
    lines = [f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}" for name, value in fields]
    path.write_text("\n".join(lines))
    assert find_card(str(path)) == card
    path.write_text("\n".join(lines[1:]))
    with pytest.raises(ConfigError, match="differs in name"):
        find_card(str(path))
    for line in ("name = 7", 'capability = "8"', "cores = true", "memory = 0", 'half = "fast"', "link = nan"):
        name = line.partition(" ")[0]
        path.write_text("\n".join(line if each.startswith(f"{name} =") else each for each in lines))
        with pytest.raises(ConfigError, match=f"card.toml cannot be read: {name} must be"):
            find_card(path)
    quoted = card._replace(name='a "fast" card')
    assert find_card(quoted) is quoted and r'device_description_str: "a \"fast\" card"' in quoted.target()


def test_cards_before_8_have_no_units_for_bfloat16():
    old, new, here = CARDS["t4"], CARDS["a100"], CARDS["t4"]._replace(cores=0)
    assert old.flops("bfloat16") == old.float32 < old.flops("float16") == old.half
    assert new.flops("bfloat16") == new.half and here.flops("bfloat16") == here.half  # as measured
    assert new.usable == 0.75 * new.memory


def test_a_plan_needs_no_products():
    scale = (lambda key, inputs: {"scale": jnp.ones(3)}, lambda params, inputs: inputs * params["scale"][None])
    plan = jn.plan(tiny.experiment(model=scale))
    assert plan.flops == plan.utilization == 0 and "no products" in repr(plan)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (jn.plan, {"device": "h10"}, "'h10' is unknown: did you mean 'h100'"),
    (jn.plan, {"device": "none.toml"}, "none.toml cannot be read"),
    (jn.plan, {"device": jax.Device}, "device must name a card, such as h100"),
    (jn.plan, {"devices": 3}, "batch_size is 8, which 3 devices cannot share"),
    (jn.plan, {"members": 2, "devices": 2}, "members are planned on one card"),
    (jn.plan, {"members": 2, "strategy": "pmap"}, "members cannot be planned with the strategy pmap"),
    (jn.plan, {"device": "h100"}, "install JAX's compiler for them: pip install"),
    (jn.plan, {"batch_size": 100}, "100"),
    (jn.advise, {"batch_size": 512}, "512"),
    (jn.advise, {"devices": ("tpu",)}, "tpu.*cpu"),
    (jn.advise, {"members": 0}, "members"),
]


@pytest.mark.parametrize(("call", "options", "words"), WRONG)
@pytest.mark.several_devices
def test_what_cannot_be_planned_is_one_line(call, options, words, monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    given = {"batch_size": 8} | options
    experiment = tiny.experiment(batch_size=given.pop("batch_size"))
    with pytest.raises(DataError if "batch_size" in options else ConfigError, match=words) as raised:
        call(experiment, **given)
    assert "\n" not in str(raised.value)


def test_compilers_of_another_version_are_named(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9" if name == "jax-cuda13-pjrt" else "0.12")
    with pytest.raises(ConfigError, match="jax-cuda13-pjrt 0.9 cannot compile for jaxlib 0.12"):
        jn.plan(tiny.experiment(), device="l4")


SIZES = (8, 32, 128, 512)
PARTS = {"call": 6e-4, "forward": 1e-4, "backward": 2e-4, "update": 1e-4}


def figures(*rates: float, members: tuple[float, ...] = ()) -> DeviceFigures:
    """Examples/s at `SIZES`, member-steps/s of 1, 4, 16, … members."""
    trials = tuple(Trial(size, size / rate, rate, 0) for size, rate in zip(SIZES, rates, strict=True))
    smallest = next(trial.size for trial in trials if trial.per_second >= 0.9 * max(rates))
    vmapped = tuple(Trial(4**power, 1.0, rate, 0) for power, rate in enumerate(members))
    return DeviceFigures("Chip", BatchSizePlan(trials, smallest, None), PARTS, vmapped)


CPU, FAST_GPU = figures(1000.0, 2000.0, 2000.0, 2000.0), figures(100.0, 400.0, 3000.0, 12000.0)


def test_the_faster_device_at_the_batch_size_is_recommended():
    slow = figures(10.0, 20.0, 30.0, 40.0)
    for batch_size, gpu, best in (
        (32, FAST_GPU, "the CPU: 5.0 times as fast as the GPU at a batch size of 32. A batch size of 32 fills it."),
        (128, FAST_GPU, "the GPU: 1.5 times as fast as the CPU at a batch size of 128. A batch size of 512"),
        (32, slow, "the CPU: 100.0 times as fast"),
    ):
        assert f"Train on {best}" in str(Advice("digits", batch_size, {"cpu": CPU, "gpu": gpu}, ""))
    found = [str(Advice("digits", size, {"cpu": CPU, "gpu": FAST_GPU}, "")).splitlines()[-1] for size in (32, 128)]
    assert found == ["The GPU is faster at batch sizes 128, 512.", "The CPU is faster at batch sizes 8, 32."]


def test_devices_are_compared_at_the_largest_batch_size_that_fits_on_all():
    small = CPU._replace(batch_sizes=BatchSizePlan(CPU.batch_sizes.trials[:2], 32, "128 cannot be run: full"))
    found = Advice("digits", 128, {"cpu": small, "gpu": FAST_GPU}, "")
    assert found.compared == 32 and found.best == "cpu" and "5.0 times as fast as the GPU" in str(found)
    assert "The GPU is faster at no size measured." in str(found)
    assert "On the CPU, batch size 128 cannot be run: full." in str(found)


def test_the_table_has_all_measurements_and_why_there_is_no_gpu():
    members = figures(1000.0, 2000.0, 2000.0, 2000.0, members=(50.0, 200.0)).members
    text = repr(Advice("digits", 32, {"cpu": CPU._replace(members=members)}, "No GPU."))
    for line in ("digits, batch size 32 Chip", "batch size 128 2,000 examples/s", "4 members 200 member-steps/s"):
        assert line in " ".join(text.split())
    assert "1 ms: call 60%, forward 10%, backward 20%, update 10%" in text
    assert "Train on the CPU: the only device measured. A batch size of 32 fills it. No GPU." in text


@pytest.mark.slow
@pytest.mark.needs_cpu
def test_an_experiment_is_measured_on_this_machine(capsys, monkeypatch):
    monkeypatch.setattr(jn.advice, "FACTORS", (0.0625, 0.25, 1.0, 16.0))  # of 8: none, 2, 8, and 128 of 37 examples
    reads: list[int] = []
    experiment: Any = tiny.experiment()
    counted = dataclasses.replace(experiment, data=lambda config: (reads.append(1), experiment.data(config))[1])
    found = jn.advise(counted, members=2)
    assert list(found.devices) == ["cpu"] and found.best == "cpu" and len(reads) == 1 and "GPU" in found.absent
    cpu = found.devices["cpu"]
    assert min(cpu.parts.values()) >= 0 and cpu.parts["call"] > 0 and sum(cpu.parts.values()) < 1
    assert {trial.size for trial in cpu.batch_sizes.trials} == {2, 8} and len(cpu.members) >= 1
    assert "advise: CPU" in capsys.readouterr().out and "Train on the CPU" in str(found)
