"""Loading a record executes nothing; and short versions of the benchmarks that kill, damage and prolong runs."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import jaxnn as jn
from jaxnn.cli import command as run_command
from tests import processes, shell, tiny

# Calls that execute loaded content, or write to paths that an archive contains.
UNSAFE = re.compile(
    r"^ *(import|from) (pickle|cPickle|cloudpickle|dill|joblib|shelve|marshal|torch|yaml|msgpack)\b"
    r"|(?<![\w.])(?<!def )(builtins\.)?(eval|exec|compile|__import__)\(|\.(extract|extractall|unpack_archive)\("
    r"|\bimport_module\((?!\")|\b(np|numpy|jnp)\.load\((?!.*allow_pickle=False)",
    re.MULTILINE,
)
# Functions on their way to worker processes; tables of jaxnn's names, and the MODULE:NAME that a user writes.
EXCEPTIONS = {"data/_grain.py": {"import cloudpickle"}} | dict.fromkeys(
    ("__init__.py", "_compat.py", "parallel/_strategies.py", "types.py"), {"import_module("}
)


def test_no_module_of_jaxnn_executes_what_it_loads():
    for source in ("import pickle", "x = eval(text)", "a.extractall(b)", "np.load(path)", "    from torch import load"):
        assert UNSAFE.search(source), source
    for source in ("jax.eval_shape(f)", "re.compile(x)", "np.load(path, allow_pickle=False)", "a.extractfile(b)"):
        assert not UNSAFE.search(source), source
    files = {path.relative_to(shell.ROOT / "jaxnn").as_posix(): path for path in (shell.ROOT / "jaxnn").rglob("*.py")}
    assert len(files) > 90
    for name, path in files.items():
        found = {match[0].strip() for match in UNSAFE.finditer(path.read_text())}
        assert found <= EXCEPTIONS.get(name, set()), name


MARK = "evil_of_a_record"
EVIL: dict[str, Any] = {"stop": f"{MARK}:x", "strategy": f"{MARK}:x", "writers": [f"{MARK}:x"], "probes": [f"{MARK}:x"]}


def test_loading_a_record_imports_nothing_that_it_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(f"{MARK}.py").write_text("open('mark', 'w')\n")
    tiny.fit(tiny.experiment(), Path("alone"))
    jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), run_dir="swept", **tiny.MEMBERS)
    script, resume = partial(jn.main, tiny.experiment()), "--progress none --resume"
    opening = {
        run_command: "show RUN;plot RUN;runs .;compare RUN RUN;diff RUN RUN;export RUN",
        script: f"evaluate RUN;{resume} RUN",
    }
    for file, more in ((Path("alone/record.json"), "--num-steps 40"), (Path("swept/record.json"), "")):
        facts = json.loads(file.read_text())
        cases = [("finished", EVIL, command, line) for command, lines in opening.items() for line in lines.split(";")]
        cases += [("interrupted", {name: EVIL[name]}, script, f"{resume} RUN {more}") for name in EVIL]
        for status, options, command, line in cases:
            changes = {"status": status, "command": [f"{MARK}.py"], "options": facts["options"] | options}
            file.write_text(json.dumps(facts | changes))
            with contextlib.suppress(SystemExit):
                command(line.replace("RUN", file.parent.name).split())
            said, asked = capsys.readouterr().err, f"'{MARK}:x'.*give {[*options][0]} again"
            assert not Path("mark").exists() and MARK not in sys.modules, (line, options)
            assert status == "finished" or re.search(asked, said), said


LEFT_OPEN = """
import sys
import jaxnn as jn
from tests import tiny
loop = iter(jn.iterate(tiny.experiment(), run_dir=sys.argv[1], checkpoint_every=5, **tiny.HOW))
print(next(loop).step)
"""


@pytest.mark.slow
def test_loop_left_open_at_exit_completes_its_record(tmp_path):
    done = shell.python("-c", LEFT_OPEN, tmp_path / "left")
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")
    assert tiny.read(tmp_path / "left")["status"] == "interrupted"
    assert tiny.fit(tiny.experiment(), resume=tmp_path / "left").summary.status == "finished"


BENCHMARKS = shell.ROOT / "experiments" / "benchmarks"


def benchmark(script: str, *words: object) -> str:
    """The output of a benchmark that succeeded."""
    with processes.started([[sys.executable, BENCHMARKS / script, *words]]) as running:
        (done,) = running.finish(900)
    assert done.status == 0, done.err
    return done.out


# Commands, and how often their outputs have which words.
CLAIMS = {
    "torture.py kills --num-kills 6 --num-steps 600": {
        r"^kills +([6-9]|\d\d)": 1,
        r"^… while a checkpoint was written +[1-9]": 1,
        r"^resumes seen, each from the newest complete checkpoint +([2-9]|\d\d)": 1,
        r"^runs finished, each bitwise that of an undisturbed one +[1-9]": 1,
    },
    # It exits with 1 if reading runs code, hangs or has a traceback.
    "hostile_records.py --quick": {r"^record\.json( of a sweep)? +\d+ +\d+ +\d+(  +0){6}$": 4},
    # A run resumes from the checkpoint before a damaged one.
    "torture.py corruption --most-files 1": {"1 of 1": 4},
    # The memory of a long run does not grow.
    "soak.py --num-steps 2_000 --report-every 20 --eval-every 40 --checkpoint-every 20": {
        "100 reports, 50 evaluations, 100 checkpoints": 1
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("command", CLAIMS)
def test_killed_and_damaged_runs_resume_and_long_ones_do_not_grow(command):
    output = benchmark(*command.split())
    for words, times in CLAIMS[command].items():
        assert len(re.findall(words, output, re.MULTILINE)) == times, output


@pytest.mark.slow
def test_run_on_a_full_disk_ends_and_resumes():
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    if shutil.which("unshare") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here: `unshare --user --map-root-user --mount` is not permitted")
    assert benchmark("torture.py", "disk-full", "--num-steps", 12_000).count("No space left on device") == 4
