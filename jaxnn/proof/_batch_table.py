"""The examples of a batch as a table: columns by name, token ids as text, other arrays by their first numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxnn._text import Table
from jaxnn.types import Batch, Source, named_leaves

MOST_CHARACTERS = 120  # of a text
MOST_NUMBERS = 6  # of an array


def batch_table(
    batch: Batch, numbers: np.ndarray | None, source: Source, class_names: Sequence[str], num_examples: int
) -> Table:
    """Returns a row for each of the first examples: its number in the training split, its inputs and targets."""
    count = min(num_examples, len(batch.mask))
    columns: dict[str, list[str]] = {} if numbers is None else {"example": [f"{n:,}" for n in numbers[:count]]}
    inputs: Any = batch.inputs
    if (tokens := _tokens(source, inputs, class_names)) is not None:
        columns["text"] = [_decoded(row, tokens) for row in np.asarray(inputs)[:count]]
        labels: Sequence[str] = class_names if hasattr(source, "vocabulary") else ()
    else:
        named = getattr(source, "columns", None)
        columns |= _named(inputs, named, count) if named is not None else _first(inputs, "inputs", count)
        labels = class_names
    targets: Any = batch.targets
    if tokens is not None and np.ndim(targets) == 2:
        columns["next"] = [_decoded(row, tokens) for row in np.asarray(targets)[:count]]
    elif np.ndim(targets) == 1 and len(labels):
        columns["target"] = [_label(value, labels) for value in np.asarray(targets)[:count]]
    else:
        columns |= _first(targets, "targets", count)
    return Table(list(columns), list(zip(*columns.values(), strict=True)))


def _tokens(source: Source, inputs: Any, class_names: Sequence[str]) -> Sequence[str] | None:
    """The text of each id, if the inputs are ids of tokens."""
    if isinstance(inputs, Mapping) or np.ndim(inputs) != 2 or not np.issubdtype(inputs.dtype, np.integer):
        return None
    known = getattr(source, "vocabulary", None)
    return known.tokens if known is not None else class_names or None


def _decoded(ids: np.ndarray, tokens: Sequence[str]) -> str:
    words = [tokens[one] if 0 <= one < len(tokens) else "…" for one in ids.tolist()]
    text = (
        ("" if all(len(word) <= 1 for word in tokens) else " ").join(word for word in words if word).replace("\n", "⏎")
    )
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def _named(inputs: Mapping[str, Any], columns: Any, count: int) -> dict[str, list[str]]:
    """The columns of a table: numbers as the network gets them, categories as texts."""
    names = iter(columns.names)
    found = {next(names): [f"{x:.5g}" for x in column[:count]] for column in np.asarray(inputs.get("numbers", ())).T}
    for (name, known), ids in zip(columns.categories.items(), np.asarray(inputs.get("categories", ())).T, strict=False):
        found[name] = ["" if one == 0 else known[one - 1] for one in ids[:count].tolist()]
    return found


def _first(tree: Any, name: str, count: int) -> dict[str, list[str]]:
    return {
        path: [_numbers(row) for row in np.asarray(leaf)[:count]] for path, leaf in named_leaves({name: tree}).items()
    }


def _numbers(row: np.ndarray) -> str:
    flat = row.reshape(-1)
    return " ".join(f"{x:.4g}" for x in flat[:MOST_NUMBERS].tolist()) + (" …" if flat.size > MOST_NUMBERS else "")


def _label(value: Any, names: Sequence[str]) -> str:
    known = np.issubdtype(type(value), np.integer) and 0 <= value < len(names)
    return names[int(value)] if known else f"{value:.4g}"
