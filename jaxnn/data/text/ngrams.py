"""Runs of two and more tokens get ids of their own: a table of integers, built by sorting and searched by halving."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxnn.data.text.ragged import Ragged


class NGrams(NamedTuple):
    """The n-grams that have an id.

    An n-gram of ``k`` tokens is one of ``k - 1`` tokens, the left one, and one token more. Its key is
    ``place * base + id``: the place of the left one among the keys of its order (for ``k = 2`` the id of the first
    token), and the id of the last token.

    Attributes:
        base: how many ids single tokens have.
        keys: for the orders 2, 3, … each ``[n-grams]`` int64, rising: all that occur in the training texts.
        ids: alike, the id of each; -1: none.
    """

    base: int
    keys: tuple[np.ndarray, ...] = ()
    ids: tuple[np.ndarray, ...] = ()

    @property
    def num_ids(self) -> int:
        """How many n-grams have an id: ``base … base + num_ids - 1``."""
        return sum(int((ids >= 0).sum()) for ids in self.ids)


def fit_ngrams(tokens: Ragged, order: int, base: int, most: int | None) -> NGrams:
    """Gives ids from ``base`` on to the runs of 2 to ``order`` tokens in ``tokens``.

    The most frequent comes first; of equals the shorter, and then the one whose tokens have the lower ids. Memory:
    some 40 bytes a token.

    Args:
        tokens: ids ``0 … base - 1`` of the training texts' tokens.
        order: the length of the longest n-gram.
        base: how many ids single tokens have.
        most: how many n-grams get an id; None: all.
    """
    keys, counts = [], []
    left = tokens.values.astype(np.int64)
    for size in range(2, order + 1):
        starts, found = _occurrences(tokens, left, size, base)
        known, places, count = np.unique(found, return_inverse=True, return_counts=True)
        left = _spread(places, starts, len(left))
        keys.append(known)
        counts.append(count)
    ids = _ranked(np.concatenate([*counts, np.zeros(0, np.int64)]), base, most)
    bounds = np.cumsum([len(known) for known in keys])[:-1]
    return NGrams(base, tuple(keys), tuple(np.split(ids, bounds))[: len(keys)])


def lookup(ngrams: NGrams, tokens: Ragged) -> list[Ragged]:
    """The ids of the n-grams in each text, in the order of the text; those without an id are left out.

    Returns:
        For each order of ``ngrams``, one sequence a text.
    """
    found = []
    left = tokens.values.astype(np.int64)
    for size, (keys, ids) in enumerate(zip(ngrams.keys, ngrams.ids, strict=True), start=2):
        starts, wanted = _occurrences(tokens, left, size, ngrams.base)
        places = _places(keys, wanted)
        left = _spread(places, starts, len(left))
        # Place -1 takes the one that is put behind the others.
        values = np.append(ids, np.int32(-1))[places]
        rows = tokens.rows[starts[values >= 0]]
        found.append(Ragged(values[values >= 0], np.bincount(rows, minlength=len(tokens.lengths))))
    return found


def _occurrences(tokens: Ragged, left: np.ndarray, size: int, base: int) -> tuple[np.ndarray, np.ndarray]:
    """Where n-grams of ``size`` tokens begin, and their keys.

    Args:
        tokens: the texts.
        left: ``[total]`` what the n-gram of one token less that begins here adds to the key; -1: it is unknown.
        size: how many tokens.
        base: how many ids single tokens have.
    """
    starts = np.flatnonzero((left >= 0) & (tokens.remaining >= size))
    return starts, left[starts] * base + tokens.values[starts + size - 1]


def _places(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where each of ``wanted`` stands among the rising ``keys``; -1: nowhere."""
    if not len(keys):
        return np.full(len(wanted), -1)
    near = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[near] == wanted, near, -1)


def _spread(values: np.ndarray, at: np.ndarray, total: int) -> np.ndarray:
    """``[total]`` int64 that are ``values`` at ``at``, and -1 elsewhere."""
    spread = np.full(total, -1, np.int64)
    spread[at] = values
    return spread


def _ranked(counts: np.ndarray, first: int, most: int | None) -> np.ndarray:
    """Ids from ``first`` on by falling count, equals in their order; -1 behind the first ``most``: int32."""
    order = np.argsort(-counts, kind="stable")[:most]
    ids = np.full(len(counts), -1, np.int32)
    ids[order] = np.arange(first, first + len(order), dtype=np.int32)
    return ids
