"""Training on several devices and processes: layouts and strategies; processes resume, stop and report as one."""

import contextlib
import functools
import io
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnn as jn
from jaxnn._signals import RESUMABLE
from jaxnn._transfers import fetching
from jaxnn.models import MLP
from jaxnn.observe import nbytes
from jaxnn.parallel import SINGLE_DEVICE, STRATEGIES, Layout, Strategy
from jaxnn.types import PyTree, TrainState
from tests import draws, processes, several, tiny
from tests.processes import Started, free_port, started
from tests.record.files import untimed

SQUARE = TrainState(np.int32(0), {"w": np.zeros((32, 32), np.float32)}, {}, (), np.uint32(0))
NARROW = SQUARE._replace(params={"w": np.zeros((32, 6), np.float32)})


def init(key: jax.Array, inputs: jax.Array) -> dict[str, Any]:
    """Matrices that the mesh axis ``model`` shards, if there is one."""
    normal = linen.initializers.lecun_normal()
    hidden = jn.nn.partitioned(normal, (None, "model"))(key, (3, 128))
    return {"hidden": hidden, "out": jn.nn.partitioned(normal, ("model", None))(key, (128, 3)), "bias": jnp.zeros(3)}


def apply(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    return jax.nn.relu(inputs @ params["hidden"]) @ params["out"] + params["bias"][None]


def wide(**fields: Any) -> jn.Experiment[Any]:
    """A network with matrices that four devices share evenly, trained by SGD with momentum."""
    return tiny.experiment(model=(init, apply), **fields)


@functools.cache
def alone() -> tuple[jn.Run, str]:
    """The run on one device, and its report."""
    with contextlib.redirect_stdout(io.StringIO()) as report:
        return tiny.fit(wide(), progress="plain"), report.getvalue()


def expected() -> Any:
    """The metrics of the run on one device."""
    return pytest.approx(alone()[0].summary.metrics, rel=1e-4)


@pytest.mark.several_devices
def test_batches_and_states_of_gpus_pass_through_pinned_memory(monkeypatch):
    put, kinds = jax.device_put, []
    monkeypatch.setattr(Layout, "platform", "gpu")
    monkeypatch.setattr(jax, "device_put", lambda x, to, **how: kinds.append(to.memory_kind) or put(x, to, **how))
    rows = np.arange(48.0, dtype=np.float32).reshape(2, 8, 3)
    for layout in (SINGLE_DEVICE, Layout.make("data", 4)):
        placed = layout.place_batch({"x": rows}, 8)["x"]
        assert kinds == ["pinned_host", "device"] and placed.sharding.memory_kind == "device"
        np.testing.assert_array_equal(placed, rows)
        kinds.clear()
        fetched = fetching([placed, rows], platform="cpu")
        assert kinds == ["pinned_host"] and fetched[1] is rows
        np.testing.assert_array_equal(fetched[0], rows)
        kinds.clear()
    assert fetching(placed) is placed  # a CPU's


@pytest.mark.several_devices
def test_fully_sharded_state_is_created_in_shards_and_recorded(tmp_path, capsys):
    run = tiny.fit(wide(num_steps=5), tmp_path / "run", devices=4, strategy="fsdp", progress="plain")
    assert "fsdp, data=4: a batch of 8 is 4 × 2 examples" in capsys.readouterr().out
    assert "--devices all would use the other 3 too" in alone()[1]
    assert tiny.read(tmp_path / "run")["groups"][0]["layout"] == {"strategy": "fsdp", "mesh": {"data": 4}}
    created = run._trainer.programs.init()
    small = sum(nbytes(leaf) for leaf in jax.tree.leaves(run.state) if leaf.size < 256)
    assert small < nbytes(run.state) / 5
    for state in (created, run.state):
        assert state.params["out"].sharding.spec == P("data", None)
        shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(state)]
        assert nbytes(shards) == (nbytes(run.state) - small) / 4 + small


@pytest.mark.several_devices
def test_auto_shards_a_state_that_is_too_large_to_be_replicated():
    assert Layout.make(mesh="data=2").num_devices == 2
    for size, expected in ((10**3, "data"), (10**15, "fsdp")):
        shapes = SQUARE._replace(params={"w": jax.ShapeDtypeStruct((size,), jnp.float32)})
        assert Layout.make("auto", 4).resolve(shapes).strategy.name == expected


@pytest.mark.several_devices
def test_model_axes_shard_its_parameters_and_moments():
    run = tiny.fit(wide(), mesh="data=2,model=2")
    for tree in (run.state.params, run.state.opt_state[0].trace):
        assert tree["hidden"].sharding.shard_shape((3, 128)) == (3, 64)
        assert tree["out"].sharding.shard_shape((128, 3)) == (64, 3)
    assert run.summary.metrics == expected()


@pytest.mark.slow
def test_accumulation_streaming_and_sweeps_train_the_same_on_several_devices():
    accumulating = tiny.experiment(optimizer=lambda config: jn.optim.with_accumulation(optax.adam(0.01), 2))
    got = tiny.fit(accumulating, resident=False, devices=4, strategy="fsdp").summary.metrics
    assert got == pytest.approx(tiny.fit(accumulating).summary.metrics, rel=1e-5)
    points, how = jn.grid(learning_rate=[0.01, 0.1]), {"vmap_size": 1, "record": False, **tiny.HOW}
    unsharded = jn.sweep(wide(), points, devices=1, **how)
    sharded = jn.sweep(wide(), points, mesh="members=2,data=2", strategy="fsdp", **how)
    for member, other in zip(sharded.members, unsharded.members, strict=True):
        assert member.final == pytest.approx(other.final, rel=1e-4)


def fully_sharded(spec: P, state: TrainState = SQUARE, mesh: str = "data=2,model=2") -> P:
    """How ``fsdp`` shards a parameter whose axes the model names in ``spec``."""
    found: P = STRATEGIES["fsdp"].shard_state(Layout.make(mesh=mesh).mesh, state, {"w": spec}).params["w"].spec
    return found


@pytest.mark.several_devices
def test_parameters_are_sharded_along_the_axes_of_the_model_and_then_data():
    assert fully_sharded(P("data", None)) == P("data", None), "not along data twice"
    assert fully_sharded(P(None, "model")) == P("data", "model")
    assert fully_sharded(P(None, ("data", "model"))) == P(None, ("data", "model"))
    assert fully_sharded(P(("model", "pipe"), None)) == P("model", "data"), "only the axes that the mesh has"


def shard_moments(mesh: Mesh, shapes: TrainState, specs: PyTree) -> TrainState:
    sharded = STRATEGIES["fsdp"].shard_state(mesh, shapes, specs)
    state: TrainState = STRATEGIES["data"].shard_state(mesh, shapes, specs)._replace(opt_state=sharded.opt_state)
    return state


# ZeRO's first stage: parameters are replicated, the optimizer's moments sharded.
zero1 = Strategy("zero1", shard_moments)
# As pmap, written by hand: each device computes with its rows, and jaxnn averages over the axis.
by_hand = zero1._replace(
    name="by_hand",
    shard_state=STRATEGIES["data"].shard_state,
    wrap=lambda mesh, function: jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False),
    axis_name="data",
)
# Batches are sharded along two axes of the mesh.
two_axes = STRATEGIES["data"]._replace(name="two_axes", batch_spec=lambda mesh: P(("data", "more")))
chooser = STRATEGIES["data"]._replace(name="chooser", choose=lambda mesh, shapes: zero1)


@pytest.mark.slow
def test_own_strategies_are_chosen_recorded_and_resumed_and_train_as_on_one_device(tmp_path):
    assert tiny.fit(wide(), strategy=two_axes, mesh="data=2,more=2").summary.metrics == expected()
    run = tiny.fit(wide(num_steps=10), tmp_path, strategy=chooser, devices=2)
    kernel, moment = (tree["out"] for tree in (run.state.params, run.state.opt_state[0].trace))
    assert kernel.sharding.is_fully_replicated and moment.sharding.spec == P("data", None)
    assert moment.sharding.num_devices == 2
    assert tiny.read(tmp_path)["groups"][0]["layout"] == {"strategy": "zero1", "mesh": {"data": 2}}
    with pytest.raises(jn.ConfigError, match="'chooser', and a record's code is not imported: give strategy again"):
        tiny.fit(wide(), resume=tmp_path)
    tiny.fit(wide(num_steps=15), resume=tmp_path, strategy=f"{__name__}:by_hand", devices=4)
    run = tiny.fit(wide(), resume=tmp_path, strategy=by_hand)
    assert run.summary.metrics == expected()
    assert run._trainer.programs.layout.strategy.name == "by_hand" and run._trainer.programs.layout.num_devices == 4
    assert [resumed["changed"] for resumed in tiny.read(tmp_path)["resumed"]] == [
        ["the layout zero1 data=2 → by_hand data=4", "num_steps 10 → 15"],
        ["num_steps 15 → 20"],
    ]


def unread(config: Any) -> Any:
    raise AssertionError("data were read")


def layout(**parts: Any) -> Layout:
    return Layout.make(zero1._replace(**parts), 4)


def devices(**options: Any) -> Callable[[], object]:
    """Trains an experiment whose data must not be read."""
    return lambda: jn.fit(jn.Experiment(tiny.Config(), unread, unread, unread), record=False, **options)


def placed(shard_state: Callable[..., Any]) -> Callable[[], object]:
    """Places a state by the ``shard_state`` of a strategy."""
    return lambda: layout(shard_state=shard_state).state_shardings(NARROW, {"w": P()})


def along_data(mesh: Mesh, shapes: TrainState, specs: PyTree) -> Any:
    return jax.tree.map(lambda leaf: NamedSharding(mesh, P(None, "data") if leaf.ndim else P()), shapes)


NAMELESS = tiny.experiment()  # its parameters name no axis
NAMED_TWICE = r"parameter w has \[32, 32\], and is named .*: name each axis once"
ERRORS: list[tuple[Callable[[], object], str]] = [
    (devices(devices=5), "requested 5 devices, but only 4 CPU devices are available.*JAX_NUM_CPU_DEVICES=5"),
    (devices(devices=3), "batch_size is 8, .* 3 devices .* 6 and 9"),
    (devices(devices=4, eval_batch_size=6), "eval_batch_size is 6, .* 4 and 8"),
    (devices(strategy="ddp"), "strategy is 'ddp', which is unknown: .*'auto', 'data', 'fsdp', 'pmap'"),
    (devices(mesh="2x2"), "mesh is '2x2', and must be axes with their sizes, as in data=2,model=2"),
    (devices(mesh="data=2", devices=4), "mesh data=2 .* 2 devices, .* 4"),
    (devices(mesh="data=2,model=2", strategy="pmap"), "strategy pmap .* axis data alone"),
    (devices(device="gpu"), r"device is 'gpu', which JAX cannot open here .*jax\[cuda13\].*--device cpu"),
    (devices(device="cuda"), "device is 'cuda', and must be one of None, cpu, gpu, tpu"),
    (lambda: tiny.fit(NAMELESS, mesh="data=2,modle=2"), "modle=2, and nothing is (split|sharded) .*modle.* over data"),
    (lambda: fully_sharded(P(None, None, "model")), NAMED_TWICE),
    (lambda: fully_sharded(P(("model", "data"), "model")), NAMED_TWICE),
    (lambda: fully_sharded(P(None, "model"), NARROW, "model=4"), r"w has \[32, 6\], whose axis 1 .* model=4 evenly"),
    (lambda: Strategy.find("nowhere:mine"), "'nowhere:mine', .*No module named 'nowhere'"),
    (lambda: Strategy.find("math:pi"), "'math:pi', of type float: .* jaxnn.parallel.Strategy"),
    (lambda: layout(axis_name="batch"), "axis_name of strategy zero1 is 'batch': .* 'data' or None"),
    (lambda: layout(batch_spec=lambda mesh: "data").data_size, "returned 'data': return a PartitionSpec of the fi"),
    (lambda: layout(batch_spec=lambda mesh: P(("data", "more"))).data_size, "along more, .* mesh data=4 lacks"),
    (placed(lambda *_: None), "a tree like the state's"),
    (
        placed(lambda mesh, shapes, specs: jax.tree.map(lambda leaf: P(), shapes)),
        r"returned P\(\) for step \[\]: return a NamedSharding",
    ),
    (placed(along_data), r"for params/w \[32, 6\], which does not fit"),
]


@pytest.mark.parametrize(("call", "words"), ERRORS, ids=[words for _, words in ERRORS])
@pytest.mark.several_devices
def test_wrong_devices_axes_and_strategies_are_named(call, words):
    with pytest.raises(jn.ConfigError, match=words):
        call()


SECONDS = 150


def starting(count: int, *flags: object, devices: int = 1) -> contextlib.AbstractContextManager[Started]:
    where = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", count, "--start-timeout", 60)
    command = [sys.executable, several.__file__, devices, *several.FLAGS, *where, *flags]
    return started([[*command, "--process-id", rank] for rank in range(count)])


def run(count: int, *flags: object, devices: int = 1) -> list[processes.Done]:
    with starting(count, *flags, devices=devices) as running:
        done = running.finish(SECONDS)
    assert [process.status for process in done] == [0] * count, done
    return done


def fit(num_steps: int, *where: Path, **options: Any) -> jn.Run:
    """The same run in this process, on one device unless more are given."""
    how = {str(flag)[2:].replace("-", "_"): value for flag, value in itertools.batched(several.FLAGS, 2)}
    return tiny.fit(several.experiment.replace(num_steps=num_steps), *where, **how, **options)


def steps_of(path: Path) -> list[int]:
    """The steps that have a checkpoint."""
    return [int(found.name) for found in (path / "checkpoints").glob("[0-9]*") if found.name.isdecimal()]


@pytest.mark.slow
def test_any_number_of_processes_resumes_a_run_as_one_trains_it_and_one_of_them_records(tmp_path):
    path = tmp_path / "run"
    fit(20, path, devices=2, strategy="fsdp")
    done = run(2, "--resume", path, "--devices", "all", "--strategy", "pmap", "--num-steps", 40, devices=2)
    facts = tiny.read(path)
    assert facts["status"] == "finished" and facts["groups"][0]["layout"] == {"strategy": "pmap", "mesh": {"data": 4}}
    assert "4 of 4 devices of 2 processes" in done[0].out and "step 40/40" in done[0].out
    assert not processes.words(done[1].out)
    # Here each process is sent its rows alone.
    run(4, "--resume", path, "--resident", False, "--strategy", "fsdp", "--num-steps", 60)
    fit(80, resume=path, strategy="data", devices=2)
    lines, expected = untimed(path), fit(80)._trainer.logs[0].lines
    assert [line["step"] for line in lines] == [*range(5, 81, 5)]
    for line, wanted in zip(lines, expected, strict=True):
        line.pop("digest", None)  # equal to rounding
        assert line == pytest.approx({name: wanted.get(name, 0) for name in line}, rel=1e-4), line["step"]
    layouts = [resumed["changed"][0].removeprefix("the layout ") for resumed in tiny.read(path)["resumed"]]
    assert layouts == ["fsdp data=2 → pmap data=4", "pmap data=4 → fsdp data=4", "fsdp data=4 → data data=2"]


@pytest.mark.slow
def test_signal_to_one_process_stops_all_at_one_step_to_resume_from_bitwise(tmp_path):
    path, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    flags = ("--strategy", "data", "--eval-every", 0)
    with starting(2, *flags, "--num-steps", 40_000, "--run-dir", path) as running:
        deadline = time.monotonic() + SECONDS
        while not steps_of(path) and time.monotonic() < deadline:
            time.sleep(0.05)
        running.signal(1, signal.SIGTERM)
        done = running.finish(SECONDS)
    assert [process.status for process in done] == [RESUMABLE, RESUMABLE], done
    assert tiny.read(path)["status"] == "interrupted"
    stopped = tiny.lines(path)[-1]["step"]
    assert stopped % 5 == 0 and stopped in steps_of(path)
    run(2, *flags, "--num-steps", stopped + 20, "--resume", path)
    run(2, *flags, "--num-steps", stopped + 20, "--run-dir", undisturbed)
    assert untimed(path) == untimed(undisturbed)
    chex.assert_trees_all_equal(jn.load_checkpoint(path)["params"], jn.load_checkpoint(undisturbed)["params"])


# Arrays that are sharded, replicated, and on the host, and differ with ``number``.
STATE = """
import errno

def state(number):
    _, sharded = adding()
    local = np.arange(2, dtype=np.float32) + 2 * rank + number
    put = jax.make_array_from_process_local_data
    same = put(NamedSharding(sharded.mesh, PartitionSpec()), np.full(2, number, np.float32))
    host = np.full(3, number, np.float32)
    return {"sharded": put(sharded, local), "same": same, "host": host, "number": float(number)}

def parts(array):
    return [shard.data for shard in array.addressable_shards] if isinstance(array, jax.Array) else [array]

def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

for number in range(2):
    jn.save_checkpoint(f"{FOLDER}/{number}", state(number))
    assert os.path.exists(f"{FOLDER}/{number}/SHA256SUMS"), "incomplete when the first process returns"
found = jn.load_checkpoint(f"{FOLDER}/1", state(0))
for name, wanted in state(1).items():
    for left, right in zip(parts(found[name]), parts(wanted), strict=True):
        np.testing.assert_array_equal(left, right)
say(error_of(jn.save_checkpoint, f"{FOLDER}/0", state(0)))
say(error_of(jn.save_checkpoint, f"{FOLDER}/new", {"a": {"b": jax.numpy.ones(2)}}))
# Orbax has written, and the sums cannot be.
fsync, os.fsync = os.fsync, full
say(error_of(jn.save_checkpoint, f"{FOLDER}/late", state(0)))
os.fsync = fsync
"""
# What differs in process 1, as a field of the experiment.
DIFFERENCES = {
    "learning_rate": "config=tiny.Config(learning_rate=0.2, num_steps=60)",
    "the program of a step": "optimizer=lambda config: optax.adam(0.02)",
    "the data": "data=lambda _: jn.data.arrays(train=tiny.points(37, 2), test=tiny.points(23, 1))",
}
FIT = """
import dataclasses, optax
from tests import several, tiny

def fit(**other):
    mine = dataclasses.replace(several.experiment, **other if rank else {})
    jn.fit(mine, strategy="data", run_dir=f"{FOLDER}/run", progress="none")
"""


@pytest.mark.slow
def test_two_processes_save_one_state_and_report_the_same_errors_and_differences(tmp_path):
    *first, last = DIFFERENCES.values()
    code = f"FOLDER = {str(tmp_path)!r}\n{STATE}{FIT}"
    code += "".join(f"\nsay(error_of(lambda: fit({difference})))" for difference in first) + f"\nfit({last})"
    done = processes.run(code, devices=2, seconds=SECONDS)
    assert [process.status for process in done] == [2, 2], done
    for process in done:
        taken, local, late, *differences = processes.words(process.out)
        assert taken == f"RecordError: {tmp_path}/0 exists already: choose a new path, or delete it first."
        assert f"cannot save a.b to {tmp_path}/new: it is only on devices of process {process.rank}; shard or" in local
        assert late.startswith(f"RecordError: {tmp_path}/late cannot be written (No space left on device): free disk")
        # A process that ends before the other has heard of it reports it for both.
        for name, line in zip(DIFFERENCES, [*differences, process.err], strict=True):
            what = "config" if name == "learning_rate" else "code or data"
            assert f"process 1 was started with another {what} ({name} is" in line
            assert line.count(" in process 0") == 1, "what is the same is listed"
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    saved = {name: np.asarray(value).tolist() for name, value in jn.load_checkpoint(tmp_path / "1").items()}
    assert saved == {"sharded": [1, 2, 3, 4], "same": [1, 1], "host": [1, 1, 1], "number": 1}


BATCH_SIZE, NUM_STEPS = 8, 10
# An epoch is longer than what is read, ahead of the last step too: no two steps have an example in common.
SIZES = {"train": 240, "val": 40}


def streamed(root: str, strategy: str) -> tuple[list[dict[str, float]], dict[str, list[int]]]:
    """The reports of a run on streamed images without what depends on the clock, and the images that it opened."""
    opened: dict[str, list[int]] = {split: [] for split in SIZES}

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(root):
            path = Path(arguments[0])
            opened[path.parent.parent.name].append(int(path.stem))

    sys.addaudithook(note)
    mirror = lambda rng, image: image[:, ::-1] if rng.random() < 0.5 else image  # noqa: E731
    data = jn.data.image_folder(root, (4, 4), stream=True, augment=mirror, num_workers=0)
    experiment = tiny.experiment(data=data, model=MLP((5, 2)), num_steps=NUM_STEPS, batch_size=BATCH_SIZE)
    run = tiny.fit(experiment, strategy=strategy, eval_every=5, eval_batch_size=BATCH_SIZE)
    kept = ("step", "train_loss", "validation_loss", "validation_accuracy")
    return [{name: line[name] for name in kept} for line in run._trainer.logs[0].lines], opened


@pytest.mark.slow
def test_streams_train_as_in_one_process_and_each_reads_its_rows(tmp_path):
    draws.write_images(tmp_path, SIZES, (4, 4, 3))
    expected, _ = streamed(str(tmp_path), "data")
    order = jn.data.batch_indices(0, np.arange(NUM_STEPS * 2), SIZES["train"], BATCH_SIZE)
    batches = np.arange(SIZES["val"]).reshape(-1, BATCH_SIZE)
    here = "import json\nfrom tests.parallel import test_distributed_training as here\n"
    each = f"for strategy in ('fsdp', 'pmap'): say(json.dumps(here.streamed({str(tmp_path)!r}, strategy)))"
    done = processes.run(here + each, seconds=SECONDS)
    assert [(process.status, process.err) for process in done] == [(0, "")] * 2, done
    for rank, process in enumerate(done):
        for strategy, line in zip(("fsdp", "pmap"), processes.words(process.out), strict=True):
            found, opened = json.loads(line)
            assert found == [pytest.approx(line, rel=1e-5) for line in expected]
            local = slice(None) if strategy == "pmap" else slice(4 * rank, 4 * rank + 4)
            # The first examples are read for their shapes.
            shown, train = set(range(BATCH_SIZE)), opened["train"]
            assert {*order[:NUM_STEPS, local].flat} <= {*train} <= {*order[:, local].flat} | shown
            assert {*opened["val"]} - shown == {*batches[:, local].flat} - shown
            # They are read twice before, under pmap once more to compare devices, and may come again.
            assert len(train) - len({*train}) <= (3 if strategy == "pmap" else 2) * BATCH_SIZE
