"""A kernel: its native form on CPUs, the fallback for derivatives and other platforms, and when each is taken."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxnn.kernels import Kernel, collect_reasons, native_call
from jaxnn.observe import Traced
from jaxnn.types import ConfigError
from tests import native, shell


def forward(x: jax.Array, *, power: int) -> Any:
    return x * x if power == 2 else x**power, (power * x ** (power - 1),)


def backward(operands: Any, kept: Any, cotangent: jax.Array, *, power: int) -> Any:
    return (kept[0] * cotangent,)


def raised(x: jax.Array, *, power: int) -> jax.Array:
    return jnp.exp(power * jnp.log(x))


def unfit(x: jax.Array, *, power: int) -> str | None:
    return None if x.ndim else "it is a number"


KERNEL = Kernel("power", raised, None, unfit, gradient=(forward, backward))
X = jnp.array([0.5, 1.5, 3.0])


def primitives(function: Any, *arrays: Any, platform: str = "cpu") -> str:
    return str(jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text())


def cube(x: jax.Array) -> jax.Array:
    return KERNEL.compute(x, power=3)


def test_all_derivatives_and_transformations_are_those_of_the_operation():
    grad = jax.grad(lambda x: cube(x).sum())
    np.testing.assert_allclose(cube(X), X**3, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(grad)(X), 3 * X**2, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(cube, (X,), (X,))[1], 3 * X**3, rtol=1e-6)
    np.testing.assert_allclose(jax.hessian(lambda x: cube(x).sum())(X), jnp.diag(6 * X), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(grad)(X[:, None])[:, 0], 3 * X**2, rtol=1e-6)
    np.testing.assert_allclose(jax.lax.map(grad, X[:, None])[:, 0], 3 * X**2, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: jax.checkpoint(cube)(x).sum())(X), 3 * X**2, rtol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(grad(X), 3 * X**2, rtol=1e-6)
    for platform, has_logarithm in (("cpu", False), ("cuda", True)):
        for function in (cube, grad):
            assert ("log" in primitives(function, X, platform=platform)) == has_logarithm


def test_mistakes_and_static_arguments_of_equal_value_are_told_apart():
    scale = Kernel("scale", lambda x, by: x * by, lambda x, by: x * by, lambda x, **_: None)
    assert [scale.compute(jnp.int32(3), by=by).dtype for by in (2, 2.0)] == [jnp.int32, jnp.float32]
    assert jax.jit(Kernel("same", jnp.abs, jnp.abs, lambda x: None))(-X).tolist() == X.tolist()
    with pytest.raises(ConfigError, match="kernel nothing: it has no native form"):
        Kernel("nothing", jnp.abs, None, lambda x: None)
    with pytest.raises(ConfigError, match="kernel power: unfit and slower return a reason, .* not True"):
        dataclasses.replace(KERNEL, slower=lambda x, **_: True)(X, power=2)
    two = dataclasses.replace(KERNEL, gradient=(forward, lambda *given, power: (X, X)))
    with pytest.raises(ConfigError, match="kernel power: the backward pass must return a cotangent for each operand"):
        jax.grad(lambda x: two.compute(x, power=2).sum())(X)
    with pytest.raises(ConfigError, match="jaxnn_x: the attribute eps must be integers, not 0.5"):
        native_call("jaxnn_x", [(3,)], X, eps=0.5)


@native.needed
@pytest.mark.needs_cpu
def test_the_form_is_chosen_by_types_and_speed_and_named():
    def forms(x: jax.Array, kernel: Kernel = KERNEL) -> Any:
        with collect_reasons() as reasons:
            return Traced(lambda x: kernel(x, power=2), x).implementations["power"], [*reasons]

    assert forms(X) == (["native"], [])
    assert forms(X[0]) == (["xla"], ["power without native: it is a number"])
    slower = dataclasses.replace(KERNEL, slower=lambda x, **_: "it is small")
    assert forms(X, slower) == (["xla"], ["power without native: it is small"])
    with jax.disable_jit():
        assert KERNEL(X, power=2).tolist() == (X * X).tolist()
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))):
        rows = jax.device_put(jnp.ones((2, 3)), PartitionSpec("data"))
        assert forms(rows) == (["xla"], ["power without native: the mesh has explicit axes"])


CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp, numpy as np
exec(open(sys.argv[2]).read())
assert gelu.obstacle(x := jnp.linspace(-6, 6, 2**16).reshape(16, -1)) is None, gelu.obstacle(x)
graded = lambda f: jax.jit(jax.value_and_grad(lambda x: (f(x) ** 2).sum()))
for function in (gelu, jax.vmap(gelu)):
    for found, wanted in zip(graded(function)(x), graded(jax.nn.gelu)(x)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=3e-5)
text = graded(gelu).lower(x).as_text()
assert "@jaxnn_gelu(" in text and "@jaxnn_gelu_backward(" in text
np.testing.assert_allclose(jax.jvp(gelu, (x,), (x,))[1], jax.jvp(jax.nn.gelu, (x,), (x,))[1], atol=1e-4)
"""


@native.needed
@pytest.mark.slow
def test_a_new_kernel_is_a_file_a_line_and_the_python_of_the_page(tmp_path):
    package, site, python = tmp_path / "native", tmp_path / "site", tmp_path / "gelu.py"
    shutil.copytree(shell.ROOT / "native", package)
    (package / "src" / "gelu").mkdir()
    shutil.copy(Path(__file__).with_name("gelu.cc"), package / "src" / "gelu")
    with (package / "src" / "kernels.def").open("a") as lines:
        lines.write('JAXNN_KERNEL(gelu, "f", "f")\nJAXNN_KERNEL(gelu_backward, "ff", "f")\n')
    python.write_text((shell.ROOT / "docs" / "kernels.md").read_text().split("```python\n")[1].split("```")[0])
    install = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--target", site)
    built = shell.python(*install, "-Ccmake.build-type=Debug", package, timeout=600, JAXNN_ONEDNN="OFF")
    assert built.returncode == 0, built.stderr
    done = shell.python("-c", CHECK, site, python)
    assert done.returncode == 0, done.stderr
