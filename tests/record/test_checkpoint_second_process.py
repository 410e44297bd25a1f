"""Two processes asked to write one directory: the second is refused, whatever the first is doing with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jaxnn as jn
from jaxnn.record import check_vacant, is_locked, open_record
from jaxnn.types import RecordError
from tests import shell, tiny

# Goes on until its standard input is closed.
HOLD = """
import pathlib
import sys

import jaxnn as jn
from tests import tiny


def held():
    splits = tiny.splits()

    class Waiting:
        def __getattr__(self, name):
            return getattr(splits.train, name)

        def order(self, *arguments):
            if (path / "run.json").exists():  # not before the directory is its own
                sys.stdin.read()
            return splits.train.order(*arguments)

    return tiny.experiment(data=splits._replace(train=Waiting()))


path, how = pathlib.Path(sys.argv[2]), dict(tiny.HOW, resident=False)
match sys.argv[1]:
    case "fit":
        jn.fit(held(), run_dir=path, **how)
    case "resume":
        jn.fit(held(), resume=path, resident=False, progress="none")
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[str, Path], None]]:
    """Has another process fit in a directory, or resume the run in it, and not get on until the test is over."""
    script = tmp_path / "hold.py"
    script.write_text(HOLD)
    started = []

    def start(what: str, path: Path) -> None:
        command = [sys.executable, str(script), what, str(path)]
        surroundings = {**os.environ, "PYTHONPATH": str(shell.ROOT)}
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=surroundings, cwd=tmp_path))
        deadline = time.monotonic() + 60
        while not is_locked(path):
            assert started[-1].poll() is None and time.monotonic() < deadline, "the other process does not get on"
            time.sleep(0.01)

    yield start
    for process in started:
        process.communicate()
        assert process.returncode == 0


def files(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


BUSY = r"another process is writing the run directory .*: wait for it, or choose another --run-dir\."


@pytest.mark.parametrize("what", ["fit", "resume"])
def test_a_run_that_is_going_on(hold: Callable[[str, Path], None], tmp_path: Path, what: str) -> None:
    path = tmp_path / "run"
    if what == "resume":
        for report in jn.iterate(tiny.experiment(), run_dir=path, checkpoint_every=5, **tiny.HOW):
            if report.step == 10:
                break
    hold(what, path)
    while not (path / "run.json").is_file():
        time.sleep(0.01)
    for second in ({"run_dir": path}, {"resume": path}):
        with pytest.raises(RecordError, match=BUSY):
            jn.fit(tiny.experiment(), **second, **tiny.HOW)
    with pytest.raises(RecordError, match=BUSY):
        jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), run_dir=path, **tiny.HOW)


def test_a_sweep_that_is_going_on(tmp_path: Path) -> None:
    path, points = tmp_path / "sweep", jn.grid(seed=[0, 1])
    jn.sweep(tiny.experiment(), points, run_dir=path, vmap_size=2, devices=1, **tiny.HOW)
    before = files(path)
    probe = (
        "import sys\nimport jaxnn as jn\nfrom tests import tiny\n"
        "points = jn.grid(seed=[0, 1])\n"
        "for option in ('run_dir', 'resume'):\n"
        "    try:\n        jn.sweep(tiny.experiment(), points, progress='none', **{option: sys.argv[1]})\n"
        "    except jn.RecordError as error:\n        print(error)"
    )
    with open_record(path):
        said = shell.python("-c", probe, path).stdout.splitlines()
    sentence = f"another process is writing the run directory {path}: wait for it, or choose another --run-dir."
    assert said == [sentence, sentence]
    assert files(path) == before


def test_a_run_that_came_and_went_meanwhile_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = check_vacant

    def as_if_nobody_were_there(path: Path, *, held: bool = False) -> Path:
        if held:
            real(path, held=True)
        return path

    run = tiny.fit(tiny.experiment(), tmp_path / "run")
    assert run.dir is not None
    before = files(run.dir)
    monkeypatch.setattr("jaxnn.run._record.check_vacant", as_if_nobody_were_there)
    monkeypatch.setattr("jaxnn.run._record.create_run_dir", as_if_nobody_were_there)
    with pytest.raises(RecordError, match="is not empty"):
        tiny.fit(tiny.experiment(), run.dir)
    assert files(run.dir) == before
