"""Adam and AdamW of Optax, which a training step updates in one pass where it can."""

from collections.abc import Callable
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxnn.optim._row_gradients import apply_updates
from jaxnn.types import Params, PyTree


class AdamTransformation(optax.GradientTransformationExtraArgs):
    """An optimizer by ``adam`` or ``adamw``.

    Its ``step(leaf_update, gradient, state, params, **extra)`` returns the parameters and the state after an update,
    which ``leaf_update``, that is `jaxnn.nn.adam_update`, makes of those leaves that it can.
    """

    step: Callable[..., tuple[Params, optax.OptState]]

    @classmethod
    def of(cls, optimizer: optax.GradientTransformation, step: Callable[..., Any]) -> Self:
        """``optimizer`` with this step."""
        transformation = cls(*optimizer)
        transformation.step = step
        return transformation


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
) -> AdamTransformation:
    """Returns ``optax.adam(…)``, of which `make_train_step` makes one pass over large parameters on a CPU.

    Kingma & Ba, Adam: A Method for Stochastic Optimization, 2014 (arXiv:1412.6980). Arguments, state and, to rounding,
    updates are Optax's. With the package of ``make onednn``, a training step reads and writes a parameter, its moments
    and its gradient once, where XLA makes three passes: in float32, on one device, if the optimizer is outermost or
    within `with_clipping` only. Other combinators around it, such as ``with_ema``, use Optax's update.

    >>> type(jn.optim.adam(1e-3).init({"kernel": jnp.ones(3)})[0])
    <class 'optax...ScaleByAdamState'>
    """
    optimizer = optax.adam(learning_rate, b1, b2, eps, eps_root)
    return _in_one_pass(optimizer, learning_rate, b1, b2, eps, eps_root, 0.0, None)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    *,
    weight_decay: ArrayLike = 1e-4,
    mask: PyTree | Callable[[Params], PyTree] | None = None,
) -> AdamTransformation:
    """Returns ``optax.adamw(…)``, of which `make_train_step` makes one pass as of `adam`.

    Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2019 (arXiv:1711.05101). ``mask`` is a tree of bools as
    the parameters, or a function to it, such as `is_decayed`: the parameters that decay.

    >>> optimizer = jn.optim.adamw(3e-4, b2=0.95, weight_decay=0.1, mask=jn.optim.is_decayed)
    """
    decay: Any = weight_decay  # Optax's annotation has no tracers
    optimizer = optax.adamw(learning_rate, b1, b2, eps, eps_root, weight_decay=decay, mask=mask)
    return _in_one_pass(optimizer, learning_rate, b1, b2, eps, eps_root, weight_decay, mask)


def _in_one_pass(
    optimizer: optax.GradientTransformationExtraArgs,
    learning_rate: Any,
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    weight_decay: Any,
    mask: Any,
) -> AdamTransformation:
    def step(
        leaf_update: Callable[..., Any], gradient: Params, state: Any, params: Params, **extra: Any
    ) -> tuple[Params, optax.OptState]:
        adam, *rest = state
        leaves, structure = cast(Any, jax.tree.flatten(params))
        decays = mask(params) if callable(mask) else mask
        decays = [True] * len(leaves) if decays is None else structure.flatten_up_to(decays)
        trees = (gradient, adam.mu, adam.nu)
        updates = [leaf_update(*of_leaf) for of_leaf in zip(leaves, *map(structure.flatten_up_to, trees), strict=True)]

        def others(tree: PyTree) -> PyTree:
            """``tree`` with nothing in the place of large leaves."""
            pairs = zip(structure.flatten_up_to(tree), updates, strict=True)
            return structure.unflatten([leaf if update is None else leaf[:0] for leaf, update in pairs])

        small_adam = adam._replace(mu=others(adam.mu), nu=others(adam.nu))
        small = others(params)
        small_updates, (new, *rest) = optimizer.update(others(gradient), (small_adam, *rest), small, **extra)
        results = apply_updates(small, small_updates), new.mu, new.nu
        new_params, mu, nu = map(structure.flatten_up_to, results)
        rate = learning_rate(adam.count) if callable(learning_rate) else learning_rate
        for index, update in enumerate(updates):
            if update is not None:
                corrected = rate / (1 - b1**new.count), 1 / (1 - b2**new.count)
                numbers = (b1, 1 - b1, b2, 1 - b2, *corrected, eps, eps_root, rate * weight_decay * decays[index])
                values = jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])
                new_params[index], mu[index], nu[index] = update(values)
        new_params, mu, nu = map(structure.unflatten, (new_params, mu, nu))
        return new_params, (new._replace(mu=mu, nu=nu), *rest)

    return AdamTransformation.of(optimizer, step)
