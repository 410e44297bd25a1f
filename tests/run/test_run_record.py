"""A run in memory and in its directory: predictions, best state, the record's files, opening it again, exporting it."""

import dataclasses
import json
import math
import os
import shutil
import sys
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

import jaxnn as jn
from jaxnn._disk import write_json
from jaxnn.engine import programs_of
from jaxnn.parallel import Layout
from jaxnn.types import ConfigError, RecordError
from tests import draws, native, shell, tiny
from tests.record.files import contents


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> jn.Run:
    # A learning rate so high that the loss goes up and down: the best state is not the last.
    experiment = tiny.experiment(learning_rate=3.0, num_steps=60)
    folder = tmp_path_factory.mktemp("run") / "run"
    return tiny.fit(experiment, folder, eval_every=5, checkpoint_every=5, keep_last=2, keep_best=1)


def by_hand(run: jn.Run, inputs: np.ndarray) -> np.ndarray:
    """The outputs of the run's model."""
    params = jax.device_get(run.state.params)
    return inputs @ params["kernel"] + params["bias"]


def test_predict_equals_the_model_for_any_batch_size(run):
    inputs, _ = tiny.points(7, seed=5)
    for batch_size in (1, 4, 512):
        outputs = run.predict(inputs, batch_size=batch_size)
        assert isinstance(outputs, np.ndarray)
        np.testing.assert_allclose(outputs, by_hand(run, inputs), rtol=1e-5, atol=1e-5)
    assert run.predict(inputs.tolist()).shape == (7, 3)


BAD_INPUTS: list[tuple[Any, str]] = [
    (np.zeros((7, 4)), r"inputs \[examples, 3\].* not \[7, 4\]"),
    (np.zeros(3), r"\[3\] is the shape of one example: add the axis, inputs\[None\]"),
    (np.zeros(4), r"not \[4\]"),
    (np.zeros((0, 3)), r"not \[0, 3\]"),
    (np.float32(3), r"not \[\]"),
    ([[1.0, 2.0, 3.0], [1.0]], "not one array of numbers"),
    ([["a", "b", "c"]], "not one array of numbers"),
]


def test_bad_arguments_of_a_run_are_named(run):
    for inputs, words in BAD_INPUTS:
        with pytest.raises(ConfigError, match=words):
            run.predict(inputs)
    with pytest.raises(ConfigError, match="batch_size must be an integer >= 1, not 0"):
        run.predict(tiny.points(7)[0], batch_size=0)
    with pytest.raises(ConfigError, match="no split 'validation' to evaluate: the data have train, test"):
        run.evaluate("validation")


def test_predict_does_not_round_fractions_to_pixels():
    images = (np.arange(37 * 3, dtype=np.uint8) * 2).reshape(37, 3)
    run = tiny.fit(tiny.experiment(data=jn.data.arrays((images, tiny.points(37)[1])), num_steps=1))
    found = run.predict(images)
    np.testing.assert_allclose(found, by_hand(run, images / np.float32(255)), rtol=1e-4)
    np.testing.assert_array_equal(run.predict(images.astype(int)), found)
    for wrong in (images / 255, images.astype(int) - 1):
        with pytest.raises(ConfigError, match="uint8"):
            run.predict(wrong)


def test_best_state_has_the_best_monitored_metric_also_after_a_resume(run, tmp_path):
    losses = run.metrics["test_loss"]
    best = int(run.metrics["step"][np.nanargmin(losses)])
    assert best != 60, "the last state is the best: the test shows nothing"
    state = run.best_state()
    assert int(state.step) == best
    assert run.evaluate(state=state)["loss"] == pytest.approx(np.nanmin(losses), rel=1e-6)
    assert run.evaluate()["loss"] == pytest.approx(losses[-1], rel=1e-6)
    assert {int(path.name) for path in (run.dir / "checkpoints").iterdir()} == {best, 55, 60}

    half = tiny.fit(run.experiment.replace(num_steps=30), tmp_path / "run", eval_every=5, checkpoint_every=5)
    resumed = tiny.fit(run.experiment, resume=half.dir)
    assert int(resumed.best_state().step) == best
    chex.assert_trees_all_equal(resumed.state.params, run.state.params)


def test_records_outlast_a_change_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = jn.sweep(tiny.experiment(), jn.grid(seed=[0]), run_dir="runs/b", **tiny.MEMBERS)
    run = tiny.fit(tiny.experiment(), "runs/a", probes={"leave": lambda run: os.chdir("/")})
    for one in (run, sweep.run(0)):
        assert int(one.best_state().step) == 20


def test_run_displays_itself(run):
    assert isinstance(run.plot(), Figure)
    table = run._repr_html_()
    for words in ("<table>", "finished", "test loss", "steps/s", str(run.dir)):
        assert words in table
    assert "finished" in repr(run) and len(repr(run)) < 2000


def test_record_is_complete(run):
    facts = tiny.read(run.dir)
    assert facts["status"] == "finished"
    assert facts["config"] == {"learning_rate": 3.0, "batch_size": 8, "num_steps": 60, "seed": 0}
    (group,) = facts["groups"]
    assert facts["options"]["eval_every"] == 5 and group["steps_per_call"] == 5
    assert facts["data"] == "points" and facts["name"] == "tiny"
    assert facts["devices"]["backend"] == jax.default_backend()
    assert facts["jax_flags"]["jax_enable_x64"] is False
    # Forward and backward of one layer, whose inputs need no gradient: two products.
    assert group["precision"] == {"float32": 2}
    assert {"jax", "numpy", "jaxnn"} <= set(facts["devices"]["versions"])
    summary = facts["summary"]
    assert summary["metrics"] == pytest.approx(dict(run.final)) and summary["step"] == 60
    assert {"train", "compile", "evaluation", "checkpoint"} <= set(summary["seconds"])
    assert summary["throughput"]["num_windows"] == 12 and summary["examples_per_second"] > 0
    lines = tiny.lines(run.dir)
    for name, values in run.metrics.items():
        np.testing.assert_array_equal([line.get(name, math.nan) for line in lines], values)
    # Float32: kernel 3 × 3 and bias 3, momentum of the same; 37 inputs of 3 and 37 int32 labels.
    expected = {"parameters": 4 * 12, "optimizer state": 4 * 12, "data": 4 * 37 * 4}
    placement = {name: tree["device_bytes"] for name, tree in tiny.read(run.dir, "placement.json").items()}
    assert placement == {name: {f"{jax.default_backend()}:0": num_bytes} for name, num_bytes in expected.items()}


@pytest.mark.several_devices
def test_fingerprint_does_not_depend_on_how_a_run_is_computed(run):
    layout = Layout.make(strategy="data", devices=4)
    fingerprint = programs_of(run.experiment, tiny.splits(), resident=False, layout=layout).fingerprint()
    assert tiny.read(run.dir)["groups"][0]["fingerprint"] == fingerprint


def test_open_run_without_the_experiment(run):
    opened = jn.open_run(run.dir)
    assert opened.config == {"learning_rate": 3.0, "batch_size": 8, "num_steps": 60, "seed": 0}
    tuples = {"peak_bytes": opened.summary.peak_bytes, "stalls": opened.summary.stalls}
    assert opened.summary.as_json() == json.loads(json.dumps(run.summary.as_json())) | tuples
    assert (opened.summary.status, opened.summary.step, opened.summary.metrics) == ("finished", 60, run.final)
    assert (opened.monitor, opened.higher_is_better) == (run.monitor, run.higher_is_better) == ("test_loss", False)
    for name, values in run.metrics.items():
        np.testing.assert_array_equal(opened.metrics[name], values)
    assert isinstance(opened.plot(), Figure) and "finished" in repr(opened)
    chex.assert_trees_all_equal(opened.state.params, dict(run.state.params))
    chex.assert_trees_all_equal(opened.best_state().params, dict(run.best_state().params))
    for use in (opened.evaluate, lambda: opened.predict(tiny.points(2)[0])):
        with pytest.raises(ConfigError, match=r"needs its experiment: jn\.open_run\(.*, experiment\)"):
            use()


@pytest.mark.several_devices
def test_open_run_with_the_experiment_shards_and_writes_nothing(run):
    shards: list[Any] = []

    def apply(params: Any, inputs: jax.Array) -> jax.Array:
        jax.debug.inspect_array_sharding(inputs, callback=shards.append)
        return tiny.apply(params, inputs)

    before = contents(run.dir)
    # With another learning rate and number of steps.
    opened = jn.open_run(str(run.dir), tiny.experiment(model=(tiny.init, apply)), devices=4)
    assert len(opened.state.params["kernel"].devices()) == 4
    assert opened.config == opened.experiment.config == run.experiment.config
    chex.assert_trees_all_equal(opened.state.params, run.state.params)
    with pytest.warns(UserWarning, match="another function .*: its code changed"):  # by the inspection
        outputs = opened.predict(tiny.points(7)[0])
    np.testing.assert_allclose(outputs, run.predict(tiny.points(7)[0]), rtol=1e-6)
    assert [sharding.shard_shape((8, 3)) for sharding in shards] == [(2, 3)]
    assert opened.evaluate() == pytest.approx(run.evaluate(), rel=1e-6)
    assert int(opened.best_state().step) == int(run.best_state().step)
    assert contents(run.dir) == before


def test_other_implementations_are_named(tmp_path):
    dropping = tiny.experiment(model=jn.models.MLP((4, 3), dropout=0.5))
    facts = tiny.read(path := tiny.fit(dropping, tmp_path / "run").dir)
    (group,) = facts["groups"]
    changed = f"dropout mine → {group['implementations']['dropout'][0]}"
    group |= {"implementations": {"dropout": ["mine"]}, "fingerprint": group["fingerprint"] | {"evaluation": "x"}}
    write_json(path / "record.json", facts)
    with pytest.warns(UserWarning, match=f"other implementations .{changed}.*same to rounding"):
        jn.open_run(path, dropping).predict(tiny.points(2)[0])
    tiny.fit(dropping.replace(num_steps=25), resume=path)
    assert changed in tiny.read(path)["resumed"][0]["changed"]


@native.needed
def test_other_instructions_of_native_kernels_are_named_at_a_resume(tmp_path):
    dropping = tiny.experiment(model=jn.models.MLP((512, 3), dropout=0.5), num_steps=5)
    facts = tiny.read(path := tiny.fit(dropping, tmp_path / "run").dir)
    now, facts["devices"]["native"] = facts["devices"]["native"], "jaxnn-native 0.2.0, AVX2"
    write_json(path / "record.json", facts)
    tiny.fit(dropping.replace(num_steps=10), resume=path)
    assert f"native kernels jaxnn-native 0.2.0, AVX2 → {now}" in tiny.read(path)["resumed"][0]["changed"]


def test_a_record_is_used_without_its_data(run, tmp_path, monkeypatch):
    def load(config: Any) -> Any:
        raise FileNotFoundError("the data")

    monkeypatch.chdir(tmp_path)
    opened = jn.open_run(run.dir, dataclasses.replace(tiny.experiment(), data=load))
    inputs, _ = tiny.points(4)
    np.testing.assert_array_equal(opened.predict(inputs), run.predict(inputs))
    best = opened.predict(inputs, state=opened.best_state())
    np.testing.assert_array_equal(best, run.predict(inputs, state=run.best_state()))
    with pytest.raises(FileNotFoundError):
        opened.evaluate()
    # Of a source that prepares batches in its own way, or by an earlier version, shapes are not recorded.
    shutil.copytree(run.dir, tmp_path / "own")
    (facts := tiny.read(run.dir))["groups"][0]["examples"] = None
    write_json(tmp_path / "own" / "record.json", facts)
    with pytest.raises(FileNotFoundError):
        jn.open_run(tmp_path / "own", opened.experiment)
    others = jn.open_run(run.dir, tiny.experiment(data=jn.data.arrays(tiny.points(9), tiny.points(9))))
    with pytest.raises(RecordError, match="the data are not those that the run in .* was trained on"):
        others.evaluate()


def test_open_run_of_a_killed_one(run, tmp_path):
    facts = {name: value for name, value in tiny.read(run.dir).items() if name != "summary"}
    lines = (run.dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]))
    write_json(tmp_path / "record.json", facts | {"status": "running"})
    killed = jn.open_run(tmp_path)
    assert (killed.summary.status, killed.summary.step) == ("interrupted", 15) and "interrupted" in repr(killed)
    with pytest.raises(RecordError, match="kept no checkpoints: open it without the experiment"):
        jn.open_run(tmp_path, tiny.experiment())


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
    pytest.importorskip("flatbuffers", reason="StableHLO files need jaxnn[export]")

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
