"""Generation of tokens by a language model: one pass over the prompts, then a compiled loop with a cache."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.typing import ArrayLike
from numpy.typing import NDArray

from jaxnn.types import ConfigError, DataError, Params, check_int


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
    context: int | None = None,
) -> NDArray[np.int32]:
    """Continues prompts by tokens sampled from a language model, and returns the new tokens.

    The prompts are one pass; then a compiled loop feeds each token back, with a cache of keys and values (`GPT`), the
    recurrent state (`RecurrentLanguageModel`) or the last tokens, all computed again (models without a cache). Programs
    are compiled per batch size, length of the prompts and ``num_tokens``, the latter two rounded up to powers of two.
    The same key gives the same tokens.

    >>> model = jn.models.GPT(65, num_layers=1, features=8, num_heads=2)
    >>> params = model.init(jax.random.key(0), np.zeros((1, 4), int))["params"]
    >>> prompts, key = np.array([[5, 6, 7], [8, 9, 0]]), jax.random.key(1)
    >>> jn.models.generate(model, params, prompts, lengths=[3, 2], num_tokens=4, key=key, top_k=10).shape
    (2, 4)

    Args:
        model: a Flax module from token ids to logits ``[batch, time, vocabulary]`` or ``[batch, vocabulary]``, with a
            cache if it has ``init_cache``, as `GPT`. ``context_length``, if it has one, limits the positions.
        params: ``run.state.params``, or all variables: ``{"params": run.state.params, **run.state.model_state}``.
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
            full, for text longer than ``max_length``. None: such text is an error.
        context: number of last tokens from which each new one is computed without a cache: usually the length of the
            inputs in training. None: with a cache, or ``context_length`` of a model without one.

    Returns:
        ``[batch, num_tokens]`` int32.

    Raises:
        ConfigError: an option of the wrong kind or range, or sampling without a key.
        DataError: prompts that are not token ids; more tokens than the model has positions, without ``overlap``; fewer
            than ``context`` for a model of logits ``[batch, vocabulary]`` without ``lengths`` or ``pad_id``.
    """
    options: dict[str, Any] = {"key": key, "temperature": temperature, "top_k": top_k, "top_p": top_p, "stop": stop}
    options |= {"num_tokens": num_tokens, "lengths": lengths, "overlap": overlap, "context": context}
    tokens = np.concatenate(list(stream(model, params, prompt, chunk=num_tokens, **options)), axis=1)
    missing = num_tokens - tokens.shape[1]  # if all sequences stopped
    return np.pad(tokens, [(0, 0), (0, missing)], constant_values=stop or 0)


def stream(
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
    context: int | None = None,
    chunk: int | None = None,
) -> Iterator[NDArray[np.int32]]:
    """Returns an iterator over the tokens of `generate` as they come, which ends early if all sequences stopped.

    They are ``[batch]`` one by one, or with ``chunk`` at most that many together, ``[batch, time]``, which is faster.
    Other arguments and errors are those of `generate`.

    >>> model = jn.models.RecurrentLanguageModel(9, features=4, num_layers=1)
    >>> params = model.init(jax.random.key(0), np.zeros((1, 4), int))["params"]
    >>> [tokens.shape for tokens in jn.models.stream(model, params, np.array([[1, 2]]), num_tokens=3, temperature=0)]
    [(1,), (1,), (1,)]
    """
    check_int("generate: num_tokens", num_tokens)
    rows, sampling = _prompts(model, prompt, lengths), _checked_sampling(temperature, top_k, top_p, stop)
    if not hasattr(key, "dtype") and (key is not None or temperature > 0):
        raise ConfigError(f"generate: sampling needs key=jax.random.key(0), for example, not {key}; or temperature=0.")
    if not isinstance(params, Mapping) or not params:
        raise ConfigError(f"generate: params must be a dict, as run.state.params, not {type(params).__name__}.")
    if context is not None or not hasattr(model, "init_cache"):
        size = getattr(model, "context_length", None) if context is None else context
        size = check_int("generate: context, the number of last tokens for a model without a cache,", size)
        model = _Window(model, size, padded=min(map(len, rows)) < size)
    limit = getattr(model, "context_length", None) or sys.maxsize
    if overlap is not None:
        overlap = min(check_int("generate: overlap", overlap), limit)
    elif (longest := max(map(len, rows))) + num_tokens - 1 > limit:
        raise DataError(
            f"generate: a prompt of {longest} tokens and {num_tokens} more do not fit into the model's {limit} "
            f"positions: generate fewer, or pass overlap={max(1, limit // 2)} to start again from the last tokens."
        )
    variables = linen.unbox(params if "params" in params else {"params": params})
    most = 1 if chunk is None else check_int("stream: chunk", chunk)
    key = jax.random.key(0) if key is None else key

    def chunks(rows: list[np.ndarray]) -> Iterator[NDArray[np.int32]]:
        start, done = 0, np.zeros(len(rows), bool)
        while start < num_tokens and not done.all():
            if overlap is not None and max(map(len, rows)) > limit:
                rows = [row[-overlap:] for row in rows]
            counts = np.array([len(row) for row in rows], np.int32)
            longest = int(counts.max())
            width, size = (min(_rounded(count), limit) for count in (longest, longest + num_tokens))
            padded = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
            state = (*_prefill(model, size, variables, padded, counts), done)
            end = min(num_tokens, start + limit - longest + 1)
            while start < end and not done.all():
                count = min(most, end - start)
                found, state = _extend(model, _rounded(most), variables, state, sampling, key, start, count)
                tokens, done = np.asarray(found)[:, :count], np.asarray(state[2])
                rows = [np.concatenate(pair) for pair in zip(rows, tokens, strict=True)]
                start += count
                yield tokens if chunk is not None else tokens[:, 0]

    return chunks(rows)


class _Sampling(NamedTuple):
    """Settings of a draw, arrays ``[]`` in a program, so that another value compiles nothing."""

    temperature: Any
    top_k: Any  # None: all, as top_p
    top_p: Any
    stop: Any  # -1: none


@dataclasses.dataclass(frozen=True)
class _Window:
    """A model as one with a cache, which holds its last ``size`` tokens and computes all of them again."""

    model: Any
    size: int
    padded: bool  # whether there are shorter texts

    def init_cache(self, batch_size: int, size: int, dtype: Any) -> Any:
        pad = getattr(self.model, "pad_id", None) or 0
        return jnp.full((batch_size, self.size), pad, jnp.int32), jnp.zeros(batch_size, jnp.int32)

    def apply(self, variables: Any, tokens: jax.Array, *, cache: Any, lengths: jax.Array | None = None) -> Any:
        window, counts = cache  # the last tokens at its end
        lengths = jnp.ones_like(counts) if lengths is None else lengths
        places = jnp.arange(self.size)[None]
        window = jnp.take_along_axis(jnp.concatenate([window, tokens], axis=1), places + lengths[:, None], axis=1)
        counts = jnp.minimum(counts + lengths, self.size)
        text = jnp.take_along_axis(window, (places - counts[:, None]) % self.size, axis=1)  # padding at its end
        takes_lengths = self.padded and "lengths" in inspect.signature(self.model.__call__).parameters
        logits = self.model.apply(variables, text, **({"lengths": counts} if takes_lengths else {}))
        if logits.ndim == 3:
            logits = jnp.take_along_axis(logits, counts[:, None, None] - 1, axis=1)[:, 0]
        elif self.padded and not takes_lengths and getattr(self.model, "pad_id", None) is None:
            name = type(self.model).__name__
            raise DataError(f"generate: {name} takes no padding: give prompts of its context of {self.size} tokens.")
        return logits, (window, counts)


def _rounded(count: int) -> int:
    """The next power of two, at least 16, so that few programs are compiled."""
    return max(16, 1 << (count - 1).bit_length())


def _checked_sampling(temperature: float, top_k: int | None, top_p: float | None, stop: int | None) -> _Sampling:
    if not isinstance(temperature, numbers.Real) or not 0 <= temperature < math.inf:
        raise ConfigError(f"generate: temperature must be a number >= 0, not {temperature!r}.")
    if top_p is not None and not (isinstance(top_p, numbers.Real) and 0 < top_p <= 1):
        raise ConfigError(f"generate: top_p must be a probability above 0, at most 1, not {top_p!r}.")
    for name, value, least in (("top_k", top_k, 1), ("stop", stop, 0)):
        if value is not None:
            check_int(f"generate: {name}", value, least)
    return _Sampling(np.float32(temperature), top_k, top_p, -1 if stop is None else stop)


def _prompts(model: Any, prompt: ArrayLike, lengths: ArrayLike | None) -> list[np.ndarray]:
    """The tokens of each prompt without its padding."""
    tokens = np.asarray(prompt)
    if tokens.ndim != 2 or 0 in tokens.shape or not np.issubdtype(tokens.dtype, np.integer):
        given = f"{tokens.dtype} {list(tokens.shape)}: encode a text by jn.data.encode_text(text, vocabulary)[None]"
        raise DataError(f"generate: a prompt must be integers [batch, time], not {given}.")
    batch, time = tokens.shape
    counts = np.full(batch, time) if lengths is None else np.asarray(lengths)
    if counts.shape != (batch,) or counts.dtype.kind not in "iu" or counts.min() < 1 or counts.max() > time:
        raise DataError(f"generate: lengths must be {batch} integers in 1…{time}, not {counts.tolist()}.")
    rows = [row[:count].astype(np.int32) for row, count in zip(tokens, counts, strict=True)]
    highest = getattr(model, "vocabulary_size", math.inf) - 1
    if any(row.min() < 0 or row.max() > highest for row in rows):
        raise DataError(f"generate: token ids of the prompt must be in 0…{highest}.")
    return rows


@partial(jax.jit, static_argnums=(0, 1))
def _prefill(model: Any, size: int, variables: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
    """The logits ``[batch, vocabulary]`` after ``tokens [batch, time]``, and a cache for ``size`` tokens."""
    dtype = jax.tree.leaves(variables["params"])[0].dtype
    cache = model.init_cache(tokens.shape[0], size, dtype)
    return model.apply(variables, tokens, cache=cache, lengths=lengths)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _extend(
    model: Any, most: int, variables: Any, state: Any, sampling: _Sampling, key: jax.Array, start: Any, count: Any
) -> tuple[jax.Array, Any]:
    """Generates ``count`` tokens, the first of which is number ``start``; returns ``[batch, most]`` and the state."""

    def step(carry: Any) -> Any:
        index, tokens, (logits, cache, done) = carry
        token = _sample(jax.random.fold_in(key, start + index), logits, sampling)
        token = jnp.where(done, sampling.stop, token)
        logits, cache = model.apply(variables, token[:, None], cache=cache)
        return index + 1, tokens.at[:, index].set(token), (logits, cache, done | (token == sampling.stop))

    def continues(carry: Any) -> Any:
        return (carry[0] < count) & ~jnp.all(carry[2][2])

    tokens = jnp.full((state[0].shape[0], most), sampling.stop, jnp.int32)
    _, tokens, state = jax.lax.while_loop(continues, step, (0, tokens, state))
    return tokens, state


def _sample(key: jax.Array, logits: jax.Array, sampling: _Sampling) -> jax.Array:
    """Draws a token ``[batch]`` int32 from ``logits [batch, vocabulary]``."""
    greedy, draws = jnp.argmax(logits, axis=-1), sampling.temperature >= np.finfo(np.float32).tiny
    # From the largest down: those divided by a small temperature overflow to -inf, and never to inf.
    scaled = logits.astype(jnp.float32) - logits.astype(jnp.float32).max(axis=-1, keepdims=True)
    scaled = scaled / jnp.where(draws, sampling.temperature, 1)
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
    drawn = jnp.where(draws, drawn, greedy)
    return drawn.astype(jnp.int32)
