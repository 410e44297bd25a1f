"""Training steps of small models, compiled for H100s that are not here, by how they are distributed."""

import collections
import functools
import math
import os
import re
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn import engine
from jaxnn._compat import tracing_for
from jaxnn.observe import nbytes
from jaxnn.parallel import DATA, Layout, find_strategy, make_mesh, parse_mesh
from jaxnn.plans import CARDS, topology, work_of
from tests import tiny

if find_spec("jax_cuda13_plugin") is None or os.environ.get("JAX_PLATFORMS") != "cpu":
    pytest.skip("needs JAX's compiler for GPUs: run make test-gpu-compile", allow_module_level=True)

BATCH, TIME, CLASSES = 16, 32, 64
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
    devices = topology(CARDS["h100"], math.prod(axes.values()))
    strategy = find_strategy(how.partition("+")[0].replace("one", "data"))
    layout = Layout(strategy, make_mesh(devices, axes), (DATA, engine.MEMBERS), abstract=True)
    one = experiment(name)
    num_seeds, shape = (members, engine.Shape(1, members)) if members > 1 else (None, None)
    with tracing_for(devices[0]):
        programs = engine.programs_of(one, one.data(one.config), resident=True, layout=layout, num_seeds=num_seeds)
        compiled: Any = programs.train(shape, 1, "test")
    text, stats, lanes = compiled.as_text(), compiled.memory_analysis(), members // axes.get(engine.MEMBERS, 1)
    calls: collections.Counter[str] = collections.Counter()
    for target, count in work_of(text).calls.items():
        calls["convolution" if target.startswith("__cudnn$conv") else target] += int(count)
    leaves = zip(jax.tree.leaves(programs.shapes), jax.tree.leaves(programs.shardings), strict=True)
    shards = [jax.ShapeDtypeStruct(where.shard_shape(leaf.shape), leaf.dtype) for leaf, where in leaves]
    return Program(
        dict(calls),
        work_of(text).collectives,
        _products(text),
        set(re.findall(r"\b([a-z]+\d+)\[", text)),
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
