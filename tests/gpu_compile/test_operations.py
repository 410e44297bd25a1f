"""Forms of attention compiled for an H100, by cuDNN where it can, and products compiled for every card."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen
from jax.sharding import SingleDeviceSharding

import jaxnn as jn
from jaxnn._compat import tracing_for
from jaxnn.nn import attention
from jaxnn.observe import Lowered, Traced, Work
from jaxnn.plans import CARDS, plan, topology
from jaxnn.types import ConfigError
from tests import tiny
from tests.gpu_compile.test_programs import SHAPE, TIME

BATCH, HEADS = 2, 4
BOTH = {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1}
MASKED = {f"__cudnn$fmhaScaleBias{name}": 1 for name in ("Softmax", "SoftmaxBackward")}


class Form(NamedTuple):
    """A form of attention, and the calls that its value and gradient make; no calls: XLA's own kernels."""

    name: str
    calls: dict[str, int] = {}
    dtype: str = "bfloat16"
    queries: int = TIME
    keys: int = TIME
    key_heads: int = HEADS
    head_dim: int = 64
    mask: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    vmap: tuple[int | None, int | None] | None = None  # axes of the arrays, and of lengths, mask and bias
    options: dict[str, Any] = {}

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


CAUSAL: dict[str, Any] = {"options": {"causal": True}}
ODD: dict[str, Any] = {"queries": 33, "keys": 33}
FULL = (BATCH, HEADS, TIME, TIME)
FORMS = [
    Form("plain", BOTH),
    Form("causal", BOTH, **CAUSAL),
    Form("causal of odd length", **ODD, **CAUSAL),
    Form("more keys", BOTH, keys=64),
    Form("odd keys", keys=33),
    Form("mask of one head", MASKED, mask=(BATCH, 1, TIME, TIME)),
    Form("mask of all heads", MASKED, mask=FULL),
    Form("mask of one row", MASKED, mask=(1, 1, 1, TIME)),
    Form("mask of odd length", mask=(BATCH, 1, 33, 33), **ODD),
    Form("mask and causal", MASKED, mask=(BATCH, 1, TIME, TIME), **CAUSAL),
    Form("bias of all heads", MASKED, bias=(1, HEADS, TIME, TIME)),
    Form("bias of one row", MASKED, bias=(1, HEADS, 1, TIME)),
    Form("bias and causal", MASKED, bias=FULL, **CAUSAL),
    Form("bias and mask", MASKED, mask=FULL, bias=FULL),
    Form("lengths", BOTH, lengths=(BATCH,)),
    Form("lengths and causal", BOTH, lengths=(BATCH,), **CAUSAL),
    Form("grouped queries", BOTH, key_heads=2, **CAUSAL),
    Form("head_dim 128", BOTH, head_dim=128, **CAUSAL),
    Form("head_dim 256", head_dim=256, **CAUSAL),
    Form("head_dim 12", head_dim=12, **CAUSAL),
    Form("float16", BOTH, dtype="float16", **CAUSAL),
    Form("float32", dtype="float32", **CAUSAL),
    Form("scale", BOTH, options={"scale": 0.5}),
    Form("vmap", BOTH, vmap=(0, None), **CAUSAL),
    Form("vmap of lengths", BOTH, vmap=(0, 0), lengths=(BATCH,)),
    Form("vmap of a mask", MASKED, vmap=(0, 0), mask=(BATCH, 1, TIME, TIME)),
    Form("vmap of a bias", MASKED, vmap=(0, 0), bias=(1, HEADS, TIME, TIME)),
    Form("vmap with a shared mask", MASKED, vmap=(0, None), mask=(1, 1, 1, TIME)),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_attention_and_its_gradient(form):
    device = topology(CARDS["h100"], 1)[0]

    def shape(axis: int | None, dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
        mapped = (3,) if form.vmap is not None and axis is not None else ()
        return jax.ShapeDtypeStruct((*mapped, *sizes), dtype, sharding=SingleDeviceSharding(device))

    array, other = form.vmap or (0, 0)
    keys = shape(array, form.dtype, BATCH, form.keys, form.key_heads, form.head_dim)
    arrays = (shape(array, form.dtype, BATCH, form.queries, HEADS, form.head_dim), keys, keys)
    kinds = {"lengths": jnp.int32, "mask": jnp.bool_, "bias": form.dtype}
    sizes = {name: getattr(form, name) for name in kinds if getattr(form, name) is not None}
    given = {name: shape(other, kinds[name], *size) for name, size in sizes.items()}

    def loss(arrays: Any, given: Any) -> jax.Array:
        # By default, cuDNN's takes more keys.
        options = {"implementation": "cudnn", **form.options} if form.calls else form.options
        return attention(*arrays, **given, **options).astype(jnp.float32).sum()

    function = jax.value_and_grad(loss)
    if form.vmap is not None:
        function = jax.vmap(function, in_axes=form.vmap)
    with tracing_for(device):
        compiled = jax.jit(function).lower(arrays, given).compile()
    assert Work.of(compiled.as_text()).calls == form.calls


def test_cards_before_8_use_attention_that_they_can_compute():
    (device,) = topology(CARDS["t4"], 1)
    shape = jax.ShapeDtypeStruct((BATCH, TIME, HEADS, 64), "bfloat16", sharding=SingleDeviceSharding(device))
    gradient = jax.jit(jax.grad(lambda query: attention(query, query, query, causal=True).astype("float32").sum()))
    with tracing_for(device):
        assert Traced(gradient, shape).implementations == {"attention": ["math"]}
        assert gradient.lower(shape).compile() is not None


def test_compiler_options_are_known_and_change_the_program():
    (device,) = topology(CARDS["h100"], 1)
    shape = jax.ShapeDtypeStruct((8, 16, 16, 8), "float32", sharding=SingleDeviceSharding(device))

    def added(x: jax.Array) -> jax.Array:
        kernel = jnp.ones((3, 3, 8, 8))
        options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        rows = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **options)
        return jnp.zeros((3, 16, 16, 8)).at[jnp.arange(8) % 3].add(rows)

    with tracing_for(device):
        one, other = (Lowered.of(added, "", "", shape, deterministic=same) for same in (False, True))
        assert one.options.faster and not one.options.needed and other.options.needed
        # What a scatter adds by atomics in any order is sorted and summed before.
        kernels = [lowered.compile()[0].as_text().count(" fusion(") for lowered in (one, other)]
        assert kernels[0] < kernels[1]


def test_an_experiment_computes_here_while_its_step_is_traced_for_the_card():
    def init(key: jax.Array, inputs: jax.Array) -> Any:
        with jax.ensure_compile_time_eval():
            scale = float(jnp.sqrt(jnp.asarray(9.0)))
        return jax.tree.map(lambda leaf: leaf / scale, tiny.init(key, inputs))

    inputs, labels = tiny.points(8)
    held = jax.device_put(jnp.arange(3.0), jax.devices()[0])
    experiment = tiny.experiment(
        data=jn.data.arrays(train=(jnp.asarray(inputs), jnp.asarray(labels))),
        model=(init, lambda params, x: tiny.apply(params, x) * held[None]),
        optimizer=lambda config: optax.add_noise(0.1, 0.1, jax.random.key(config.seed)),
    )
    assert plan(experiment, device="h100").work.launches > 0
    assert plan(experiment, device="h100", members=2).work.launches > 0


def test_what_was_traced_for_this_machine_is_traced_again_for_the_card():
    (device,) = topology(CARDS["h100"], 1)
    attend = jax.jit(lambda query: attention(query, query, query))
    shape = jax.ShapeDtypeStruct((BATCH, 512, HEADS, 64), "bfloat16")
    assert Traced(attend, shape).implementations != {"attention": ["cudnn"]}
    with tracing_for(device):
        assert Traced(attend, shape).implementations == {"attention": ["cudnn"]}


@pytest.mark.parametrize(
    ("layer", "shape", "all_inside"),
    [
        (jn.nn.LSTM(64, implementation="cudnn"), (16, TIME, 64), False),  # a graph of five kernels, the fewest
        (jn.models.CNN(10, blocks=((8,), (8,)), dense=(16,)), (16, 16, 16, 3), True),
    ],
)
def test_kernels_outside_of_graphs_are_those_that_xla_leaves_outside(layer, shape, all_inside, tmp_path):
    (device,) = topology(CARDS["h100"], 1)
    inputs = jax.ShapeDtypeStruct(shape, "float32", sharding=SingleDeviceSharding(device))

    def loss(params: Any, inputs: jax.Array) -> jax.Array:
        return jnp.sin(layer.apply(params, jnp.sort(jnp.cos(inputs), axis=0))).sum()

    with tracing_for(device):
        params = jax.eval_shape(layer.init, jax.random.key(0), inputs)
        lowered = Lowered.of(jax.value_and_grad(loss), "", "", params, inputs)
        dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
        compiled = lowered.program.compile({**lowered.options.faster, **dump})
    (graphs,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    inside = len(re.findall(r"^ +\d+: k", graphs.read_text(), re.MULTILINE))
    work = Work.of(compiled.as_text())
    assert work.launches == work.alone + inside and (work.alone == 0) == all_inside


@pytest.mark.parametrize("tied", [False, True])
def test_products_with_an_odd_vocabulary_are_padded(tied):
    (device,) = topology(CARDS["h100"], 1)
    tokens = jax.ShapeDtypeStruct((16, TIME), "int32", sharding=SingleDeviceSharding(device))
    model = jn.models.GPT(1027, num_layers=1, features=64, num_heads=1, max_length=TIME, tied=tied)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
        return jn.nn.cross_entropy(model.apply(half, tokens), tokens).sum()

    with tracing_for(device):
        params = linen.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens))
        text = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile().as_text()
    sizes = {name: set(shape.split(",")) for name, shape in SHAPE.findall(text)}
    products = re.findall(r"%([\w.\-]+) = .* dot\(%([\w.\-]+), %([\w.\-]+)", text)
    wide = [set().union(*map(sizes.__getitem__, names)) for names in products]
    # The third product, the hidden states' gradient, sums over the classes, which XLA splits.
    assert sum("1152" in one for one in wide) >= 2 and not any("1027" in one for one in wide), wide


def test_calls_of_python_are_refused():
    def apply(params: Any, inputs: jax.Array) -> jax.Array:
        jax.debug.print("{}", inputs.sum())
        return tiny.apply(params, inputs)

    with pytest.raises(ConfigError, match="calls Python .* cannot be compiled for a card that is not here"):
        plan(tiny.experiment(model=(tiny.init, apply)), device="h100")


@pytest.mark.parametrize("name", CARDS)
def test_products_compile_for_every_card(name):
    (device,) = topology(CARDS[name], 1)
    for dtype in ("float32", "bfloat16"):
        shape = jax.ShapeDtypeStruct((256, 256), dtype, sharding=SingleDeviceSharding(device))
        with tracing_for(device):
            compiled = jax.jit(jnp.matmul).lower(shape, shape).compile()
        assert Work.of(compiled.as_text()).launches >= 1
        assert compiled.memory_analysis().argument_size_in_bytes == 2 * 256**2 * jnp.dtype(dtype).itemsize
