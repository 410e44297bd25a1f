"""Convolutions: lax's and Flax's values and gradients, with channels last in loops and under vmap."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax

from jaxnn.nn import Conv, conv_general_dilated
from jaxnn.types import ConfigError
from tests import draws

LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


class Case(NamedTuple):
    """One convolution; features are of input and output."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Any = "SAME"
    features: tuple[int, int] = (6, 4)
    batch: int = 3
    groups: int = 1
    lhs_dilation: tuple[int, ...] | None = None
    rhs_dilation: tuple[int, ...] | None = None

    def arrays(self, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
        generator = np.random.default_rng(0)
        inputs, outputs = self.features
        x = generator.standard_normal((self.batch, *self.size, inputs), np.float32)
        kernel = generator.standard_normal((*self.kernel, inputs // self.groups, outputs), np.float32)
        return jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)

    def function(self, implementation: str | None = None, **options: Any) -> Callable[..., jax.Array]:
        return functools.partial(
            conv_general_dilated,
            window_strides=self.strides,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.rhs_dilation,
            dimension_numbers=LAYOUTS[len(self.size)],
            feature_group_count=self.groups,
            implementation=implementation,
            **options,
        )


# The forms: any convolution, the kernel's gradient in chunks (of 8, with a rest), a product, by element, by group.
DENSE = Case((7, 6), (3, 2), (1, 1))
CHUNKS = Case((7, 6), (3, 3), (1, 1), features=(3, 4), batch=19)
PRODUCT = Case((5, 4), (1, 1), (2, 1), "VALID")
DEPTHWISE = Case((6, 7), (3, 3), (2, 1), features=(4, 4), groups=4)
GROUPS = Case((6, 7), (3, 3), (1, 2), features=(6, 4), groups=2, batch=9)
FORMS = {"dense": DENSE, "chunks": CHUNKS, "product": PRODUCT, "depthwise": DEPTHWISE, "groups": GROUPS}
CASES = {
    **FORMS,
    "valid": Case((9, 8), (3, 4), (1, 1), "VALID"),
    "same_lower": Case((9, 8), (4, 2), (2, 2), "SAME_LOWER"),
    "explicit": Case((9, 8), (3, 3), (2, 3), ((2, 0), (1, 3)), features=(5, 3)),
    "cropped": Case((9, 8), (3, 3), (1, 1), ((-1, 2), (1, -2))),
    "far padded": Case((4, 5), (2, 2), (2, 2), ((4, 5), (3, 4))),
    "dilated": Case((11, 10), (3, 2), (1, 1), rhs_dilation=(2, 3)),
    "dilated, strided": Case((11, 10), (3, 3), (2, 3), "VALID", rhs_dilation=(2, 1)),
    "input dilated": Case((5, 4), (3, 3), (2, 1), ((2, 1), (1, 2)), lhs_dilation=(2, 3), rhs_dilation=(1, 2)),
    "one example": Case((5, 7), (3, 3), (2, 2), batch=1),
    "whole chunks": Case((7, 7), (3, 3), (2, 2), features=(1, 5), batch=16),
    "one position": Case((3, 3), (3, 3), (1, 1), "VALID"),
    "product, one example": Case((5, 4), (1, 1), (1, 1), batch=1),
    "1x1, padded": Case((5, 4), (1, 1), (2, 2), ((1, 1), (0, 2))),
    "depthwise, dilated": Case((5, 4), (2, 3), (1, 1), ((2, 1), (-1, 3)), (3, 3), groups=3, rhs_dilation=(2, 1)),
    "depthwise, input dilated": Case((5, 4), (2, 3), (1, 2), ((2, 1), (1, 3)), (3, 3), groups=3, lhs_dilation=(2, 2)),
    "two outputs a feature": Case((6, 7), (3, 3), (2, 2), features=(3, 6), groups=3),
    "groups of products": Case((6, 7), (1, 1), (2, 2), "VALID", features=(6, 4), groups=2),
    "1-D": Case((13,), (5,), (2,), features=(2, 3), batch=10),
    "1-D, dilated": Case((13,), (3,), (1,), ((4, 0),), rhs_dilation=(2,)),
    "1-D, depthwise": Case((13,), (5,), (1,), features=(4, 4), groups=4),
    "1-D, groups": Case((13,), (3,), (3,), "VALID", groups=2),
    "1-D, product": Case((13,), (1,), (2,)),
    "3-D": Case((5, 4, 6), (3, 2, 3), (1, 2, 1), features=(2, 3)),
}


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """``(x, kernel) -> (output, gradient by x, gradient by kernel)`` of a sum that is not linear in the output."""

    def run(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(function, x, kernel)
        wide = jnp.promote_types(output.dtype, jnp.float32)
        return output, *pull(jax.grad(lambda y: jnp.sum(jnp.sin(y.astype(wide))))(output))

    return run


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5, name: str = "") -> None:
    """Of equal structure and shapes, and nowhere further apart than ``tolerance`` of the largest."""
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        assert left.shape == right.shape
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance * np.abs(right).max(initial=1.0), err_msg=name)


def graded(cases: dict[str, Case], implementation: str | None, dtype: Any, **options: Any) -> dict[str, Any]:
    """Value and gradients of all cases, by one program."""
    runs = {name: with_gradients(case.function(implementation, **options)) for name, case in cases.items()}
    arrays = {name: case.arrays(dtype) for name, case in cases.items()}
    return jax.jit(lambda arrays: {name: run(*arrays[name]) for name, run in runs.items()})(arrays)


@functools.cache
def exact(*names: str) -> dict[str, Any]:
    """By lax itself, in float64."""
    with jax.enable_x64(True):
        return graded({name: CASES[name] for name in names}, "xla", jnp.float64)


def lowered(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    return jax.jit(function).lower(*args).as_text(**options)


@pytest.mark.parametrize("part", range(3))
def test_values_and_gradients_equal_lax_in_float64(part: int) -> None:
    names = list(CASES)[len(FORMS) :][part::3]
    found = graded({name: CASES[name] for name in names}, "channels_last", jnp.float32)
    for name, expected in exact(*names).items():
        assert_close(found[name], expected, name=name)


@pytest.mark.parametrize("dtype", ["float32", "float64", pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_dtypes_are_kept_and_as_exact_as_they_can_be(dtype: str) -> None:
    tolerance = {"float32": 1e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    with jax.enable_x64(dtype == "float64"):
        results = graded(FORMS, None, dtype)
    for name, expected in exact(*FORMS).items():
        assert {str(result.dtype) for result in results[name]} == {dtype}
        assert_close(results[name], expected, tolerance, name)


def test_sums_in_the_preferred_element_type_and_chunks_in_float32() -> None:
    results = graded(FORMS, None, jnp.bfloat16, preferred_element_type=jnp.float32)
    for name, (output, *gradients) in results.items():
        assert output.dtype == jnp.float32
        assert {gradient.dtype for gradient in gradients} == {jnp.dtype(jnp.bfloat16)}
        # Products of two bfloat16 are exact in float32: what is left is the rounding of its sums.
        wide = (array.astype(jnp.float32) for array in FORMS[name].arrays(jnp.bfloat16))
        assert_close(output, FORMS[name].function("xla")(*wide), 1e-5, name)
    case = Case((2,), (2,), (1,), "VALID", features=(1, 1), batch=4096)
    ones = jnp.ones((4096, 2, 1), jnp.bfloat16), jnp.ones((2, 1, 1), jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda kernel: case.function()(ones[0], kernel).sum()))(ones[1])
    # One position of each example: 4096. Summed in bfloat16, of 8 bits, 2048 + 8 were 2048 again.
    np.testing.assert_array_equal(gradient, 4096.0)


def members(case: Case, axes: tuple[int | None, int | None]) -> list[Any]:
    """Three of x, of the kernel or of both, along axis 0 as ``axes`` says."""
    return [a if axis is None else np.stack([a, -a, 2 * a]) for a, axis in zip(case.arrays(), axes, strict=True)]


AXES = pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=["inputs", "kernels", "both"])


@AXES
def test_vmap_equals_separate_runs_without_grouped_convolutions(axes: tuple[int | None, int | None]) -> None:
    arrays = {name: members(case, axes) for name, case in FORMS.items()}

    def run(arrays: Any, implementation: str) -> Any:
        """Of each member, and the gradient of the vmap, where what the members share sums up."""
        functions = {name: case.function(implementation) for name, case in FORMS.items()}
        each = {name: jax.vmap(with_gradients(f), axes)(*arrays[name]) for name, f in functions.items()}
        return each, {name: with_gradients(jax.vmap(f, axes))(*arrays[name])[1:] for name, f in functions.items()}

    (each, summed), (expected, _) = jax.jit(lambda a: [run(a, name) for name in ("channels_last", "xla")])(arrays)
    for name in FORMS:
        assert_close(each[name], expected[name], name=name)
        pairs = zip(expected[name][1:], axes, strict=True)
        assert_close(summed[name], [e if axis == 0 else np.sum(e, 0) for e, axis in pairs], name=name)
        counts = [
            set(re.findall(r"_group_count = (\d+)", lowered(jax.vmap(with_gradients(f), axes), *arrays[name])))
            for f in map(FORMS[name].function, ("channels_last", "xla"))
        ]
        assert counts[0] <= {"1"} and (axes[1] is None or counts[1] > {"1"})


def test_nested_vmap_scan_and_rematerialization_equal_lax() -> None:
    def nested(case: Case, implementation: str | None) -> Any:
        # Outer members have their own x, inner ones their own kernel, of an inner axis each.
        x, kernel = case.arrays()
        run = with_gradients(case.function(implementation))
        arrays = jnp.stack([x, -2 * x], -1), jnp.stack([kernel, 3 * kernel], 1)
        return jax.vmap(jax.vmap(run, (None, 1), 1), (-1, None))(*arrays)

    def scanned(case: Case, implementation: str | None) -> Any:
        function = case.function(implementation)
        run = with_gradients(jax.checkpoint(function) if implementation is None else function)

        def step(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            output, _, gradient = run(x, kernel)
            return kernel - 0.1 * gradient, output

        x, kernel = case.arrays()
        return lax.scan(step, kernel, jnp.stack([x, 0.5 * x]))

    for transform in (nested, scanned):
        run = jax.jit(lambda f=transform: [{n: f(case, i) for n, case in FORMS.items()} for i in (None, "xla")])
        found, expected = run()
        for name in FORMS:
            assert_close(found[name], expected[name], name=name)


def test_programs_have_channels_last_and_convolve_thin_inputs_once() -> None:
    x, kernel = DENSE.arrays()

    def layouts(implementation: str) -> set[str]:
        run = with_gradients(DENSE.function(implementation))
        scan = functools.partial(lax.scan, lambda kernel, x: (run(x, kernel)[2], None))
        return set(re.findall(r"dim_numbers = (.*?), window", lowered(scan, kernel, x[None])))

    assert layouts("channels_last") == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"} and len(layouts("xla")) > 1
    text = lowered(jax.vmap(CHUNKS.function("channels_last"), (None, 0)), *members(CHUNKS, (None, 0)))
    assert "while" not in text and text.count("stablehlo.convolution") == 1  # with 3 x 4 output features
    assert re.search(r"stablehlo.convolution.*-> tensor<19x7x6x12xf32>", text)
    for case in FORMS.values():
        text = lowered(with_gradients(case.function("channels_last")), *case.arrays(), debug_info=True)
        assert re.search(r"[(/\"]jvp\(jaxnn\.convolution\.channels_last\)", text)
        assert "transpose(jvp(jaxnn.convolution.channels_last))" in text and "jaxnn.convolution.xla" not in text


def test_a_large_kernel_gradient_is_summed_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((4, 4), (3, 3), (1, 1), features=(5, 4), batch=9)
    run = with_gradients(case.function())
    assert "while" not in lowered(run, *case.arrays())
    jax.clear_caches()
    monkeypatch.setattr("jaxnn.nn._channels_last_conv._CACHED", 9 * 4 * 4 * 8)  # elements; there are 9 of each pixel
    assert "while" in lowered(run, *case.arrays())
    assert_close(jax.jit(run)(*case.arrays()), with_gradients(case.function("xla"))(*case.arrays()))
    jax.clear_caches()


def chosen(function: Callable[..., jax.Array], *arrays: jax.Array) -> set[str]:
    return set(re.findall(r"jaxnn\.convolution\.(\w+)", lowered(function, *arrays, debug_info=True)))


OBSTACLES: dict[str, tuple[Any, ...]] = {
    "channels last": ({"dimension_numbers": None}, (2, 3, 6, 5), (4, 3, 2, 2), jnp.float32),
    "batch_group_count": ({"batch_group_count": 2}, (2, 6, 5, 3), (2, 2, 3, 4), jnp.float32),
    "int32": ({}, (2, 6, 5, 3), (2, 2, 3, 4), jnp.int32),
    "empty": ({"padding": "VALID"}, (2, 1, 5, 3), (2, 2, 3, 4), jnp.float32),
}


def test_implementations_are_chosen_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, kernel = DENSE.arrays()
    assert chosen(DENSE.function(), x, kernel) == {"channels_last"}
    for name, (options, *shapes, dtype) in OBSTACLES.items():
        arrays = [jnp.arange(np.prod(shape), dtype=dtype).reshape(shape) for shape in shapes]
        arguments = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": LAYOUTS[2], **options}
        function = functools.partial(conv_general_dilated, **arguments)
        assert_close(function(*arrays), lax.conv_general_dilated(*arrays, **arguments))
        assert chosen(function, *arrays) <= {"xla"}
        with pytest.raises(ConfigError, match=rf"'channels_last' here: .*{name}.*; leave implementation out"):
            function(*arrays, implementation="channels_last")
    for implementation in ("xla", "channels_last"):
        with pytest.raises(ConfigError, match=r"convolution of \(3, 7, 6, 6\) with a kernel \(3, 2, 5, 4\)"):
            DENSE.function(implementation)(x, kernel[:, :, 1:])
    monkeypatch.setattr("jaxnn.nn._layer_arguments.platform", lambda: "gpu")
    assert chosen(DENSE.function(), x, kernel) == {"xla"}


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": (3, 3)},
    "strided": {"kernel_size": (3, 3), "strides": 2, "padding": "VALID", "use_bias": False},
    "circular": {"kernel_size": (3, 2), "padding": "CIRCULAR", "kernel_dilation": 2},
    "padded by a number": {"kernel_size": (3, 3), "padding": 2, "feature_group_count": 2},
    "masked": {"kernel_size": (3, 3), "mask": np.triu(np.ones((3, 3, 4, 8)))},
    "product in bfloat16": {"kernel_size": (1, 1), "dtype": jnp.bfloat16},
    "causal": {"kernel_size": 3, "padding": "CAUSAL", "kernel_dilation": 2},
}


def test_layers_equal_flax() -> None:
    x = draws.normal(0, 2, 3, 6, 5, 4)  # two batch axes

    def run(kind: Any, params: Any) -> Any:
        results = {}
        for name, options in LAYERS.items():
            inputs = x[0, :, :, 0] if name == "causal" else x[0]

            def loss(params: Any, x: jax.Array, options: Any = options) -> Any:
                output = kind(8, **options).apply(params, x)
                return jnp.sum(jnp.sin(output.astype(jnp.float32))), output

            results[name] = jax.grad(loss, (0, 1), has_aux=True)(params[name], inputs)
        plain = kind(8, (3, 3))
        return results, [plain.apply(params["plain"], x), plain.apply(params["plain"], x[1, 2])]

    params = {
        name: draws.variables(linen.Conv(8, **options), x[0, :, :, 0] if name == "causal" else x[0])
        for name, options in LAYERS.items()
    }
    (ours, axes), (flaxs, flax_axes) = jax.jit(lambda params: [run(kind, params) for kind in (Conv, linen.Conv)])(
        params
    )
    assert_close(axes, flax_axes)
    for name in LAYERS:
        assert_close(ours[name], flaxs[name], 3e-2 if "bfloat16" in name else 1e-5, name)
    init = jax.jit(lambda: [kind(3, (3, 3)).init(jax.random.key(0), x[0]) for kind in (Conv, linen.Conv)])
    jax.tree.map(np.testing.assert_array_equal, *init())


def test_a_layer_takes_an_implementation_or_a_function() -> None:
    def plain(*args: Any) -> jax.Array:
        return lax.conv_general_dilated(*args)

    x, kernel = GROUPS.arrays()
    assert_close(GROUPS.function(plain)(x, kernel), GROUPS.function("xla")(x, kernel))
    layer = Conv(2, (3, 3), implementation="xla")
    params = draws.variables(layer, x)
    assert chosen(layer.apply, params, x) == {"xla"}
    assert chosen(layer.clone(implementation="channels_last").apply, params, x) == {"channels_last"}
    with pytest.raises(ConfigError, match="no implementation 'fast'"):
        layer.clone(implementation="fast").apply(params, x)
    for implementation in ("xla", plain):
        layer = Conv(2, (3, 3), implementation=implementation)
        assert layer == Conv(2, (3, 3), implementation=implementation) != Conv(2, (3, 3))
        assert hash(layer) == hash(layer.clone())
    assert chosen(layer.apply, params, x) == {"plain"}
    given = Conv(2, (3, 3), conv_general_dilated=lax.conv_general_dilated)
    assert chosen(given.apply, params, x) == set()
    flaxs = linen.Conv(2, (3, 3), conv_general_dilated=conv_general_dilated)
    assert chosen(flaxs.apply, params, x) == {"channels_last"}
    own = functools.partial(conv_general_dilated, implementation="xla")
    assert chosen(Conv(2, (3, 3), conv_general_dilated=own).apply, params, x) == {"xla"}
    with pytest.raises(ConfigError, match="implementation or a conv_general_dilated, not both"):
        given.clone(implementation="channels_last")
