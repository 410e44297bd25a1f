"""CIFAR's pickles, read without unpickling: they can name inert stand-ins and nothing else."""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np

from jaxnn.types import DataError

_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
# An array has some ten.
_MOST_TUPLES = 1_000


def read_pickle(data: bytes, where: str) -> dict[Any, Any]:
    """The dictionary in a pickle of bytes, numbers, lists and uint8 arrays.

    Unpickling calls what a pickle names. Here every name is resolved to a stand-in of ours that
    does nothing but remember its arguments, or refused; so a hostile file runs nothing.

    Args:
        data: the pickle, of Python 2 or 3, in protocol 0 to 2.
        where: the file's name, for messages.

    Returns:
        The dictionary, with NumPy arrays where the pickle has them.

    Raises:
        DataError: a pickle that names anything else, is damaged, or holds no dictionary.
    """
    try:
        _check_opcodes(data, where)
        value = _InertUnpickler(io.BytesIO(data), where).load()
    except DataError:
        raise
    # A damaged pickle makes the unpickler fail in any of many ways.
    except Exception as error:
        raise DataError(f"{where} is truncated or damaged ({error}): download it again.") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} does not hold a dictionary: it is not a batch of CIFAR.")
    return {key: _array(item, where) for key, item in value.items()}


def _check_opcodes(data: bytes, where: str) -> None:
    """Raises DataError for what the unpickler does not survive, small as the pickle may be.

    It makes room for all places of its memo up to the one that is written: 32 GB for ten bytes. And a key of thousands
    of tuples in one another overflows the stack.
    """
    num_tuples = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        num_tuples += opcode.name in _TUPLES
        if num_tuples > _MOST_TUPLES or (opcode.name in _PUTS and not 0 <= int(argument or 0) <= count):
            raise DataError(
                f"{where} is refused, since its opcode {count}, {opcode.name}, asks for more than a batch of CIFAR "
                "does: it may be hostile; download it again."
            )


class _InertUnpickler(pickle.Unpickler):
    """An unpickler that knows five names, each a stand-in."""

    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file, encoding="bytes")
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of a name, or a refusal."""
        known = _STAND_INS.get((module, name))
        if known is None:
            raise DataError(
                f"{self._where} is refused, since it names {module}.{name}, which no batch of "
                "CIFAR does: it may be hostile; download it again."
            )
        return known


class _StandIn:
    """Something a pickle builds: its arguments and its state, with no meaning yet.

    Stand-ins are classes that have ``__setstate__``, since a pickle may also set attributes of what
    it names: of a function, or of a class without that method, it could.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_StandIn):
    """Stands for ``numpy.ndarray`` and for the function that makes one in a pickle."""


class _Dtype(_StandIn):
    """Stands for ``numpy.dtype``."""


class _Encode(_StandIn):
    """Stands for ``_codecs.encode``, by which protocol 2 writes the bytes of Python 3."""

    def __new__(cls, text: str, encoding: str) -> Any:
        """The bytes themselves."""
        if encoding != "latin1":
            raise ValueError(f"bytes in the encoding {encoding!r}")
        return text.encode("latin1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Encode,
}


def _array(value: Any, where: str) -> Any:
    """The uint8 array that a stand-in remembers; any other value as it is."""
    if not isinstance(value, _Array):
        return value
    try:
        _, shape, dtype, is_fortran, data = value.state
        if dtype.arguments[0] not in ("u1", b"u1"):
            raise TypeError(f"dtype {dtype.arguments[0]!r}")
        array = np.ndarray(shape, np.uint8, data, order="F" if is_fortran else "C")
        if array.nbytes != len(data):
            raise ValueError(f"{len(data)} bytes for the shape {shape}")
        return array
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(
            f"{where} holds an array that is not whole, or not of uint8 ({error}): download it again."
        ) from error
