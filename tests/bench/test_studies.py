"""Every study of this repository is complete and runs, and its computations are correct."""

import dataclasses
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from articles import mnist_mlp
from articles.studies import (
    activations,
    bandwidth,
    convolution,
    cost,
    inference,
    latency,
    matmul,
    pipeline,
    study_scaling,
    text,
    transfer,
)
from articles.studies.scaling import PictureSettings, picture_cnn
from articles.studies.study_training import training_call, training_cases
from matplotlib.figure import Figure
from PIL import Image

from jaxnn.bench import NotMeasured, Rows, Study, find_studies, write_page
from jaxnn.models import Bottleneck, MobileNetV2, ResNet
from jaxnn.types import Splits
from tests import tiny
from tests.bench.test_study_findings import random_data
from tests.studies import CPU, GPU, cases_of, measured_rows, on_cpu, results_of, two_devices

STUDIES = find_studies()
FAST: dict[str, Any] = {"rounds": 2, "seconds": 0.0}
SCALING = PictureSettings(8, 2, (8,), 2, 2, 2, 0.0, blocks=((2,),), dense=(), size=4)
PIPELINE = pipeline.Settings(8, (2,), batch_size=4, num_workers=0, steps=3, **FAST)
# Small settings; other studies run without their data sets, so all of their cases have a reason.
TINY = {
    "activations": activations.Settings((100, 1_000), 100, **FAST),
    "bandwidth": bandwidth.Settings((64, 256), largest_on_cpu=256, **FAST),
    "convolution": convolution.Settings((5, 12), largest_loop=5, largest_on_cpu=12, compared_size=12, **FAST),
    "cost": dataclasses.replace(cost.QUICK, scripts=("mnist_mlp",), steps=1, seconds=0.0),
    "inference": inference.Settings(32, batches=(1, 4), largest_on_cpu=1, precisions=("float32",), **FAST),
    "latency": latency.Settings((1, 4), largest_cnn_on_cpu=1, **FAST),
    "matmul": matmul.Settings((8, 128), 128, 128, **FAST),
    "pipeline": PIPELINE,
    "scaling": SCALING,
    "transfer": transfer.Settings((64, 256), (8, 16), (2, 4), (1, 2), **FAST),
}
ON_ONE_DEVICE = {"matmul", "pipeline", "scaling"}
RESNET = ResNet(3, num_blocks=(1,), features=4, block=Bottleneck, stem="imagenet")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data directory with ten pictures of noise in each split, and no other data sets."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(10):
            file = folder / "cats_vs_dogs" / split / ("cats" if number < 5 else "dogs") / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (12, 10, 3), np.uint8)).save(file)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JAXNN_DATA", str(folder))
        yield folder


@pytest.mark.parametrize("study", STUDIES.values(), ids=list(STUDIES))
def test_a_study_is_complete_and_handles_no_rows(study: Study) -> None:
    assert study.title[-1] == "?" and len(study.method) > 40 and re.fullmatch(r"[a-z_]+", study.name)
    assert study.claims and all(re.fullmatch(r"A\d+", claim) for claim in study.claims)
    for settings in (study.full, study.quick):
        assert settings.rounds >= 2
        json.dumps(study.definition(settings))
    assert study.definition(study.full) != study.definition(study.quick)
    assert all(one.quantity is None for one in study.findings(Rows())) and list(study.conclude({"CPU": Rows()})) == []
    study.draw({"CPU": Rows()}, Figure(layout="constrained"))


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES.values(), ids=list(STUDIES))
def test_a_study_runs(study: Study, photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mobile = MobileNetV2(3, stages=((1, 4, 1, 1),), features=4, last_features=4)
    monkeypatch.setattr(inference, "NETWORKS", {"ResNet-50": lambda: RESNET, "MobileNetV2": lambda: mobile})
    if study.name == "scaling":
        study = study_scaling.make_study(picture_cnn, quick=SCALING, claims=("A13",))
    settings = TINY.get(study.name, study.quick)
    if study.name == "cats_vs_dogs":
        monkeypatch.setenv("JAXNN_DATA", str(tmp_path))
    context = on_cpu(settings) if study.name in ON_ONE_DEVICE else two_devices(settings)
    rows = measured_rows(study, context)
    columns = dict(zip((CPU, GPU), rows.values(), strict=False))
    results = results_of(dataclasses.replace(study, quick=settings), settings, columns)
    write_page(results, tmp_path, {study.name: dataclasses.replace(study, quick=settings)}, [study.name])

    page, measured = (tmp_path / "results.md").read_text(), [row for row in rows["cpu"] if row.seconds]
    assert f"## {study.name} ({', '.join(study.claims)})" in page and "Quick settings." in page
    assert (tmp_path / f"{study.name}.png").read_bytes().startswith(b"\x89PNG")
    assert all(bool(row.missing) != bool(row.seconds) for row in rows["cpu"])
    assert bool(measured) == (study.name in TINY), rows["cpu"][0].missing
    for label, column in columns.items():
        for finding in study.findings(column):
            assert set(finding.claim.split(", ")) <= set(study.claims)
            assert f"| {finding.claim} | {finding.what} |" in page
        for row in column:
            assert not row.missing or f"Not measured on {label}" in page and row.missing.rstrip(".") in page
    assert all(sentence.endswith(".") and sentence in page for sentence in study.conclude(columns))
    if study.name == "scaling":
        shared = rows["cpu"].where(batch="shared", alone=False)
        assert [one.what["devices"] for one in shared] == [1, 2, 4] and {one.work for one in shared} == {16}
        losses = [float(one.observed["loss"] or 0) for one in shared]
        assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5) and "predicted speed-up" in page
        # The gradient of 9·3·2 + 2 and 8·10 + 10 parameters; with it loss, accuracy and number of examples.
        sizes = [float(one.observed["all-reduce num_bytes"] or 0) for one in shared[1:]]
        assert all(4 * 146 <= size <= 4 * 149 for size in sizes)
        assert not [name for one in rows["cpu"].where(alone=True) for name in one.observed if "all-" in name]


# --- computations ---


@pytest.mark.slow
def test_all_forms_of_a_computation_agree() -> None:
    first, device = jax.devices()[:2]
    vector = np.linspace(-3, 3, 50, dtype=np.float32)
    for operation in activations.OPERATIONS:
        values = [activations.make_call(operation, form, vector, first)() for form in activations.FORMS]
        for found in values[1:]:
            np.testing.assert_allclose(np.asarray(found), values[0], rtol=1e-5, atol=1e-6)
    # At the first position of rows 0 1 2 3, 4 5 6 7, …: .6·1 − .1·2 + .5·4 − .4·6 + .2·8 − .7·9 − 1·10 = −14.7; the
    # filter sums to 0, so all positions of a ramp are equal.
    ramp, noise = np.arange(16, dtype=np.float32).reshape(4, 4), convolution.make_picture(19)
    exact = convolution.exact(noise)
    for form in convolution.FORMS:
        found = [np.asarray(convolution.make_call(form, picture, first)()) for picture in (ramp, noise)]
        np.testing.assert_allclose(found[0], np.full((2, 2), -14.7), rtol=1e-5)
        np.testing.assert_allclose(found[1], exact, rtol=1e-5, atol=1e-6)
    assert convolution.make_call("XLA", ramp, device)().devices() == {device}


def test_the_error_of_a_precision_is_its_rounding() -> None:
    def error(name: str) -> float:
        return float(matmul._error(name, 128, "cpu", jax.devices()[0])["error"])  # type: ignore[arg-type]

    assert 1e-17 < error("float64") < 1e-14 and 1e-8 < error("float32") < 1e-6
    # Steps of 1/32 have an error of 1/32/√12 each: 0.9 % of a standard deviation, in two factors 1.3 %.
    assert error("int8") == pytest.approx(0.0128, rel=0.1)
    with pytest.raises(NotMeasured, match="hardware"):
        matmul._begin("tf32", 8, "cpu", jax.devices()[0])


@pytest.mark.slow
def test_transfers_copy_and_operations_agree_wherever_the_data_are() -> None:
    device = jax.devices()[1]
    array = transfer.host_array(10_000)
    assert array.ctypes.data % 64 == 16  # JAX would use aligned memory without a copy
    copied, before = jax.block_until_ready(jax.device_put(array, device)), array.copy()
    array[:] = -1
    np.testing.assert_array_equal(copied, before)
    first, second = transfer.fetch_again(copied), transfer.fetch_again(copied)
    assert len({first.ctypes.data, second.ctypes.data, copied.unsafe_buffer_pointer()}) == 3
    for direction in transfer.DIRECTIONS:
        for memory in (transfer.PINNED, transfer.PAGEABLE):
            found = transfer.make_transfer(direction, memory, 64, device)()
            np.testing.assert_array_equal(found, transfer.host_array(16))
    for name, operation in transfer.OPERATIONS.items():
        arrays = [transfer.host_array(*shape) for shape in operation.shapes(3)]
        forms = (transfer.THERE_AND_BACK, transfer.IN_PLACE)
        found, resident = (transfer.make_computation(operation, form, 3, device)() for form in forms)
        assert isinstance(found, np.ndarray) and resident.devices() == {device}
        np.testing.assert_array_equal(found, resident)
        if name != "convolution":
            expected = np.maximum(arrays[0], 0) if name == "relu" else arrays[0] @ arrays[1]
            np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_inference_answers_as_the_model_does() -> None:
    variables, device = inference.make_variables(RESNET, 32), jax.devices()[1]
    pictures = np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), np.uint8)
    expected = RESNET.apply(variables, pictures.astype(np.float32) / 255)
    for precision, tolerance in (("float32", 1e-5), ("bfloat16", 0.05)):
        found = inference.make_call(RESNET, variables, precision, pictures, device)()
        np.testing.assert_allclose(found, expected, atol=tolerance * float(np.abs(expected).max()))
    alone, among = (latency.make_call("MLP", batch, device)() for batch in (1, 3))
    np.testing.assert_allclose(among[0], alone[0], rtol=1e-5, atol=1e-6)
    assert np.abs(among[1] - among[0]).max() > 1e-3 and among.devices() == {device}


@pytest.mark.slow
def test_pipeline_forms_train_on_the_same_batches(photographs: Path) -> None:
    losses = []
    for form in pipeline.FORMS:
        training = pipeline.FedTraining(form, PIPELINE, "cpu")
        training()
        training()
        losses.append(training.losses)
        observed = training.end()
        assert 0 <= float(observed["waited"] or 0) < 1 and observed["workers"] == 0
    assert len(losses[0]) == len(set(losses[0])) == 2
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)


@pytest.mark.slow
def test_training_calls_continue_where_the_last_one_ended() -> None:
    def losses(num_steps: int, times: int) -> list[float]:
        train, _, _ = training_call(tiny.experiment(), tiny.splits(), "cpu", num_steps)
        return [float(train().sums["loss"]) for _ in range(times)]

    parts = losses(5, 3)
    assert sum(parts) == pytest.approx(losses(15, 1)[0], rel=1e-6) and parts[2] < parts[0]


@pytest.mark.slow
def test_a_full_run_reports_its_metrics_unless_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def data(interrupt: bool) -> Splits:
        if interrupt:
            signal.raise_signal(signal.SIGTERM)  # ends the run at its next window
        train = random_data("mnist_mlp", 256).train
        return Splits(train, train)

    _, (full,) = training_cases(on_cpu(dataclasses.replace(text.STUDY.full, networks=("mnist_mlp",))))
    short = mnist_mlp.experiment.replace(num_steps=30)
    assert full.observe is not None
    monkeypatch.setattr(mnist_mlp, "experiment", dataclasses.replace(short, data=lambda _: data(False)))
    assert {"test_accuracy", "run_seconds"} <= set(full.observe())
    monkeypatch.setattr(mnist_mlp, "experiment", dataclasses.replace(short, data=lambda _: data(True)))
    with pytest.raises(KeyboardInterrupt):
        full.observe()


def test_scaling_needs_enough_devices_and_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, devices = picture_cnn(SCALING), jax.devices()
    with pytest.raises(NotMeasured, match="more than the 8 of the data"):
        study_scaling.make_step(experiment, experiment.data(experiment.config), devices[:1], 9, 2, False)
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: devices[:1])
    cases = cases_of(study_scaling.make_study(picture_cnn), on_cpu(SCALING))
    with pytest.raises(NotMeasured, match="JAX_NUM_CPU_DEVICES=4"):
        cases[-1].begin()  # type: ignore[misc]
