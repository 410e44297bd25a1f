"""The origin of a run: code, versions, flags, fingerprints of its programs and data, and the shapes of its data."""

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
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxnn.data import ArraySource
from jaxnn.record._state_files import is_key
from jaxnn.types import ConfigError, Examples, RecordError, Splits

PARTS = {
    "program": "the program of a step",
    "batches": "the order or augmentation of the data",
    "evaluation": "the evaluation",
}
"""Descriptions of a fingerprint's parts, except the data."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit, and whether the work tree around ``folder`` differs from it; None without git or a commit."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def script() -> dict[str, Any]:
    """The command that was run, and the git state of its script's folder."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(main).resolve().parent if main else Path.cwd()
    return {"command": sys.argv, "git": git_state(folder)}


def jax_flags() -> dict[str, Any]:
    """The current JAX settings that change numbers."""
    names = (
        "enable_x64 default_matmul_precision default_prng_impl threefry_partitionable numpy_dtype_promotion "
        "random_seed_offset accurate_erf_inv high_dynamic_range_gumbel allow_f16_reductions softmax_custom_jvp"
    )
    return {name: getattr(jax.config, name, None) for name in (f"jax_{word}" for word in names.split())}


def leaf_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name of each field of a config and its nested dataclasses, with the dataclass that has it."""
    for field in (field for field in dataclasses.fields(config) if field.init):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from leaf_fields(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, config


def config_json(config: Any) -> dict[str, Any]:
    """Converts the fields of a config dataclass to JSON's types; ConfigError names one that is not plain data."""
    return {field.name: _plain(getattr(config, field.name), field.name) for field in dataclasses.fields(config)}


def _plain(value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return config_json(value)
    if isinstance(value, tuple | list):
        return [_plain(item, name) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bool | int | float | str | None):
        return value
    raise ConfigError(
        f"config field {name!r} holds {value!r}, which a record cannot store: use numbers, strings, booleans, "
        "None, tuples of these, or another dataclass, and build the object in task(config)."
    )


def config_from_json(content: dict[str, Any], default: Any) -> Any:
    """The inverse of :func:`config_json`, with the types of ``default``; ConfigError if a field does not fit it."""
    known = {field.name: field.init for field in dataclasses.fields(default)}
    if unknown := sorted(content.keys() - known.keys()):
        raise ConfigError(f"the record's config has {unknown[0]!r}, which this experiment lacks.")
    fields = {name: _shaped(content[name], getattr(default, name), name) for name in content if known[name]}
    return dataclasses.replace(default, **fields)


def _shaped(value: Any, default: Any, name: str) -> Any:
    if isinstance(value, dict):
        if not dataclasses.is_dataclass(default):
            raise ConfigError(
                f"the record's config has a dataclass in {name!r}, this experiment {default!r}: use a dataclass of the "
                "same class there."
            )
        return config_from_json(value, default)
    if isinstance(value, list):
        return tuple(_shaped(item, (), name) if isinstance(item, list) else item for item in value)
    # JSON has no NaN and no infinities: the record holds their names.
    return float(value) if value in ("nan", "inf", "-inf") and not isinstance(default, str) else value


def check_same_data(path: Path | str, before: Mapping[str, Any], data: str | None, what: str = "run") -> None:
    """Raises RecordError unless ``data`` is the data's fingerprint in ``before``, of the run or sweep in ``path``."""
    if before.get("data") != data:
        raise RecordError(
            f"the data are not those that the {what} in {path} was trained on: restore the data, or start a new {what}."
        )


def changed_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Descriptions of the parts of a fingerprint that changed."""
    return [description for part, description in PARTS.items() if before.get(part) != now[part]]


def changed_implementations(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Descriptions of the operations whose implementations changed, such as ``convolution channels_last → onednn``."""
    changed = [name for name in now if before.get(name, now[name]) != now[name]]
    return [f"{name} {' and '.join(before[name])} → {' and '.join(now[name])}" for name in changed]


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


def describe_data(splits: Splits, examples: Examples) -> dict[str, Any] | None:
    """Returns the number of examples of each split, and the dtype and shape of one of ``examples [batch, ...]``.

    ``{"splits": {"train": 1437}, "inputs": "float32[64]", "targets": "int32[]"}``; None if the source prepares batches
    in a way of its own, which a record does not hold.
    """
    if getattr(type(splits.train), "as_batch", None) is not ArraySource.as_batch:
        return None
    one = jax.tree.map(lambda rows: f"{rows.dtype}{list(rows.shape[1:])}", examples._asdict())
    return {"splits": {name: source.num_examples for name, source in splits.named().items()}, **one}


def recorded_data(path: object, facts: Mapping[str, Any]) -> Splits | None:
    """Returns data of zeros, which take no memory, with the splits and shapes of the run or group in ``path``.

    None if ``facts`` do not describe the data; RecordError if they do in another form.
    """
    described = facts.get("examples")
    if described is None:
        return None

    def rows(count: int, text: str) -> np.ndarray:
        dtype, _, shape = text.removesuffix("]").partition("[")
        return np.broadcast_to(np.zeros((), jnp.dtype(dtype)), (count, *map(int, filter(None, shape.split(",")))))

    try:
        one = with_tuples({name: described[name] for name in Examples._fields})
        if not jax.tree.leaves(one["inputs"]):
            raise ValueError("there are no inputs")
        splits: Any = {
            split: ArraySource(Examples(**jax.tree.map(functools.partial(rows, count), one)))
            for split, count in described["splits"].items()
        }
        others = {name: splits.pop(name) for name in [*splits] if name not in Splits._fields}
        return Splits(**splits, others=others)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"the shapes of the data in {path} cannot be read ({error!r}): it is damaged.") from error


def with_tuples(tree: Any) -> Any:
    """``tree`` of JSON, which has no tuples, with tuples for its lists: data sets and configs have no lists."""
    if isinstance(tree, Mapping):
        return {name: with_tuples(part) for name, part in tree.items()}
    return tuple(map(with_tuples, tree)) if isinstance(tree, list) else tree
