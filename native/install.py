"""Builds jaxnn-native and installs it into the environment of this Python: `make native`.

Shows the progress of the build, and in the end what changed.
"""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
STAGES = {
    "Installing build dependencies: started": "fetching what it is built with (CMake, JAX's headers, oneDNN)",
    "*** Configuring CMake": "configuring",
    "*** Making wheel": "packing",
}
LOADED = """
import jaxnn_native as native
onednn = "with oneDNN" if native.has_onednn() else "without oneDNN"
print(f"{native.__version__}: {len(native.TARGETS)} kernels, {native.instructions()} on this CPU, {onednn}")
"""


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def build() -> None:
    """Prints a line for each stage and each compiled file; all output of pip if it fails."""
    start, output = time.monotonic(), []
    command = [*PIP, "install", "-v", "--force-reinstall", "--no-deps", str(HERE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            output.append(line)
            compiled = re.search(r"\[(\d+/\d+)\] Building .*?/(src/\S+?)\.o", line)
            stage = next((words for sign, words in STAGES.items() if sign in line), None)
            if compiled or stage:
                words = stage or f"compiling {compiled[1]}: {compiled[2]}"
                print(f"  {time.monotonic() - start:4.0f} s  {words}", flush=True)
    if pip.returncode:
        sys.exit("".join(output) + "\njaxnn-native cannot be built, see above: it needs g++ or clang++, and a network.")


def main() -> None:
    before, start = installed("jaxnn-native"), time.monotonic()
    print("Building jaxnn-native, kernels for CPUs (convolutions, attention, LSTMs, Adam, trees …): takes two minutes.")
    build()
    if installed("jaxnn-onednn"):
        subprocess.run([*PIP, "uninstall", "-q", "-y", "jaxnn-onednn"], check=True)
        print("Removed jaxnn-onednn, its former name.")
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    if loaded.returncode:
        sys.exit(f"jaxnn-native is installed, but cannot be loaded: {loaded.stderr.strip().splitlines()[-1]}")
    change = f"replaced {before} by" if before else "installed"
    print(f"Built in {time.monotonic() - start:.0f} s and {change} jaxnn-native {loaded.stdout.strip()}.")
    print(f"jaxnn uses it in {sys.prefix} from now on, unless JAXNN_NATIVE=off is set.")


if __name__ == "__main__":
    main()
