"""Adam and AdamW of Optax, whose updates of large parameters a training step may compute in one pass."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxnn import kernels
from jaxnn.optim._row_gradients import apply_updates
from jaxnn.types import Params, PyTree

type Mask = PyTree | Callable[[Params], PyTree] | None


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """An optimizer that updates the parameters itself, as it may do in fewer passes than by ``update``.

    ``update_params(gradient, state, params, **extra)`` returns the parameters and the state after an update, equal to
    rounding to those by ``update``.
    """

    update_params: Callable[..., tuple[Params, optax.OptState]]

    @classmethod
    def of(cls, optimizer: optax.GradientTransformation, update_params: Callable[..., Any]) -> Self:
        """``optimizer`` with this way to update."""
        transformation = cls(*optimizer)
        transformation.update_params = update_params
        return transformation


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optax.adam``, whose updates of large parameters are faster on a CPU.

    Kingma & Ba, Adam: A Method for Stochastic Optimization, 2014 (arXiv:1412.6980). Arguments, state and, to rounding,
    updates are Optax's. With the package of ``make native``, `make_train_step` reads and writes a parameter, its
    moments and its gradient once, where XLA makes three passes: in float32, on one device, without ``options``, if the
    optimizer is outermost or within `with_clipping` only. Other combinators around it, such as ``with_ema``, use
    Optax's update. It is in place if the state is donated, as `jaxnn.fit` does.

    >>> type(jn.optim.adam(1e-3).init({"kernel": jnp.ones(3)})[0])
    <class 'optax...ScaleByAdamState'>
    """
    make: Any = partial(optax.adam, learning_rate, b1, b2, eps, eps_root, **options)
    numbers = (b1, b2, eps, eps_root)
    return _in_one_pass(lambda mask: make(), learning_rate, numbers, 0.0, None, is_plain=not options)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    *,
    weight_decay: ArrayLike | optax.Schedule = 1e-4,
    mask: Mask = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optax.adamw``, whose updates of large parameters are faster on a CPU, as those of `adam`.

    Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2019 (arXiv:1711.05101). ``mask`` is a tree of bools as
    the parameters, or a function to it, such as `is_decayed`: the parameters that decay. Optax updates if
    ``weight_decay`` is a schedule.

    >>> optimizer = jn.optim.adamw(3e-4, b2=0.95, weight_decay=0.1, mask=jn.optim.is_decayed)
    """
    make: Any = partial(optax.adamw, learning_rate, b1, b2, eps, eps_root, weight_decay=weight_decay, **options)
    numbers, is_plain = (b1, b2, eps, eps_root), not options and not callable(weight_decay)
    return _in_one_pass(lambda mask: make(mask=mask), learning_rate, numbers, weight_decay, mask, is_plain=is_plain)


def _in_one_pass(
    make: Callable[[Mask], optax.GradientTransformationExtraArgs],
    learning_rate: Any,
    numbers: tuple[Any, ...],
    weight_decay: Any,
    mask: Mask,
    *,
    is_plain: bool,
) -> optax.GradientTransformationExtraArgs:
    b1, b2, eps, eps_root = numbers

    def update_params(gradient: Params, state: Any, params: Params, **extra: Any) -> tuple[Params, optax.OptState]:
        moments, *others = state
        leaves, structure = cast(Any, jax.tree.flatten(params))
        decays = mask(params) if callable(mask) else mask
        columns = map(structure.flatten_up_to, (gradient, moments.mu, moments.nu))
        of_leaves = [*zip(*columns, leaves, strict=True)]
        like_numbers = jax.ShapeDtypeStruct((9,), jnp.float32)
        by_kernel = [kernels.adam.is_chosen(*of_moments, like_numbers, param) for *of_moments, param in of_leaves]

        def small(tree: PyTree) -> PyTree:
            """``tree`` with nothing in the place of leaves that are not Optax's to update."""
            pairs = zip(structure.flatten_up_to(tree), by_kernel, strict=True)
            return structure.unflatten([leaf[:0] if is_large else leaf for leaf, is_large in pairs])

        small_state = (moments._replace(mu=small(moments.mu), nu=small(moments.nu)), *others)
        small_updates, (new, *new_others) = make(decays).update(small(gradient), small_state, small(params), **extra)
        results = apply_updates(small(params), small_updates), new.mu, new.nu
        new_params, mu, nu = map(structure.flatten_up_to, results)

        rate = learning_rate(others[-1].count) if callable(learning_rate) else learning_rate
        corrected = rate / (1 - b1**new.count), 1 / (1 - b2**new.count)
        is_decayed = [True] * len(leaves) if decays is None else jax.tree.leaves(jax.tree.broadcast(decays, params))
        for index, (*of_moments, param) in enumerate(of_leaves):
            if by_kernel[index]:
                shrink = rate * weight_decay if is_decayed[index] else 0.0
                values = (b1, 1 - b1, b2, 1 - b2, *corrected, eps, eps_root, shrink)
                of_leaf = jnp.stack([jnp.asarray(value, jnp.float32) for value in values])
                new_params[index], mu[index], nu[index] = kernels.adam(*of_moments, of_leaf, param)
        new_params, mu, nu = map(structure.unflatten, (new_params, mu, nu))
        return new_params, (new._replace(mu=mu, nu=nu), *new_others)

    optimizer, has_rate = make(mask), learning_rate is not None  # else Optax does not scale
    return FusedTransformation.of(optimizer, update_params) if is_plain and has_rate else optimizer
