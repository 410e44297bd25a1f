"""Checkpoints are complete or absent and loaded with the same bits under any layout; damage and misfits are named."""

import functools
import hashlib
import json
import math
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import jaxnn as jn
from jaxnn.parallel import Layout
from jaxnn.record import Checkpoints, find_damage
from jaxnn.types import RecordError, TrainState
from tests import draws, shell, tiny
from tests.record.files import flip, make_state

assert_equal = functools.partial(draws.assert_close, tolerance=0.0)
OPTIMIZERS = {
    "chain with a schedule": optax.chain(optax.clip(1.0), optax.sgd(optax.linear_schedule(1.0, 0.0, 9), 0.9)),
    "two in one": optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(1e-3)}, {"kernel": "a", "bias": "b", "square": "a"}
    ),
    "averaged and accumulated": jn.optim.with_ema(jn.optim.with_accumulation(optax.adamw(1e-3), 2), 0.9),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(1e-3),
}


def test_any_tree_is_saved_and_loaded_with_its_bits(tmp_path):
    tmp_path = tmp_path / "lr=[0.1,0.2]" / "a\\b"  # neither patterns nor separators
    params = make_state().params
    shapes = jax.eval_shape(lambda: {name: optimizer.init(params) for name, optimizer in OPTIMIZERS.items()})
    states = jax.tree.map(lambda leaf: np.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype), shapes)
    wide = {"fine": np.array([1.0 + 1e-12]), "large": np.array([2**40])}
    tree = {"state": make_state(5), "optimizers": jax.tree.map(jnp.asarray, states), "wide": wide, "number": 3}
    jn.save_checkpoint(tmp_path / "tree", tree)
    found = jn.load_checkpoint(tmp_path / "tree", tree)
    assert int(found.pop("number")) == 3
    assert isinstance(found["state"], TrainState)
    assert_equal(found, {name: tree[name] for name in found})
    assert_equal(jax.random.normal(found["state"].key, (3,)), jax.random.normal(make_state().key, (3,)))
    # Shapes give JAX arrays; without them everything is NumPy's, and a key is its data.
    by_shape = jn.load_checkpoint(tmp_path / "tree", jax.eval_shape(lambda: tree | {"wide": {}}) | {"wide": wide})
    assert_equal(by_shape["state"], tree["state"])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(by_shape["state"]))
    plain = jn.load_checkpoint(tmp_path / "tree")
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(plain["state"]))
    assert_equal(plain["state"]["params"], jax.device_get(tree["state"].params))
    assert_equal(plain["state"]["key"], jax.device_get(jax.random.key_data(tree["state"].key)))


def test_save_that_lost_an_array_is_refused(tmp_path, monkeypatch):
    save = ocp.StandardCheckpointer.save
    monkeypatch.setattr(
        ocp.StandardCheckpointer, "save", lambda to, path, state, **how: save(to, path, {"a": state["a"]}, **how)
    )
    with pytest.raises(RecordError, match="tree cannot be written .its b is absent"):
        jn.save_checkpoint(tmp_path / "tree", {"a": np.int64(1), "b": np.ones(2)})
    assert not any(tmp_path.iterdir())


LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "data on 2": {"strategy": "data", "devices": 2},
    "fsdp on 2": {"strategy": "fsdp", "devices": 2},
    "fsdp on 4": {"strategy": "fsdp", "devices": 4},
    "pmap on 4": {"strategy": "pmap", "devices": 4},
    "a model axis": {"mesh": "data=2,model=2"},
    "both": {"mesh": "data=2,model=2", "strategy": "fsdp"},
}


@functools.cache
def placed(name: str, step: int) -> TrainState:
    """A state as it is placed under a layout."""
    state = make_state(step)
    specs = {"kernel": P(), "bias": P(), "square": P(None, "model")}
    shardings = Layout.make(**LAYOUTS[name]).state_shardings(jax.eval_shape(lambda: state), specs)
    placed: TrainState = jax.device_put(state, shardings)
    return placed


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with one checkpoint of each layout; its step is the position in ``LAYOUTS``."""
    path = tmp_path_factory.mktemp("runs") / "run"
    checkpoints = Checkpoints(path / "checkpoints", keep_last=len(LAYOUTS))
    for step, name in enumerate(LAYOUTS):
        checkpoints.save(step, placed(name, step), {"loss": 1.0})
    checkpoints.close()
    (path / "metrics.jsonl").write_text(f'{{"step": {len(LAYOUTS) - 1}}}\n')
    return path


@pytest.mark.several_devices
def test_each_layout_loads_checkpoints_of_others(run_dir):
    for step, name in enumerate(LAYOUTS):
        like = placed([*LAYOUTS][step - 2], 0)
        found = jn.load_checkpoint(run_dir / "checkpoints" / str(step), like)
        assert_equal(found, placed(name, step))
        for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
            assert got.sharding.is_equivalent_to(wanted.sharding, got.ndim), name
    # The directory of a run is its newest checkpoint.
    assert int(jn.load_checkpoint(run_dir)["step"]) == len(LAYOUTS) - 1


READ = """
import os
os.chdir("/")
import jaxnn as jn
opened = jn.open_run(sweep, member=3)
jax.tree.map(np.testing.assert_array_equal, opened.state._asdict(), dict(of_member))
assert [line["train_loss"] for line in lines] == opened.metrics["train_loss"].tolist()
again = jn.load_checkpoint(run)
np.testing.assert_array_equal(again["params"]["kernel"], state["params"]["kernel"])
print(jax.tree.structure(again) == jax.tree.structure(state), type(state["params"]["kernel"]).__name__)
"""


@pytest.mark.slow
def test_documented_recipes_read_on_one_device_what_four_saved_and_a_member(run_dir, tmp_path):
    text = (shell.ROOT / "docs" / "records.md").read_text()
    code = "\n".join(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "ocp" in block)
    swept = jn.sweep(tiny.experiment(), jn.grid(seed=range(4)), run_dir=tmp_path / "swept", **tiny.MEMBERS)
    names = {"/abs/path/runs/…/sweep-…": swept.dir, "/abs/path/runs/…": run_dir, "4000": len(LAYOUTS) - 1}
    for name, value in names.items():
        assert name in code
        code = code.replace(name, str(value))
    done = shell.python("-W", "ignore", "-c", code + READ, JAX_NUM_CPU_DEVICES="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "ndarray"]


@pytest.mark.several_devices
def test_plain_orbax_reads_both_kinds(run_dir, tmp_path):
    step = len(LAYOUTS) - 1
    state = make_state(step)
    jn.save_checkpoint(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "state")
    np.testing.assert_array_equal(found["params"]["kernel"], state.params["kernel"])
    with ocp.CheckpointManager(run_dir / "checkpoints") as manager:
        found = manager.restore(step, args=ocp.args.StandardRestore())
    assert set(found) == set(TrainState._fields) and int(found["step"]) == manager.latest_step() == step
    np.testing.assert_array_equal(found["params"]["bias"], state.params["bias"])


@pytest.mark.several_devices
def test_states_that_do_not_fit_are_named_in_one_line(run_dir, tmp_path):
    jn.save_checkpoint(tmp_path / "state", state := make_state())
    for like, words in (
        (make_state(width=4), r"its opt_state.2.mean.bias is bfloat16 \[3\].*\[4\]"),
        (state._replace(step=np.float32(0)), r"its step is int32 \[\].*float32"),
        (state._replace(params={"conv": np.zeros(2)}), "its params.bias .*requested one absent"),
        (state._replace(model_state={"mean": np.zeros(2)}), "its model_state.mean is abs"),
        (state._replace(opt_state=()), "its opt_state.0 is int32"),
    ):
        for path in (tmp_path / "state", run_dir):
            with pytest.raises(RecordError, match=f"does not hold a state .*{words}") as caught:
                jn.load_checkpoint(path, like)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_errors_name_the_path_and_the_fix(tmp_path):
    (tmp_path / "file").write_text("mine")
    jn.save_checkpoint(tmp_path / "state", {"w": np.ones(2)})
    before = jn.load_checkpoint(tmp_path / "state")
    new = tmp_path / "new"
    for call, words in (
        (lambda: jn.save_checkpoint(tmp_path / "state", {"w": np.zeros(2)}), f"{tmp_path / 'state'} exists already"),
        (lambda: jn.save_checkpoint(tmp_path / "file" / "state", {"w": np.zeros(2)}), "cannot be written"),
        (lambda: jn.load_checkpoint(tmp_path / "nowhere"), "there is no checkpoint at .*nowhere: check the path"),
        (lambda: jn.load_checkpoint(tmp_path), "does not hold a state"),
        *((lambda tree=tree: jn.save_checkpoint(new, tree), "put arrays in a dict") for tree in ({}, None, np.ones(3))),
    ):
        with pytest.raises(RecordError, match=words):
            call()
    assert_equal(jn.load_checkpoint(tmp_path / "state"), before)
    assert not new.exists()


LOSSES, FEW = [5.0, 1.0, 3.0, 2.0, 4.0], [None, 2.0, math.nan, None]


@pytest.mark.parametrize(
    ("losses", "options", "steps", "best"),
    [
        (LOSSES, {}, [2, 4, 5], 2),
        (LOSSES, {"keep_last": 1, "keep_best": 2}, [2, 4, 5], 2),
        (LOSSES, {"keep_last": 1, "keep_best": 0}, [5], 5),
        (LOSSES, {"keep_last": 1, "higher_is_better": True}, [1, 5], 1),
        (FEW, {"keep_last": 1}, [2, 4], 2),
        (FEW, {"keep_last": 1, "higher_is_better": True}, [2, 4], 2),
        ([None, None, None], {"keep_last": 1, "keep_best": 1}, [3], 3),
        ([2.0, 1.0, 1.0, 3.0], {"keep_last": 1}, [2, 4], 2),  # the first of equal ones, as for patience
    ],
)
def test_last_and_best_are_kept_and_unmeasured_ones_are_never_best(tmp_path, losses, options, steps, best):
    checkpoints = Checkpoints(tmp_path, monitor="test_loss", **options)
    assert checkpoints.best() is None
    state = TrainState(np.int32(0), {"w": np.zeros(2)}, {}, {}, np.int32(0))
    for step, value in enumerate(losses, start=1):
        checkpoints.save(step, state, {"train_loss": -float(step)} | ({} if value is None else {"test_loss": value}))
    checkpoints.close()
    for opened in (checkpoints, Checkpoints(tmp_path, monitor="test_loss", **options)):
        assert (opened.steps(), opened.best()) == (steps, best)


def test_save_copies_before_its_buffers_are_donated(tmp_path):
    # Large enough that writing outlasts the updates that overwrite the buffers.
    size = 300_000
    update = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    zeros = np.zeros(size, np.float32)
    state = jax.device_put(TrainState(np.int32(0), {"w": zeros}, {}, {"m": zeros}, np.int32(0)))
    checkpoints = Checkpoints(tmp_path / "run", keep_last=100, keep_best=0)
    for step in range(1, 4):
        state = update(state)
        checkpoints.save(step, state, {})
    for _ in range(20):
        state = update(state)
    checkpoints.close()
    assert checkpoints.steps() == [1, 2, 3]
    for step in checkpoints.steps():
        for leaf in jax.tree.leaves(jn.load_checkpoint(tmp_path / "run" / str(step))):
            np.testing.assert_array_equal(leaf, np.full(leaf.shape, step, leaf.dtype))


SUMS_FILE = "SHA256SUMS"
CHANGED = "has other bytes than were saved"


def files_of(checkpoint: Path) -> list[str]:
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3, and a state saved by hand in the folder ``state`` beside them."""
    path = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(path, keep_last=3)
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), {"loss": 1.0 / step, "test_loss": math.nan})
    checkpoints.close()
    jn.save_checkpoint(path.parent / "state", make_state(1))
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def test_sha256sum_checks_a_checkpoint(saved):
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no sha256sum on this machine")
    command = ["sha256sum", "--check", "--strict", SUMS_FILE]
    done = subprocess.run(command, cwd=saved / "3", capture_output=True, text=True, check=True)
    names = [line.removesuffix(": OK") for line in done.stdout.splitlines()]
    assert names == [name for name in files_of(saved / "3") if name != SUMS_FILE]
    assert {"default/_METADATA", "checkpoint.json"} <= set(names)
    about = json.loads((saved / "3" / "checkpoint.json").read_text())
    assert about == {"step": 3, "metrics": {"loss": 1.0 / 3}, "log": None, "search": None}


def test_damage_to_any_file_is_named_and_not_loaded(saved, tmp_path):
    for whole in (saved / "3", saved.parent / "state"):
        assert find_damage(whole) is None
        for damage, words in ((flip, CHANGED), (Path.unlink, "is missing")):
            for name in files_of(whole):
                damaged = Path(shutil.copytree(whole, tmp_path / "copy"))
                damage(damaged / name)
                assert find_damage(damaged) == f"its file {name} {words}"
                if name != SUMS_FILE or words != "is missing":
                    with pytest.raises(RecordError, match=f"copy is damaged, its file {name} {words}: .*from a copy"):
                        jn.load_checkpoint(damaged)
                shutil.rmtree(damaged)


def test_sums_list_exactly_the_files_below(copy, tmp_path):
    (copy / "2" / "default" / "d" / "more").write_text("")
    assert find_damage(copy / "2") == "its file default/d/more was not there when it was saved"

    def sign(step: int, lines: str) -> None:
        head = f"# sha256 of the lines below: {hashlib.sha256(lines.encode()).hexdigest()}\n"
        (copy / f"{step}" / SUMS_FILE).write_text(head + lines)

    # A list that names a file elsewhere does not have it read; one that fits a wrong file does not make it right.
    (tmp_path / "elsewhere").write_text("mine")
    lines = (copy / "3" / SUMS_FILE).read_text().partition("\n")[2]
    sign(3, lines + f"{'0' * 64}  ../../elsewhere\n")
    assert find_damage(copy / "3") == "its file ../../elsewhere is missing"
    for about in ('{"step": "3", "metrics": {}}', '{"step": 3, "metrics": [1]}', "[" * 9_999):
        (copy / "3" / "checkpoint.json").write_text(about)
        sign(3, re.sub(r"\w+(?=  checkpoint.json)", hashlib.sha256(about.encode()).hexdigest(), lines))
        assert str(find_damage(copy / "3", 3)).startswith("its file checkpoint.json cannot be used (it")


def test_newest_undamaged_checkpoint_is_restored_and_damaged_ones_are_moved(copy):
    (copy / "3" / "checkpoint.json").write_text('{"metrics": ')
    (copy / "2" / "checkpoint.json").unlink()
    (copy / "007").mkdir()  # not the name of a step
    checkpoints = Checkpoints(copy)
    assert checkpoints.best() == 1, "damaged metrics hide other checkpoints"
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and restored.step == 1
    assert_equal(restored.state, make_state(1))
    damages = {3: f"its file checkpoint.json {CHANGED}", 2: "its file checkpoint.json is missing"}
    assert restored.damaged == [*damages.items()]
    for step, what in restored.damaged:
        message = checkpoints.set_aside(step, what)
        assert message.startswith(f"the checkpoint of step {step} is damaged, {what}")
        assert message.endswith(f"moved to {copy / 'damaged' / str(step)}")
    assert checkpoints.steps() == [1] and sorted(os.listdir(copy / "damaged")) == ["2", "3"]
    # Those steps are saved again, and may be damaged again.
    checkpoints.save(3, make_state(3), {})
    checkpoints.wait()
    flip(copy / "3" / "default" / "_METADATA")
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and [step for step, _ in restored.damaged] == [3]
    assert checkpoints.set_aside(*restored.damaged[0]).endswith(f"{copy / 'damaged' / '3-2'}")
    checkpoints.close()


@pytest.mark.parametrize("moment", ["sums", "name"])
def test_unfinished_checkpoint_is_absent_and_older_ones_stay(copy, monkeypatch, moment):
    rename, sync = Path.rename, os.fsync

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    def refused_name(path: Path, target: Path) -> None:
        (refuse if path.name == "4.unfinished" else rename)(path, target)

    def refused_sync(descriptor: int) -> None:
        (refuse if os.readlink(f"/proc/self/fd/{descriptor}").endswith(SUMS_FILE) else sync)(descriptor)

    checkpoints = Checkpoints(copy, keep_last=1, keep_best=0)
    with monkeypatch.context() as patched:
        patched.setattr(*((os, "fsync", refused_sync) if moment == "sums" else (Path, "rename", refused_name)))
        checkpoints.save(4, make_state(4), {})
        assert checkpoints.steps() == [1, 2, 3], "older ones were removed before the new one was complete"
        with pytest.raises(RecordError, match=r"step 4 could not be written to .* \(Input/output error\): .* intact"):
            checkpoints.wait()
    assert sorted(os.listdir(copy)) == ["1", "2", "3"], "half a checkpoint was left"
    checkpoints.save(4, make_state(4), {})
    checkpoints.close()
    assert Checkpoints(copy).steps() == [4]


def test_metrics_and_sums_come_before_a_name_which_goes_before_its_files_whoever_reads(tmp_path, monkeypatch):
    folder, named, removed = tmp_path / "run" / "checkpoints", [], []
    sync, rename, remove = os.fsync, Path.rename, shutil.rmtree

    def noted_sync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            named.append("metrics")
        sync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        if path.name.endswith(".unfinished"):
            named.append((target.name, Checkpoints(folder).steps(), find_damage(path)))
        return rename(path, target)

    def noted_remove(path: Path, **options: bool) -> None:
        if path.name.endswith(".removed"):
            removed.append((path.name, Checkpoints(folder).steps(), find_damage(path)))
        remove(path, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    monkeypatch.setattr(shutil, "rmtree", noted_remove)
    tiny.fit(tiny.experiment(), tmp_path / "run", checkpoint_every=10, keep_last=1, keep_best=0)
    assert named == ["metrics", ("10", [], None), "metrics", ("20", [10], None)]
    assert removed == [("10.removed", [20], None)]
    assert Checkpoints(folder).best() == 20 and find_damage(folder / "20") is None


def test_remnants_of_a_killed_process_are_ignored_and_cleared(copy):
    for name in ("4.unfinished", "5.unfinished.orbax-checkpoint-tmp", "2.removed", "damaged/9"):
        shutil.copytree(copy / "3", copy / name)
    (copy / "2.removed" / SUMS_FILE).unlink()
    checkpoints = Checkpoints(copy, keep_last=3)
    assert checkpoints.steps() == [1, 2, 3]
    restored = checkpoints.restore_newest(make_state(0))
    assert restored is not None and restored.step == 3 and restored.damaged == []
    with ocp.CheckpointManager(copy) as manager:
        assert manager.all_steps() == [1, 2, 3], "plain Orbax takes a remnant for a checkpoint"
    checkpoints.save(4, make_state(4), {})
    checkpoints.save(3, make_state(30), {})  # a step with a checkpoint keeps the one it has
    checkpoints.close()
    assert sorted(os.listdir(copy)) == ["2", "3", "4", "damaged"]
    assert_equal(jn.load_checkpoint(copy / "3", make_state(0)), make_state(3))


@pytest.mark.several_devices
def test_weights_keep_names_shapes_dtypes_and_bytes(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="weights need jaxnn[safetensors]")
    sharding = jax.NamedSharding(jax.make_mesh((4,), ("data",)), P("data"))
    weights = {
        "Dense_0": {"kernel": np.arange(6).astype(jnp.bfloat16).reshape(2, 3).T, "bias": np.float16([1, np.nan])},
        "scale": np.float32(3),
        "table": jax.device_put(np.arange(8, dtype=np.int32), sharding),
        "order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    jn.save_weights(tmp_path / "w.safetensors", weights)
    found = jn.load_weights(tmp_path / "w.safetensors")
    written = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()), tree)
        for tree in (found, weights)
    ]
    assert written[0] == written[1]
    with safetensors.safe_open(tmp_path / "w.safetensors", "np") as file:
        assert sorted(file.keys()) == ["Dense_0.bias", "Dense_0.kernel", "order", "scale", "table"]


def test_what_is_no_weights_is_named(tmp_path):
    save = pytest.importorskip("safetensors.numpy", reason="weights need jaxnn[safetensors]").save_file
    for wrong in ({"a.b": np.ones(1)}, [np.ones(1)], np.ones(1), {1: {"b": [np.ones(1)]}}):
        with pytest.raises(jn.ConfigError, match="weights must be arrays in dicts, whose keys have no dots"):
            jn.save_weights(tmp_path / "w.safetensors", wrong)
    narrow = np.ones(1, jnp.float8_e5m2)
    for dtype, wrong in {"float8_e5m2": narrow, "key<fry>": jax.random.key(0), "object": None, "<U1": "w"}.items():
        with pytest.raises(jn.ConfigError, match=f"cannot hold Dense_0.bias of dtype {dtype}: convert it"):
            jn.save_weights(tmp_path / "w.safetensors", {"Dense_0": {"bias": wrong}})
    with pytest.raises(jn.ConfigError, match="cannot hold __metadata__"):
        jn.save_weights(tmp_path / "w.safetensors", {"__metadata__": np.ones(1)})
    assert not any(tmp_path.iterdir())
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    save({"Dense.bias": narrow}, tmp_path / "float8.safetensors")
    save({"a.b": np.ones(1), "a.b.c": np.ones(1)}, tmp_path / "both.safetensors")
    save({"." * 300_000: np.ones(1)}, tmp_path / "deep.safetensors")
    for name, shape in {"axes": [1] * 65, "huge": [0, 2**62]}.items():
        size = 4 * (name == "axes")
        header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    files = dict.fromkeys(("torn", "missing", "float8", "axes", "huge"), "cannot be read as safetensors")
    names = {"deep": "has a name of 300000 dots", "both": "has a tensor a.b and others below this name"}
    for name, words in (files | names).items():
        with pytest.raises(jn.RecordError, match=f"{name}.safetensors {words}"):
            jn.load_weights(tmp_path / f"{name}.safetensors")
