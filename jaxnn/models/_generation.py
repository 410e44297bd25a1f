"""Generation of tokens by a language model: one pass over the prompts, then a compiled loop with a cache."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray

from jaxnn.types import ConfigError, DataError, Params, check_int

_LEAST_WIDTH = 16  # prompts are padded to this length or a larger power of two, so that few programs are compiled


def generate(
    model: Any,
    params: Params,
    prompt: ArrayLike,
    *,
    num_tokens: int,
    key: jax.Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    lengths: ArrayLike | None = None,
    overlap: int | None = None,
) -> NDArray[np.int32]:
    """Continues prompts by tokens sampled from a language model, and returns the new tokens.

    The prompts are one pass; then a compiled loop feeds each token back, with a cache of keys and values (`GPT`) or the
    recurrent state (`RecurrentLanguageModel`). A program is compiled per batch size, ``num_tokens`` and length of the
    prompts, rounded up to a power of two. The same key gives the same tokens.

    >>> model = jn.models.GPT(65, num_layers=1, features=8, num_heads=2)
    >>> params = linen.unbox(model.init(jax.random.key(0), np.zeros((1, 4), int)))["params"]
    >>> prompts, key = np.array([[5, 6, 7], [8, 9, 0]]), jax.random.key(1)
    >>> jn.models.generate(model, params, prompts, lengths=[3, 2], num_tokens=4, key=key, top_k=10).shape
    (2, 4)

    Args:
        model: a `GPT`, a `RecurrentLanguageModel`, or a Flax module with their ``init_cache`` and ``cache`` argument;
            ``context_length``, if it has one, limits the positions.
        params: the model's parameters, without boxes: ``run.state.params``.
        prompt: ``[batch, time]`` token ids, at least one.
        num_tokens: number of new tokens of each sequence.
        key: of ``jax.random``; needed unless ``temperature`` is 0.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: samples only from this many most likely tokens; None: from all.
        top_p: samples only from the fewest tokens that together have this probability, 0…1, after ``top_k`` (Holtzman
            et al., The Curious Case of Neural Text Degeneration, 2020, arXiv:1904.09751); None: from all.
        stop: a token that ends a sequence, whose remaining tokens are ``stop`` too; None: none does.
        lengths: ``[batch]`` number of tokens of each prompt before its padding; None: no padding.
        overlap: number of last tokens from which the model starts again, with an empty cache, whenever its context is
            full, for text longer than ``max_length``; ``max_length`` itself slides by one token, without the speed of
            the cache. None: such text is an error.

    Returns:
        ``[batch, num_tokens]`` int32.

    Raises:
        ConfigError: an option of the wrong kind or range, or sampling without a key.
        DataError: prompts that are not token ids or, without ``overlap``, more tokens than the model has positions.
    """
    options: dict[str, Any] = {"key": key, "temperature": temperature, "top_k": top_k, "top_p": top_p, "stop": stop}
    options |= {"num_tokens": num_tokens, "lengths": lengths, "overlap": overlap}
    tokens = np.concatenate(list(_pieces(model, params, prompt, num_tokens, **options)), axis=1)
    missing = num_tokens - tokens.shape[1]  # if all sequences stopped
    return np.pad(tokens, [(0, 0), (0, missing)], constant_values=stop or 0)


def stream(model: Any, params: Params, prompt: ArrayLike, **options: Any) -> Iterator[NDArray[np.int32]]:
    """Yields the tokens of `generate` one by one, ``[batch]`` each, as they come; ends early if all sequences stopped.

    >>> model = jn.models.RecurrentLanguageModel(9, features=4, num_layers=1)
    >>> params = model.init(jax.random.key(0), np.zeros((1, 4), int))["params"]
    >>> [tokens.shape for tokens in jn.models.stream(model, params, np.array([[1, 2]]), num_tokens=3, temperature=0)]
    [(1,), (1,), (1,)]

    Arguments and errors are those of `generate`.
    """
    return (tokens[:, 0] for tokens in _pieces(model, params, prompt, 1, **options))


class _Sampling(NamedTuple):
    """Settings of a draw, arrays ``[]`` in a program, so that another value compiles nothing."""

    temperature: Any
    top_k: Any  # None: all, as top_p
    top_p: Any
    stop: Any  # -1: none


def _pieces(
    model: Any,
    params: Params,
    prompt: ArrayLike,
    piece: int,
    *,
    num_tokens: int,
    key: jax.Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    lengths: ArrayLike | None = None,
    overlap: int | None = None,
) -> Iterator[NDArray[np.int32]]:
    """Yields the new tokens ``[batch, at most piece]``, one piece after another."""
    rows, limit = _prompts(model, prompt, lengths), getattr(model, "context_length", None) or sys.maxsize
    check_int("generate: num_tokens", num_tokens)
    sampling = _checked_sampling(temperature, top_k, top_p, stop)
    if key is None and temperature > 0:
        raise ConfigError("generate: sampling needs key=jax.random.key(0), for example; or pass temperature=0.")
    key = jax.random.key(0) if key is None else key
    if overlap is not None:
        overlap = min(check_int("generate: overlap", overlap), limit)
    elif (longest := max(map(len, rows))) + num_tokens - 1 > limit:
        raise DataError(
            f"generate: a prompt of {longest} tokens and {num_tokens} more do not fit into the model's {limit} "
            f"positions: generate fewer, or pass overlap={max(1, limit // 2)} to start again from the last tokens."
        )
    start, done = 0, np.zeros(len(rows), bool)
    while start < num_tokens and not done.all():
        if overlap is not None and max(map(len, rows)) > limit:
            rows = [row[-overlap:] for row in rows]
        counts = np.array([len(row) for row in rows], np.int32)
        width = min(max(_LEAST_WIDTH, 2 ** int(counts.max() - 1).bit_length()), limit)
        padded = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
        state = (*_prefill(model, min(width + num_tokens, limit), params, padded, counts), done)
        end = min(num_tokens, start + limit - int(counts.max()) + 1)
        while start < end and not done.all():
            count = min(piece, end - start)
            found, state = _extend(model, piece, params, state, sampling, key, start, count)
            tokens, done = np.asarray(found)[:, :count], np.asarray(state[2])
            rows = [np.concatenate(pair) for pair in zip(rows, tokens, strict=True)]
            start += count
            yield tokens


def _checked_sampling(temperature: float, top_k: int | None, top_p: float | None, stop: int | None) -> _Sampling:
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"generate: temperature must be a number >= 0, not {temperature!r}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"generate: top_p must be a probability above 0, at most 1, not {top_p!r}.")
    for name, value, least in (("top_k", top_k, 1), ("stop", stop, 0)):
        if value is not None:
            check_int(f"generate: {name}", value, least)
    return _Sampling(np.float32(temperature), top_k, top_p, -1 if stop is None else stop)


def _prompts(model: Any, prompt: ArrayLike, lengths: ArrayLike | None) -> list[np.ndarray]:
    """The tokens of each prompt without its padding."""
    tokens = np.asarray(prompt)
    if tokens.ndim != 2 or 0 in tokens.shape or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"generate: a prompt must be integers [batch, time], not {tokens.dtype} {list(tokens.shape)}.")
    batch, time = tokens.shape
    counts = np.full(batch, time) if lengths is None else np.asarray(lengths)
    if counts.shape != (batch,) or counts.min() < 1 or counts.max() > time:
        raise DataError(f"generate: lengths must be {batch} integers in 1…{time}, not {counts.tolist()}.")
    rows = [row[:count].astype(np.int32) for row, count in zip(tokens, counts, strict=True)]
    highest = getattr(model, "vocabulary_size", math.inf) - 1
    if any(row.min() < 0 or row.max() > highest for row in rows):
        raise DataError(f"generate: token ids of the prompt must be in 0…{highest}.")
    return rows


@partial(jax.jit, static_argnums=(0, 1))
def _prefill(model: Any, size: int, params: Params, tokens: jax.Array, lengths: jax.Array) -> Any:
    """The logits ``[batch, vocabulary]`` after ``tokens [batch, time]``, and a cache for ``size`` tokens."""
    dtype = jax.tree.leaves(params)[0].dtype
    cache = model.init_cache(tokens.shape[0], size, dtype)
    return model.apply({"params": params}, tokens, cache=cache, lengths=lengths)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _extend(
    model: Any, most: int, params: Params, state: Any, sampling: _Sampling, key: jax.Array, start: Any, count: Any
) -> tuple[jax.Array, Any]:
    """Generates ``count`` tokens, the first of which is number ``start``; returns ``[batch, most]`` and the state."""

    def step(carry: Any) -> Any:
        index, tokens, (logits, cache, done) = carry
        token = _sample(jax.random.fold_in(key, start + index), logits, sampling)
        token = jnp.where(done, sampling.stop, token)
        logits, cache = model.apply({"params": params}, token[:, None], cache=cache)
        return index + 1, tokens.at[:, index].set(token), (logits, cache, done | (token == sampling.stop))

    def continues(carry: Any) -> Any:
        return (carry[0] < count) & ~jnp.all(carry[2][2])

    tokens = jnp.full((state[0].shape[0], most), sampling.stop, jnp.int32)
    _, tokens, state = jax.lax.while_loop(continues, step, (0, tokens, state))
    return tokens, state


def _sample(key: jax.Array, logits: jax.Array, sampling: _Sampling) -> jax.Array:
    """Draws a token ``[batch]`` int32 from ``logits [batch, vocabulary]``."""
    greedy = jnp.argmax(logits, axis=-1)
    scaled = logits.astype(jnp.float32) / jnp.where(sampling.temperature > 0, sampling.temperature, 1)
    order = None
    if sampling.top_k is not None or sampling.top_p is not None:  # by rank, so that ties do not add tokens
        order = jnp.argsort(-scaled, axis=-1, stable=True)
        scaled = jnp.take_along_axis(scaled, order, axis=-1)
    if sampling.top_k is not None:
        scaled = jnp.where(jnp.arange(scaled.shape[-1])[None] < sampling.top_k, scaled, -jnp.inf)
    if sampling.top_p is not None:
        shares = jax.nn.softmax(scaled, axis=-1)
        scaled = jnp.where(jnp.cumsum(shares, axis=-1) - shares < sampling.top_p, scaled, -jnp.inf)
    drawn = jax.random.categorical(key, scaled)
    if order is not None:
        drawn = jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0]
    drawn = jnp.where(sampling.temperature > 0, drawn, greedy)
    return drawn.astype(jnp.int32)
