"""Convolutions: jax.lax's and Flax's values and gradients, in a form that stays fast in loops and under vmap."""

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

    def loss(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = function(x, kernel)
        return jnp.sum(jnp.sin(output.astype(jnp.promote_types(output.dtype, jnp.float32)))), output

    def run(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, ...]:
        (_, output), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, kernel)
        return output, *gradients

    return run


@functools.cache
def reference(case: Case) -> list[np.ndarray]:
    """By jax.lax itself, in float64."""
    with jax.enable_x64(True):
        lax_conv = functools.partial(
            lax.conv_general_dilated,
            window_strides=case.strides,
            padding=case.padding,
            lhs_dilation=case.lhs_dilation,
            rhs_dilation=case.rhs_dilation,
            dimension_numbers=LAYOUTS[len(case.size)],
            feature_group_count=case.groups,
        )
        return [np.asarray(array) for array in jax.jit(with_gradients(lax_conv))(*case.arrays(jnp.float64))]


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Of equal structure and shapes, and nowhere further apart than ``tolerance`` of the largest."""
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        assert left.shape == right.shape
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance * np.abs(right).max(initial=1.0))


def lowered(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    return jax.jit(function).lower(*args).as_text(**options)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_lax_in_float64(name: str) -> None:
    case = CASES[name]
    assert_close(jax.jit(with_gradients(case.function("channels_last")))(*case.arrays()), reference(case))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 3e-2), ("float16", 4e-3), ("float64", 1e-12)])
def test_each_dtype_is_kept_and_as_exact_as_it_can_be(name: str, dtype: str, tolerance: float) -> None:
    case = FORMS[name]
    with jax.enable_x64(dtype == "float64"):
        results = jax.jit(with_gradients(case.function()))(*case.arrays(dtype))
        assert {str(result.dtype) for result in results} == {dtype}
        assert_close(results, reference(case), tolerance)


@pytest.mark.parametrize("name", FORMS)
def test_preferred_element_type_is_summed_in_and_returned(name: str) -> None:
    case = FORMS[name]
    arrays = case.arrays(jnp.bfloat16)
    output, *gradients = jax.jit(with_gradients(case.function(preferred_element_type=jnp.float32)))(*arrays)
    assert output.dtype == jnp.float32
    assert {gradient.dtype for gradient in gradients} == {jnp.dtype(jnp.bfloat16)}
    # Products of two bfloat16 are exact in float32: what is left is the rounding of its sums.
    exact = case.function("xla")(*(array.astype(jnp.float32) for array in arrays))
    assert_close(output, exact, 1e-5)


def test_chunks_in_bfloat16_are_summed_in_float32() -> None:
    case = Case((2,), (2,), (1,), "VALID", features=(1, 1), batch=4096)
    ones = jnp.ones((4096, 2, 1), jnp.bfloat16), jnp.ones((2, 1, 1), jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda kernel: case.function()(ones[0], kernel).sum()))(ones[1])
    # One position of each example: 4096. Summed in bfloat16, of 8 bits, 2048 + 8 were 2048 again.
    np.testing.assert_array_equal(gradient, 4096.0)


def members(case: Case, axes: tuple[int | None, int | None]) -> list[jax.Array]:
    """Three of x, of the kernel or of both, along axis 0 as ``axes`` says."""
    return [a if axis is None else jnp.stack([a, -a, 2 * a]) for a, axis in zip(case.arrays(), axes, strict=True)]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=["inputs", "kernels", "both"])
def test_members_of_vmap_are_their_solo_runs(name: str, axes: tuple[int | None, int | None]) -> None:
    case = FORMS[name]
    arrays, run = members(case, axes), with_gradients(case.function())
    solo = jax.jit(with_gradients(case.function("xla")))
    runs = [solo(*(a if axis is None else a[i] for a, axis in zip(arrays, axes, strict=True))) for i in range(3)]
    expected = [np.stack(each) for each in zip(*runs, strict=True)]
    assert_close(jax.jit(jax.vmap(run, axes))(*arrays), expected)
    # The gradient of a vmap: what the members share sums up.
    _, by_x, by_kernel = jax.jit(with_gradients(jax.vmap(case.function(), axes)))(*arrays)
    summed = [each if axis == 0 else each.sum(0) for each, axis in zip(expected[1:], axes, strict=True)]
    assert_close((by_x, by_kernel), summed)


@pytest.mark.parametrize("name", FORMS)
def test_nested_vmap_along_other_axes_is_the_solo_runs(name: str) -> None:
    case = FORMS[name]
    x, kernel = case.arrays()
    xs, kernels = jnp.stack([x, -2 * x], -1), jnp.stack([kernel, 3 * kernel], 1)
    run = with_gradients(case.function())
    # Outer members have their own x, inner ones their own kernel, of an inner axis each.
    results = jax.jit(jax.vmap(jax.vmap(run, (None, 1), 1), (-1, None)))(xs, kernels)
    solo = jax.jit(with_gradients(case.function("xla")))
    for outer, inner in [(0, 1), (1, 0)]:
        assert_close([r[outer, :, inner] for r in results], solo(xs[..., outer], kernels[:, inner]))


def test_thin_inputs_shared_by_the_members_are_convolved_once() -> None:
    x, kernels = members(CHUNKS, (None, 0))
    text = lowered(jax.vmap(CHUNKS.function("channels_last"), (None, 0)), x, kernels)
    assert "while" not in text and text.count("stablehlo.convolution") == 1  # with 3 x 4 output features
    assert re.search(r"stablehlo.convolution.*-> tensor<19x7x6x12xf32>", text)


@pytest.mark.parametrize("name", FORMS)
def test_steps_in_scan_with_rematerialisation_are_those_of_a_loop(name: str) -> None:
    case = FORMS[name]
    xs = jnp.stack([case.arrays()[0], 0.5 * case.arrays()[0]])

    def step(kernel: jax.Array, x: jax.Array, function: Callable[..., jax.Array]) -> tuple[jax.Array, jax.Array]:
        output, _, gradient = with_gradients(function)(x, kernel)
        return kernel - 0.1 * gradient, output

    ours = functools.partial(step, function=jax.checkpoint(case.function()))
    kernel, outputs = jax.jit(lambda kernel: lax.scan(ours, kernel, xs))(case.arrays()[1])
    expected, kept = case.arrays()[1], []
    plain = jax.jit(functools.partial(step, function=case.function("xla")))
    for x in xs:
        expected, output = plain(expected, x)
        kept.append(output)
    assert_close((kernel, outputs), (expected, jnp.stack(kept)))


def layouts(text: str) -> set[str]:
    return set(re.findall(r"dim_numbers = (.*?), window", text))


def groups(text: str) -> set[str]:
    return set(re.findall(r"_group_count = (\d+)", text))


def scanned_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda xs, kernel: lax.scan(lambda kernel, x: (with_gradients(function)(x, kernel)[2], None), kernel, xs)


def test_all_convolutions_of_a_scanned_step_have_channels_last() -> None:
    x, kernel = DENSE.arrays()
    canonical = lowered(scanned_gradients(DENSE.function("channels_last")), x[None], kernel)
    assert layouts(canonical) == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}
    plain = lowered(scanned_gradients(DENSE.function("xla")), x[None], kernel)
    assert len(layouts(plain)) > 1


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=["inputs", "kernels", "both"])
def test_vmap_makes_no_grouped_convolution(name: str, axes: tuple[int | None, int | None]) -> None:
    arrays = members(FORMS[name], axes)
    canonical = lowered(jax.vmap(with_gradients(FORMS[name].function("channels_last")), axes), *arrays)
    assert groups(canonical) <= {"1"}
    if axes[1] == 0:
        assert groups(lowered(jax.vmap(with_gradients(FORMS[name].function("xla")), axes), *arrays)) > {"1"}


def test_a_large_kernel_gradient_is_summed_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((4, 4), (3, 3), (1, 1), features=(5, 4), batch=9)
    run = with_gradients(case.function())
    assert "while" not in lowered(run, *case.arrays())
    jax.clear_caches()
    monkeypatch.setattr("jaxnn.nn._channels_last_conv._CACHED", 9 * 4 * 4 * 8)  # elements; there are 9 of each pixel
    assert "while" in lowered(run, *case.arrays())
    assert_close(jax.jit(run)(*case.arrays()), reference(case))
    jax.clear_caches()


@pytest.mark.parametrize("name", FORMS)
def test_the_program_says_what_ran_backward_too(name: str) -> None:
    text = lowered(with_gradients(FORMS[name].function("channels_last")), *FORMS[name].arrays(), debug_info=True)
    assert re.search(r"[(/\"]jvp\(jaxnn\.convolution\.channels_last\)", text)
    assert "transpose(jvp(jaxnn.convolution.channels_last))" in text
    assert "jaxnn.convolution.xla" not in text


def chosen(function: Callable[..., jax.Array], *arrays: jax.Array) -> set[str]:
    return set(re.findall(r"jaxnn\.convolution\.(\w+)", lowered(function, *arrays, debug_info=True)))


def test_the_best_of_a_platform_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(DENSE.function(), *DENSE.arrays()) == {"channels_last"}
    monkeypatch.setattr("jaxnn.nn._layer_arguments.platform", lambda: "gpu")
    assert chosen(DENSE.function(), *DENSE.arrays()) == {"xla"}


OBSTACLES = {
    "channels last": ({"dimension_numbers": None}, (2, 3, 6, 5), (4, 3, 2, 2), jnp.float32),
    "batch_group_count": ({"batch_group_count": 2}, (2, 6, 5, 3), (2, 2, 3, 4), jnp.float32),
    "int32": ({}, (2, 6, 5, 3), (2, 2, 3, 4), jnp.int32),
    "empty": ({"padding": "VALID"}, (2, 1, 5, 3), (2, 2, 3, 4), jnp.float32),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_canonical_cannot_do_xla_does(name: str) -> None:
    options, *shapes, dtype = OBSTACLES[name]
    x, kernel = (jnp.arange(np.prod(shape), dtype=dtype).reshape(shape) for shape in shapes)
    arguments = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": LAYOUTS[2], **options}
    function = functools.partial(conv_general_dilated, **arguments)
    assert_close(function(x, kernel), lax.conv_general_dilated(x, kernel, **arguments))
    assert chosen(function, x, kernel) <= {"xla"}
    with pytest.raises(ConfigError, match=rf"cannot use 'channels_last' here: .*{name}.*; leave implementation out"):
        function(x, kernel, implementation="channels_last")


@pytest.mark.parametrize("implementation", ["xla", "channels_last"])
def test_shapes_that_do_not_fit_are_named(implementation: str) -> None:
    x, kernel = DENSE.arrays()
    with pytest.raises(ConfigError, match=r"convolution of \(3, 7, 6, 6\) with a kernel \(3, 2, 5, 4\)"):
        DENSE.function(implementation)(x, kernel[:, :, 1:])


LAYERS = {
    "plain": {"kernel_size": (3, 3)},
    "strided": {"kernel_size": (3, 3), "strides": 2, "padding": "VALID", "use_bias": False},
    "circular": {"kernel_size": (3, 2), "padding": "CIRCULAR", "kernel_dilation": 2},
    "padded by a number": {"kernel_size": (3, 3), "padding": 2, "feature_group_count": 2},
    "masked": {"kernel_size": (3, 3), "mask": np.triu(np.ones((3, 3, 4, 8)))},
    "product in bfloat16": {"kernel_size": (1, 1), "dtype": jnp.bfloat16},
    "causal": {"kernel_size": 3, "padding": "CAUSAL", "kernel_dilation": 2},
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_flaxs(name: str) -> None:
    ours, flaxs = Conv(8, **LAYERS[name]), linen.Conv(8, **LAYERS[name])
    x = DENSE._replace(size=(6,) if name == "causal" else (6, 5), features=(4, 8)).arrays()[0]
    shapes = jax.eval_shape(flaxs.init, jax.random.key(1), x)
    assert jax.eval_shape(ours.init, jax.random.key(1), x) == shapes
    generator = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: generator.standard_normal(leaf.shape, leaf.dtype), shapes)

    def loss(params: Any, x: jax.Array, layer: linen.Module) -> jax.Array:
        return jnp.sum(jnp.sin(layer.apply(params, x).astype(jnp.float32)))

    gradients = [jax.jit(jax.grad(functools.partial(loss, layer=layer), (0, 1)))(params, x) for layer in (ours, flaxs)]
    tolerance = 3e-2 if "bfloat16" in name else 1e-5
    assert_close(jax.jit(ours.apply)(params, x), flaxs.apply(params, x), tolerance)
    assert_close(*gradients, tolerance)


def test_the_layer_is_initialised_as_flaxs() -> None:
    x = jnp.ones((1, 4, 4, 2))
    ours, flaxs = (layer(3, (3, 3)).init(jax.random.key(0), x) for layer in (Conv, linen.Conv))
    jax.tree.map(np.testing.assert_array_equal, ours, flaxs)


def test_the_layer_takes_one_example_or_more_batch_axes_as_flaxs() -> None:
    layer, x = Conv(8, (3, 3)), np.random.default_rng(0).standard_normal((2, 3, 6, 5, 4), np.float32)
    params = layer.init(jax.random.key(1), x)
    output = layer.apply(params, x)
    assert_close(output, linen.Conv(8, (3, 3)).apply(params, x))
    assert_close(output[1, 2], layer.apply(params, x[1, 2]))


def test_the_layers_implementation_can_be_given_and_changed() -> None:
    x, layer = DENSE.arrays()[0], Conv(2, (3, 3), implementation="xla")
    params = layer.init(jax.random.key(0), x)
    assert chosen(layer.apply, params, x) == {"xla"}
    assert chosen(layer.clone(implementation="channels_last").apply, params, x) == {"channels_last"}
    with pytest.raises(ConfigError, match="no implementation 'fast'"):
        layer.clone(implementation="fast").apply(params, x)
    assert layer == Conv(2, (3, 3), implementation="xla") != Conv(2, (3, 3))
    assert hash(layer) == hash(Conv(2, (3, 3), implementation="xla"))


def test_a_convolution_of_ones_own_is_kept_and_ours_fits_flaxs_layer() -> None:
    x, layer = DENSE.arrays()[0], Conv(2, (3, 3), conv_general_dilated=lax.conv_general_dilated)
    params = layer.init(jax.random.key(0), x)
    assert chosen(layer.apply, params, x) == set()
    assert chosen(linen.Conv(2, (3, 3), conv_general_dilated=conv_general_dilated).apply, params, x) == {
        "channels_last"
    }
    own = functools.partial(conv_general_dilated, implementation="xla")
    assert chosen(Conv(2, (3, 3), conv_general_dilated=own).apply, params, x) == {"xla"}
    with pytest.raises(ConfigError, match="give an implementation or a conv_general_dilated, not both"):
        layer.clone(implementation="channels_last")


def test_a_function_is_an_implementation() -> None:
    def plain(*args: Any) -> jax.Array:
        return lax.conv_general_dilated(*args)

    x, kernel = GROUPS.arrays()
    assert_close(GROUPS.function(plain)(x, kernel), GROUPS.function("xla")(x, kernel))
    layer = Conv(2, (3, 3), implementation=plain)
    params = layer.init(jax.random.key(0), x)
    assert chosen(layer.apply, params, x) == {"plain"}
    assert layer == Conv(2, (3, 3), implementation=plain) != Conv(2, (3, 3))
