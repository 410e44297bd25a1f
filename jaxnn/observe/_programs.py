"""Programs: what was compiled, why and how long it took, and what a traced one contains."""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import math
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxnn._equations import constants_and_carries, equations, source_line
from jaxnn._fingerprints import ProgramPart, program_fingerprint, program_lines, program_parts
from jaxnn._signals import INTERRUPTED, leave
from jaxnn.kernels import products_of
from jaxnn.observe._compiler_options import (
    CompilerOptions,
    Fault,
    compile_with,
    compiler_options,
    computes_in_tf32,
    known_faults,
)

# Operations of cuDNN, with the products of their gradient as a multiple of those forward.
_CUDNN = {"rnn_fwd": 1, "rnn": 1, "rnn_bwd": 2}
_CUDNN |= {"dot_product_attention_fwd_wrapper": 1, "dot_product_attention_bwd_wrapper": 2}
_PRODUCTS = "dot_general", "conv_general_dilated", "ragged_dot_general"  # beside those of kernels
_WITH_DERIVATIVES = "custom_jvp_call", "custom_vjp_call"
# The named scopes in which `jaxnn.nn` traces its implementations; a test compares the two.
_SCOPE = re.compile(r"\bjaxnn\.(\w+)\.(\w+)")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One program made ready to run."""

    name: str  # such as ``"train_steps"``
    cause: str  # why it had to be compiled, such as ``"first step"``
    trace_seconds: float  # Python to jaxpr
    lower_seconds: float  # jaxpr to StableHLO
    compile_seconds: float = 0.0  # StableHLO to an executable, or its retrieval from a cache
    cache_hit: bool = False  # whether this process had compiled it before, or the persistent cache had it
    saved_seconds: float = 0.0  # after a hit, whole seconds of the compilation that filled the cache, less retrieval's
    temporary_bytes: int = 0  # memory that each call allocates and frees, besides its arguments and results

    @property
    def seconds(self) -> float:
        """All three stages together."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds

    @staticmethod
    def totals(ledger: Sequence[Compilation]) -> dict[str, float]:
        """Sums over all: seconds of each stage and together, number of compilations and hits, seconds saved."""
        names = ("trace_seconds", "lower_seconds", "compile_seconds", "seconds", "saved_seconds")
        sums = {name: sum(getattr(one, name) for one in ledger) for name in names}
        return {"num_compilations": len(ledger), "num_cache_hits": sum(one.cache_hit for one in ledger), **sums}


# The executables compiled last in this process, by what they were compiled from.
_EXECUTABLES: dict[Hashable, Any] = {}
_MOST_EXECUTABLES = 64


class Lowered(NamedTuple):
    """A program that is traced and lowered, ready to be compiled in any thread, and its entry so far."""

    program: Any  # `jax.stages.Lowered`; an executable if this process compiled an equal one before
    entry: Compilation
    key: Hashable = None  # equal for programs that may share an executable; None: not shared
    options: CompilerOptions | None = None  # None for an executable

    @staticmethod
    def of(
        function: Callable[..., Any],
        name: str,
        cause: str,
        *args: Any,
        platform: str | None = None,
        once: bool = False,
        deterministic: bool = False,
        **jit_options: Any,
    ) -> Lowered:
        """Traces and lowers a pure ``function`` without running it; ``name`` and ``cause`` are for the ledger.

        ``args`` are its arguments, or ``jax.ShapeDtypeStruct`` in their place; static ones are omitted when the
        executable is called. ``jit_options`` are those of ``jax.jit``: ``static_argnums``, ``donate_argnums``,
        ``out_shardings``, …. For the compiler: the ``platform`` that the arguments are on, None: JAX's; whether the
        program is called ``once``, and whether its bits have to be equal in each process (``deterministic``), as they
        are on a CPU.
        """
        started = time.perf_counter()
        traced = jax.jit(function, **jit_options).trace(*args)
        traced_at = time.perf_counter()
        options = compiler_options(traced.jaxpr, platform=platform, once=once, deterministic=deterministic)
        settings = {str(kind): tuple(given.items()) for kind, given in options._asdict().items()}
        key = _executable_key(traced, args, jit_options | settings)
        if (known := _EXECUTABLES.pop(key, None)) is not None:
            _EXECUTABLES[key] = known  # the last
        program = known or traced.lower()
        entry = Compilation(name, cause, traced_at - started, time.perf_counter() - traced_at)
        return Lowered(program, entry, key, None if known else options)

    @staticmethod
    def compile_all(programs: Iterable[Lowered]) -> list[Any]:
        """Compiles all ``programs``, each as soon as it is given; KeyboardInterrupt ends the wait."""
        found: list[concurrent.futures.Future[Any]] = []

        def compile_one(program: Lowered, future: concurrent.futures.Future[Any]) -> None:
            try:
                future.set_result(program.compile())
            except BaseException as error:
                future.set_exception(error)

        # Not by an executor, which waits for XLA also after KeyboardInterrupt: that may take minutes.
        at_exit = functools.partial(_end_of_compilation, found)
        atexit.register(at_exit)
        for program in programs:
            found.append(concurrent.futures.Future())
            threading.Thread(target=compile_one, args=(program, found[-1]), name="compile", daemon=True).start()
        concurrent.futures.wait(found)
        atexit.unregister(at_exit)
        return [future.result() for future in found]

    def compile(self) -> tuple[Any, Compilation]:
        """The executable, which refuses arguments of another shape, dtype or sharding, and its complete entry.

        A program that this process compiled before, and that is among the last 64, is not compiled again.
        """
        if self.options is None:
            return self.program, dataclasses.replace(
                self.entry, cache_hit=True, temporary_bytes=temporary_bytes(self.program)
            )
        started = time.perf_counter()
        thread = threading.get_ident()
        saved: list[float] = []  # seconds that hits of the persistent cache on this thread save, as JAX reports them

        def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
            if event == "/jax/compilation_cache/compile_time_saved_sec" and threading.get_ident() == thread:
                saved.append(duration_secs)

        jax.monitoring.register_event_duration_secs_listener(on_duration)
        try:
            compiled = compile_with(self.program, self.options)
        finally:
            jax.monitoring.unregister_event_duration_listener(on_duration)
        if self.key is not None:
            _EXECUTABLES[self.key] = compiled
            if len(_EXECUTABLES) > _MOST_EXECUTABLES:
                _EXECUTABLES.pop(next(iter(_EXECUTABLES)), None)
        return compiled, dataclasses.replace(
            self.entry,
            compile_seconds=time.perf_counter() - started,
            cache_hit=bool(saved),
            saved_seconds=max(0.0, sum(saved)),
            temporary_bytes=temporary_bytes(compiled),
        )


def _executable_key(traced: jax.stages.Traced, args: Any, jit_options: Any) -> Hashable:
    """All that an executable is compiled from: the program, the structures around it, and its devices."""
    # Also of arguments that the program does not use.
    given = tuple(repr(info) for info in jax.tree.leaves(traced.args_info))
    places = tuple(
        (getattr(leaf, "sharding", None), getattr(leaf, "committed", None)) for leaf in jax.tree.leaves(args)
    )
    options, structure = jax.tree.flatten(jit_options)
    device = jax.config.jax_default_device, jax.sharding.get_mesh()
    try:
        program = _contents(traced.jaxpr)
        key = program, traced.in_tree, traced.out_tree, given, places, tuple(options), structure, device
        hash(key)
    except TypeError:  # a value without a hash, or a function
        return None
    return key


def _contents(value: Any) -> Hashable:
    """What is equal for two jaxprs, or parameters of equations, only if they are lowered to the same program.

    TypeError for functions, of which this is not known: those that a program calls back, for example.
    """
    match value:
        case core.Jaxpr() | core.ClosedJaxpr():  # which JAX 0.12 made one class
            jaxpr = getattr(value, "jaxpr", value)
            numbers = collections.defaultdict[Any, int](itertools.count().__next__)

            def atoms(of: Sequence[Any]) -> Hashable:
                """Numbers of variables, in order of appearance, and values of literals; and their types."""
                return tuple(
                    (_contents(atom.val) if isinstance(atom, core.Literal) else numbers[atom], atom.aval) for atom in of
                )

            def equation(of: Any) -> Hashable:
                # Functions for derivatives are beside the jaxpr of the function itself.
                jaxpr_only = of.primitive.name in _WITH_DERIVATIVES
                parameters = {
                    name: parameter
                    for name, parameter in of.params.items()
                    if not jaxpr_only or isinstance(parameter, core.Jaxpr | core.ClosedJaxpr)
                }
                return of.primitive, of.ctx, atoms(of.invars), atoms(of.outvars), _contents(parameters)

            arguments = atoms([*jaxpr.constvars, *jaxpr.invars])
            equations = tuple(map(equation, jaxpr.eqns))
            return _contents(tuple(getattr(value, "consts", ()))), arguments, equations, atoms(jaxpr.outvars)
        case np.ndarray() | np.generic() | jax.Array() if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            array = np.asarray(value)
            of_jax = (getattr(value, name, None) for name in ("weak_type", "sharding", "committed"))
            return array.shape, array.dtype, *of_jax, hashlib.sha256(array.tobytes()).digest()
        case float() | complex():
            return type(value), repr(value)  # of which 0.0 and -0.0 differ
        case dict():
            return tuple((name, _contents(each)) for name, each in value.items())
        case tuple() | list() if type(value) in (tuple, list):
            return type(value), *map(_contents, value)
        case types.FunctionType() | types.MethodType() | functools.partial():
            raise TypeError("a function")
    return type(value), value


def temporary_bytes(compiled: Any) -> int:
    """Memory that each call allocates and frees, besides its arguments and results; 0 if XLA does not report it."""
    return getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)


class Traced:
    """What a traced ``function`` contains, for ``args``: its arguments, or ``jax.ShapeDtypeStruct`` in their place.

    Costs one trace, or none if a jitted ``function`` was traced before.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._jaxpr = jax.make_jaxpr(function)(*args)

    def equations(self) -> Iterator[tuple[Any, str]]:
        """The equations at any depth, each once as written, with their named scopes."""
        return equations(self._jaxpr)

    @functools.cached_property
    def _parts(self) -> list[ProgramPart]:
        # Tracing again costs nothing if the function is jitted, and lowering would take five times as long.
        return list(program_parts(self._jaxpr))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of it with its constants, the same in every process."""
        return program_fingerprint(self._parts)

    def listing(self) -> Iterator[str]:
        """Its equations as text, with their lines in the source: `program_lines`."""
        # Many are of the same place, and finding its line takes longer than the rest.
        known: dict[Any, str] = {}

        def line_of(equation: Any) -> str:
            place = equation.source_info.traceback
            return known[place] if place in known else known.setdefault(place, source_line(equation))

        return program_lines(self._parts, line_of)

    def faults(self, platform: str) -> list[Fault]:
        """The known faults of jaxlib on a ``platform`` that its program would have."""
        return [fault for fault in known_faults(platform) if fault.is_in(self._jaxpr)]

    @functools.cached_property
    def implementations(self) -> dict[str, list[str]]:
        """The implementations of each operation of ``jaxnn.nn``, in order of appearance.

        ``{"convolution": ["channels_last"], "attention": ["cudnn"]}``; ``{}`` if there is none.
        """
        found: dict[str, dict[str, None]] = {}
        for _, scopes in self.equations():
            for operation, name in _SCOPE.findall(scopes):
                found.setdefault(operation, {})[name] = None
        return {operation: list(names) for operation, names in found.items()}

    @functools.cached_property
    def plain_convolutions(self) -> int:
        """Number of convolutions that are not a jaxnn layer's, without those of gradients."""
        return sum(
            equation.primitive.name == "conv_general_dilated"
            and "transpose(" not in scopes
            and not _SCOPE.search(scopes)
            for equation, scopes in self.equations()
        )

    @functools.cached_property
    def product_dtypes(self) -> dict[str, int]:
        """Number of matrix products and convolutions by the dtype of their inputs, most frequent first.

        A product of unequal dtypes is named ``"bfloat16*float32"``, and ``"float32 as TF32"`` one that the device
        rounds to 10 bits of mantissa: NVIDIA's GPUs from capability 8.0, unless a higher precision is asked for.
        Products are counted as written: one in the body of a ``scan`` once, one in each branch of a ``cond``.
        """
        counts: collections.Counter[str] = collections.Counter()
        rounds = computes_in_tf32()
        for equation, _ in self.equations():
            if equation.primitive.name in _PRODUCTS or products_of(equation) is not None:
                left, right = (str(operand.aval.dtype) for operand in equation.invars[:2])
                name = left if left == right else f"{left}*{right}"
                counts[f"{name} as TF32" if rounds and name == "float32" and not _is_exact(equation) else name] += 1
        return dict(counts.most_common())

    @functools.cached_property
    def operations(self) -> float:
        """A rough number of arithmetic operations, to guess its time from before it is compiled.

        Counts the elements that each equation computes and the operations of products, and the body of a ``scan`` as
        often as it runs; infinite if there is a ``while`` loop.
        """

        def cost(equation: Any, scopes: str) -> dict[str, float]:
            if equation.primitive.name == "while":
                return {"": math.inf}
            # Tokens have no shape.
            elements = sum(math.prod(getattr(value.aval, "shape", ())) for value in equation.outvars)
            return {"": elements + _product_flops(equation)}

        return _count(self._jaxpr.jaxpr, None, cost)[0][""]

    def product_flops(self, by: Callable[[Any, str], str] | None = None) -> dict[str, float]:
        """Floating-point operations of the products that the results need, by dtype, most first.

        Or by what ``by`` returns for an equation and its named scopes, as those of `equations`.

        Products are matrix products, convolutions and cuDNN's operations. Two per multiplication and addition; the body
        of a ``scan`` counts as often as it runs, that of a ``while`` loop once, the branch of a ``cond`` with the
        fewest.
        """

        def dtype(equation: Any, scopes: str) -> str:
            return str(jnp.promote_types(*(value.aval.dtype for value in equation.invars[:2])))

        def cost(equation: Any, scopes: str) -> dict[str, float]:
            flops = _product_flops(equation)
            return {(by or dtype)(equation, scopes): flops} if flops else {}

        found = _count(self._jaxpr.jaxpr, None, cost)[0]
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _is_exact(equation: Any) -> bool:
    """Whether a product asks for float32's own precision."""
    precision = getattr(equation.params.get("geometry", None), "precision", equation.params.get("precision"))
    asked = precision if isinstance(precision, tuple) else (precision,)
    return any(str(one).upper() in ("HIGHEST", "FLOAT32", "F32_F32_F32") for one in asked)


def _count(
    jaxpr: Any, used: Sequence[bool] | None, cost: Callable[[Any, str], Mapping[str, float]], scopes: str = ""
) -> tuple[dict[str, float], list[bool]]:
    """The cost of what ``used`` results, None: all, need, as XLA computes no more, and which arguments those need."""
    total: dict[str, float] = collections.defaultdict(float)
    needed = {id(value) for value in itertools.compress(jaxpr.outvars, used or itertools.repeat(True))}
    for equation in reversed(jaxpr.eqns):
        outputs, name = [id(value) in needed for value in equation.outvars], equation.primitive.name
        within = f"{scopes}/{equation.source_info.name_stack}"
        if not (any(outputs) or equation.effects):
            continue
        # What an operation of cuDNN does is not written in equations.
        bodies = [] if name in _CUDNN else list(core.jaxprs_in_params(equation.params))
        inputs, times = [True] * len(equation.invars), 1
        if name == "scan":
            consts, carries = constants_and_carries(equation, bodies[0])
            times, before = equation.params["length"], None
            while outputs != before:  # a carry that a later step needs is needed
                before, (each, inputs) = outputs, _count(bodies[0], outputs, cost, within)
                carried = inputs[consts : consts + carries]
                outputs = [mine or other for mine, other in zip(outputs, carried, strict=False)] + outputs[carries:]
            found = [each]
        else:
            same = len(bodies) == 1 and len(bodies[0].outvars) == len(outputs)
            pairs = [_count(body, outputs if same else None, cost, within) for body in bodies]
            found = [each for each, _ in pairs]
            if same and len(bodies[0].invars) == len(inputs):
                inputs = pairs[0][1]
        if name == "shard_map":  # shapes are those of one device
            times = math.prod(equation.params["mesh"].shape[axis] for axis in equation.params["newly_manual_axes"])
        if name == "cond":
            # Nor what the package's kernels do: the branch for other platforms counts.
            foreign = [any(each.primitive.name == "ffi_call" for each, _ in equations(body)) for body in bodies]
            written = [each for each, is_foreign in zip(found, foreign, strict=True) if not is_foreign]
            found = [min(written or found, key=lambda each: sum(each.values()))]
        for part, count in [(cost(equation, within), 1), *((each, times) for each in found)]:
            for key, value in part.items():
                total[key] += count * value
        needed |= {id(value) for value in itertools.compress(equation.invars, inputs)}
    return total, [id(value) in needed for value in jaxpr.invars]


def _product_flops(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if (products := products_of(equation)) is not None:
        return 2 * products
    if name not in {*_PRODUCTS, *_CUDNN}:
        return 0.0
    left, right = (value.aval.shape for value in equation.invars[:2])
    size = int(math.prod(equation.outvars[0].aval.shape))
    if name == "ragged_dot_general":
        return float(2 * math.prod(left) * equation.outvars[0].aval.shape[-1])  # [m, k] and n columns, in either mode
    if name == "dot_general":
        return 2.0 * size * math.prod(int(left[axis]) for axis in params["dimension_numbers"][0][0])
    if name == "conv_general_dilated":
        out_features = right[params["dimension_numbers"].rhs_spec[0]]
        # Products with the zeros between the inputs of a transposed convolution are none.
        return float(2 * size * math.prod(right) / out_features / math.prod(params["lhs_dilation"]))
    if name.startswith("rnn"):  # inputs [batch, time, features], state [directions, batch, hidden]
        products = 8.0 * math.prod(left[:2]) * right[0] * right[2] * (left[2] + right[2])
    else:  # query [batch, time, heads, size], key [batch, time, heads, size]: scores and weighted sums
        queries, keys = left[1], right[1]
        pairs = float(queries * keys)
        if "CAUSAL" in str(params.get("mask_type")):  # query t sees keys 0…t only
            within = min(queries, keys)
            pairs = within * (within + 1) / 2 + (queries - within) * keys
        products = 4.0 * math.prod(left) / queries * pairs
    return float(products * _CUDNN[name])


def _end_of_compilation(found: Sequence[concurrent.futures.Future[Any]]) -> None:
    """Ends an interpreter that Ctrl-C ends without waiting; another one waits, as XLA must not run after it."""
    if isinstance(getattr(sys, "last_exc", None), KeyboardInterrupt):
        leave(INTERRUPTED)
    concurrent.futures.wait(found)
