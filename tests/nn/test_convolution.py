"""Convolutions: the values and gradients of lax and Flax, with channels last in loops and under vmap."""

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

DEFAULT = "native" if native.USED else "channels_last"
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

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        inputs, outputs = self.features
        return (self.batch, *self.size, inputs), (*self.kernel, inputs // self.groups, outputs)

    def arrays(self, dtype: Any = jnp.float32, seed: int = 0) -> tuple[jax.Array, jax.Array]:
        x, kernel = (draws.normal(seed + k, *shape, dtype=dtype) for k, shape in enumerate(self.shapes()))
        return x, kernel

    def options(self) -> dict[str, Any]:
        """Those of ``lax.conv_general_dilated``."""
        return {
            **{"window_strides": self.strides, "padding": self.padding, "feature_group_count": self.groups},
            **{"lhs_dilation": self.lhs_dilation, "rhs_dilation": self.rhs_dilation},
            "dimension_numbers": LAYOUTS[len(self.size)],
        }

    def by_lax(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, kernel, **self.options())

    def exact(self, x: Any, kernel: Any, weights: Any = None) -> list[np.ndarray]:
        """Output, and the gradients of its sum weighed by ``weights`` or as by `draws.graded`: by lax, in float64."""

        def run(x: Any, kernel: Any) -> list[jax.Array]:
            output, pull = jax.vjp(self.by_lax, x, kernel)
            return [output, *pull(draws.weights(output) if weights is None else np.float64(weights))]

        with jax.enable_x64(True):
            return [*map(np.asarray, jax.jit(run)(np.float64(x), np.float64(kernel)))]

    def function(self, implementation: str | None = None, **options: Any) -> Callable[..., jax.Array]:
        return functools.partial(conv_general_dilated, implementation=implementation, **self.options(), **options)


# The forms: any convolution, the kernel's gradient in chunks (of 8, with a rest), a product, by element, by group.
DENSE = Case((7, 6), (3, 2), (1, 1))
CHUNKS = Case((7, 6), (3, 3), (1, 1), features=(3, 4), batch=19)
PRODUCT = Case((5, 4), (1, 1), (2, 1), "VALID")
DEPTHWISE = Case((6, 7), (3, 3), (2, 1), features=(4, 4), groups=4)
GROUPS = Case((6, 7), (3, 3), (1, 2), features=(6, 4), groups=2, batch=9)
FORMS = {"dense": DENSE, "chunks": CHUNKS, "product": PRODUCT, "depthwise": DEPTHWISE, "groups": GROUPS}
CASES = {
    **FORMS,
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
    "3-D": Case((5, 4, 6), (3, 2, 3), (1, 2, 1), features=(2, 3)),
}
TRANSPOSED = {
    "transposed": Case((4, 5), (3, 4), (1, 1), ((2, 1), (1, 3)), lhs_dilation=(2, 3)),
    "transposed groups, dilated": Case(
        (4, 5), (2, 3), (1, 1), ((0, 2), (3, 0)), groups=2, lhs_dilation=(3, 2), rhs_dilation=(2, 1)
    ),
    "transposed, padded beyond the kernel": Case((3,), (2,), (1,), ((4, 3),), lhs_dilation=(3,)),
    "transposed, cropped": Case((4, 5), (3, 3), (1, 1), ((-2, 0), (-1, -3)), lhs_dilation=(2, 2)),
    "3-D, transposed": Case((2, 3, 2), (2, 2, 1), (1, 1, 1), ((1, 1),) * 3, (2, 3), lhs_dilation=(2, 2, 2)),
}
# Enough work to be cut into parts, of unequal sizes too; the last more than one thread's share of features.
LARGE = {
    "even": Case((16, 16), (3, 3), (1, 1), features=(16, 24), batch=8),
    "uneven": Case((16, 16), (3, 3), (2, 2), features=(16, 24), batch=7),
    "few": Case((32, 32), (3, 3), (1, 1), features=(16, 24), batch=1),
    "4x4 tiles": Case((15, 12), (3, 3), (1, 1), ((1, 1), (2, 0)), features=(32, 48), batch=5),
    "2x2 tiles": Case((12, 9), (3, 3), (1, 1), ((0, 0), (0, 2)), features=(48, 16), batch=2),
    "depthwise": Case((32, 32), (3, 3), (1, 1), features=(32, 32), groups=32, batch=5),
}
# oneDNN refuses strides and input dilation at once.
SUPPORTED = {name: case for name, case in CASES.items() if not (case.lhs_dilation and max(case.strides) > 1)}
implementations = pytest.mark.parametrize(
    "implementation", ["channels_last", "patches", pytest.param("native", marks=native.needed)]
)


FACTORS = np.float32([1, -2, 3])


def members(array: Any, axis: int | None) -> np.ndarray:
    """An array times each of ``FACTORS`` along an axis, or the array itself."""
    return np.asarray(array) if axis is None else np.stack([factor * array for factor in FACTORS], axis)


def assert_exact(case: Case, arrays: Any, results: Any, tolerance: float, name: str) -> None:
    """The results of `draws.graded` by the definition, relative to the largest of each."""
    for found, expected in zip(jax.tree.leaves(results), case.exact(*arrays), strict=True):
        found = np.float64(found)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max(), err_msg=name)


def all_graded(cases: dict[str, Case], dtype: Any, implementation: str | None = None, **options: Any) -> dict[str, Any]:
    """Value and gradients of all cases, by one program, which returns the same bits in every run."""
    runs = {name: draws.graded(case.function(implementation, **options)) for name, case in cases.items()}
    arrays = {name: case.arrays(dtype) for name, case in cases.items()}
    run = jax.jit(lambda arrays: {name: run(*arrays[name]) for name, run in runs.items()})
    results = jax.device_get(run(arrays))
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, run(arrays), results)
    return results


def lowered(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    return jax.jit(function).lower(*args).as_text(**options)


@implementations
def test_values_and_gradients_are_exact(implementation):
    if implementation == "native":
        cases, dtype, tolerance = SUPPORTED | TRANSPOSED | LARGE, "float32", 1e-5
    else:
        cases, dtype, tolerance = CASES, "float64", 1e-12
    with jax.enable_x64(dtype == "float64"):
        for name, results in all_graded(cases, dtype, implementation).items():
            assert {str(result.dtype) for result in jax.tree.leaves(results)} == {dtype}
            assert_exact(cases[name], cases[name].arrays(dtype), results, tolerance, name)


def test_results_have_the_errors_of_their_own_sums():
    # Winograd's method computes those of a tile together: 4x4 here, and 2x2 in the gradient of the inputs.
    case = Case((10, 11), (3, 3), (1, 1), features=(16, 32), batch=4)
    (x, kernel), weights = jax.device_get(case.arrays()), np.asarray(draws.normal(2, 4, 10, 11, 32))
    scales = np.float32(10.0) ** np.random.default_rng(0).integers(-6, 6, (4, 10, 11, 1))
    window = np.zeros((10, 11, 1), bool)
    window[3:8, 2:7] = True
    uneven = {"zeros": (x * window, weights * window), "scales": (x * scales, weights * scales[::-1])}
    uneven |= {"background": (np.where(window, x, 0.001), weights), "corner": (x.copy(), weights)}
    uneven["corner"][0][0, 0, 0] = 1e6
    for value in (1e6, 1e37, np.inf, np.nan):
        uneven[f"{value}"] = x.copy(), weights
        uneven[f"{value}"][0][0, 5, 5, :3] = value
    run = jax.jit(lambda x, weights: [(value := jax.vjp(case.function(), x, kernel))[0], *value[1](weights)])
    for name, (x, weights) in uneven.items():
        expected = case.exact(x, kernel, weights)
        sizes = case.exact(np.abs(x), np.full_like(kernel, np.abs(kernel).max()), np.abs(weights))
        for found, right, size in zip(run(x, weights), expected, sizes, strict=True):
            with np.errstate(invalid="ignore"):
                is_right = (np.abs(found - right) <= 1e-5 * size) | (found == right) | np.isnan(found) & np.isnan(right)
            assert np.all(is_right), name


def test_convolutions_run_where_jit_is_disabled_and_nan_is_found():
    arrays = DENSE.arrays()
    with jax.disable_jit():
        results = draws.graded(DENSE.function())(*arrays)
    assert_exact(DENSE, arrays, results, 1e-5, "dense")
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="channels_last_convolution"):
        DENSE.function("channels_last")(arrays[0] * jnp.inf, arrays[1] * 0)


def test_bfloat16_is_kept_or_summed_in_the_preferred_element_type_and_chunks_in_float32():
    cases = FORMS | LARGE
    for wide in (None, "float32"):
        for name, results in all_graded(cases, jnp.bfloat16, preferred_element_type=wide).items():
            assert [str(result.dtype) for result in jax.tree.leaves(results)] == [
                wide or "bfloat16",
                "bfloat16",
                "bfloat16",
            ]
            arrays = cases[name].arrays(jnp.bfloat16)
            assert_exact(cases[name], arrays, results, 3e-2, name)
            if wide and name in FORMS:
                # Products of two bfloat16 are exact in float32: what is left is the rounding of its sums.
                np.testing.assert_allclose(results[0], cases[name].exact(*arrays)[0], atol=1e-5, err_msg=name)
    case = Case((2,), (2,), (1,), "VALID", features=(1, 1), batch=4096)
    ones = np.ones((4096, 2, 1), jnp.bfloat16), np.ones((2, 1, 1), jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda kernel, x: case.function()(x, kernel).sum()))(ones[1], ones[0])
    # One position of each example: 4096. Summed in bfloat16, of 8 bits, 2048 + 8 were 2048 again.
    np.testing.assert_array_equal(gradient, 4096.0)


def test_no_members_convolve():
    layer = Conv(3, (3, 3))
    params = draws.variables(layer, np.ones((1, 5, 4, 2), np.float32))
    stacked = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), np.float32), params)
    for each in (layer, Conv(3, (3, 3), implementation="patches")):
        members = jax.vmap(each.apply, (0, None))(stacked, np.ones((2, 5, 4, 2), np.float32))
        assert members.shape == (0, 2, 5, 4, 3)


def test_second_derivatives_of_either_order_are_exact():
    native_cases = {name: (LARGE | TRANSPOSED)[name] for name in ("4x4 tiles", "transposed groups, dilated")}
    cases = {"dense": DENSE, "depthwise": DEPTHWISE, "groups": GROUPS} | (native_cases if native.USED else {})
    given = {name: (case.arrays(), case.arrays(seed=5)) for name, case in cases.items()}

    def derivatives(convolve: Callable[..., jax.Array], arrays: Any, tangents: Any) -> Any:
        def loss(*arrays: Any) -> jax.Array:
            return (convolve(*arrays) ** 3).sum()

        def forward(*arrays: Any) -> jax.Array:
            return jax.jvp(loss, arrays, tangents)[1]

        return jax.jvp(jax.grad(loss, (0, 1)), arrays, tangents), jax.grad(forward, (0, 1))(*arrays)

    def run(given: Any) -> Any:
        pairs = {name: (case.function(), case.by_lax) for name, case in cases.items()}
        return {name: [derivatives(one, *given[name]) for one in pair] for name, pair in pairs.items()}

    for found, expected in jax.jit(run)(given).values():
        draws.assert_near(found, expected, 2e-5)


@implementations
@pytest.mark.parametrize(
    "axes", [(1, None), *(pytest.param(pair, marks=pytest.mark.slow) for pair in ((None, -1), (0, 2)))], ids=str
)
def test_vmap_equals_separate_runs_without_grouped_convolutions(axes, implementation):
    cases = dict(FORMS)
    if implementation == "native":
        del cases["chunks"]  # which it does not form
        cases |= {"4x4 tiles": LARGE["4x4 tiles"], "transposed": TRANSPOSED["transposed"]}
    arrays = {name: [*map(members, case.arrays(), axes)] for name, case in cases.items()}
    runs = {name: jax.vmap(draws.graded(case.function(implementation)), axes) for name, case in cases.items()}
    # Output and gradients are linear in the inputs and in the kernel.
    of_x, of_kernel = (np.ones(3) if axis is None else FACTORS for axis in axes)
    if None not in axes:  # members of members, of which the outer share their inputs
        arrays = {name: [x, np.stack([kernel, 2 * kernel])] for name, (x, kernel) in arrays.items()}
        runs = {name: jax.vmap(run, (None, 0)) for name, run in runs.items()}
        of_x, of_kernel = np.stack([of_x, of_x]), np.stack([of_kernel, 2 * of_kernel])
    program = jax.jit(lambda arrays: {name: run(*arrays[name]) for name, run in runs.items()}).lower(arrays)
    # At most the layer's own groups.
    if known := {"channels_last": {"1"}, "patches": {"1", "2", "4"}}.get(implementation):
        assert set(re.findall(r"_group_count = (\d+)", program.as_text())) <= known
    for name, results in program.compile()(arrays).items():
        case = cases[name]
        exact = case.exact(*case.arrays())
        for found, scale, one in zip(jax.tree.leaves(results), (of_x * of_kernel, of_kernel, of_x), exact, strict=True):
            expected = np.multiply.outer(scale, one)
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max(), err_msg=name)


def test_programs_have_channels_last_and_convolve_thin_inputs_once():
    x, kernel = DENSE.arrays()

    def layouts(implementation: str) -> set[str]:
        def step(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            output, (_, gradient) = draws.graded(DENSE.function(implementation))(x, kernel)
            return gradient, output

        scan = functools.partial(lax.scan, step)
        return set(re.findall(r"dim_numbers = (.*?), window", lowered(scan, kernel, x[None])))

    assert layouts("channels_last") == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"} and len(layouts("xla")) > 1
    images, kernels = CHUNKS.arrays()
    text = lowered(jax.vmap(CHUNKS.function("channels_last"), (None, 0)), images, jnp.stack([kernels] * 3))
    assert "while" not in text and text.count("stablehlo.convolution") == 1  # with 3 x 4 output features
    assert re.search(r"stablehlo.convolution.*-> tensor<19x7x6x12xf32>", text)
    for name, case in FORMS.items():
        text = lowered(draws.graded(case.function("channels_last")), *case.arrays(), debug_info=True)
        assert ("while" in text) == (name in ("chunks", "groups"))  # which sum a thin kernel's gradient in a loop
        assert ("stablehlo.convolution" in text) == (name not in ("product", "depthwise"))  # few taps, by element
        assert re.search(r"[(/\"]jvp\(jaxnn\.convolution\.channels_last\)", text)
        assert "transpose(jvp(jaxnn.convolution.channels_last))" in text and "jaxnn.convolution.xla" not in text


def chosen(function: Callable[..., jax.Array], *arrays: jax.Array) -> set[str]:
    return set(re.findall(r"jaxnn\.convolution\.(\w+)", lowered(function, *arrays, debug_info=True)))


LAST = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": LAYOUTS[2]}
CROPPED = Case((2, 9), (2, 2), (1, 1), ((-2, 3), (0, 0)))
BOTH_DILATED = CASES["input dilated"]
SHAPES = (2, 6, 5, 3), (2, 2, 3, 4)
# The implementation, why it refuses, options, shapes of inputs and kernel, dtype.
OBSTACLES: list[tuple[str, str, dict[str, Any], Any, str]] = [
    ("channels_last", "channels last", {**LAST, "dimension_numbers": None}, ((2, 3, 6, 5), (4, 3, 2, 2)), "float32"),
    ("channels_last", "batch_group_count", {**LAST, "batch_group_count": 2}, SHAPES, "float32"),
    ("channels_last", "int32", LAST, SHAPES, "int32"),
    ("channels_last", "empty", {**LAST, "padding": "VALID"}, ((2, 1, 5, 3), (2, 2, 3, 4)), "float32"),
    ("native", "float32 and bfloat16, not float16", LAST, SHAPES, "float16"),
    ("native", "both strides and input dilation", BOTH_DILATED.options(), BOTH_DILATED.shapes(), "float32"),
    ("native", "crops all", CROPPED.options(), CROPPED.shapes(), "float32"),
]


@pytest.mark.needs_cpu
def test_implementations_are_chosen_or_refused(pretend_gpu):
    x, kernel = DENSE.arrays()
    assert chosen(DENSE.function(), x, kernel) == {DEFAULT}
    for name, words, options, shapes, dtype in OBSTACLES:
        if name == "native" and not native.USED:
            continue
        arrays = [np.ones(shape, dtype) for shape in shapes]
        function = functools.partial(conv_general_dilated, **options)
        assert chosen(function, *arrays) <= {"channels_last" if name == "native" else "xla"}
        with pytest.raises(ConfigError, match=rf"'{name}' here: .*{words}.*; leave implementation out"):
            function(*arrays, **{"implementation": name})
    with pytest.raises(ConfigError, match=r"convolution of \(3, 7, 6, 6\) with a kernel \(3, 2, 5, 4\)"):
        DENSE.function()(x, kernel[:, :, 1:])
    pretend_gpu()
    assert chosen(DENSE.function(), x, kernel) == {"patches"}


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": (3, 3)},
    "strided": {"kernel_size": (3, 3), "strides": 2, "padding": "VALID", "use_bias": False},
    "circular": {"kernel_size": (3, 2), "padding": "CIRCULAR", "kernel_dilation": 2},
    "padded by a number": {"kernel_size": (3, 3), "padding": 2, "feature_group_count": 2},
    "masked": {"kernel_size": (3, 3), "mask": np.triu(np.ones((3, 3, 4, 8)))},
    "product in bfloat16": {"kernel_size": (1, 1), "dtype": jnp.bfloat16},
    "causal": {"kernel_size": 3, "padding": "CAUSAL", "kernel_dilation": 2},
}


def test_layers_equal_flax():
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


def test_a_layer_takes_an_implementation_or_a_function():
    def plain(*args: Any) -> jax.Array:
        return lax.conv_general_dilated(*args)

    x, kernel = GROUPS.arrays()
    draws.assert_close(*jax.jit(lambda: [GROUPS.function(by)(x, kernel) for by in (plain, "xla")])())
    params = draws.variables(linen.Conv(2, (3, 3)), x)
    make, own = functools.partial(Conv, 2, (3, 3)), functools.partial(conv_general_dilated, implementation="xla")
    given = make(conv_general_dilated=lax.conv_general_dilated)
    for layer, expected in (
        *((make(implementation=name), {name}) for name in ("xla", "channels_last")),
        (make(implementation=plain), {"plain"}),
        (given, set()),
        (make(conv_general_dilated=own), {"xla"}),
        (linen.Conv(2, (3, 3), conv_general_dilated=conv_general_dilated), {DEFAULT}),
    ):
        assert chosen(layer.apply, params, x) == expected
    for implementation in ("xla", plain):
        layer = make(implementation=implementation)
        assert layer == make(implementation=implementation) != make()
        assert hash(layer) == hash(layer.clone())
    with pytest.raises(ConfigError, match="no implementation 'fast'"):
        make(implementation="fast").apply(params, x)
    with pytest.raises(ConfigError, match="implementation or a conv_general_dilated, not both"):
        given.clone(implementation="channels_last")
