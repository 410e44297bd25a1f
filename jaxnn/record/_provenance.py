"""Where a run came from: code, versions, flags, and fingerprints of what was computed on which data."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxnn.types import ConfigError, Splits

PARTS = {
    "program": "the program of a step",
    "batches": "the order or augmentation of the data",
    "evaluation": "the evaluation",
}
"""The parts of a fingerprint besides that of the data, in words."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def git_state(folder: Path, *, tracked: bool = False) -> dict[str, Any] | None:
    """Commit and whether the work tree around ``folder`` differs from it; None without git or a commit.

    With ``tracked`` the folder must be part of the tree: a package that is installed within another's is not.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return answer.stdout.strip()

    try:
        if tracked:
            git("ls-files", "--error-unmatch", ".")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def script() -> dict[str, Any]:
    """The command that was run, and the git state of its script's folder."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(main).resolve().parent if main else Path.cwd()
    return {"command": sys.argv, "git": git_state(folder)}


def jax_flags() -> dict[str, Any]:
    """JAX settings that change numbers, as they are now."""
    names = "enable_x64 default_matmul_precision default_prng_impl threefry_partitionable numpy_dtype_promotion"
    return {name: getattr(jax.config, name, None) for name in (f"jax_{word}" for word in names.split())}


def config_json(config: Any) -> dict[str, Any]:
    """The fields of a config dataclass in JSON's types; ConfigError names one that is not plain data."""
    return {field.name: _plain(getattr(config, field.name), field.name) for field in dataclasses.fields(config)}


def _plain(value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return config_json(value)
    if isinstance(value, tuple | list):
        return [_plain(item, where) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bool | int | float | str | None):
        return value
    raise ConfigError(
        f"config field {where!r} holds {value!r}, which a record cannot keep: use numbers, strings, booleans, "
        "None, tuples of these, or another dataclass, and build the object in task(config)."
    )


def config_from_json(content: dict[str, Any], default: Any) -> Any:
    """The inverse of :func:`config_json`, shaped like ``default``; lists become tuples.

    ConfigError names a field that the config does not have (any more), or has no dataclass in.
    """
    known = {field.name: field.init for field in dataclasses.fields(default)}
    if unknown := sorted(content.keys() - known.keys()):
        raise ConfigError(f"the record's config has {unknown[0]!r}, which this experiment lacks.")
    fields = {name: _shaped(content[name], getattr(default, name), name) for name in content if known[name]}
    return dataclasses.replace(default, **fields)


def _shaped(value: Any, default: Any, where: str) -> Any:
    if isinstance(value, dict):
        if not dataclasses.is_dataclass(default):
            raise ConfigError(
                f"the record's config has a dataclass in {where!r}, this experiment {default!r}: give the experiment "
                "one of the same class there."
            )
        return config_from_json(value, default)
    if isinstance(value, list):
        return tuple(_shaped(item, (), where) if isinstance(item, list) else item for item in value)
    # JSON has no infinities: the record holds their names.
    return float(value) if value in ("nan", "inf", "-inf") and not isinstance(default, str) else value


def changed_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The parts of a fingerprint that differ from those before, in words."""
    return [words for part, words in PARTS.items() if before.get(part) != now[part]]


def data_fingerprint(splits: Splits) -> str:
    """A digest of every example of every split, or of what identifies them if they are not in memory."""
    digest = hashlib.blake2b(digest_size=16)
    for name, source in splits.named().items():
        digest.update(name.encode())
        source.fingerprint(digest)
    return digest.hexdigest()


def program_fingerprint(function: Callable[..., Any], *args: Any) -> str:
    """A digest of what ``function`` computes, including the numbers it closes over; the same in every process.

    It is that of the traced program: a trace costs nothing if ``function`` is jitted and was traced before, and
    lowering would take five times as long. ``args`` may be of ``jax.ShapeDtypeStruct``.
    """
    return text_fingerprint("".join(f"{part}\n" for part in _program_parts(jax.make_jaxpr(function)(*args))))


def text_fingerprint(text: str) -> str:
    """A digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _program_parts(jaxpr: Any) -> Iterator[object]:
    """Everything that identifies a traced program: its operations with their settings, inputs and outputs."""
    numbers: dict[Any, int] = {}

    def given(variables: Iterable[Any]) -> list[int | str]:
        return [
            f"{_contents(one.val)} {_type(one.aval)}" if isinstance(one, core.Literal) else numbers[one]
            for one in variables
        ]

    def made(variables: Sequence[Any]) -> list[str]:
        numbers.update(zip(variables, itertools.count(len(numbers)), strict=False))
        return [_type(one.aval) for one in variables]

    # JAX before 0.12 keeps the numbers of inner programs elsewhere.
    yield made([*jaxpr.constvars, *jaxpr.invars]), [*map(_contents, getattr(jaxpr, "consts", ()))]
    for equation in jaxpr.eqns:
        yield equation.primitive.name, given(equation.invars), made(equation.outvars)
        for name, value in sorted(equation.params.items()):
            if inner := [*core.jaxprs_in_params({name: value})]:
                for one in inner:
                    yield from _program_parts(one)
            else:
                # The address of a function differs between processes, and what it computes was traced.
                yield name, ADDRESS.sub("", _text(value))
    yield given(jaxpr.outvars)


# A program has few types, and NumPy takes its time to name one.
_type = functools.lru_cache(maxsize=1024)(str)


def _contents(value: Any) -> str:
    """A digest of the numbers of an array, or of a key."""
    is_key = jax.numpy.issubdtype(getattr(value, "dtype", bool), jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(value) if is_key else value)
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return str(sorted(map(_text, value)))
    return _contents(value) if isinstance(value, np.ndarray | jax.Array) else repr(value)
