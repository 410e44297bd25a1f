"""The native package, `jaxnn-native`: whether its kernels can be called here, and the call of one."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxnn._compat import platform
from jaxnn.types import ConfigError

INSTALL = "make native (or: pip install ./native)"
SWITCH = "JAXNN_NATIVE"  # the environment variable: auto, on or off
ABI = 1  # the targets' arguments that jaxnn passes; the package says which ones it takes
_MISSING = f"the package jaxnn-native is not installed: {INSTALL}"
_OFF = f"native kernels are switched off by {SWITCH}=off"


def native_package() -> Any:
    """The package, whose import registers its targets; if it is not to be used or cannot be loaded, the reason.

    ``JAXNN_NATIVE`` in the environment decides: with ``off`` the package is not used, with ``on`` it must load, by
    default, ``auto``, it is used if it is there. ConfigError for another value, and with ``on`` without the package.
    """
    wanted = os.environ.get(SWITCH) or "auto"
    if wanted == "off":
        return _OFF
    if wanted not in ("auto", "on"):
        raise ConfigError(f"{SWITCH} in the environment is {wanted!r}: choose auto, on or off.")
    try:
        package: Any = importlib.import_module("jaxnn_native")
        if (has := package.abi()) == ABI:
            return package
        reason = f"the package jaxnn-native has kernels of version {has}, and jaxnn calls version {ABI}: {INSTALL}"
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError) as error:  # of another jax, for example
        reason = f"the package jaxnn-native cannot be loaded: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == "jaxnn_native":
            reason = _MISSING
    if wanted == "on":
        raise ConfigError(f"{SWITCH} is on, but {reason}.")
    return reason


def package_obstacle() -> str | None:
    """The reason why no native kernel can be called here, or None."""
    if platform() != "cpu":
        return "the package jaxnn-native computes on CPUs"
    package = native_package()
    return package if isinstance(package, str) else None


def native_missing() -> str | None:
    """Why native kernels cannot be used on this machine, where they could be: what to install; else None."""
    package = native_package() if sys.platform == "linux" and os.uname().machine == "x86_64" else None
    return package if isinstance(package, str) and package != _OFF and platform() == "cpu" else None


def native_fault() -> str | None:
    """Why a package that is installed cannot be used on this CPU; None if it can, or is not wanted."""
    reason = native_package() if platform() == "cpu" else None
    return reason if isinstance(reason, str) and reason not in (_OFF, _MISSING) else None


def describe_native() -> str:
    """Returns what native kernels compute here: ``jaxnn-native 0.2.0 with oneDNN, AVX-512``, or why none do."""
    if isinstance(package := native_package(), str):
        return f"not used: {package}"
    return f"jaxnn-native {package.__version__}{' with oneDNN' * package.has_onednn()}, {package.instructions()}"


def native_call(
    target: str,
    results: Sequence[Any],
    *operands: jax.Array,
    in_place: dict[int, int] | None = None,
    vmap_method: str = "broadcast_all",
    **attributes: Any,
) -> list[jax.Array]:
    """Returns what the package's kernel ``target`` computes, in whose arrays the members of `jax.vmap` come first.

    ``results`` are the shapes of float32 arrays, or `jax.ShapeDtypeStruct`. ``in_place`` maps the index of an operand,
    to which the kernel may write, to the index of its result; ``vmap_method`` is that of `jax.ffi.ffi_call`; attributes
    are integers or arrays of them, else ConfigError.

    >>> from jaxnn.kernels import native_call
    >>> like = jax.ShapeDtypeStruct((8,), jnp.uint16)
    >>> (bits,) = native_call("jaxnn_random_bits", [like], jnp.zeros(2, jnp.uint32))  # with jaxnn-native
    """
    like: Any = jax.typeof(operands[-1])  # varies over the mesh axes of all
    types = [
        like.update(
            shape=getattr(result, "shape", result),
            dtype=np.dtype(getattr(result, "dtype", "float32")),
            weak_type=False,
        )
        for result in results
    ]
    numbers = {name: np.asarray(value, np.int64)[()] for name, value in attributes.items()}
    for name, value in attributes.items():
        if not np.array_equal(numbers[name], value):
            raise ConfigError(f"{target}: the attribute {name} must be integers, not {value!r}: pass it as an operand.")
    call: Any = jax.ffi.ffi_call(target, types, vmap_method=vmap_method, input_output_aliases=in_place)
    return list(call(*operands, **numbers))
