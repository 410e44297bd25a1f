"""The shapes of a run's data in its record, and data of these shapes: what opens a run that has lost its data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.data import ArraySource
from jaxnn.types import Examples, RecordError, Splits


def describe_data(splits: Splits, examples: Examples) -> dict[str, Any] | None:
    """Returns the number of examples of each split, and the dtype and shape of one of ``examples [batch, ...]``.

    ``{"splits": {"train": 1437}, "inputs": "float32[64]", "targets": "int32[]"}``; None if the source prepares batches
    in a way of its own, which a record does not hold.
    """
    if getattr(type(splits.train), "as_batch", None) is not ArraySource.as_batch:
        return None
    one = jax.tree.map(lambda rows: f"{rows.dtype}{list(rows.shape[1:])}", examples._asdict())
    return {"splits": {name: source.num_examples for name, source in splits.named().items()}, **one}


def recorded_data(path: object, facts: Mapping[str, Any]) -> Splits | None:
    """Returns data of zeros, which take no memory, with the splits and shapes of the run or group in ``path``.

    None if ``facts`` do not describe the data; RecordError if they do in another form.
    """
    described = facts.get("examples")
    if described is None:
        return None

    def rows(count: int, text: str) -> np.ndarray:
        dtype, _, shape = text.removesuffix("]").partition("[")
        return np.broadcast_to(np.zeros((), jnp.dtype(dtype)), (count, *map(int, filter(None, shape.split(",")))))

    try:
        one = with_tuples({name: described[name] for name in Examples._fields})
        splits: Any = {
            split: ArraySource(Examples(**jax.tree.map(functools.partial(rows, count), one)))
            for split, count in described["splits"].items()
        }
        others = {name: splits.pop(name) for name in [*splits] if name not in Splits._fields}
        return Splits(**splits, others=others)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"the shapes of the data in {path} cannot be read ({error!r}): it is damaged.") from error


def with_tuples(tree: Any) -> Any:
    """``tree`` of JSON, which has no tuples, with tuples for its lists: data sets and configs have no lists."""
    if isinstance(tree, Mapping):
        return {name: with_tuples(part) for name, part in tree.items()}
    return tuple(map(with_tuples, tree)) if isinstance(tree, list) else tree
