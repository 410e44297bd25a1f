"""What holds for every model: published parameter counts, dtypes, statistics, dropout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn import models
from jaxnn.models import CNN, GPT, MLP, Bottleneck, FastText, MobileNetV2, ResNet, TextGenRNN, create, num_parameters
from jaxnn.models import RecurrentClassifier as Classifier
from jaxnn.models import RecurrentLanguageModel as Language
from jaxnn.nn import GRU, BatchNorm, Dropout

KEY = jax.random.key(0)
SIZES = {"vocabulary_size": 6, "embedding_features": 4, "features": 3}


def images(size: int, channels: int = 3) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, size, size, channels), jnp.float32)


def tokens(time: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, time), jnp.int32)


IMAGE, TEXT = images(12), tokens(4)
SMALL_CNN = CNN(3, blocks=((4,), (6, 6)), dense=(8,), batch_norm=True, dropout=0.5)
MOBILENET = MobileNetV2(5, stages=((1, 4, 1, 1), (2, 4, 2, 2)), features=4, last_features=6, dropout=0.5)
WIDE = models.WideResNet(5, depth=10, width=1, dropout=0.5)
ENCODER: dict[str, Any] = {"num_layers": 2, "features": 6, "num_heads": 2, "dropout": 0.5}
TINY_VIT = models.ViT(5, **ENCODER)
TINY_ENCODER = models.TransformerClassifier(3, **ENCODER, vocabulary_size=6, pad_id=0)
TINY_UNET = models.UNet(2, features=4, multipliers=(1, 2), num_groups=2, num_heads=2, dropout=0.5)
TINY_GPT = GPT(5, num_layers=2, features=4, num_heads=1, max_length=4, dropout=0.5)
MODELS: dict[str, linen.Module] = {
    "mlp": MLP((4, 3), dropout=0.5),
    "cnn": SMALL_CNN,
    "resnet": ResNet(5, num_blocks=(1, 2), features=4),
    "bottlenecks": ResNet(5, num_blocks=(1, 2), features=2, block=Bottleneck, stem="imagenet"),
    "mobilenet": MOBILENET,
    "wide": WIDE,
    "vit": TINY_VIT,
    "unet": TINY_UNET,
    "fasttext": FastText(3, vocabulary_size=6, features=2, pad_id=0),
    "encoder": TINY_ENCODER,
    "classifier": Classifier(2, **SIZES, layer=GRU),
    "both directions": Classifier(2, **SIZES, bidirectional=True),
    "language": Language(6, features=3),
    "textgenrnn": TextGenRNN(6, embedding_features=4, features=3, hidden=(5, 2)),
    "gpt": TINY_GPT,
}
IMAGE_MODELS = [*MODELS][: [*MODELS].index("fasttext")]


def calls_of(kind: type[linen.Module], function: Callable[..., Any], *args: Any) -> list[tuple[Any, Any, Any]]:
    """The layers of a kind that ``function`` calls, their arguments and their keywords."""
    found: list[Any] = []

    def note(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, kind) and context.method_name == "__call__":
            found.append((context.module, args, kwargs))
        return call(*args, **kwargs)

    with linen.intercept_methods(note):
        jax.eval_shape(function, *args)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_dtypes_and_batch_statistics(name):
    model, inputs = MODELS[name], IMAGE if name in IMAGE_MODELS else TEXT
    variables = linen.unbox(jax.eval_shape(model.init, KEY, inputs))
    for train in (True, False):
        options = {} if name == "fasttext" else {"train": train, "rngs": {"dropout": KEY}, "mutable": ["batch_stats"]}
        calls = calls_of(BatchNorm, partial(model.apply, **options), variables, inputs)
        norms = {(norm.use_running_average, norm.momentum, norm.epsilon) for norm, *_ in calls}
        assert norms == ({(not train, 0.9, 1e-5)} if "batch_stats" in variables else set())
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), variables["params"])
    half = jax.ShapeDtypeStruct(inputs.shape, jnp.bfloat16) if inputs.dtype == jnp.float32 else inputs
    if "batch_stats" not in variables:
        assert jax.eval_shape(model.apply, {"params": narrow}, half).dtype == jnp.bfloat16


# (the network, its inputs, its parameters: as published, or by hand); other networks are in the
# docstrings' examples and among those of the articles.
COUNTS: list[tuple[linen.Module, jax.ShapeDtypeStruct, int]] = [
    # He et al.'s ResNet-20, whose shortcuts have no parameters.
    (ResNet(10, project=False), images(32), 269_722),
    # Of torchvision.
    (create("resnet18"), images(224), 11_689_512),
    (create("resnet50"), images(224), 25_557_032),
    (create("vit_b_16", scan=True), images(224), 86_567_656),
    (create("vit_l_16", scan=True), images(224), 304_326_632),
    # Of timm; in a scan as one after another.
    (create("vit_ti_16"), images(224), 5_717_416),
    (create("vit_s_16", scan=True, remat=True), images(224), 22_050_664),
    # Zagoruyko & Komodakis: 2.7 million.
    (models.WideResNet(10, depth=16, width=4), images(32), 2_748_890),
    # 4x4 <- 2x2 <- 1x1: 2*1*3 + 3; 3*3*3*2 + 2, 3*3*2*2 + 2; 3*3*2*1 + 1
    (models.ConvDecoder((4, 3, 1), features=(3, 2)), jax.ShapeDtypeStruct((1, 2), jnp.float32), 9 + 56 + 38 + 19),
    # 3*3*1*32 + 32, 3*3*32*64 + 64; 28 -> 14 -> 7: 7*7*64*128 + 128; 128*10 + 10
    (CNN(num_classes=10), images(28, 1), 320 + 18_496 + 401_536 + 1_290),
    # 5*3*1*2 + 2, 5*3*2*2 + 2; 8x8 pooled by 3x4 to 2x2: 2*2*2*4 + 4; 4*1 + 1
    (CNN(1, blocks=((2, 2),), kernel_size=(5, 3), pool=(3, 4), dense=(4,)), images(8, 1), 32 + 62 + 36 + 5),
    # No biases of convolutions, but a scale and a bias a channel: 9*2 + 4; 2*2*2*3 + 3
    (CNN(3, blocks=((2,),), dense=(), batch_norm=True), images(4, 1), 22 + 27),
    # Images just large enough: 7 -> 3 -> 1 by windows of 3 at steps of 2.
    (CNN(2, blocks=((1,), (1,)), pool=(3, 3), pool_strides=(2, 2), dense=()), images(7, 1), 10 + 10 + 4),
    (linen.Dropout(0.5, deterministic=True), images(2), 0),
]


# Of torchvision, and of Zagoruyko & Komodakis.
DEEP = {"resnet34": 21_797_672, "resnet101": 44_549_160, "resnet152": 60_192_808, "wrn_28_10": 36_479_194}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_numbers_of_parameters_of_deep_networks(name):
    assert num_parameters(create(name), images(32 if name.startswith("wrn") else 224)) == DEEP[name]


def test_numbers_of_parameters():
    for model, inputs, count in COUNTS:
        assert num_parameters(model, inputs) == count, model
    # Options are of the call; running statistics do not count.
    assert num_parameters(linen.BatchNorm(), images(4, 2), use_running_average=True) == 2 + 2
    assert num_parameters(MLP((3,)), np.ones((2, 5))) == 5 * 3 + 3


# Models at a dropout rate of 0.5, their inputs, and the shapes that are dropped in training, in order.
DROPPED: list[tuple[linen.Module, jax.ShapeDtypeStruct, list[tuple[int, ...]]]] = [
    (MLP((4, 2, 3), dropout=0.5), IMAGE, [(1, 4), (1, 2)]),
    # What is pooled, then dense layers.
    (SMALL_CNN, IMAGE, [(1, 6, 6, 4), (1, 3, 3, 6), (1, 8)]),
    (MOBILENET, IMAGE, [(1, 6)]),
    # Between the convolutions of each block.
    (WIDE, IMAGE, [(1, 12, 12, 16), (1, 6, 6, 32), (1, 3, 3, 64)]),
    # Patches and the class token, and before each addition to the residual stream.
    (TINY_VIT, IMAGE, [(1, 10, 6)] * 5),
    (TINY_ENCODER, TEXT, [(1, 4, 6)] * 5),
    # In the middle two blocks, and between them one of attention.
    (
        TINY_UNET,
        IMAGE,
        [(1, 12, 12, 4), *[(1, 6, 6, 8)] * 2, *[(1, 36, 8)] * 2, *[(1, 6, 6, 8)] * 3, *[(1, 12, 12, 4)] * 2],
    ),
    (Classifier(2, **SIZES, dropout=0.5), TEXT, [(1, 3)]),
    # Before each layer and the logits; time comes first.
    (Language(6, features=3, embedding_features=5, dropout=0.5), TEXT, [(4, 1, 5), (4, 1, 3), (4, 1, 3)]),
    # The embeddings, and before each addition to the residual stream.
    (TINY_GPT, TEXT, [(1, 4, 4)] * 5),
]


def test_dropout_in_training_only():
    rngs = {"params": KEY, "dropout": KEY}

    def dropped(model: linen.Module, inputs: Any, train: bool) -> list[Any]:
        calls = calls_of(Dropout, partial(model.init, rngs, train=train), inputs)
        return [(layer.rate, layer.batch_axis, given["train"], args[0].shape) for layer, args, given in calls]

    for model, inputs, shapes in DROPPED:
        # The axis of the batch, of which every device draws its rows.
        axis = int(isinstance(model, Language))
        for train in (True, False):
            assert dropped(model, inputs, train) == [(0.5, axis, train, shape) for shape in shapes]
        # The rate may be traced.
        traced = lambda rate, inputs, model=model: model.clone(dropout=rate).init(rngs, inputs, train=True)  # noqa: E731
        jax.eval_shape(traced, 0.5, inputs)
    rates = SMALL_CNN.clone(dropout=0.25, dense_dropout=0.0)
    assert [rate for rate, *_ in dropped(rates, IMAGE, True)] == [0.25, 0.25, 0.0]
