"""Native CPU kernels of jaxnn: importing this module registers them as targets of `jax.ffi.ffi_call`.

- ``jaxnn_adam(gradient, mu, nu, numbers, param)``: see ``src/adam.cc``; `jaxnn.nn` calls it.
- ``jaxnn_attention(query, key, value, lengths, causal)`` and ``jaxnn_attention_backward(…)``: see ``src/attention.h``;
  `jaxnn.nn` calls them.
- ``jaxnn_channel_sums(grad, x, mean)``, ``jaxnn_moments(x)``: see ``src/batch_norm.cc``; `jaxnn.nn` calls them.
- ``jaxnn_convolution(first, second)``: see ``src/convolution.cc``; `jaxnn.nn` calls it.
- ``jaxnn_grow_trees(bins, gradients, …)``: see ``src/trees.cc``; `jaxnn.trees` calls it.
- ``jaxnn_lookup_sums(table, ids)``, ``jaxnn_lookup_gradient(ids, sums)``: see ``src/lookup.cc``; `jaxnn.nn` calls them.
- ``jaxnn_lstm(products, kernel, c, h)`` and ``jaxnn_lstm_backward(…)``: see ``src/lstm.h``; `jaxnn.nn` calls them.
- ``jaxnn_product(left, right, transposed)``: ``left @ right``, of which one may be transposed; `jaxnn.nn` calls it.
- ``jaxnn_random_bits(seed)``: see ``src/random_bits.cc``; `jaxnn.nn` calls it.
- ``jaxnn_threads()``: the number of threads in XLA's pool, int32.

A target whose arguments change gets a new name: by that jaxnn finds that this package is older.
"""

import ctypes
import importlib.metadata
import pathlib

import jax

TARGETS = (
    "jaxnn_adam",
    "jaxnn_attention",
    "jaxnn_attention_backward",
    "jaxnn_channel_sums",
    "jaxnn_convolution",
    "jaxnn_grow_trees",
    "jaxnn_lookup_gradient",
    "jaxnn_lookup_sums",
    "jaxnn_lstm",
    "jaxnn_lstm_backward",
    "jaxnn_moments",
    "jaxnn_product",
    "jaxnn_random_bits",
    "jaxnn_threads",
)


def _load() -> ctypes.CDLL:
    """The library. Raises ImportError or OSError if it, or oneDNN's if that is not linked in, cannot be loaded."""
    try:
        files = importlib.metadata.files("onednn-cpu-gomp") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    # Loaded first, from wherever it is installed: the dynamic linker then knows it by name.
    for file in files:
        if file.name == "libdnnl.so.3":
            ctypes.CDLL(str(file.locate()))
    directory = pathlib.Path(__file__).parent
    library = next(directory.glob("libjaxnn_onednn.*"), None)
    if library is None:  # in a checkout, or installed as editable
        raise ImportError(f"{directory} has no compiled library: install the package, not as editable")
    return ctypes.CDLL(str(library))


_library = _load()
_library.jaxnn_has_attention.restype = ctypes.c_bool
_library.jaxnn_has_bfloat16.restype = ctypes.c_bool
_library.jaxnn_has_fast_products.restype = ctypes.c_bool
_library.jaxnn_num_plans.restype = ctypes.c_int64
for _name in TARGETS:
    jax.ffi.register_ffi_target(_name, jax.ffi.pycapsule(getattr(_library, _name)), platform="cpu")


def has_attention() -> bool:
    """Whether this CPU has the instructions that attention needs: AVX2."""
    return bool(_library.jaxnn_has_attention())


def has_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16 itself; otherwise oneDNN emulates it, slowly."""
    return bool(_library.jaxnn_has_bfloat16())


def has_fast_products(rows: int) -> bool:
    """Whether products in float32, with this number of rows, are faster than those of XLA, transposed or not."""
    return bool(_library.jaxnn_has_fast_products(ctypes.c_int64(rows)))


def num_plans() -> int:
    """The number of convolutions and products whose primitives are cached."""
    return int(_library.jaxnn_num_plans())
