"""A script that shows a number that is not finite again: ``repro.py``, with its state and batch in ``repro.npz``."""

from __future__ import annotations

import dataclasses
import inspect
import io
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxnn._disk import refusals, write_bytes
from jaxnn._provenance import Definition
from jaxnn.types import Batch, ConfigError, Experiment, TrainState, is_key, named_leaves

_FIRST = '"""Shows what is not finite after step '  # the first words of the scripts that are written here
_SCRIPT = '''{first}{step:,} of {record}: python repro.py."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxnn as jn

sys.path.insert(0, {folder!r})
from {module} import {name} as experiment  # noqa: E402

inf, nan = float("inf"), float("nan")
config = experiment.config
config = {config}
arrays = np.load(pathlib.Path(__file__).with_suffix(".npz"), allow_pickle=False)


def array(name, dtype):
    return jnp.asarray(arrays[name].view(dtype))


batch = {batch}
task, optimizer = experiment.task(config), experiment.optimizer(config)
step = {make}
shapes = jax.eval_shape(lambda: jn.steps.init_train_state(task, optimizer, jax.random.key(0), batch))
names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(shapes)]
leaves = [array(f"state/{{name}}", leaf.dtype) for name, leaf in zip(names[:-1], jax.tree.leaves(shapes))]
key = jax.random.wrap_key_data(arrays["state/key"], impl={impl!r})
state = jax.tree.unflatten(jax.tree.structure(shapes), [*leaves, key])

after, metrics = jax.jit(step)(state, batch)
print("loss", metrics["loss"])
for path, leaf in jax.tree.leaves_with_path(after._replace(key=None)):
    bad = int((~jnp.isfinite(leaf)).sum())
    if bad:
        print(f"{{jax.tree_util.keystr(path, simple=True, separator='/')}}: {{bad:,}} of {{leaf.size:,}} not finite")
'''


def write_repro(
    folder: Path, record: Path, step: int, experiment: Experiment[Any], state: TrainState, batch: Batch
) -> Path | None:
    """Writes ``repro.py`` and ``repro.npz``, and returns the script's path; None: no script defines the experiment."""
    found = Definition.find(experiment)
    if found is None or found[0].key is not None:
        return None
    definition, before = found
    path, file = folder / "repro.py", Path(definition.file)
    arrays = {f"state/{leaf}": _plain(value) for leaf, value in named_leaves(state).items()}
    expression = (
        f"jn.Batch({', '.join(_expression(f'batch/{part}', getattr(batch, part), arrays) for part in Batch._fields)})"
    )
    text = _SCRIPT.format(
        first=_FIRST,
        step=step,
        record=record,
        folder=str(file.parent),
        module=file.stem,
        name=definition.name,
        config=_changed("config", before.config, experiment.config),
        batch=expression,
        make=_step_maker(experiment),
        impl=str(jax.random.key_impl(state.key)),
    )
    np.savez(buffer := io.BytesIO(), **arrays)  # type: ignore[arg-type]
    with refusals(f"cannot write {path}", ": choose another folder."):
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(path.with_suffix(".npz"), buffer.getvalue())
        write_bytes(path, text.encode())
    return path


def check_own(folder: Path) -> None:
    """Raises ConfigError if a folder has files of these names that an autopsy did not write."""
    path = folder / "repro.py"
    data, own = path.with_suffix(".npz"), path.exists() and path.read_text(errors="replace").startswith(_FIRST)
    for file in (path, data):
        if file.exists() and not own:
            raise ConfigError(f"{file} is not an autopsy's: choose another folder, by folder= or --out.")


def _plain(value: Any) -> np.ndarray:
    """An array that a file without pickle can hold: keys as their data, numbers of other libraries as integers."""
    array = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" or array.dtype.isbuiltin != 1 else array


def _expression(name: str, tree: Any, arrays: dict[str, np.ndarray]) -> str:
    """The code that makes a part of a batch of ``arrays``, to which its leaves are added."""
    if tree is None:
        return "None"
    if isinstance(tree, dict):
        parts = (f"{key!r}: {_expression(f'{name}/{key}', value, arrays)}" for key, value in tree.items())
        return f"{{{', '.join(parts)}}}"
    if isinstance(tree, tuple | list):
        listed = ", ".join(_expression(f"{name}/{at}", value, arrays) for at, value in enumerate(tree))
        return f"[{listed}]" if isinstance(tree, list) else f"({listed},)"
    arrays[name] = _plain(tree)
    return f"array({name!r}, jnp.dtype({str(tree.dtype)!r}))"


def _changed(name: str, before: Any, now: Any) -> str:
    """The code that makes the config ``now`` of the one before, which has a ``name``."""
    parts = []
    for field in dataclasses.fields(now):
        old, new = getattr(before, field.name), getattr(now, field.name)
        if dataclasses.is_dataclass(new) and type(old) is type(new) and old != new:
            parts.append(f"{field.name}={_changed(f'{name}.{field.name}', old, new)}")
        elif old != new and not (isinstance(new, float) and math.isnan(new)):
            parts.append(f"{field.name}={new!r}")
    return f"dataclasses.replace({', '.join([name, *parts])})"


def _step_maker(experiment: Experiment[Any]) -> str:
    """The code that makes the step."""
    if experiment.step is None:
        return "jn.steps.make_train_step(task, optimizer, value_and_grad=jn.optim.value_and_grad_of(optimizer))"
    others = [*inspect.signature(experiment.step).parameters.values()][2:]
    wants_config = any(parameter.default is parameter.empty or parameter.name == "config" for parameter in others)
    return f"experiment.step(task, optimizer{', config' * wants_config})"
