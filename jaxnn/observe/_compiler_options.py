"""All options that jaxnn gives the compiler: around its faults, for equal bits, and for speed."""

import functools
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxnn._compat import compute_capability, target_device
from jaxnn._equations import constants_and_carries, equations
from jaxnn.types import ConfigError

SWITCH = "JAXNN_COMPILER_OPTIONS"  # the environment variable: auto, or off for none of those for speed
# XLA's own list, and convolutions: by default they break each CUDA graph of a network (openxla/xla#34572). cuDNN's
# recurrent layers cannot be recorded.
RECORDED = ("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION", "CONVOLUTION")
# Why options for speed were given up in this process, one line each.
_given_up: dict[str, None] = {}


class CompilerOptions(NamedTuple):
    """The compiler's options for a program."""

    needed: Mapping[str, Any]  # for right numbers, or for equal ones
    faster: Mapping[str, Any]  # without which it is compiled if it fails with them


def compiler_options(jaxpr: Any, *, platform: str | None, once: bool, deterministic: bool) -> CompilerOptions:
    """The options for the program of ``jaxpr`` on a ``platform``, None: JAX's; called ``once``; with equal bits.

    ConfigError for an unknown value of the switch.
    """
    if (switch := os.environ.get(SWITCH) or "auto") not in ("auto", "off"):
        raise ConfigError(f"{SWITCH} in the environment is {switch!r}: choose auto or off.")
    platform = platform or _platform()
    needed = {name: value for fault in known_faults(platform) if fault.is_in(jaxpr) for name, value in fault.options}
    if deterministic and platform == "cuda":
        # Otherwise scatters add in any order, and another process may choose other kernels.
        needed |= {"xla_gpu_exclude_nondeterministic_ops": True}
    faster: dict[str, Any] = {}
    if switch == "off":
        return CompilerOptions(needed, faster)
    if once and platform == "cpu":
        # LLVM works 77 seconds on the initial state of a ResNet-56, and 6 with few passes; the bits are the same.
        needed |= {"xla_backend_optimization_level": 1}
    if platform == "cuda" and not _given_up and has_convolution(jaxpr):
        faster = {"xla_gpu_enable_command_buffer": ",".join(RECORDED)}
    return CompilerOptions(needed, faster)


def _platform() -> str:
    """The platform of the device that JAX computes on here: ``cpu``, ``cuda``, ``rocm`` or ``tpu``."""
    platform = str(target_device().platform)
    return platform if platform != "gpu" else "cuda" if compute_capability() else "rocm"


def computes_in_tf32() -> bool:
    """Whether the device that JAX computes on here rounds the operands of float32 products by default."""
    return compute_capability() >= 8.0


def has_convolution(jaxpr: Any) -> bool:
    """Whether a convolution is in ``jaxpr``."""
    names = "conv_general_dilated", "channels_last_convolution"
    return any(equation.primitive.name in names for equation, _ in equations(jaxpr))


def _give_up(error: Exception) -> None:
    """Has no program of this process compiled any more with the options for speed, which failed by ``error``."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    _given_up.setdefault(f"convolutions could not be recorded in CUDA graphs, and are launched one by one: {first}")


def given_up() -> list[str]:
    """Returns why programs of this process were compiled without the compiler's options for speed.

    >>> jn.observe.given_up()  # nothing failed
    []
    """
    return list(_given_up)


def compile_with(program: jax.stages.Lowered, options: CompilerOptions) -> Any:
    """The executable; without the options for speed if it cannot be compiled, or first called, with them."""

    def plainly(error: Exception) -> jax.stages.Compiled:
        _give_up(error)
        return program.compile(dict(options.needed))

    if not options.faster:
        return program.compile(dict(options.needed)) if options.needed else program.compile()
    try:
        return _OnTrial(program.compile({**options.needed, **options.faster}), plainly)
    except jax.errors.JaxRuntimeError as error:
        return plainly(error)


class _OnTrial:
    """An executable whose first call may fail by its options: then it is ``compiled_again``, and called once more."""

    def __init__(self, compiled: Any, compiled_again: Callable[[Exception], Any]) -> None:
        self._compiled, self._compiled_again, self._proven = compiled, compiled_again, False

    def __call__(self, *args: Any) -> Any:
        if self._proven:
            return self._compiled(*args)
        # A call may consume its arguments.
        kept = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, args)
        try:
            results = jax.block_until_ready(self._compiled(*args))
        except jax.errors.JaxRuntimeError as error:
            self._compiled = self._compiled_again(error)
            results = self._compiled(*kept)
        self._proven = True
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


class Fault(NamedTuple):
    """A pattern that some versions of jaxlib compile to wrong numbers."""

    versions: tuple[str, ...]  # of jaxlib
    platform: str
    pattern: str
    way_round: str  # and what it costs
    is_in: Callable[[Any], bool]  # whether a jaxpr has the pattern
    options: Sequence[tuple[str, Any]]  # the compiler's, with which its program is right
    shows: Callable[[], bool]  # whether `jax.jit` computes an example of it wrongly, here and now


def known_faults(platform: str, version: str | None = None) -> list[Fault]:
    """Returns the known faults of a ``version`` of jaxlib, by default this one, on a ``platform`` such as ``"cpu"``.

    >>> len(jn.observe.known_faults("cpu", "0.12.0.1")), jn.observe.known_faults("gpu", "0.12.0.1")
    (2, [])
    """
    version = version or _jaxlib_version()
    return [fault for fault in _FAULTS if fault.platform == platform and version in fault.versions]


@functools.cache
def _jaxlib_version() -> str:
    return importlib.metadata.version("jaxlib")


# Of a broadcast array XLA makes the same of an operand.
_ELEMENTWISE = frozenset(
    "abs add convert_element_type copy div exp integer_pow log max min mul neg pow select_n sqrt sub tanh".split()
)


def _multiplies_by_one_value(jaxpr: Any) -> bool:
    """Whether a product in ``jaxpr`` has a right operand of one value, or one for each of its batch."""
    return _follow(getattr(jaxpr, "jaxpr", jaxpr), ())[0]


def _follow(jaxpr: Any, given: Sequence[frozenset[int]]) -> tuple[bool, list[frozenset[int]]]:
    """Whether the pattern is in ``jaxpr``, and the axes along which each of its results may vary.

    ``given`` are those of its first arguments; the others may vary along all.
    """
    varying = dict(zip(jaxpr.invars, given, strict=False))

    def axes(atom: Any) -> frozenset[int]:
        known = varying.get(atom) if isinstance(atom, core.Var) else None
        return frozenset(range(atom.aval.ndim if hasattr(atom.aval, "ndim") else 0)) if known is None else known

    for equation in jaxpr.eqns:
        of, name, parameters = [axes(atom) for atom in equation.invars], equation.primitive.name, equation.params
        results: Sequence[frozenset[int]] = ()
        match name:
            case "dot_general":
                _, (_, batch) = parameters["dimension_numbers"]
                if equation.invars[1].aval.ndim > len(batch) and of[1] <= {*batch}:
                    return True, []
            case "broadcast_in_dim":
                results = [frozenset(parameters["broadcast_dimensions"][axis] for axis in of[0])]
            case "transpose":
                results = [frozenset(parameters["permutation"].index(axis) for axis in of[0])]
            case "reshape" if not of[0]:
                results = of[:1]
            case _ if name in _ELEMENTWISE:
                results = [frozenset().union(*of)]
        # What is carried through a loop may vary after its first turn.
        shared = {"while": of[:0], "cond": of[1:]}.get(name, of)
        for inner in core.jaxprs_in_params(parameters):
            if name == "scan":
                shared = of[: constants_and_carries(equation, inner)[0]]
            found, inner_results = _follow(inner, shared if len(shared) <= len(inner.invars) else ())
            if found:
                return True, []
            if name not in ("while", "scan", "cond"):
                results = inner_results
        varying.update(zip(equation.outvars, results, strict=False))
    return False, [axes(atom) for atom in jaxpr.outvars]


def _one_value_shows() -> bool:
    x = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    wrong = jax.jit(lambda x: jnp.square(x @ jnp.full_like(x, 1.3)).sum(-1))(x)
    return not np.allclose(wrong, 64 * np.square(1.3 * x.sum(1)), rtol=1e-3, atol=1e-3)


def _broadcast_shows() -> bool:
    total = jax.jit(lambda ones: jnp.broadcast_to(ones, (2, 1024, 1024)).sum())
    return any(float(total(jnp.ones((1024, 1)))) != 2 * 1024 * 1024 for _ in range(20))


def _maximum_shows() -> bool:
    return bool(jax.jit(lambda x: jnp.maximum(x, 0).sum())(jnp.full(2**15, jnp.nan)) == 0)


_WITHOUT_FUSIONS = (("xla_cpu_experimental_ynn_fusion_type", ""),)
_BY_FLAG = "for jax.jit set XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=, at 5 to 30 % of the speed"
_FAULTS = (
    Fault(
        ("0.11.2", "0.12.0", "0.12.0.1"),
        "cpu",
        "a product with an array of one value, such as x @ jnp.full_like(x, c), whose result is reduced",
        f"fit, iterate and sweep compile it right; {_BY_FLAG}",
        _multiplies_by_one_value,
        _WITHOUT_FUSIONS,
        _one_value_shows,
    ),
    Fault(
        ("0.11.2",),
        "cpu",
        "sums of broadcast arrays, such as jnp.broadcast_to(x, shape).sum(), which differ from call to call",
        f"install jax 0.12; fit, iterate and sweep compile all programs without it; {_BY_FLAG}",
        lambda jaxpr: True,
        _WITHOUT_FUSIONS,
        _broadcast_shows,
    ),
    Fault(
        ("0.11.2", "0.12.0", "0.12.0.1"),
        "cpu",
        "NaN in a maximum that is reduced, such as jax.nn.relu(x).sum() of 10,000 numbers: they become 0",
        f"fit, iterate and sweep end at the next checkpoint of parameters that are not finite; {_BY_FLAG}",
        lambda jaxpr: False,  # finite numbers are right, and are not to be computed more slowly
        (),
        _maximum_shows,
    ),
)
