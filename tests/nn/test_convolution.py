"""Convolutions: the values and gradients of lax and Flax, with channels last in loops and under vmap."""

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
from tests import draws, native

DEFAULT = "onednn" if native.USED else "channels_last"
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

    def arrays(self, dtype: Any = jnp.float32, seed: int = 0) -> tuple[jax.Array, jax.Array]:
        inputs, outputs = self.features
        x = draws.normal(seed, self.batch, *self.size, inputs, dtype=dtype)
        return x, draws.normal(seed + 1, *self.kernel, inputs // self.groups, outputs, dtype=dtype)

    def exact(self, x: Any, kernel: Any) -> np.ndarray:
        """By the definition, in float64: for each tap of the kernel the product with the inputs that it meets."""
        rank, groups = len(self.size), self.groups
        spread, apart = (given or (1,) * rank for given in (self.lhs_dilation, self.rhs_dilation))
        size = [(length - 1) * step + 1 for length, step in zip(self.size, spread, strict=True)]
        window = [(length - 1) * step + 1 for length, step in zip(self.kernel, apart, strict=True)]
        pads = lax.padtype_to_pads(size, window, self.strides, self.padding) if isinstance(self.padding, str) else None
        pads = np.array(pads or self.padding)
        dilated = np.zeros((len(x), *size, x.shape[-1]))
        dilated[:, *(slice(None, None, step) for step in spread)] = x
        cuts = [slice(max(-low, 0), length - max(-high, 0)) for length, (low, high) in zip(size, pads, strict=True)]
        padded = np.pad(dilated[:, *cuts], [(0, 0), *np.maximum(pads, 0).tolist(), (0, 0)])
        padded = padded.reshape(*padded.shape[:-1], groups, -1)
        counts = (np.array(padded.shape[1 : 1 + rank]) - window) // self.strides + 1
        total = np.zeros((len(x), *counts, groups, kernel.shape[-1] // groups))
        for tap in np.ndindex(*self.kernel):
            starts = np.multiply(tap, apart)
            ends = starts + (counts - 1) * self.strides + 1
            met = padded[:, *map(slice, starts, ends, self.strides)]
            total += np.einsum("...gi,igo->...go", met, np.float64(kernel[tap]).reshape(-1, groups, total.shape[-1]))
        return total.reshape(*total.shape[:-2], -1)

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
    "dilated, strided": Case((11, 10), (3, 3), (2, 3), "VALID", rhs_dilation=(2, 1)),
    "input dilated": Case((5, 4), (3, 3), (2, 1), ((2, 1), (1, 2)), lhs_dilation=(2, 3), rhs_dilation=(1, 2)),
    "one example": Case((5, 7), (3, 3), (2, 2), batch=1),
    "whole chunks": Case((7, 7), (3, 3), (2, 2), features=(1, 5), batch=16),
    "one position": Case((3, 3), (3, 3), (1, 1), "VALID"),
    "1x1, padded": Case((5, 4), (1, 1), (2, 2), ((1, 1), (0, 2))),
    "depthwise, dilated": Case((5, 4), (2, 3), (1, 1), ((2, 1), (-1, 3)), (3, 3), groups=3, rhs_dilation=(2, 1)),
    "depthwise, input dilated": Case((5, 4), (2, 3), (1, 2), ((2, 1), (1, 3)), (3, 3), groups=3, lhs_dilation=(2, 2)),
    "two outputs a feature": Case((6, 7), (3, 3), (2, 2), features=(3, 6), groups=3),
    "groups of products": Case((6, 7), (1, 1), (2, 2), "VALID", features=(6, 4), groups=2),
    "1-D": Case((13,), (5,), (2,), features=(2, 3), batch=10),
    "1-D, depthwise": Case((13,), (5,), (1,), features=(4, 4), groups=4),
    "1-D, groups": Case((13,), (3,), (3,), "VALID", groups=2),
    "3-D": Case((5, 4, 6), (3, 2, 3), (1, 2, 1), features=(2, 3)),
}


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """``(x, kernel) -> (output, gradient by x, gradient by kernel)`` of a weighted sum."""

    def run(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(function, x, kernel)
        return output, *pull(draws.normal(2, *output.shape, dtype=output.dtype))

    return run


def assert_exact(case: Case, x: Any, kernel: Any, results: Any, tolerance: float, name: str) -> None:
    """The results of `with_gradients` by the definition, relative to the largest or to the norm."""
    x, kernel, output, *gradients = (np.asarray(array, np.float64) for array in (x, kernel, *results))
    exact = case.exact(x, kernel)
    np.testing.assert_allclose(output, exact, rtol=0, atol=tolerance * np.abs(exact).max(), err_msg=name)
    weights = np.float64(draws.normal(2, *output.shape, dtype=results[0].dtype))
    # A convolution is linear in x and in the kernel: each gradient is compared along a random direction.
    directions = [np.float64(array) for array in case.arrays(seed=3)]
    changes = case.exact(directions[0], kernel), case.exact(x, directions[1])
    for gradient, direction, change in zip(gradients, directions, changes, strict=True):
        assert gradient.shape == direction.shape
        error = abs(np.vdot(gradient, direction) - np.vdot(weights, change))
        assert error <= tolerance * np.linalg.norm(gradient), name


def graded(cases: dict[str, Case], dtype: Any, implementation: str | None = None, **options: Any) -> dict[str, Any]:
    """Value and gradients of all cases, by one program."""
    runs = {name: with_gradients(case.function(implementation, **options)) for name, case in cases.items()}
    arrays = {name: case.arrays(dtype) for name, case in cases.items()}
    return jax.device_get(jax.jit(lambda arrays: {name: run(*arrays[name]) for name, run in runs.items()})(arrays))


def lowered(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    return jax.jit(function).lower(*args).as_text(**options)


def test_values_and_gradients_are_exact_in_float64() -> None:
    with jax.enable_x64(True):
        for name, results in graded(CASES, jnp.float64, "channels_last").items():
            assert {result.dtype for result in results} == {np.dtype("float64")}
            assert_exact(CASES[name], *CASES[name].arrays(jnp.float64), results, 1e-12, name)


def test_convolutions_run_where_jit_is_disabled_and_nan_is_found() -> None:
    function, arrays = DENSE.function("channels_last"), DENSE.arrays()
    with jax.disable_jit():
        results = with_gradients(function)(*arrays)
    assert_exact(DENSE, *arrays, results, 1e-5, "dense")
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="channels_last_convolution"):
        function(arrays[0] * jnp.inf, arrays[1] * 0)


def test_bfloat16_is_kept_or_summed_in_the_preferred_element_type_and_chunks_in_float32() -> None:
    narrow, wide = (graded(FORMS, jnp.bfloat16, preferred_element_type=dtype) for dtype in (None, jnp.float32))
    for name, case in FORMS.items():
        assert {str(result.dtype) for result in narrow[name]} == {"bfloat16"}
        assert [str(result.dtype) for result in wide[name]] == ["float32", "bfloat16", "bfloat16"]
        arrays = case.arrays(jnp.bfloat16)
        assert_exact(case, *arrays, narrow[name], 3e-2, name)
        assert_exact(case, *arrays, wide[name], 3e-2, name)
        # Products of two bfloat16 are exact in float32: what is left is the rounding of its sums.
        np.testing.assert_allclose(wide[name][0], case.exact(*arrays), atol=1e-5, err_msg=name)
    case = Case((2,), (2,), (1,), "VALID", features=(1, 1), batch=4096)
    ones = jnp.ones((4096, 2, 1), jnp.bfloat16), jnp.ones((2, 1, 1), jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda kernel: case.function()(ones[0], kernel).sum()))(ones[1])
    # One position of each example: 4096. Summed in bfloat16, of 8 bits, 2048 + 8 were 2048 again.
    np.testing.assert_array_equal(gradient, 4096.0)


@pytest.mark.parametrize("axes", [(1, None), (None, -1), (0, 2)], ids=["inputs", "kernels", "both"])
def test_vmap_equals_separate_runs_without_grouped_convolutions(axes: tuple[int | None, int | None]) -> None:
    def members(case: Case) -> list[Any]:
        pairs = zip(case.arrays(), axes, strict=True)
        return [
            a if axis is None else np.stack([scale * np.asarray(a) for scale in (1, -2, 3)], axis) for a, axis in pairs
        ]

    arrays = {name: members(case) for name, case in FORMS.items()}
    runs = {name: jax.vmap(with_gradients(case.function("channels_last")), axes) for name, case in FORMS.items()}
    program = jax.jit(lambda arrays: {name: run(*arrays[name]) for name, run in runs.items()}).lower(arrays)
    assert set(re.findall(r"_group_count = (\d+)", program.as_text())) == {"1"}
    for name, results in jax.device_get(program.compile()(arrays)).items():
        for member in range(3):
            pair = [a if axis is None else np.take(a, member, axis) for a, axis in zip(arrays[name], axes, strict=True)]
            assert_exact(FORMS[name], *map(np.asarray, pair), [result[member] for result in results], 1e-5, name)


def test_programs_have_channels_last_and_convolve_thin_inputs_once() -> None:
    x, kernel = DENSE.arrays()

    def layouts(implementation: str) -> set[str]:
        def step(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            output, _, gradient = with_gradients(DENSE.function(implementation))(x, kernel)
            return gradient, output

        scan = functools.partial(lax.scan, step)
        return set(re.findall(r"dim_numbers = (.*?), window", lowered(scan, kernel, x[None])))

    assert layouts("channels_last") == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"} and len(layouts("xla")) > 1
    images, kernels = CHUNKS.arrays()
    text = lowered(jax.vmap(CHUNKS.function("channels_last"), (None, 0)), images, jnp.stack([kernels] * 3))
    assert "while" not in text and text.count("stablehlo.convolution") == 1  # with 3 x 4 output features
    assert re.search(r"stablehlo.convolution.*-> tensor<19x7x6x12xf32>", text)
    for case in FORMS.values():
        text = lowered(with_gradients(case.function("channels_last")), *case.arrays(), debug_info=True)
        assert re.search(r"[(/\"]jvp\(jaxnn\.convolution\.channels_last\)", text)
        assert "transpose(jvp(jaxnn.convolution.channels_last))" in text and "jaxnn.convolution.xla" not in text


# Examples, width of square images, input and output features; whether a loop sums the kernel's gradient.
CHUNKED = [
    ((8, 4, 4, 4), False),
    ((9, 4, 4, 4), True),  # more than a chunk of thin inputs
    ((9, 4, 5, 4), False),
    ((10, 100, 5, 5), False),  # a million elements
    ((10, 100, 5, 6), True),
]


def test_thin_or_large_inputs_are_summed_over_chunks_and_depthwise_kernels_over_elements() -> None:
    for (batch, width, *features), chunked in CHUNKED:
        case = Case((width, width), (3, 3), (1, 1), features=tuple(features), batch=batch)
        arrays = jax.eval_shape(case.arrays)
        assert ("while" in lowered(with_gradients(case.function("channels_last")), *arrays)) == chunked
    for taps in (128, 129):
        case = Case((5,), (taps,), (1,), features=(2, 2), groups=2)
        assert ("stablehlo.convolution" in lowered(case.function("channels_last"), *case.arrays())) == (taps > 128)


def chosen(function: Callable[..., jax.Array], *arrays: jax.Array) -> set[str]:
    return set(re.findall(r"jaxnn\.convolution\.(\w+)", lowered(function, *arrays, debug_info=True)))


OBSTACLES: dict[str, tuple[Any, ...]] = {
    "channels last": ({"dimension_numbers": None}, (2, 3, 6, 5), (4, 3, 2, 2), jnp.float32),
    "batch_group_count": ({"batch_group_count": 2}, (2, 6, 5, 3), (2, 2, 3, 4), jnp.float32),
    "int32": ({}, (2, 6, 5, 3), (2, 2, 3, 4), jnp.int32),
    "empty": ({"padding": "VALID"}, (2, 1, 5, 3), (2, 2, 3, 4), jnp.float32),
}


def test_implementations_are_chosen_or_refused(pretend_gpu: Callable[..., None]) -> None:
    x, kernel = DENSE.arrays()
    assert chosen(DENSE.function(), x, kernel) == {DEFAULT}
    for name, (options, *shapes, dtype) in OBSTACLES.items():
        arrays = [jnp.arange(np.prod(shape), dtype=dtype).reshape(shape) for shape in shapes]
        arguments = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": LAYOUTS[2], **options}
        function = functools.partial(conv_general_dilated, **arguments)
        assert chosen(function, *arrays) <= {"xla"}
        with pytest.raises(ConfigError, match=rf"'channels_last' here: .*{name}.*; leave implementation out"):
            function(*arrays, implementation="channels_last")
    with pytest.raises(ConfigError, match=r"convolution of \(3, 7, 6, 6\) with a kernel \(3, 2, 5, 4\)"):
        DENSE.function()(x, kernel[:, :, 1:])
    pretend_gpu()
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
    inputs = {name: x[0, :, :, 0] if name == "causal" else x[0] for name in LAYERS} | {"batch": x, "single": x[1, 2]}
    layers = {**LAYERS, "batch": LAYERS["plain"], "single": LAYERS["plain"]}
    params = {name: draws.variables(linen.Conv(8, **options), inputs[name]) for name, options in layers.items()}

    def run(kind: Any, params: Any) -> Any:
        return {name: kind(8, **options).apply(params[name], inputs[name]) for name, options in layers.items()}

    ours, flaxs = jax.jit(lambda params: [run(kind, params) for kind in (Conv, linen.Conv)])(params)
    for name in layers:
        draws.assert_close(ours[name], flaxs[name], 3e-2 if "bfloat16" in name else 1e-5)
    init = jax.jit(lambda: [kind(3, (3, 3)).init(jax.random.key(0), x[0]) for kind in (Conv, linen.Conv)])
    jax.tree.map(np.testing.assert_array_equal, *init())


def test_a_layer_takes_an_implementation_or_a_function() -> None:
    def plain(*args: Any) -> jax.Array:
        return lax.conv_general_dilated(*args)

    x, kernel = GROUPS.arrays()
    draws.assert_close(*jax.jit(lambda: [GROUPS.function(by)(x, kernel) for by in (plain, "xla")])())
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
    assert chosen(flaxs.apply, params, x) == {DEFAULT}
    own = functools.partial(conv_general_dilated, implementation="xla")
    assert chosen(Conv(2, (3, 3), conv_general_dilated=own).apply, params, x) == {"xla"}
    with pytest.raises(ConfigError, match="implementation or a conv_general_dilated, not both"):
        given.clone(implementation="channels_last")
