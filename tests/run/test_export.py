"""Models as files: equal to the run's predictions for any batch size, and used without jaxnn."""

import sys
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxnn as jn
from tests import draws, shell, tiny

pytest.importorskip("flatbuffers", reason="StableHLO files need jaxnn[export]")
IMAGES = np.random.default_rng(0).integers(0, 256, (11, 8, 8, 1)).astype(np.uint8)
TOKENS = np.random.default_rng(0).integers(0, 7, (11, 5)).astype(np.int32)
M = jn.models
MODELS: dict[str, tuple[Any, np.ndarray]] = {
    "cnn": (M.CNN(3, blocks=((4,),), dense=(4,), batch_norm=True), IMAGES),
    "lstm": (M.RecurrentClassifier(3, vocabulary_size=7, features=4, pad_id=0), TOKENS),
    "gpt": (M.GPT(7, num_layers=1, features=8, num_heads=2, max_length=5), TOKENS),
}


def task_of(model: Any) -> jn.Task:
    """Predicts with ``model``, and is trained on its parameters alone, which compiles fast."""

    def loss(params: Any, state: Any, batch: jn.Batch, key: jax.Array) -> Any:
        return sum(leaf.mean() for leaf in jax.tree.leaves(params)), (state, {})

    return jn.tasks.classification(model)._replace(loss=loss, check=lambda *_: None)


@pytest.fixture(scope="module")
def runs() -> dict[str, jn.Run]:
    def run_of(model: Any, inputs: np.ndarray) -> jn.Run:
        data, optimizer = jn.data.arrays((inputs, np.arange(11))), jn.optim.with_ema(optax.sgd(9.0), 0.5)
        parts = {"task": lambda config: task_of(model), "optimizer": lambda config: optimizer}
        # Given parameters, since the initializers of some layers compile for seconds.
        example = inputs[:1] / np.float32(255) if inputs is IMAGES else inputs[:1]
        params = draws.variables(model, example)["params"]
        experiment = tiny.experiment(data=data, params=lambda config: params, num_steps=2, **parts)
        return tiny.fit(experiment, steps_per_call=1)

    return {name: run_of(*parts) for name, parts in MODELS.items()}


USE = """
import pathlib, sys, jax, numpy as np
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.stablehlo")):
    model = jax.export.deserialize(bytearray(file.read_bytes()))
    with np.load(file.with_suffix(".npz")) as arrays:
        expected = dict(arrays)
    for count in (3, 11) if file.stem == "cnn" else (3,):
        outputs = model.call(expected["inputs"][:count])
        np.testing.assert_allclose(outputs, expected["outputs"][:count], rtol=1e-4, atol=1e-5)
    print(file.stem)
assert not {"jaxnn", "flax", "optax"} & set(sys.modules)
"""


@pytest.mark.slow
def test_models_with_a_symbolic_batch_predict_as_the_run_and_need_jax_alone(runs, tmp_path):
    for name, run in runs.items():
        run.export(tmp_path / f"{name}.stablehlo")
        np.savez(tmp_path / f"{name}.npz", inputs=MODELS[name][1], outputs=run.predict(MODELS[name][1]))
    done = shell.python("-I", "-c", USE, tmp_path)
    assert (done.stdout.split(), done.returncode) == (sorted(MODELS), 0), done.stderr


@pytest.mark.slow
def test_one_file_has_several_platforms_and_a_given_batch(runs, tmp_path):
    path = runs["cnn"].export(tmp_path / "cnn.stablehlo", batch=5, platforms=("cpu", "cuda", "tpu"))
    exported = jax.export.deserialize(bytearray(path.read_bytes()))
    assert exported.platforms == ("cpu", "cuda", "tpu") and exported.in_avals[0].shape == (5, 8, 8, 1)
    # Operations of jaxnn's own are replaced by those of all platforms.
    np.testing.assert_allclose(exported.call(IMAGES[:5]), runs["cnn"].predict(IMAGES[:5]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_onnx_runtime_predicts_as_the_run(name, runs, tmp_path):
    pytest.importorskip("jax2onnx", reason="ONNX files need jaxnn[onnx]")
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX files need jaxnn[onnx]")
    session = onnxruntime.InferenceSession(str(runs[name].export(tmp_path / "model.onnx")))
    inputs = MODELS[name][1]
    for count in (3, 11):
        (outputs,) = session.run(None, {session.get_inputs()[0].name: inputs[:count]})
        np.testing.assert_allclose(outputs, runs[name].predict(inputs[:count]), rtol=1e-4, atol=1e-5)


def test_what_onnx_lacks_is_named(tmp_path):
    pytest.importorskip("jax2onnx", reason="ONNX files need jaxnn[onnx]")
    model = tiny.init, lambda params, inputs: tiny.apply(params, jax.pure_callback(np.negative, inputs, inputs))
    run = tiny.fit(tiny.experiment(model=model, num_steps=1))
    with pytest.raises(jn.ConfigError, match="ONNX does not have all of .*operation pure_callback"):
        run.export(tmp_path / "model.onnx")
    assert not any(tmp_path.iterdir())


def test_wrong_exports_are_named(runs, tmp_path, monkeypatch):
    run = runs["cnn"]
    for name, options, words in (
        ("model.pt", {}, "no suffix of a format to export to: .*'.onnx', '.safetensors', '.stablehlo'"),
        ("model.stablehlo", {"batch": 0}, "batch must be an integer >= 1, not 0"),
    ):
        with pytest.raises(jn.ConfigError, match=words):
            run.export(tmp_path / name, **options)
    for module, extra in (("flatbuffers", "export"), ("onnxruntime", "onnx"), ("safetensors.numpy", "safetensors")):
        monkeypatch.setitem(sys.modules, module, None)
        suffix = "stablehlo" if extra == "export" else extra
        with pytest.raises(jn.ConfigError, match=rf'is not installed: pip install "jaxnn\[{extra}\]"'):
            run.export(tmp_path / f"model.{suffix}")
    assert not any(tmp_path.iterdir())


def test_variables_are_those_that_are_evaluated(runs, tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="weights need jaxnn[safetensors]")
    run = runs["cnn"]
    path = run.export(tmp_path / "cnn.safetensors")
    with safetensors.safe_open(path, "np") as file:
        assert {"params.Conv_0.kernel", "batch_stats.BatchNorm_0.mean"} <= set(file.keys())
    outputs = jax.jit(MODELS["cnn"][0].apply)(jn.load_weights(path), IMAGES.astype(np.float32) / 255)
    np.testing.assert_allclose(outputs, run.predict(IMAGES), rtol=1e-5, atol=1e-5)
