"""Training steps of small models and scripts, compiled for cards that are not here: calls, collectives, memory."""

import collections
import functools
import importlib
import math
import os
import pathlib
import re
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pooch
import pytest

import jaxnn as jn
from jaxnn import engine
from jaxnn._compat import tracing_for
from jaxnn.observe import Work, nbytes
from jaxnn.parallel import DATA, Layout, Strategy, make_mesh, parse_mesh
from jaxnn.plans import CARDS, topology
from tests import tiny

if find_spec("jax_cuda13_plugin") is None or os.environ.get("JAX_PLATFORMS") != "cpu":
    pytest.skip("needs JAX's compiler for GPUs: run make test-gpu-compile", allow_module_level=True)

BATCH, TIME, CLASSES = 16, 32, 64
SHAPE = re.compile(r"%([\w.\-]+)(?: = |: )\w+\[([\d,]*)\]")
MOST_TERMS = 64  # that may be summed in half precision
# How a step is distributed, the strategy first, to the axes of the mesh.
MESHES = {
    "one": "data=1",
    "data": "data=8",
    "fsdp": "data=8",
    "pmap": "data=8",
    "data+model": "data=4,model=2",
    "data+members": "members=8,data=1",
    "data+members+data": "members=2,data=4",
    "fsdp+members": "members=2,data=4",
}
RNN = functools.partial(jn.models.RecurrentLanguageModel, CLASSES, features=64, num_layers=2)
GPT = functools.partial(jn.models.GPT, CLASSES, num_layers=2, features=192, max_length=TIME)
MODELS = {
    "mlp": jn.models.MLP((256, 256, CLASSES)),
    "cnn": jn.models.CNN(CLASSES, blocks=((16,), (32,)), dense=(64,)),
    "resnet20": jn.models.ResNet(CLASSES, num_blocks=(3, 3, 3)),
    "lstm": RNN(layer=jn.nn.LSTM),
    "gru": RNN(layer=jn.nn.GRU),
    "gpt4": GPT(num_heads=4),
    "gpt12": GPT(num_heads=12),
}


def experiment(name: str) -> jn.Experiment[Any]:
    """Trains ``MODELS[name]`` by Adam, GPTs in bfloat16, the others in float32; or ``trees``."""
    if name == "trees":
        return tree_experiment()
    reads_text = name.startswith(("lstm", "gru", "gpt"))
    shape = (TIME,) if reads_text else (256,) if name == "mlp" else (16, 16, 3)
    inputs = np.ones((2 * BATCH, *shape), np.int32 if reads_text else np.float32)
    targets = inputs if reads_text else np.arange(len(inputs), dtype=np.int32)
    make_task = jn.tasks.next_token if reads_text else jn.tasks.classification
    policy = jn.nn.Policy(compute="bfloat16" if name.startswith("gpt") else "float32")
    return tiny.experiment(
        data=jn.data.arrays(train=(inputs, targets), num_classes=CLASSES),
        task=lambda config: make_task(MODELS[name], policy=policy),
        optimizer=lambda config: optax.adam(config.learning_rate),
        batch_size=BATCH,
    )


def tree_experiment() -> jn.Experiment[Any]:
    """Boosts trees of a table with a category."""
    inputs = np.random.default_rng(0).integers(0, 9, (32 * BATCH, 4)).astype(float)
    splits = jn.data.binned((inputs, inputs[:, 0].astype(np.float32)), categorical=(3,))

    def booster(config: Any) -> jn.trees.Boosting:
        given = {"num_trees": 2, "max_depth": 3, "categorical": (3,)}
        return jn.trees.boosting(jn.trees.squared_error(), learning_rate=config.learning_rate, **given)

    return jn.trees.experiment(tiny.Config(batch_size=32 * BATCH, num_steps=2), lambda config: splits, booster)


class Program(NamedTuple):
    """A compiled training step as one device runs it."""

    calls: dict[str, float]  # to libraries
    collectives: dict[str, tuple[float, float]]
    products: set[str]  # dtypes of the operands of products
    dtypes: set[str]  # of all arrays
    half_sums: list[str]  # instructions that sum more than 64 terms in bfloat16
    call_shapes: set[tuple[int, ...]]  # of outputs of recurrent layers and attention
    params: int  # bytes, not sharded
    state: int  # bytes, sharded
    aliased: int
    temporary: int


def compile_step(name: str, how: str, members: int) -> Program:
    """Compiles a step of one run, or of a population if there are several ``members``."""
    axes = parse_mesh(MESHES[how])
    if members > 1:
        axes = {engine.MEMBERS: 1, **axes}
    # On an H100, cuDNN is not chosen for so few features and keys.
    card = "a100" if name.startswith(("lstm", "gpt")) else "h100"
    devices = topology(CARDS[card], math.prod(axes.values()))
    strategy = Strategy.find(how.partition("+")[0].replace("one", "data"))
    layout = Layout(strategy, make_mesh(devices, axes), (DATA, engine.MEMBERS), abstract=True)
    one = experiment(name)
    num_seeds, shape = (members, engine.Shape(1, members)) if members > 1 else (None, None)
    with tracing_for(devices[0]):
        programs = engine.programs_of(one, one.data(one.config), resident=True, layout=layout, num_seeds=num_seeds)
        compiled: Any = programs.train(shape, 1, "test")
    text, stats, lanes = compiled.as_text(), compiled.memory_analysis(), members // axes.get(engine.MEMBERS, 1)
    calls: collections.Counter[str] = collections.Counter()
    for target, count in Work.of(text).calls.items():
        calls["convolution" if target.startswith("__cudnn$conv") else target] += int(count)
    leaves = zip(jax.tree.leaves(programs.shapes), jax.tree.leaves(programs.shardings), strict=True)
    shards = [jax.ShapeDtypeStruct(where.shard_shape(leaf.shape), leaf.dtype) for leaf, where in leaves]
    return Program(
        dict(calls),
        Work.of(text).collectives,
        _products(text),
        set(re.findall(r"\b([a-z]+\d+)\[", text)),
        _half_sums(text),
        {
            tuple(map(int, found.split(",")))
            for found in re.findall(r" = \(\w+\[([\d,]*)\].* custom-call\(.*=\"(?:__cudnn\$fmha|cudnn_rnn_ffi)", text)
        },
        lanes * nbytes(programs.shapes.params),
        lanes * nbytes(shards),
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes,
    )


def _products(text: str) -> set[str]:
    dtypes = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", text))
    operands = re.findall(r" (?:dot|convolution)\(%([\w.\-]+), %([\w.\-]+)", text)
    operands += re.findall(r' custom-call\(%([\w.\-]+), %([\w.\-]+).*custom_call_target="__cu', text)
    return {dtypes[name] for pair in operands for name in pair if name in dtypes}


def _half_sums(text: str) -> list[str]:
    sizes = {name: [*map(int, filter(None, sizes.split(",")))] for name, sizes in SHAPE.findall(text)}
    adds = {name for name, body in re.findall(r"^%([\w.\-]+) \(.*\{$([^}]*)^\}", text, re.MULTILINE) if " add(" in body}
    found = []
    for line, operands, by in re.findall(r"(= bf16\[.* (?:reduce|scatter)\((.*?)\), .*to_apply=%([\w.\-]+).*)", text):
        *_, last = names = [operand.strip().removeprefix("%") for operand in operands.split(",")]
        axes = re.findall(r" dimensions=\{([\d,]*)\}", line)  # a scatter has none
        summed = [sizes[names[0]][int(axis)] for axis in axes[0].split(",")] if axes else sizes[last][:1]
        found += [line] * (by in adds and math.prod(summed) > MOST_TERMS)
    return found


class Case(NamedTuple):
    """What to compile, and the kinds of collectives with the most of each, and the temporaries that it needs."""

    name: str
    how: str
    members: int
    collectives: dict[str, int]
    temporary: float  # MB, within a factor of two

    def __str__(self) -> str:
        return f"{self.name}-{self.how}" + (f"-{self.members}" if self.members > 1 else "")


GATHERED = {"all-gather": 1, "all-reduce": 1, "reduce-scatter": 1}
# Gradients of kernels are summed in bfloat16, those of biases and embeddings in float32. Tokens are exchanged for their
# embeddings and for their gradients.
GPT_FSDP = {"all-gather": 3, "all-reduce": 3, "reduce-scatter": 3, "all-to-all": 2}
# A block's sums over the axis `model`, forward and backward, and its exchange of query, key and value.
GPT_MODEL = {"all-reduce": 11, "all-to-all": 8, "collective-permute": 4}
CASES = [
    Case("mlp", "one", 1, {}, 0.35),
    Case("mlp", "data", 1, {"all-reduce": 1}, 1.2),
    Case("mlp", "fsdp", 1, GATHERED, 0.67),
    Case("mlp", "pmap", 1, {"all-reduce": 1}, 1.2),
    Case("cnn", "one", 1, {}, 0.79),
    Case("cnn", "data", 1, {"all-reduce": 1}, 0.34),
    Case("cnn", "fsdp", 1, {"all-gather": 2, "all-reduce": 1, "reduce-scatter": 2}, 0.26),
    Case("cnn", "pmap", 1, {"all-reduce": 1}, 0.34),
    # The batch statistics of 19 layers, forward and backward, and the gradients.
    Case("resnet20", "one", 1, {}, 7.0),
    Case("resnet20", "data", 1, {"all-reduce": 40}, 2.7),
    Case("resnet20", "fsdp", 1, {"all-gather": 21, "all-reduce": 40, "reduce-scatter": 20, "all-to-all": 1}, 1.7),
    # Means and variances are exchanged one after the other.
    Case("resnet20", "pmap", 1, {"all-reduce": 79}, 2.7),
    Case("lstm", "one", 1, {}, 9.6),
    Case("lstm", "data", 1, {"all-reduce": 2}, 1.7),
    Case("lstm", "fsdp", 1, {"all-gather": 1, "all-reduce": 2, "reduce-scatter": 1}, 1.7),
    Case("lstm", "pmap", 1, {"all-reduce": 2}, 1.7),
    Case("gru", "one", 1, {}, 3.1),
    Case("gru", "data", 1, {"all-reduce": 2}, 0.59),
    # The kernel is gathered once, and not in each step.
    Case("gru", "fsdp", 1, {"all-gather": 2, "all-reduce": 2, "reduce-scatter": 2}, 0.62),
    Case("gru", "pmap", 1, {"all-reduce": 2}, 0.65),
    Case("gpt4", "one", 1, {}, 15.0),
    Case("gpt4", "data", 1, {"all-reduce": 4}, 6.6),
    Case("gpt4", "fsdp", 1, GPT_FSDP, 6.5),
    Case("gpt4", "pmap", 1, {"all-reduce": 4}, 7.4),
    Case("gpt4", "data+model", 1, GPT_MODEL, 4.3),
    Case("gpt12", "data+model", 1, GPT_MODEL, 4.3),
    # Members never communicate.
    Case("mlp", "one", 8, {}, 4.5),
    Case("mlp", "data+members", 8, {}, 0.35),
    Case("mlp", "data+members+data", 8, {"all-reduce": 1}, 4.7),
    Case("mlp", "fsdp+members", 8, GATHERED, 3.0),
    Case("cnn", "one", 4, {}, 3.8),
    Case("lstm", "one", 2, {}, 18.0),
    Case("lstm", "data+members+data", 2, {"all-gather": 1, "all-reduce": 2}, 2.8),
    Case("gru", "fsdp+members", 4, {"all-gather": 2, "all-reduce": 2, "reduce-scatter": 2}, 3.1),
    Case("gpt4", "one", 2, {}, 26.2),
    Case("gpt4", "data+members", 8, {}, 15.0),
    Case("gpt4", "data+members+data", 2, {"all-gather": 1, "all-reduce": 4}, 6.7),
    Case("gpt4", "fsdp+members", 2, GPT_FSDP, 6.7),
]
CALLS = {
    "cnn": {"convolution": 2 + 3},  # of the first layer, the inputs have no gradient
    "resnet20": {"convolution": 21 + 41},
    "lstm": {"cudnn_rnn_ffi": 2, "cudnn_rnn_bwd_ffi": 2},
    "gpt": {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 2},
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_step(case):
    program, axes = compile_step(case.name, case.how, case.members), parse_mesh(MESHES[case.how])
    family = "gpt" if "gpt" in case.name else case.name
    lanes = case.members // axes.get("members", 1)
    # cuDNN's LSTM runs the members of a device one after another.
    times = lanes if family == "lstm" else 1
    if family == "cnn" and lanes > 1:
        times = 0  # cuDNN takes members with kernels of their own as groups, slowly: products of patches
    assert program.calls == {name: times * count for name, count in CALLS.get(family, {}).items() if times}
    # Each device computes on its rows, of all its members, and on its heads.
    rows, shapes = BATCH // axes["data"], set()
    if family == "lstm":
        shapes = {(rows, TIME, 64)}
    if family == "gpt":
        heads = int(case.name.removeprefix("gpt"))
        shapes = {(rows * lanes, heads // axes.get("model", 1), TIME, 192 // heads)}
    assert program.call_shapes == shapes

    counts = {kind: count for kind, (count, _) in program.collectives.items()}
    assert counts.keys() == case.collectives.keys()
    # The digest of a sharded state is one more sum.
    more = {"all-reduce": int("fsdp" in case.how or "model" in axes)}
    assert all(count <= case.collectives[kind] + more.get(kind, 0) for kind, count in counts.items()), counts
    # No more is gathered than parameters, once forward and once backward.
    assert program.collectives.get("all-gather", (0, 0))[1] <= 2 * program.params

    # A population has some values besides.
    assert program.state <= program.aliased <= program.state + 32 * case.members
    if "fsdp" in case.how:
        assert program.state < 1.15 * 3 * program.params / axes["data"]  # Adam keeps two moments
    assert case.temporary / 2 < program.temporary / 1e6 < case.temporary * 2, program.temporary

    assert not program.half_sums
    assert program.products == {"bf16" if family == "gpt" else "f32"}
    assert "f64" not in program.dtypes


@pytest.mark.parametrize(("how", "members"), [("one", 4), ("data", 1), ("data+members+data", 2)])
def test_boosted_trees(how, members):
    program = compile_step("trees", how, members)
    assert not program.calls
    if how == "one":
        assert not program.collectives
    else:
        # Of three levels the histograms of up to two parents, int64; the largest gradient, a bound of their sum, and
        # the loss, and the digest. The scores of all rows are gathered.
        assert program.collectives["all-reduce"][0] == 3 + 4
        assert 3 * 4 * 2 * 256 * 16 <= program.collectives["all-reduce"][1] < 3 * 4 * 2 * 256 * 16 + 64
        assert program.collectives["all-gather"] == (1, 32 * BATCH * 4)


EXPERIMENTS = pathlib.Path(__file__).resolve().parents[2] / "experiments"
SCRIPTS = sorted(path.stem for path in EXPERIMENTS.glob("*.py") if "\nexperiment = " in path.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_planned(name, real_data, tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("tests download nothing")

    monkeypatch.setattr(pooch, "retrieve", refuse)
    monkeypatch.setenv("JAXNN_DATA", str(real_data or tmp_path))
    try:
        found = jn.plan(importlib.import_module(name).experiment, device="h100")
    except jn.DataError as error:
        pytest.skip(str(error))
    assert found.fits and found.work.launches > 0
