"""Models as files that are used without jaxnn: StableHLO, ONNX, safetensors."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend.core import jaxpr_as_fun

from jaxnn._compat import needs_extra
from jaxnn._disk import write_bytes
from jaxnn._text import first_line
from jaxnn.engine import Programs, make_predict
from jaxnn.kernels import portable
from jaxnn.optim import evaluation_state
from jaxnn.record import save_weights
from jaxnn.types import ConfigError, TrainState, check_int, suggest


def export_model(
    programs: Programs, state: TrainState, path: Path, batch: int | str, platforms: Sequence[str] | None
) -> Path:
    """Writes what `Run.export` describes, in the format of the suffix of ``path``; returns the path."""
    _check_format(path, batch, (*WRITERS, ".safetensors"))
    # Without the optimizer's state, which would be stored with the program.
    state = evaluation_state(state)._replace(opt_state=(), key=jax.random.key_data(state.key))
    state = jax.device_get(state)
    if path.suffix == ".safetensors":
        save_weights(path, {"params": state.params, **state.model_state})
        return path
    predict = make_predict(programs.task, programs.source)

    def model(inputs: Any) -> Any:
        return _plain(predict(state, inputs))

    return export_function(path, model, programs.inputs, batch, platforms)


def export_function(
    path: Path, function: Callable[[Any], Any], like: Any, batch: int | str, platforms: Sequence[str] | None
) -> Path:
    """Writes a pure function of arrays like ``like [any, ...]`` as the program that the suffix of ``path`` names."""
    _check_format(path, batch, WRITERS)
    WRITERS[path.suffix](path, function, like, batch, platforms)
    return path


def _check_format(path: Path, batch: int | str, known: Iterable[str]) -> None:
    if path.suffix not in known:
        raise ConfigError(f"{path} has no suffix of a format to export to: {suggest(path.suffix, known)}.")
    if batch != "symbolic":
        check_int("batch", batch)


def _plain(tree: Any) -> Any:
    """Named tuples as dicts: a file holds no classes."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, Mapping):
        return {name: _plain(part) for name, part in tree.items()}
    return type(tree)(map(_plain, tree)) if isinstance(tree, tuple | list) else tree


def _write_stablehlo(path: Path, model: Callable[[Any], Any], like: Any, batch: Any, platforms: Any) -> None:
    with needs_extra("export", "a StableHLO file"):
        import flatbuffers  # noqa: F401 - which JAX writes it with
    (rows,) = export.symbolic_shape("batch") if batch == "symbolic" else (batch,)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), like)
    # Those of the platform that runs it, if it is the one here.
    here = platforms is None or tuple(platforms) == (export.default_export_platform(),)
    try:
        with contextlib.nullcontext() if here else portable():
            exported = export.export(jax.jit(model), platforms=platforms)(shapes)
        content = exported.serialize()
    # A model's own errors, for a batch whose size is unknown, or an output that is no dict, list or tuple.
    except Exception as error:
        hint = ": give batch a number" if batch == "symbolic" else ""
        raise ConfigError(f"the model cannot be exported ({first_line(error)}){hint}.") from error
    write_bytes(path, bytes(content))


def _write_onnx(path: Path, model: Callable[[Any], Any], like: Any, batch: Any, _: Any) -> None:
    if not hasattr(like, "shape"):
        raise ConfigError("a model whose inputs are several arrays is not exported to ONNX: write a .stablehlo file.")
    with needs_extra("onnx", "an ONNX file"):
        import onnxruntime
        from jax2onnx import to_onnx
    (rows,) = export.symbolic_shape("batch") if batch == "symbolic" else (batch,)
    shape = jax.ShapeDtypeStruct((rows, *like.shape[1:]), like.dtype)
    examples = np.zeros((2 if batch == "symbolic" else batch, *like.shape[1:]), like.dtype)
    try:
        # Traced first, and without nested programs: jax2onnx replaces functions of JAX while it traces, and does not
        # know those that JAX compiles apart.
        with portable(), jax.disable_jit():
            traced = jax.make_jaxpr(model)(shape)
        with contextlib.redirect_stdout(io.StringIO()):  # its progress
            graph = to_onnx(lambda inputs: jaxpr_as_fun(traced)(inputs), [shape]).SerializeToString()
        session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        session.run(None, {session.get_inputs()[0].name: examples})
    except Exception as error:
        named = re.search(r"(?:[Pp]rimitive|implementation for) [\"'`]?([\w-]+)", str(error))
        what = f"the operation {named.group(1)}" if named else first_line(error)
        raise ConfigError(f"ONNX does not have all of the model ({what}): write a .stablehlo file instead.") from error
    write_bytes(path, graph)


WRITERS = {".stablehlo": _write_stablehlo, ".onnx": _write_onnx}
