"""Digests of data, of programs and of texts, the same in every process; and what changed between two runs."""

import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxnn.types import RecordError, Splits, is_key

PARTS = {
    "program": "the program of a step",
    "batches": "the order or augmentation of the data",
    "evaluation": "the evaluation",
}
"""Descriptions of a fingerprint's parts, except the data."""
STATE_PARTS = {"params": "the parameters", "model_state": "the model's state", "opt_state": "the optimizer's state"}
"""Descriptions of the parts of a training state that have a digest in a report, in their order."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def data_fingerprint(splits: Splits) -> str:
    """A digest of all examples of all splits, or of what identifies them if they are not in memory."""
    digest = hashlib.blake2b(digest_size=16)
    for name, source in splits.named().items():
        digest.update(name.encode())
        source.fingerprint(digest)
    return digest.hexdigest()


def program_fingerprint(function: Callable[..., Any], *args: Any) -> str:
    """A digest of the program that ``function`` computes, with its constants; the same in every process."""
    # Tracing again costs nothing if the function is jitted, and lowering would take five times as long.
    return text_fingerprint("".join(f"{part}\n" for part in _program_parts(jax.make_jaxpr(function)(*args))))


def text_fingerprint(text: str) -> str:
    """A digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _program_parts(jaxpr: Any) -> Iterator[object]:
    """Everything that identifies a traced program: its operations with their parameters, inputs and outputs."""
    numbers: dict[Any, int] = {}

    def inputs(variables: Iterable[Any]) -> list[int | str]:
        return [
            f"{_contents(one.val)} {_type(one.aval)}" if isinstance(one, core.Literal) else numbers[one]
            for one in variables
        ]

    def outputs(variables: Sequence[Any]) -> list[str]:
        numbers.update(zip(variables, itertools.count(len(numbers)), strict=False))
        return [_type(one.aval) for one in variables]

    # JAX before 0.12 keeps the constants of inner programs elsewhere.
    yield outputs([*jaxpr.constvars, *jaxpr.invars]), [*map(_contents, getattr(jaxpr, "consts", ()))]
    for equation in jaxpr.eqns:
        yield equation.primitive.name, inputs(equation.invars), outputs(equation.outvars)
        for name, value in sorted(equation.params.items()):
            if inner := [*core.jaxprs_in_params({name: value})]:
                for one in inner:
                    yield from _program_parts(one)
            else:
                # The address of a function differs between processes; the function itself was traced.
                yield name, ADDRESS.sub("", _text(value))
    yield inputs(jaxpr.outvars)


# A program has few types, and NumPy is slow at formatting one.
_type = functools.lru_cache(maxsize=1024)(str)


def _contents(value: Any) -> str:
    """A digest of the values of an array, or of a key."""
    array = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return str(sorted(map(_text, value)))
    return _contents(value) if isinstance(value, np.ndarray | jax.Array) else repr(value)


def check_same_data(path: Path | str, before: Mapping[str, Any], data: str | None, what: str = "run") -> None:
    """Raises RecordError unless ``data`` is the data's fingerprint in ``before``, of the run or sweep in ``path``."""
    if before.get("data") != data:
        raise RecordError(
            f"the data are not those that the {what} in {path} was trained on: restore the data, or start a new {what}."
        )


def changed_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Descriptions of the parts of a fingerprint that changed."""
    return [description for part, description in PARTS.items() if before.get(part) != now[part]]


def differing_parts(before: str, now: str) -> list[str]:
    """The names of the parts of a training state whose digests differ in two reports."""
    pairs = zip(before.split("-"), now.split("-"), strict=True)
    return [part for part, (a, b) in zip(STATE_PARTS, pairs, strict=True) if a != b]


def changed_implementations(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Descriptions of the operations whose implementations changed, such as ``convolution channels_last → onednn``."""
    changed = [name for name in now if before.get(name, now[name]) != now[name]]
    return [f"{name} {' and '.join(before[name])} → {' and '.join(now[name])}" for name in changed]
