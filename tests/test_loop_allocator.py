"""The run option `allocator`: when freed memory is kept, for how long, and what is told of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jaxnn.loop import allocating
from jaxnn.loop.allocating import Allocation, keep_from_the_start, settle_allocation

import jaxnn as jn
from jaxnn.observe import can_keep_freed_memory
from jaxnn.types import ConfigError, TrainingError
from tests import tiny

MIB = 2**20
PAGE = allocating.mmap.PAGESIZE
LARGE = 40 * MIB


class Machine:
    """A C library that keeps freed memory as told, and calls whose page faults are imagined.

    Attributes:
        told: what was told to it, in order.
        keeps: whether it keeps freed memory now.
        cures: whether that spares page faults, from the third call on.
        calls: whether memory was kept, call by call.
    """

    def __init__(self, cures: bool = True) -> None:
        self.told: list[str] = []
        self.keeps = False
        self.cures = cures
        self.calls: list[bool] = []
        self.faults = 0

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        self.told.append("keep")
        self.keeps = True
        try:
            yield
        finally:
            self.told.append("usual")
            self.keeps = False

    def call(self) -> object:
        self.calls.append(self.keeps)
        self.faults += 3 if self.keeps and self.cures and len(self.calls) > 2 else LARGE // PAGE
        return ()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(allocating, "can_keep_freed_memory", lambda: True)
    monkeypatch.setattr(allocating, "keeping_freed_memory", machine.keeping)
    monkeypatch.setattr(allocating, "share_heap", lambda: machine.told.append("share"))
    monkeypatch.setattr(allocating, "page_faults", lambda: machine.faults)
    return machine


# --- what is decided ---


def test_large_temporaries_have_memory_kept_until_the_run_ends(machine: Machine) -> None:
    with contextlib.ExitStack() as stack:
        allocation = settle_allocation("auto", LARGE, machine.call, stack)
        assert allocation == Allocation(kept=True, temporary_bytes=LARGE, page_faults=3)
        # Two calls to fill the heap and one that shows it.
        assert machine.calls == [True, True, True]
        assert machine.keeps
    assert machine.told == ["keep", "usual"]


def test_what_does_not_help_is_undone_at_once(machine: Machine) -> None:
    machine.cures = False
    with contextlib.ExitStack() as stack:
        allocation = settle_allocation("auto", LARGE, machine.call, stack)
        assert allocation == Allocation(kept=False, temporary_bytes=LARGE, page_faults=LARGE // PAGE)
        assert not machine.keeps
    assert machine.told == ["keep", "usual"]
    assert len(machine.calls) == allocating.MOST_CALLS


@pytest.mark.parametrize(("wish", "size"), [("auto", 32 * MIB - 1), ("auto", 0), ("default", LARGE)])
def test_nothing_is_touched_or_tried_where_there_is_no_need(machine: Machine, wish: str, size: int) -> None:
    with contextlib.ExitStack() as stack:
        allocation = settle_allocation(wish, size, machine.call, stack)
    assert allocation == Allocation(False, size) and allocation.line(1) is None
    assert not machine.told and not machine.calls


def test_calls_of_many_steps_are_not_tried(machine: Machine) -> None:
    with contextlib.ExitStack() as stack:
        assert settle_allocation("auto", 32 * MIB, None, stack) == Allocation(True, 32 * MIB)
        assert machine.keeps


def test_keeping_on_request_starts_before_jax_does_and_asks_for_no_reason(machine: Machine) -> None:
    with contextlib.ExitStack() as stack:
        keep_from_the_start("keep", stack)
        assert machine.told == ["share", "keep"]
        assert settle_allocation("keep", 1, machine.call, stack) == Allocation(True, 1)
    assert machine.told == ["share", "keep", "usual"] and not machine.calls


@pytest.mark.parametrize("wish", ["auto", "default"])
def test_only_a_request_touches_anything_at_the_start(machine: Machine, wish: str) -> None:
    with contextlib.ExitStack() as stack:
        keep_from_the_start(wish, stack)
    assert not machine.told


def test_where_memory_cannot_be_kept_only_asking_for_it_is_answered(monkeypatch, machine: Machine) -> None:
    monkeypatch.setattr(allocating, "can_keep_freed_memory", lambda: False)
    with contextlib.ExitStack() as stack:
        allocation = settle_allocation("auto", LARGE, machine.call, stack)
        assert not allocation.kept and allocation.line(1) is None
        with pytest.raises(ConfigError, match="allocator is 'keep', and only glibc's") as caught:
            keep_from_the_start("keep", stack)
    assert "\n" not in str(caught.value) and not machine.told


# --- what is told ---


def test_the_report_gives_the_reason_and_the_way_out() -> None:
    line = Allocation(True, LARGE, 3).line(1)
    assert line == (
        "keeps freed memory for the run (a call's 40.0 MiB of temporaries, now 3 page faults); "
        "--allocator default leaves it to glibc"
    )
    unhelped = Allocation(False, 80 * MIB, 20480)
    assert "20,480 page faults" in unhelped.line(1) and "MALLOC_ARENA_MAX=1" in unhelped.line(1)
    assert unhelped.line(16) is None, "sixteen steps share those page faults: no advice is due"


# --- a run ---


def test_a_run_holds_the_setting_while_it_trains_and_records_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(allocating, "MAPPED_BYTES", 1)
    monkeypatch.setattr(allocating, "page_faults", lambda: 0)
    iteration = jn.iterate(tiny.experiment(), run_dir=tmp_path / "run", **tiny.HOW | {"steps_per_call": 1})
    assert not machine.told
    for _ in iteration:
        assert machine.keeps
    assert machine.told == ["keep", "usual"]
    facts, ledger = tiny.read(tmp_path / "run"), tiny.read(tmp_path / "run", "compiles.json")
    program = next(one for one in ledger["compilations"] if one["name"] == "train 1 step")
    assert facts["allocator"] == {"kept": True, "temporary_bytes": program["temporary_bytes"], "page_faults": 0}
    assert program["temporary_bytes"] > 0 and facts["options"]["allocator"] == "auto"
    tiny.fit(tiny.experiment(), steps_per_call=1, progress="plain")
    assert "allocator" in capsys.readouterr().out


def test_trying_it_out_trains_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    untouched = tiny.fit(tiny.experiment(), steps_per_call=1)
    assert not machine.told
    monkeypatch.setattr(allocating, "MAPPED_BYTES", 1)
    monkeypatch.setattr(allocating, "page_faults", iter(range(0, 10**9, 10**6)).__next__)
    tried = tiny.fit(tiny.experiment(), steps_per_call=1)
    assert machine.told == ["keep", "usual"]
    tiny.assert_bitwise_equal(tried.state._replace(key=None), untouched.state._replace(key=None))


@pytest.mark.parametrize("options", [{"steps_per_call": 1}, {"steps_per_call": 1, "monitor": "lss"}])
def test_a_run_that_fails_or_never_starts_puts_it_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(allocating, "MAPPED_BYTES", 1)
    monkeypatch.setattr(allocating, "page_faults", lambda: 0)
    diverging = tiny.experiment(learning_rate=1e38)
    with pytest.raises((TrainingError, ConfigError)):
        tiny.fit(diverging, **options)
    assert machine.told == ["keep", "usual"]


# Its hidden layer holds 8 × 2^20 floats, 32 MiB, which the backward pass needs.
SCRIPT = """
import dataclasses, json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import jaxnn as jn
from jaxnn.loop import allocating

@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 8
    num_steps: int = 2
    seed: int = 0

WIDTH = 2**20
model = (lambda key, x: {"up": jnp.ones((3, WIDTH)), "down": jnp.ones((WIDTH, 3))},
         lambda params, x: x @ params["up"] @ params["down"])
rng = np.random.default_rng(0)
points = rng.normal(size=(16, 3)).astype(np.float32), rng.integers(0, 3, 16)
experiment = jn.Experiment(Config(), lambda config: jn.data.arrays(points),
                           lambda config: jn.tasks.classification(model), lambda config: optax.sgd(1e-9))
jn.fit(experiment, run_dir=sys.argv[1], allocator="keep", steps_per_call=1, checkpoint_every=0)
print(json.load(open(sys.argv[1] + "/run.json"))["allocator"])
"""


@pytest.mark.skipif(not can_keep_freed_memory(), reason="needs glibc, whose settings these are")
def test_a_training_step_with_large_temporaries_no_longer_pays_for_its_pages(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parent.parent,
    )
    assert done.returncode == 0, done.stderr
    allocation = json.loads((tmp_path / "run" / "run.json").read_text())["allocator"]
    assert allocation["kept"] and allocation["temporary_bytes"] > 32 * MIB, allocation
    assert allocation["page_faults"] < allocation["temporary_bytes"] // PAGE // 2
    assert "keeps freed memory for the run" in done.stdout


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU's temporaries lie on the host")
def test_the_default_says_nothing_of_a_small_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny.fit(tiny.experiment(), tmp_path / "run", progress="plain")
    facts = tiny.read(run.dir)
    assert facts["allocator"]["kept"] is False and 0 < facts["allocator"]["temporary_bytes"] < MIB
    assert "allocator" not in capsys.readouterr().out
