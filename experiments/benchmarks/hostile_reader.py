"""A process that reads records from elsewhere, and what it does that it should not."""

import contextlib
import dataclasses
import faulthandler
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import optax
from hostile_mutations import BAIT, CANARY, MARK

import jaxnn as jn
from jaxnn.cli import command

STEPS = 4
MOST_BYTES = 6 << 30
MOST_ATTEMPTS = 500  # of one process, which keeps what it compiled
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
CHANGING = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
RUNNING = ("os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "socket.connect", "ctypes.call_function")
LIBRARY = str(Path(jn.__file__).parent)


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 0.1  # Learning rate
    batch_size: int = 4  # Examples per step
    num_steps: int = STEPS  # Updates
    seed: int = 0  # Determines initial parameters and data order


INPUTS = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
LABELS = INPUTS.argmax(axis=1)
SPLITS = jn.data.arrays(train=(INPUTS[:16], LABELS[:16]), test=(INPUTS[16:], LABELS[16:]), name="points")
experiment = jn.Experiment(
    Config(),
    lambda config: SPLITS,
    lambda config: jn.tasks.classification(jn.models.MLP((3,))),
    lambda config: optax.sgd(config.rate, momentum=0.9),
)


def _words(*words: object) -> Callable[[Path], object]:
    """A call of the command ``jaxnn`` with the record in place of ``RUN`` and its folder in place of ``ALL``."""

    def call(case: Path) -> None:
        command([str(case if word == "RUN" else case.parent if word == "ALL" else word) for word in words])

    return call


def _script(*words: object) -> Callable[[Path], object]:
    """A call of the script with the record in place of ``RUN``."""
    return lambda case: jn.main(experiment, [str(case if word == "RUN" else word) for word in words])


def _open(case: Path) -> object:
    run = jn.open_run(case)
    return repr(run), run._repr_html_(), run.plot()


def _predict(case: Path) -> object:
    run = jn.open_run(case, experiment)
    return run.predict(INPUTS[:5]), run.best_state()


def _open_sweep(case: Path) -> object:
    swept = jn.open_sweep(case)
    return repr(swept), swept._repr_html_(), swept.table(), swept.group(), swept.best()


def _resume_sweep(case: Path) -> object:
    shard = ["--shard", "1/2"] if (case / "shards").is_dir() else []
    return jn.main(experiment, ["--progress", "none", "--resume", str(case), *shard])


def _member(case: Path) -> object:
    jn.open_run(case, experiment, member=1).predict(INPUTS[:5])
    return jn.open_run(case, member=0).state, jn.fit(
        experiment, resume=case, member=1, run_dir=case / "alone", progress="none"
    )


def _trees(case: Path) -> object:
    model = jn.trees.GradientBoostingClassifier.load(case)
    return repr(model), model.predict(INPUTS[:5, : model.n_features_in_]), model.feature_importances_


READERS: dict[str, Callable[[Path], object]] = {
    "show": _words("show", "RUN"),
    "runs": _words("runs", "ALL"),
    "compare": _words("compare", "RUN", "RUN"),
    "plot": _words("plot", "RUN"),
    "export": _words("export", "RUN", "out.safetensors", "--script", __file__),
    "export here": _words("export", "RUN", "--script", __file__),
    "evaluate": _script("evaluate", "RUN"),
    "resume": _script("--progress", "none", "--resume", "RUN", "--num-steps", STEPS + 2),
    "resume sweep": _resume_sweep,
    "open": _open,
    "predict": _predict,
    "open sweep": _open_sweep,
    "predict members": lambda case: jn.open_sweep(case, experiment).predict(INPUTS[:5]),
    "member": _member,
    "load": jn.load_checkpoint,
    "load like": lambda case: jn.load_checkpoint(case, {"w": np.ones((3, 2)), "step": np.array(7, np.int32)}),
    "load trees": _trees,
    "load weights": jn.load_weights,
}


class Reader:
    """A process that reads, started again after it hung or died."""

    def __init__(self, root: Path, seconds: float) -> None:
        self.root, self.seconds, self.count = root, seconds, 0
        self.process: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def attempt(self, name: str, case: Path) -> dict[str, str]:
        """Has a ``case`` read; returns what was found, and where."""
        if self.process is None or self.count >= MOST_ATTEMPTS:
            self._end()
            self._start()
        self.count += 1
        found: dict[str, str] = {}
        try:
            self.channel.send((name, str(case)))
            # The process ends itself at a hang, unless it cannot.
            if not self.channel.poll(self.seconds + 30):
                raise EOFError
            found = self.channel.recv()
        except (EOFError, OSError):
            self._end()
            said = (self.root / "scratch" / "output").read_text(errors="replace")
            found["hang" if "Timeout (" in said or not said else "death"] = f"{name} {place_in(said)}"
        if (mark := self.root / MARK).exists():
            mark.unlink()
            found["code"] = name
        outside = {path.name: path.read_bytes() for path in (self.root / BAIT).parent.iterdir()}
        if outside != {"bait": b"private\n"}:
            found["outside"] = f"{name} changed {', '.join(outside)}"
            for path in (self.root / BAIT).parent.iterdir():
                path.unlink()
            (self.root / BAIT).write_text("private\n")
        return found

    def _start(self) -> None:
        (self.root / "scratch").mkdir(exist_ok=True)
        self.channel, other = (context := multiprocessing.get_context("spawn")).Pipe()
        self.process, self.count = context.Process(target=serve, args=(other, self.root, self.seconds)), 0
        self.process.start()
        other.close()
        self.channel.recv()

    def _end(self) -> None:
        if self.process is not None:
            self.channel.close()
            self.process.kill()
            self.process.join()
            self.process = None


def place_in(text: str) -> str:
    """The innermost line of jaxnn in a traceback of ``faulthandler``."""
    # The command's own thread waits for signals.
    lines = re.findall(rf'File "{re.escape(LIBRARY)}/(?!_signals)(.*)", line (\d+)', text)
    return ":".join(lines[0]) if lines else text.strip().splitlines()[-1][:90] if text.strip() else "in silence"


def serve(channel: Any, root: Path, seconds: float) -> None:
    """Reads what is asked for, in this process, until the ``channel`` is closed."""
    scratch = root / "scratch"
    output = os.open(scratch / "output", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    tempfile.tempdir, sys.dont_write_bytecode = str(scratch), True
    os.environ |= {"MPLCONFIGDIR": str(scratch), "JAXNN_DATA": str(scratch)}
    import jax

    jax.config.update("jax_compilation_cache_dir", str(scratch / "compiled"))
    faulthandler.enable(output)
    (root / "work").mkdir(exist_ok=True)
    sys.path += ["", str(root / "work")]
    touched: list[str] = []
    allowed = (root / "work", scratch, Path("/dev/null"))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in RUNNING:
            touched.append(f"{event} {arguments[:2]!r:.80}")
        if event != "open" and event not in CHANGING or isinstance(arguments[0], int):
            return
        with contextlib.suppress(TypeError, ValueError):
            path = Path(os.path.abspath(os.fsdecode(arguments[0])))
            changes = event != "open" or any(letter in str(arguments[1]) for letter in "wax+")
            inside = any(path.is_relative_to(folder) for folder in allowed)
            if path.is_relative_to(root / "outside") or (changes and not inside):
                touched.append(f"{event} {path}")

    sys.addaudithook(watch)
    channel.send(None)
    with contextlib.suppress(EOFError):
        while True:
            name, case = channel.recv()
            os.chdir(root / "work")
            os.ftruncate(output, 0)
            touched.clear()
            faulthandler.dump_traceback_later(seconds, exit=True, file=output)
            found = judged(READERS[name], Path(case))
            faulthandler.cancel_dump_traceback_later()
            said = os.pread(output, 1 << 24, 0).decode(errors="surrogateescape")
            if "Traceback (most recent" in said:
                found.setdefault("traceback", f"in a thread: {said.strip().splitlines()[-1][:90]}")
            if (control := CONTROL.search(said + found.get("refused", ""))) is not None:
                found["control"] = f"{name} {control[0]!r}"
            for one in touched:
                found["code" if one.split()[0] in RUNNING else "outside"] = f"{name}: {one.replace(str(root), '…')}"
            sys.modules.pop(CANARY, None)
            channel.send(found)


def judged(read: Callable[[Path], object], case: Path) -> dict[str, str]:
    """Reads a ``case``; returns what is wrong with how that ended, and the error for the user if it is ``refused``."""
    found = {}
    try:
        read(case)
    except SystemExit as ending:
        if ending.code not in (None, 0, 1, 2):  # 1: what it describes takes more memory than there is
            found["traceback"] = f"SystemExit {ending.code!r:.60}"
        found["refused"] = f"status {ending.code}"
    except jn.JaxnnError as error:
        found["refused"] = str(error)
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(LIBRARY)]
        where = f"{frames[-1].filename.removeprefix(LIBRARY)}:{frames[-1].lineno}" if frames else "outside of jaxnn"
        found["traceback"] = f"{where.lstrip('/')} {type(error).__name__}: {error!s:.80}".replace("\n", " ")
    sys.stdout.flush()
    sys.stderr.flush()
    return found
