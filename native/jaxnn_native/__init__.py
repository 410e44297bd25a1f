"""Native CPU kernels of jaxnn: importing this module registers them as targets of `jax.ffi.ffi_call`.

`TARGETS` names them. ``src/kernels.def`` lists their operands and results; the comment above each kernel in ``src``
states shapes and attributes. ``JAXNN_MAX_ISA`` in the environment limits the instructions: ``baseline``, ``avx2`` or
``avx512``.
"""

import ctypes
import importlib.metadata
import itertools
import pathlib
from collections.abc import Sequence

import jax

__version__ = importlib.metadata.version("jaxnn-native")


def _load() -> ctypes.CDLL:
    """The library. Raises ImportError or OSError if it, or a library that it needs, cannot be loaded."""
    directory = pathlib.Path(__file__).parent
    path = next(directory.glob("libjaxnn_native.*"), None)
    if path is None:  # in a checkout, or installed as editable
        raise ImportError(f"{directory} has no compiled library: install the package, not as editable")
    library = ctypes.CDLL(str(path))
    for name in ("load", "target", "instructions"):
        getattr(library, f"jaxnn_{name}").restype = ctypes.c_char_p
    for name in ("has_onednn", "has_bfloat16", "has_fast_products", "fits_winograd"):
        getattr(library, f"jaxnn_{name}").restype = ctypes.c_bool
    library.jaxnn_num_plans.restype = ctypes.c_int64
    if (error := library.jaxnn_load()) is not None:
        raise ImportError(error.decode())
    return library


def _register() -> tuple[str, ...]:
    names = itertools.takewhile(bool, map(_library.jaxnn_target, map(ctypes.c_int64, itertools.count())))
    targets = tuple(name.decode() for name in names)
    for target in targets:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(_library, target)), platform="cpu")
    return targets


_library = _load()
TARGETS = _register()


def abi() -> int:
    """Returns the version of the targets' arguments, raised with each change."""
    return int(_library.jaxnn_abi())


def instructions() -> str:
    """Returns the instructions that all kernels use: "AVX-512", "AVX2", "baseline", or on AArch64 "NEON"."""
    return str(_library.jaxnn_instructions().decode())


def has_onednn() -> bool:
    """Returns whether this package was built with oneDNN."""
    return bool(_library.jaxnn_has_onednn())


def has_attention() -> bool:
    """Returns whether attention is faster here than XLA's: on x86-64 it needs AVX2."""
    return instructions() != "baseline"


def has_bfloat16() -> bool:
    """Returns whether convolutions and products in bfloat16 use instructions of this CPU for it."""
    return bool(_library.jaxnn_has_bfloat16())


def has_fast_products(rows: int) -> bool:
    """Returns whether products in float32 with this number of rows are faster than XLA's, transposed or not."""
    return bool(_library.jaxnn_has_fast_products(ctypes.c_int64(rows)))


def fits_convolution(
    strides: Sequence[int],
    input_dilation: Sequence[int],
    kernel_dilation: Sequence[int],
    kernel_size: Sequence[int],
    groups: int,
    in_features: int,
    out_features: int,
    dtype_is_float32: bool,
) -> bool:
    """Returns whether ``jaxnn_convolution`` computes such a convolution and its gradients.

    Always with oneDNN. Without it Winograd's algorithm does, in float32, if the window is 3 × 3 without strides,
    dilation and groups, and the numbers of features are multiples of 16 whose product is at most 2**17.
    """
    plain = (1, 1) == tuple(strides) == tuple(input_dilation) == tuple(kernel_dilation) and groups == 1
    fits = plain and tuple(kernel_size) == (3, 3) and dtype_is_float32
    features = ctypes.c_int64(in_features), ctypes.c_int64(out_features)
    return has_onednn() or (fits and bool(_library.jaxnn_fits_winograd(*features)))


def num_plans() -> int:
    """Returns the number of convolutions and products whose oneDNN primitives are cached."""
    return int(_library.jaxnn_num_plans())
