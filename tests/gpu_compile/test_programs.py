"""Training steps compiled for H100s: calls to libraries, collectives, donation, memory and precision."""

from typing import NamedTuple

import pytest

from jaxnn.parallel import parse_mesh
from tests.gpu_compile.programs import BATCH, MESHES, TIME, compile_step


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
# Tokens are exchanged for their embeddings and for their gradients.
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
    Case("gpt4", "data", 1, {"all-reduce": 3}, 6.6),
    Case("gpt4", "fsdp", 1, GPT_FSDP, 6.5),
    Case("gpt4", "pmap", 1, {"all-reduce": 3}, 7.4),
    Case("gpt4", "data+model", 1, GPT_MODEL, 4.3),
    Case("gpt12", "fsdp", 1, GPT_FSDP, 6.5),
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
    Case("gpt4", "data+members+data", 2, {"all-gather": 1, "all-reduce": 3}, 6.7),
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
    assert program.calls == {name: times * count for name, count in CALLS.get(family, {}).items()}
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
    assert all(count <= case.collectives[kind] for kind, count in counts.items()), counts
    # No more is gathered than parameters, once forward and once backward.
    assert program.collectives.get("all-gather", (0, 0))[1] <= 2 * program.params

    # A population has some values besides.
    assert program.state <= program.aliased <= program.state + 32 * case.members
    if "fsdp" in case.how:
        assert program.state < 1.15 * 3 * program.params / axes["data"]  # Adam keeps two moments
    assert case.temporary / 2 < program.temporary / 1e6 < case.temporary * 2

    assert program.products == {"bf16" if family == "gpt" else "f32"}
    assert "f64" not in program.dtypes


@pytest.mark.parametrize(("how", "members"), [("one", 4), ("data", 1), ("data+members+data", 2)])
def test_boosted_trees(how, members):
    program = compile_step("trees", how, members)
    assert "f64" not in program.dtypes and "s64" not in program.dtypes and not program.calls
    if how == "one":
        assert not program.collectives
    else:
        # Of three levels the histograms of up to two parents, and two sums in one; the scores of all rows are gathered.
        assert program.collectives["all-reduce"][0] == 3 + 1
        assert 3 * 4 * 2 * 256 * 8 <= program.collectives["all-reduce"][1] < 3 * 4 * 2 * 256 * 8 + 64
        assert program.collectives["all-gather"] == (1, 32 * BATCH * 4)
