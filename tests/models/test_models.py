"""What holds for every model: documented names, published parameter counts, dtypes, statistics, errors."""

from __future__ import annotations

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
from jaxnn.nn import GRU, BatchNorm, Dropout, max_pool
from jaxnn.types import ConfigError, DataError

KEY = jax.random.key(0)
SIZES = {"vocabulary_size": 6, "embedding_features": 4, "features": 3}


def images(size: int, channels: int = 3) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, size, size, channels), jnp.float32)


def tokens(time: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, time), jnp.int32)


def numbered(layers: str) -> set[str]:
    """``"Conv*3"`` stands for Conv_0, Conv_1 and Conv_2."""
    pairs = (layer.partition("*") for layer in layers.split())
    return {f"{name}_{index}" if star else name for name, star, count in pairs for index in range(int(count or 1))}


IMAGE, TEXT = images(12), tokens(4)
SMALL_CNN = CNN(3, blocks=((4,), (6, 6)), dense=(8,), batch_norm=True, dropout=0.5)
RESNET = ResNet(5, num_blocks=(1, 2), features=4)
BOTTLENECKS = ResNet(5, num_blocks=(1, 2), features=2, block=Bottleneck, stem="imagenet")
MOBILENET = MobileNetV2(5, stages=((1, 4, 1, 1), (2, 4, 2, 2)), features=4, last_features=6, dropout=0.5)
TEXT_GEN = TextGenRNN(6, embedding_features=4, features=3, hidden=(5, 2))
WIDE = models.WideResNet(5, depth=10, width=1, dropout=0.5)
ENCODER: dict[str, Any] = {"num_layers": 2, "features": 6, "num_heads": 2, "dropout": 0.5}
TINY_VIT, TINY_ENCODER = (
    models.ViT(5, **ENCODER),
    models.TransformerClassifier(3, **ENCODER, vocabulary_size=6, pad_id=0),
)
TINY_UNET = models.UNet(2, features=4, multipliers=(1, 2), num_groups=2, num_heads=2, dropout=0.5)
TINY_GPT = GPT(5, num_layers=2, features=4, num_heads=1, max_length=4, dropout=0.5)
# Models and the names of their parameters.
MODELS: dict[str, tuple[linen.Module, str]] = {
    "mlp": (MLP((4, 3), dropout=0.5), "Dense*2"),
    "cnn": (SMALL_CNN, "Conv*3 BatchNorm*3 Dense*2"),
    "resnet": (RESNET, "Conv*1 BatchNorm*1 ResNetBlock*3 Dense*1"),
    "bottlenecks": (BOTTLENECKS, "Conv*1 BatchNorm*1 Bottleneck*3 Dense*1"),
    "mobilenet": (MOBILENET, "Conv*2 BatchNorm*2 InvertedResidual*3 Dense*1"),
    "wide": (WIDE, "Conv*1 WideBlock*3 BatchNorm*1 Dense*1"),
    "vit": (TINY_VIT, "class_token Conv*1 positions TransformerBlock*2 LayerNorm*1 Dense*1"),
    "unet": (TINY_UNET, "Conv*4 UNetBlock*8 TransformerBlock*1 GroupNorm*1"),
    "fasttext": (FastText(3, vocabulary_size=6, features=2, pad_id=0), "Embed*1 Dense*1"),
    "encoder": (TINY_ENCODER, "Embed*1 positions TransformerBlock*2 LayerNorm*1 Dense*1"),
    "classifier": (Classifier(2, **SIZES, layer=GRU), "Embed*1 GRU*1 Dense*1"),
    "both directions": (Classifier(2, **SIZES, bidirectional=True), "Embed*1 LSTM*2 Dense*1"),
    "language": (Language(6, features=3), "Embed*1 LSTM*2 Dense*1"),
    "textgenrnn": (TEXT_GEN, "Embed*1 LSTM*1 Dense*3 BatchNorm*2 auxiliary"),
    "gpt": (TINY_GPT, "Embed*2 Block*2 LayerNorm*1 Dense*1"),
}

IMAGE_MODELS = [*MODELS][: [*MODELS].index("fasttext")]


@pytest.mark.parametrize("name", MODELS)
def test_names_dtypes_and_batch_statistics(name: str) -> None:
    model, layers = MODELS[name]
    inputs = IMAGE if name in IMAGE_MODELS else TEXT
    names, variables = numbered(layers), linen.unbox(jax.eval_shape(model.init, KEY, inputs))
    assert set(variables["params"]) == names
    normed = ("BatchNorm", "ResNetBlock", "Bottleneck", "InvertedResidual", "WideBlock")
    assert set(variables.get("batch_stats", {})) == {layer for layer in names if layer.startswith(normed)}

    norms: set[Any] = set()

    def note(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, BatchNorm) and context.method_name == "__call__":
            norms.add((context.module.use_running_average, context.module.momentum, context.module.epsilon))
        return call(*args, **kwargs)

    for train in (True, False):
        norms.clear()
        options = {} if name == "fasttext" else {"train": train, "rngs": {"dropout": KEY}, "mutable": ["batch_stats"]}
        with linen.intercept_methods(note):
            jax.eval_shape(partial(model.apply, **options), variables, inputs)
        assert norms == ({(not train, 0.9, 1e-5)} if "batch_stats" in variables else set())
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), variables["params"])
    half = jax.ShapeDtypeStruct(inputs.shape, jnp.bfloat16) if inputs.dtype == jnp.float32 else inputs
    if "batch_stats" not in variables:
        assert jax.eval_shape(model.apply, {"params": narrow}, half).dtype == jnp.bfloat16


ONE_HOT = {"vocabulary_size": 57, "embedding_features": None, "features": 128}

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
    # One level of 2 channels, at most 4 into a block. Stem 3*3*1*2 + 2; a block of 2 channels: two norms of 4, two
    # convolutions of 3*3*2*2 + 2: 84, and of 4 channels: norms 8 + 4, 3*3*4*2 + 2, 38, shortcut 4*2 + 2: 134.
    # One block down, two in the middle, two up; the last norm 4, and 3*3*2*1 + 1.
    (models.UNet(1, features=2, multipliers=(1,), num_groups=1), images(4, 1), 20 + 3 * 84 + 2 * 134 + 4 + 19),
    # 16*3 + 3, 3*4 + 4; 2*5 + 5, 5*16 + 16
    (models.VAE(MLP((3, 4)), MLP((5, 16))), images(4, 1), 51 + 16 + 15 + 96),
    # 4x4 <- 2x2 <- 1x1: 2*1*3 + 3; 3*3*3*2 + 2, 3*3*2*2 + 2; 3*3*2*1 + 1
    (models.ConvDecoder((4, 3, 1), features=(3, 2)), jax.ShapeDtypeStruct((1, 2), jnp.float32), 9 + 56 + 38 + 19),
    # Keras's lstm_text_generation: 4 * 128 * (57 + 128 + 1) and 128*57 + 57.
    (Classifier(57, **ONE_HOT), tokens(40), 95_232 + 7_353),
    # 3*3*1*32 + 32, 3*3*32*64 + 64; 28 -> 14 -> 7: 7*7*64*128 + 128; 128*10 + 10
    (CNN(num_classes=10), images(28, 1), 320 + 18_496 + 401_536 + 1_290),
    # 5*3*1*2 + 2, 5*3*2*2 + 2; 8x8 pooled by 3x4 to 2x2: 2*2*2*4 + 4; 4*1 + 1
    (CNN(1, blocks=((2, 2),), kernel_size=(5, 3), pool=(3, 4), dense=(4,)), images(8, 1), 32 + 62 + 36 + 5),
    # No biases of convolutions, but a scale and a bias a channel: 9*2 + 4; 2*2*2*3 + 3
    (CNN(3, blocks=((2,),), dense=(), batch_norm=True), images(4, 1), 22 + 27),
    # Images just large enough: 7 -> 3 -> 1 by windows of 3 at steps of 2.
    (CNN(2, blocks=((1,), (1,)), pool=(3, 3), pool_strides=(2, 2), dense=()), images(7, 1), 10 + 10 + 4),
    # 6 * 4; three gates of 4 * 3 + 3 * 3 + 3, and a second bias of 3; 3 * 5 + 5
    (Classifier(5, **SIZES, layer=GRU), tokens(4), 24 + 3 * 24 + 3 + 20),
    (linen.Dropout(0.5, deterministic=True), images(2), 0),
]


@pytest.mark.slow
def test_numbers_of_parameters_of_deep_networks() -> None:
    assert num_parameters(create("resnet34"), images(224)) == 21_797_672
    assert num_parameters(create("resnet101"), images(224)) == 44_549_160
    assert num_parameters(create("resnet152"), images(224)) == 60_192_808
    assert num_parameters(create("wrn_28_10"), images(32)) == 36_479_194


def test_numbers_of_parameters() -> None:
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


def test_dropout_in_training_only() -> None:
    calls: list[Any] = []
    rngs = {"params": KEY, "dropout": KEY}

    def note(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, Dropout) and context.method_name == "__call__":
            calls.append((context.module.rate, context.module.batch_axis, kwargs["train"], args[0].shape))
        return call(*args, **kwargs)

    def dropped(model: linen.Module, inputs: Any, train: bool) -> list[Any]:
        calls.clear()
        with linen.intercept_methods(note):
            jax.eval_shape(partial(model.init, rngs, train=train), inputs)
        return [*calls]

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


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: MLP(()), "MLP: features is empty"),
    (lambda: MLP((8, 0)), r"MLP: features must be a tuple .* as \(512, 10\)"),
    (lambda: CNN(10, blocks=((32,), ())), "CNN: blocks must hold a tuple"),
    (lambda: CNN(10, blocks=(32, 64)), r"CNN: blocks\[0\] must be a tuple of integers >= 1"),
    (lambda: CNN(10, dense=(-1,)), "CNN: dense must be a tuple of integers >= 1"),
    (lambda: CNN(10, kernel_size=(3,)), "CNN: kernel_size must be two integers"),
    (lambda: CNN(10, pooling="max"), "CNN: pooling .*max_pool.* 2 blocks, not 'max'"),
    (lambda: CNN(10, pooling=(max_pool,)), "CNN: pooling .* 2 blocks"),
    (lambda: CNN(10, padding=("VALID", "SAM")), "CNN: no padding 'SAM': did you mean 'SAME'"),
    (lambda: CNN(10, blocks=((8, 8), (8,)), padding=("SAME", "VALID")), r"padding .* 2 .*blocks\[1\] has 1"),
    (lambda: CNN(10, dense_dropout=7), "dropout rate"),
    (lambda: ResNet(10, num_blocks=()), "ResNet: num_blocks is empty"),
    (lambda: ResNet(10, block="bottleneck"), "ResNet: block must be models.ResNetBlock .*, not 'bottleneck'"),
    (lambda: ResNet(10, stem="imagent"), "ResNet: no stem 'imagent': did you mean 'imagenet'"),
    (lambda: MobileNetV2(stages=((6, 24, 2),)), "MobileNetV2: stages must hold expan"),
    (lambda: MobileNetV2(stages=((6, 24, 0, 2),)), r"MobileNetV2: stages\[0\] must be a tuple of integers >= 1"),
    (lambda: models.WideResNet(10, depth=20), r"WideResNet: depth must be 6 n \+ 4, as 16, 28 or 40, not 20"),
    (lambda: models.ViT(10, features=10, num_heads=4), "ViT: features 10 .*num_heads 4"),
    (lambda: models.ViT(10, pooling="cls_token"), "ViT: no pooling 'cls_token': did you mean 'class_token'"),
    (lambda: models.UNet(1, multipliers=()), "UNet: multipliers is empty"),
    (lambda: create("resnet5"), "create: no network 'resnet5': did you mean 'resnet50'"),
    (lambda: GPT(5, features=10, num_heads=4), "GPT: .*10.* 4"),
    (lambda: GPT(5, num_key_heads=3), "GPT: num_heads 4 must be a multiple of num_key_heads 3"),
    (lambda: GPT(5, features=12, rotary=True), "GPT: rotary needs an even features / num_heads, not 3"),
    (lambda: GPT(5, norm=BatchNorm), "GPT: norm must be nn.LayerNorm or nn.RMSNorm"),
    (lambda: TextGenRNN(6, hidden=512), r"hidden must be a tuple of integers >= 1, as \(512, 256\), not 512"),
]
INTEGERS = ("num_classes", "vocabulary_size", "features", "embedding_features", "last_features")
INTEGERS += ("num_layers", "num_heads", "max_length", "patch_size", "out_features", "num_blocks", "depth", "width")


def test_bad_arguments() -> None:
    for make, words in BAD:
        with pytest.raises(ConfigError, match=words):
            make()
    for model, _ in MODELS.values():
        tuples = {MLP: "features", ResNet: "num_blocks"}
        for name in set(INTEGERS) & set(vars(model)) - {tuples.get(type(model), "")}:
            for value in (0, 1.5):
                words = f"{type(model).__name__}: {name} must be an integer >= 1, not {value!r}"
                with pytest.raises(ConfigError, match=words):
                    model.clone(**{name: value})
        for name, values, words in [
            ("dropout", (-0.5, 1.2), "dropout rate"),
            ("layer", ("l", linen.LSTMCell), "layer must be nn.LSTM or nn.GRU"),
        ]:
            for value in values if hasattr(model, name) else ():
                with pytest.raises(ConfigError, match=words):
                    model.clone(**{name: value})


def test_inputs_of_a_wrong_rank_or_dtype() -> None:
    for model in (SMALL_CNN, RESNET, MOBILENET, WIDE, TINY_VIT, TINY_UNET):
        with pytest.raises(DataError, match=rf"{type(model).__name__} .*images .*\(2, 17, 12\).*channel axis"):
            jax.eval_shape(model.init, KEY, np.ones((2, 17, 12)))
    for model, _ in [MODELS[name] for name in MODELS if name not in IMAGE_MODELS]:
        for wrong, words in ((np.ones((2, 4), np.float32), "float32 .*int32"), (np.ones(4, np.int32), r"int32 \[4\]")):
            with pytest.raises(DataError, match=rf"{type(model).__name__} needs token ids \[batch, time\] .*{words}"):
                jax.eval_shape(model.init, KEY, wrong)
