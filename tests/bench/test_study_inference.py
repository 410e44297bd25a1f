"""The study of networks that are asked: what is computed, which batches, and the article's percent by hand."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from articles.studies import inference
from flax import linen

from jaxnn.bench import Bench, Row, Rows, bench
from jaxnn.models import Bottleneck, MobileNetV2, ResNet
from jaxnn.nn import Policy

MODEL = ResNet(3, num_blocks=(1,), features=4, block=Bottleneck, stem="imagenet")
TINY = inference.Settings(32, batches=(1, 2, 4), largest_on_cpu=2, precisions=("float32",), rounds=2, seconds=0.0)


def row(network: str, batch: int, seconds: float, precision: str = "float32") -> Row:
    return Row({"network": network, "precision": precision, "batch": batch}, (seconds,), batch, "pictures")


def test_variables_are_those_of_the_network() -> None:
    found = inference.make_variables(MODEL, 32)
    own = jax.eval_shape(MODEL.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 32, 32, 3), "float32"))
    assert jax.tree.structure(found) == jax.tree.structure(own)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), own
    )
    norm, statistics = found["params"]["BatchNorm_0"], found["batch_stats"]["BatchNorm_0"]
    assert set(norm["scale"]) == set(statistics["var"]) == {1.0} and set(norm["bias"]) == set(statistics["mean"]) == {
        0.0
    }
    # 7 · 7 · 3 numbers go into each that the first convolution gives.
    assert np.std(found["params"]["Conv_0"]["kernel"]) == pytest.approx((2 / 147) ** 0.5, rel=0.1)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_a_call_answers_as_the_network_does(precision: str, tolerance: float) -> None:
    variables = inference.make_variables(MODEL, 32)
    pictures = np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), np.uint8)
    found = inference.make_call(MODEL, variables, precision, pictures, jax.devices()[0])()
    expected = MODEL.apply(variables, pictures.astype(np.float32) / 255)
    assert found.shape == (2, 3) and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=tolerance * float(np.abs(expected).max()))
    assert (np.array_equal(found, found.astype(jax.numpy.bfloat16))) == (precision == "bfloat16")


def test_it_computes_in_the_precision_asked_for() -> None:
    variables = jax.tree.map(lambda leaf: leaf, inference.make_variables(MODEL, 32))
    variables["params"] = Policy(compute="bfloat16").cast_to_compute(variables["params"])
    answer = inference.make_answer(MODEL, Policy(compute="bfloat16"))
    traced = str(jax.make_jaxpr(answer)(variables, jax.ShapeDtypeStruct((1, 32, 32, 3), "uint8")))
    products = [line for line in traced.splitlines() if "dot_general" in line or "conv_general_dilated" in line]
    assert products and not [line for line in products if ":f32[" in line.partition("=")[0]]


class Witness(linen.Module):
    """Tells the device that layers choose their implementations by."""

    tell: Callable[[Any], None]

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.tell(jax.config.jax_default_device)
        return x.mean(axis=(1, 2)) * self.param("scale", linen.initializers.ones, (3,))[None]


def test_layers_are_traced_for_the_device_that_they_run_on() -> None:
    device, seen = jax.devices()[2], []
    model = Witness(seen.append)
    call = inference.make_call(
        model, inference.make_variables(model, 4), "float32", np.ones((1, 4, 4, 3), "u1"), device
    )
    np.testing.assert_allclose(call(), np.full((1, 3), 1 / 255), rtol=1e-6)
    assert seen[-1] == device


def test_a_cpu_gets_no_large_batches() -> None:
    device = jax.devices()[0]
    groups = list(inference.STUDY.cases(Bench({"cpu": device, "gpu": device}, TINY)))
    batches: dict[str, list[Any]] = {"cpu": [], "gpu": []}
    for case in (case for group in groups for case in group if case.what["network"] == "ResNet-50"):
        batches[case.device].append(case.what["batch"])
    assert batches == {"cpu": [1, 2], "gpu": [1, 2, 4]}


def test_findings_are_the_first_answer_and_the_best_batch() -> None:
    rows = Rows([row("ResNet-50", 1, 0.5), row("ResNet-50", 4, 1.0), row("ResNet-50", 8, 2.5)])
    one, many = inference.STUDY.findings(rows)
    assert one.quantity is not None and one.quantity.median == 0.5 and one.what == "ResNet-50, float32: one picture"
    assert many.quantity is not None and many.quantity.median == 4.0
    assert (many.note, many.article) == ("batch 4", inference.ARTICLE)


def test_percent_faster_is_as_in_the_article() -> None:
    columns = {
        "CPU, Chip": Rows([row("ResNet-50", 1, 0.1), row("ResNet-50", 8, 1.0)]),
        "GPU, H100": Rows([row("ResNet-50", 8, 0.1), row("ResNet-50", 904, 10.0, "bfloat16")]),
    }
    # 10 a second against 90.4.
    assert inference.STUDY.conclude(columns) == [
        f"ResNet-50: GPU, H100 is 804 % faster than CPU, Chip; in the article {inference.ARTICLE}."
    ]


def test_the_page_has_both_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "ResNet-50": lambda: MODEL,
        "MobileNetV2": lambda: MobileNetV2(3, stages=((1, 4, 1, 1),), features=4, last_features=4),
    }
    monkeypatch.setattr(inference, "NETWORKS", small)
    study = dataclasses.replace(inference.STUDY, quick=TINY)
    found = bench(study, devices=("cpu",), quick=True, out=tmp_path, say=lambda line: None)
    (rows,) = found["inference"].rows.values()
    assert [(one.what["network"], one.what["batch"]) for one in rows] == [
        ("ResNet-50", 1),
        ("ResNet-50", 2),
        ("MobileNetV2", 1),
        ("MobileNetV2", 2),
    ]
    page = (tmp_path / "results.md").read_text()
    assert "| A13 | MobileNetV2, float32: one picture | – | " in page
    assert f"| A13 | ResNet-50, float32: pictures a second, at the best batch | {inference.ARTICLE} | " in page
