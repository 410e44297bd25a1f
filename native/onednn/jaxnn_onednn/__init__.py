"""Native CPU kernels of jaxnn: importing this module registers them as targets of `jax.ffi.ffi_call`.

``jaxnn_threads`` takes nothing and returns the number of threads in XLA's pool, int32.
"""

import ctypes
import importlib.metadata
import pathlib

import jax

TARGETS = ("jaxnn_threads",)


def _load() -> ctypes.CDLL:
    """The library. Raises OSError if it, or oneDNN's if that is not linked in, cannot be loaded."""
    try:
        files = importlib.metadata.files("onednn-cpu-gomp") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    # Loaded first, from wherever it is installed: the dynamic linker then knows it by name.
    for file in files:
        if file.name == "libdnnl.so.3":
            ctypes.CDLL(str(file.locate()))
    (library,) = pathlib.Path(__file__).parent.glob("libjaxnn_onednn.*")
    return ctypes.CDLL(str(library))


library = _load()
for _name in TARGETS:
    jax.ffi.register_ffi_target(_name, jax.ffi.pycapsule(getattr(library, _name)), platform="cpu")
