"""One classifier with batch statistics and dropout as a model of each other library."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx


class NNXNet(nnx.Module):
    def __init__(self, num_inputs: int, rate: Any = 0.25, *, rngs: nnx.Rngs) -> None:
        layers = nnx.Linear(num_inputs, 6, use_bias=False, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)
        self.layers, self.norm = nnx.List(layers), nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.layers[0](x.reshape(x.shape[0], -1))
        return self.layers[1](self.dropout(nnx.relu(self.norm(x))))


def equinox_net(num_inputs: int, rate: Any = 0.25) -> Callable[[jax.Array], Any]:
    """A factory, whose class is a new one in each call, as in a notebook."""
    eqx = pytest.importorskip("equinox")

    def build(key: jax.Array) -> Any:
        class Net(eqx.Module):
            layers: list[Any]
            norm: Any
            dropout: Any

            def __init__(self, key: jax.Array) -> None:
                first, last = jax.random.split(key)
                layers = eqx.nn.Linear(num_inputs, 6, use_bias=False, key=first), eqx.nn.Linear(6, 3, key=last)
                self.layers, self.norm = list(layers), eqx.nn.BatchNorm(6, "batch", mode="batch")
                self.dropout = eqx.nn.Dropout(rate)

            def __call__(self, x: jax.Array, state: Any, *, key: jax.Array) -> Any:
                (own_key,) = jax.random.split(key, 1)  # not allowed to be None
                x, state = self.norm(self.layers[0](x.ravel()), state)
                return self.layers[1](self.dropout(jax.nn.relu(x), key=own_key)), state

        return eqx.nn.make_with_state(Net)(key)

    return build


class Transformed(NamedTuple):
    """As what `haiku.transform_with_state` returns, of which nothing but the names is used."""

    init: Callable[..., Any]
    apply: Callable[..., Any]


def haiku_net(rate: float = 0.25) -> Transformed:
    def init(rng: jax.Array, x: jax.Array) -> Any:
        first, last = jax.random.split(rng)
        params = {"first": jax.random.normal(first, (x[0].size, 6)), "last": jax.random.normal(last, (6, 3))}
        return params, {"mean": jnp.zeros(6)}

    def apply(params: Any, state: Any, rng: jax.Array | None, *arguments: jax.Array) -> Any:
        x = arguments[0].reshape(len(arguments[0]), -1) @ params["first"]
        if rng is None:
            return jax.nn.relu(x - state["mean"][None]) @ params["last"], state
        state, x = {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}, x - x.mean(0)[None]
        kept = jax.random.bernoulli(rng, 1 - rate, x.shape)
        return jnp.where(kept, jax.nn.relu(x) / (1 - rate), 0) @ params["last"], state

    return Transformed(init, apply)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    """A user's pytree, without state."""

    layers: list[jax.Array]
    rate: float = dataclasses.field(default=0.25, metadata={"static": True})

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        x = jax.nn.relu(x.reshape(x.shape[0], -1) @ self.layers[0])
        kept = True if key is None else jax.random.bernoulli(key, 1 - self.rate, x.shape) / (1 - self.rate)
        return x * kept @ self.layers[1]


def models(num_inputs: int) -> dict[str, Any]:
    def tree(key: jax.Array) -> Tree:
        first, last = jax.random.split(key)
        return Tree([jax.random.normal(first, (num_inputs, 6)), jax.random.normal(last, (6, 3))])

    return {
        "a Flax NNX module": lambda rngs: NNXNet(num_inputs, rngs=rngs),
        "an Equinox module": lambda key: equinox_net(num_inputs)(key),
        "a Haiku transform": haiku_net(),
        "a pytree": tree,
    }
