"""GPT: a decoder-only transformer with the usual options, and its cache for generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike, DTypeLike

from jaxnn import nn
from jaxnn.models import _generation
from jaxnn.models._model_inputs import apply_layers, check_fields, checked_tokens
from jaxnn.models._transformer import STDDEV, residual_block
from jaxnn.types import ConfigError, DataError, check_int

_ROTARY_BASE = 10_000.0


class GPTCache(NamedTuple):
    """What `GPT` keeps of the tokens so far, so that the next one costs a single step."""

    lengths: jax.Array  # [batch] int32: the number of tokens
    layers: Any  # (key, value) [batch, size, key_heads, head_dim] of each layer; with `scan` one pair, of all layers


class GPT(linen.Module):
    """A decoder-only transformer: token and position embeddings, pre-norm blocks with causal attention, logits.

    Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), GPT-2, with its initialization: normal
    with deviation 0.02, divided by ``sqrt(2 * num_layers)`` for projections onto the residual stream. Unlike GPT-2, the
    logits have their own kernel and a bias unless ``tied``, and attention weights have no dropout. The default is
    nanoGPT's size for characters on a CPU (Karpathy, 2022). Parameters: ``Embed_0`` of tokens, ``Embed_1`` of positions
    unless ``rotary``, ``Block_0``, …, ``LayerNorm_0``, ``Dense_0`` unless ``tied``; each block ``LayerNorm_0``,
    ``Dense_0`` (queries, keys and values, in this order), ``Dense_1``, ``LayerNorm_1``, ``Dense_2``, ``Dense_3``.

    On a mesh with an axis ``model``, ``Dense_0`` and ``Dense_2`` of each block are sharded along their outputs,
    ``Dense_1`` and ``Dense_3`` along their inputs (Shoeybi et al., Megatron-LM, 2019); shards of ``Dense_0`` are
    exchanged before attention. So ``init`` returns these parameters in Flax's boxes with axis names;
    ``flax.linen.unbox`` removes them, as jaxnn's own steps do.

    >>> jn.models.num_parameters(jn.models.GPT(65), jax.ShapeDtypeStruct((1, 64), "int32"))
    818241

    Attributes:
        num_layers: number of blocks.
        features: width of the residual stream; the hidden layer after attention is four times as wide.
        num_heads: attention heads, which divide ``features``.
        max_length: maximum sequence length; not used by ``rotary``.
        dropout: ``[]`` the rate after the embeddings and before each residual addition, 0…1; may be a tracer.
        num_key_heads: heads of keys and values, which divide ``num_heads``: grouped queries (Ainslie et al., 2023,
            arXiv:2305.13245). The cache is smaller by their ratio. None: ``num_heads``.
        rotary: rotates queries and keys by their positions (Su et al., RoFormer, 2021, arXiv:2104.09864; halves of a
            head, as in GPT-NeoX) instead of adding embeddings of positions.
        norm: ``nn.LayerNorm``, or ``nn.RMSNorm`` (Zhang & Sennrich, 2019, arXiv:1910.07467).
        epsilon: of ``norm``; GPT-2 has 1e-5.
        tied: whether the logits are products with the token embeddings (Press & Wolf, 2017), without a bias.
        remat: recomputes a block's activations in the backward pass (``linen.remat``): about a third more time, and
            memory for the inputs of the blocks only.
        scan: compiles one block and loops over the layers (``linen.scan``); their parameters are stacked along a first
            axis, under ``Block_0``. Initial values and dropout masks then differ.
    """

    vocabulary_size: int
    _: dataclasses.KW_ONLY
    num_layers: int = 4
    features: int = 128
    num_heads: int = 4
    max_length: int = 64
    dropout: ArrayLike = 0.0
    num_key_heads: int | None = None
    rotary: bool = False
    norm: type[linen.Module] = nn.LayerNorm
    epsilon: float = 1e-6
    tied: bool = False
    remat: bool = False
    scan: bool = False

    generate, stream = linen.nowrap(_generation.generate), linen.nowrap(_generation.stream)

    def __post_init__(self) -> None:
        check_fields(self, "vocabulary_size", "num_layers", "features", "num_heads", "max_length")
        if self.features % self.num_heads:
            raise ConfigError(f"GPT: features {self.features} must be a multiple of num_heads {self.num_heads}.")
        if self.num_heads % check_int("GPT: num_key_heads", self.key_heads):
            raise ConfigError(f"GPT: num_heads {self.num_heads} must be a multiple of num_key_heads {self.key_heads}.")
        if self.rotary and self.features // self.num_heads % 2:
            raise ConfigError(f"GPT: rotary needs an even features / num_heads, not {self.features // self.num_heads}.")
        if self.norm not in (nn.LayerNorm, nn.RMSNorm):
            raise ConfigError(f"GPT: norm must be nn.LayerNorm or nn.RMSNorm, not {self.norm!r}.")
        super().__post_init__()

    @property
    def key_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_heads if self.num_key_heads is None else self.num_key_heads

    @property
    def context_length(self) -> int | None:
        """The largest number of tokens for which there are positions; None: any number."""
        return None if self.rotary else self.max_length

    def init_cache(self, batch_size: int, size: int, dtype: DTypeLike = jnp.float32) -> GPTCache:
        """Returns an empty cache for up to ``size`` tokens of each sequence, of the dtype of the parameters."""
        shape: tuple[int, ...] = (batch_size, size, self.key_heads, self.features // self.num_heads)
        if self.scan:
            shape = (self.num_layers, *shape)
        pairs = tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(self.num_layers))
        return GPTCache(jnp.zeros(batch_size, jnp.int32), pairs[0] if self.scan else pairs)

    @linen.compact
    def __call__(
        self, tokens: jax.Array, train: bool = False, *, cache: GPTCache | None = None, lengths: jax.Array | None = None
    ) -> Any:
        """Token ids ``[batch, time]`` to logits of each one's successor ``[batch, time, vocabulary_size]``.

        Logits depend on no later token. More than ``max_length`` tokens raise `DataError`. With the ``cache`` of the
        tokens before, of `init_cache` or of another call, returns the logits after the last token only, ``[batch,
        vocabulary_size]``, and the cache after it; ``lengths [batch]`` are then the numbers of tokens that are not
        padding. `generate` counts positions; here, those beyond ``max_length`` or the cache are not checked.
        """
        tokens = checked_tokens("GPT", tokens)
        batch, time = tokens.shape
        if self.context_length is not None and time > self.context_length:
            raise DataError(f"GPT: sequences of {time} tokens are longer than max_length, {self.max_length}.")
        init = linen.initializers.normal(STDDEV)
        embed = nn.Embed(self.vocabulary_size, self.features, embedding_init=init)
        x, positions = embed(tokens), jnp.arange(time)[None]
        if cache is not None:
            positions = cache.lengths[:, None] + positions
        if not self.rotary:
            # Padding after the longest sequence may be beyond the table, whose rows there would be NaN.
            rows = positions if cache is None else jnp.minimum(positions, self.max_length - 1)
            x = nn.add_broadcast(x, nn.Embed(self.max_length, self.features, embedding_init=init)(rows))
        x = nn.Dropout(self.dropout)(x, train=train)
        stddev = STDDEV / (2 * self.num_layers) ** 0.5
        norm = partial(self.norm, epsilon=self.epsilon)
        block = partial(Block, self.num_heads, self.key_heads, stddev, self.dropout, self.rotary, norm)
        call = lambda block, x, layer: block(x, positions, layer, train)  # noqa: E731
        layers = None if cache is None else cache.layers
        x, layers = apply_layers(call, block, self.num_layers, x, layers, remat=self.remat, scan=self.scan)
        if cache is not None:
            counts = jnp.full(batch, time) if lengths is None else lengths
            x = jnp.take_along_axis(x, counts[:, None, None] - 1, axis=1)
        x = norm()(x)
        logits = embed.attend(x) if self.tied else nn.Dense(self.vocabulary_size, kernel_init=init)(x)
        return logits if cache is None else (logits[:, 0], GPTCache(cache.lengths + counts, layers))


class Block(linen.Module):
    """A pre-norm transformer block: causal self-attention, then two dense layers, each with a residual connection."""

    num_heads: int
    key_heads: int
    stddev: float  # of the initial kernels of the projections onto the residual stream
    dropout: ArrayLike  # [] the rate before each residual addition
    rotary: bool
    norm: Callable[[], linen.Module]

    @linen.compact
    def __call__(self, x: jax.Array, positions: jax.Array, cache: Any, train: bool) -> tuple[jax.Array, Any]:
        """Maps ``[batch, time, features]`` at ``positions [batch | 1, time]`` to the same shape and the new cache."""
        features, head_dim = x.shape[-1], x.shape[-1] // self.num_heads
        width = self.key_heads * head_dim

        def attend(projected: jax.Array) -> jax.Array:
            nonlocal cache
            parts = jnp.split(projected, [features, features + width], axis=-1)
            query, key, value = (part.reshape(*x.shape[:2], -1, head_dim) for part in parts)
            if self.rotary:
                query, key = _rotate(query, positions), _rotate(key, positions)
            seen = None
            if cache is not None:
                rows = jnp.arange(len(x))[:, None]
                new = zip(cache, (key, value), strict=True)
                cache = tuple(held.at[rows, positions].set(part.astype(held.dtype)) for held, part in new)
                key, value = (held.astype(query.dtype) for held in cache)
                # Keys after a sequence's end are padding, until its next tokens replace them.
                seen = (jnp.arange(key.shape[1])[None, None] <= positions[..., None])[:, None]
            return nn.attention(query, key, value, causal=cache is None, mask=seen).reshape(x.shape)

        how: dict[str, Any] = {"train": train, "dropout": self.dropout, "stddev": self.stddev, "norm": self.norm}
        return residual_block(x, attend, features + 2 * width, 4 * features, activation=linen.gelu, **how), cache


def _rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates each pair ``(i, i + head_dim / 2)`` of ``x [batch, time, heads, head_dim]`` by an angle per position."""
    half = x.shape[-1] // 2
    rates = _ROTARY_BASE ** -(jnp.arange(half) / half)
    angles = positions[..., None, None] * rates[None, None, None]  # [batch | 1, time, 1, half]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(angles.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
