"""Networks with images or latents as outputs: U-Net, and the variational autoencoder with a convolutional decoder."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike

from jaxnn import nn
from jaxnn._batch_context import normal_rows
from jaxnn._fields import positive_ints
from jaxnn.models._model_inputs import check_fields, check_images
from jaxnn.models._transformer import TransformerBlock


class UNet(linen.Module):
    """A U-Net: residual blocks on levels of decreasing height and width, and back, with connections across.

    Ronneberger, Fischer & Brox, "U-Net" (2015, arXiv:1505.04597), with the blocks of Ho, Jain & Abbeel, "Denoising
    Diffusion Probabilistic Models" (2020, arXiv:2006.11239). Outputs have the image's height and width, such as logits
    of each pixel's class, or the noise in it. With ``time``, in ``init`` too, blocks get an embedding of it.
    Parameters: ``Conv_0``, ``UNetBlock_0``, …, ``Conv_1``, …, in the order of the computation, ``TransformerBlock_0``,
    ``GroupNorm_0`` (or ``LayerNorm_0``), and ``Dense_0`` and ``Dense_1`` of the time.

    >>> images = jax.ShapeDtypeStruct((2, 32, 32, 1), "float32")
    >>> jn.models.num_parameters(jn.models.UNet(1), images)
    2559969
    >>> jn.models.num_parameters(jn.models.UNet(1), images, time=jnp.arange(2))
    2700417

    Attributes:
        out_features: channels of the outputs.
        features: channels of the first level.
        multipliers: of the channels, for each level; each but the first halves height and width, rounded up.
        num_blocks: residual blocks per level, and one more on the way back.
        num_groups: of group norm (Wu & He, 2018), which divide all channels; None: layer norm over the channels.
        num_heads: attention heads among all positions of the last level; None: no attention.
        dropout: ``[]`` the rate before each block's second convolution, 0…1; may be a tracer.
    """

    out_features: int
    _: dataclasses.KW_ONLY
    features: int = 32
    multipliers: tuple[int, ...] = (1, 2, 4)
    num_blocks: int = 1
    num_groups: int | None = 8
    num_heads: int | None = None
    dropout: ArrayLike = 0.0

    def __post_init__(self) -> None:
        given = (name for name in ("num_groups", "num_heads") if getattr(self, name) is not None)
        check_fields(self, "out_features", "features", "num_blocks", *given)
        self.multipliers = positive_ints("UNet: multipliers", self.multipliers, "(1, 2, 4)", nonempty=True)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False, *, time: jax.Array | None = None) -> jax.Array:
        """``[batch, height, width, channels]``, ``time [batch]`` to ``[batch, height, width, out_features]``."""
        check_images("UNet", x)
        if time is not None:
            time = nn.Dense(4 * self.features)(_sinusoidal(time, self.features).astype(x.dtype))
            time = nn.Dense(4 * self.features)(linen.silu(time))
        block = partial(UNetBlock, num_groups=self.num_groups, dropout=self.dropout)
        widths = [self.features * multiplier for multiplier in self.multipliers]
        x = nn.Conv(self.features, (3, 3))(x)
        across = [x]
        for level, width in enumerate(widths):
            if level:
                x = nn.Conv(width, (3, 3), strides=(2, 2))(x)
                across.append(x)
            for _ in range(self.num_blocks):
                x = block(width)(x, time, train)
                across.append(x)
        x = block(widths[-1])(x, time, train)
        if self.num_heads is not None:
            positions = x.reshape(x.shape[0], -1, x.shape[-1])
            x = TransformerBlock(self.num_heads, dropout=self.dropout)(positions, train).reshape(x.shape)
        x = block(widths[-1])(x, time, train)
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(self.num_blocks + 1):
                x = block(width)(jnp.concatenate([x, across.pop()], axis=-1), time, train)
            if level:
                x = nn.Conv(width, (3, 3))(_doubled(x, across[-1].shape))
        return nn.Conv(self.out_features, (3, 3))(_norm_silu(x, self.num_groups))


class UNetBlock(linen.Module):
    """Twice a norm, silu and a 3x3 convolution; the embedding of time is added between; and a shortcut."""

    features: int  # output channels
    num_groups: int | None  # as `UNet`'s
    dropout: ArrayLike  # [] the rate before the second convolution

    @linen.compact
    def __call__(self, x: jax.Array, time: jax.Array | None, train: bool = False) -> jax.Array:
        """``[batch, height, width, channels]``, ``time [batch, embedding]`` to ``[batch, height, width, features]``."""
        y = nn.Conv(self.features, (3, 3))(_norm_silu(x, self.num_groups))
        if time is not None:
            y = y + nn.Dense(self.features)(linen.silu(time))[:, None, None, :]
        y = nn.Dropout(self.dropout)(_norm_silu(y, self.num_groups), train=train)
        y = nn.Conv(self.features, (3, 3))(y)
        return y + (x if x.shape == y.shape else nn.Conv(self.features, (1, 1))(x))


def _norm_silu(x: jax.Array, num_groups: int | None) -> jax.Array:
    norm = nn.LayerNorm() if num_groups is None else linen.GroupNorm(num_groups, use_fast_variance=False)
    return linen.silu(norm(x))


def _doubled(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Each pixel of ``[batch, height, width, channels]`` four times, cut to height and width of ``shape``."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)[:, : shape[1], : shape[2]]


def _sinusoidal(time: jax.Array, features: int) -> jax.Array:
    """Sines and cosines of ``time [batch]`` at frequencies from 1 to 1/10,000: ``[batch, 2 * (features // 2)]``."""
    half = max(features // 2, 1)
    frequencies = jnp.exp(-math.log(10_000) / half * jnp.arange(half, dtype=jnp.float32))
    angles = time.astype(jnp.float32)[:, None] * frequencies[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class VAEOutputs(NamedTuple):
    """What a `VAE` returns: the reconstruction, and the normal distribution of the latents.

    >>> jn.models.VAEOutputs(jnp.zeros((1, 4)), mean=jnp.array([[0.0, 2.0]]), log_variance=jnp.zeros((1, 2))).kl()
    Array([2.], dtype=float32)
    """

    reconstruction: jax.Array  # [batch, ...] the decoder's outputs, such as logits of pixels
    mean: jax.Array  # [batch, latents], as `log_variance`
    log_variance: jax.Array

    def kl(self) -> jax.Array:
        """``[batch]`` the Kullback-Leibler divergence of the latents from the standard normal distribution, in nats."""
        terms = jnp.exp(self.log_variance) + jnp.square(self.mean) - 1 - self.log_variance
        return 0.5 * terms.sum(axis=-1)


class VAE(linen.Module):
    """A variational autoencoder: an encoder of the latents' mean and log variance, and a decoder of a sample of them.

    Kingma & Welling, "Auto-Encoding Variational Bayes" (2014, arXiv:1312.6114). Training draws the sample with
    ``rngs={"latents": key}``. Evaluation takes the mean, and with that key it draws too, as an unbiased estimate of the
    evidence lower bound needs. ``method="encode"`` and ``method="decode"`` of ``apply`` call the halves. Parameters:
    ``encoder``, ``decoder``.

    >>> encoder = jn.models.MLP((512, 2 * 16))  # means and log variances of 16 latents
    >>> model = jn.models.VAE(encoder, jn.models.MLP((512, 784)), shape=(28, 28, 1))
    >>> jn.models.num_parameters(model, jax.ShapeDtypeStruct((1, 28, 28, 1), "float32"))
    829232

    Attributes:
        encoder: a module called as ``encoder(inputs, train)``, such as `MLP` or `CNN`, to ``[batch, 2 * latents]``.
        decoder: one called as ``decoder(latents, train)``, such as `MLP` or `ConvDecoder`, to an example's numbers.
        shape: of an example; None: that of the decoder's outputs.
    """

    encoder: linen.Module
    decoder: linen.Module
    _: dataclasses.KW_ONLY
    shape: tuple[int, ...] | None = None

    def __call__(self, x: jax.Array, train: bool = False) -> VAEOutputs:
        """``[batch, ...]`` to reconstructions of the same shape, and the means and log variances of the latents."""
        latents, log_variance = mean, _ = self.encode(x, train)
        if train or self.has_rng("latents"):
            latents += jnp.exp(log_variance / 2) * normal_rows(self.make_rng("latents"), mean.shape, mean.dtype)
        return VAEOutputs(self.decode(latents, train), mean, log_variance)

    def encode(self, x: jax.Array, train: bool = False) -> tuple[jax.Array, jax.Array]:
        """``[batch, ...]`` to mean and log variance ``[batch, latents]``."""
        mean, log_variance = jnp.split(self.encoder(x, train), 2, axis=-1)
        return mean, log_variance

    def decode(self, latents: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, latents]`` to reconstructions ``[batch, *shape]``."""
        out: jax.Array = self.decoder(latents, train)
        return out if self.shape is None else out.reshape(out.shape[0], *self.shape)


class ConvDecoder(linen.Module):
    """A dense layer, then convolutions that double height and width, from latents to images.

    Each doubling: every pixel four times, a 3x3 convolution, and the activation, which leaves no checkerboard (Odena,
    Dumoulin & Olah, "Deconvolution and Checkerboard Artifacts", 2016). Parameters: ``Dense_0``, ``Conv_0``, ….

    >>> decoder = jn.models.ConvDecoder((28, 28, 1))
    >>> jn.models.num_parameters(decoder, jax.ShapeDtypeStruct((1, 16), "float32"))
    81313

    Attributes:
        shape: height, width and channels of the images.
        features: channels before each doubling.
    """

    shape: tuple[int, int, int]
    _: dataclasses.KW_ONLY
    features: tuple[int, ...] = (64, 32)

    @linen.compact
    def __call__(self, latents: jax.Array, train: bool = False) -> jax.Array:
        """``[batch, latents]`` to ``[batch, *shape]``."""
        height, width, channels = self.shape
        # Of each level; odd sizes are rounded up.
        sizes = [(-(-height // 2**level), -(-width // 2**level)) for level in range(len(self.features) + 1)]
        smallest = (*sizes.pop(), self.features[0])
        x = linen.relu(nn.Dense(math.prod(smallest))(latents)).reshape(-1, *smallest)
        for features in (*self.features[1:], self.features[-1]):
            x = linen.relu(nn.Conv(features, (3, 3))(_doubled(x, (len(x), *sizes.pop()))))
        return nn.Conv(channels, (3, 3))(x)
