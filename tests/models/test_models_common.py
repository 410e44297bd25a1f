"""What holds for every model: sizes and inputs checked, documented names, dtypes, statistics, parameters counted."""

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
from jaxnn.models import CNN, GPT, MLP, BagOfTokens, BottleneckResNet, MobileNetV2, ResNet, TextGenerator
from jaxnn.models import RecurrentClassifier as Classifier
from jaxnn.models import RecurrentLanguageModel as Language
from jaxnn.nn import GRU, max_pool
from jaxnn.types import ConfigError, DataError
from tests import draws

KEY = jax.random.key(0)
TOKENS = jnp.array([[4, 2, 4, 1], [1, 0, 5, 0], [3, 0, 0, 0]])
IMAGES = jax.random.normal(jax.random.key(1), (2, 17, 12, 3))
SIZES = {"vocabulary_size": 6, "embedding_features": 4, "features": 3}
# Without the first convolution; halved, added in its second block; another number of channels.
STAGES = ((1, 4, 1, 1), (2, 4, 2, 2), (2, 3, 1, 1))
MODELS: dict[str, tuple[linen.Module, jax.Array]] = {
    "mlp": (MLP((4, 3)), IMAGES),
    "cnn": (CNN(3, blocks=((4,), (6, 6)), dense=(8,), batch_norm=True), IMAGES),
    "resnet": (ResNet(5, num_blocks=(1, 2), features=4), IMAGES),
    "bottleneck": (BottleneckResNet(5, num_blocks=(1, 2), features=2), IMAGES),
    "mobilenet": (MobileNetV2(5, stages=STAGES, features=4, last_features=6), IMAGES),
    "bag": (BagOfTokens(3, vocabulary_size=6, features=2, pad_id=0), TOKENS),
    "classifier": (Classifier(2, **SIZES), TOKENS),
    "both directions": (Classifier(2, **SIZES, bidirectional=True), TOKENS),
    "gru classifier": (Classifier(2, **SIZES, layer=GRU), TOKENS),
    "one-hot classifier": (Classifier(2, **SIZES | {"embedding_features": None}), TOKENS),
    "language": (Language(6, features=3), TOKENS),
    "gru language": (Language(6, features=3, num_layers=1, layer=GRU), TOKENS),
    "generator": (TextGenerator(6, embedding_features=4, features=3, hidden=(5, 2)), TOKENS),
    "short generator": (TextGenerator(6, embedding_features=4, features=3, hidden=()), TOKENS),
}


def numbered(*layers: str) -> set[str]:
    """``numbered("Conv", 3)``-like names: ``"Conv*3"`` stands for Conv_0, Conv_1 and Conv_2."""
    pairs = (layer.split("*") for layer in layers)
    return {f"{name}_{index}" for name, count in pairs for index in range(int(count))}


NAMES = {
    "mlp": numbered("Dense*2"),
    "cnn": numbered("Conv*3", "BatchNorm*3", "Dense*2"),
    "resnet": numbered("Conv*1", "BatchNorm*1", "ResNetBlock*3", "Dense*1"),
    "bottleneck": numbered("Conv*1", "BatchNorm*1", "Bottleneck*3", "Dense*1"),
    "mobilenet": numbered("Conv*2", "BatchNorm*2", "InvertedResidual*4", "Dense*1"),
    "bag": numbered("Embed*1", "Dense*1"),
    "classifier": numbered("Embed*1", "LSTM*1", "Dense*1"),
    "both directions": numbered("Embed*1", "LSTM*2", "Dense*1"),
    "gru classifier": numbered("Embed*1", "GRU*1", "Dense*1"),
    "one-hot classifier": numbered("LSTM*1", "Dense*1"),
    "language": numbered("Embed*1", "LSTM*2", "Dense*1"),
    "gru language": numbered("Embed*1", "GRU*1", "Dense*1"),
    "generator": numbered("Embed*1", "LSTM*1", "Dense*3", "BatchNorm*2") | {"auxiliary"},
    "short generator": numbered("Embed*1", "LSTM*1", "Dense*1") | {"auxiliary"},
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_have_the_names_that_are_documented(name: str) -> None:
    model, inputs = MODELS[name]
    variables = jax.eval_shape(model.init, KEY, inputs)
    assert set(variables["params"]) == NAMES[name]
    plain = ("Conv_", "Dens", "Embe", "LSTM", "GRU_", "auxi")
    with_statistics = {layer for layer in NAMES[name] if not layer.startswith(plain)}
    assert set(variables.get("batch_stats", {})) == with_statistics


@pytest.mark.parametrize("name", ["cnn", "resnet", "bottleneck", "mobilenet", "generator"])
def test_batch_statistics_move_in_training_only(name: str) -> None:
    model, inputs = MODELS[name]
    variables = draws.variables(model, inputs)
    before = variables["batch_stats"]
    _, trained = jax.jit(partial(model.apply, train=True, mutable=["batch_stats"]))(variables, inputs)
    moved = jax.tree.map(lambda old, new: bool(np.any(old != new)), before, trained["batch_stats"])
    assert all(jax.tree.leaves(moved))
    _, evaluated = jax.jit(partial(model.apply, mutable=["batch_stats"]))(variables, inputs)
    jax.tree.map(np.testing.assert_array_equal, evaluated["batch_stats"], before)


@pytest.mark.parametrize("name", ["bag", "classifier", "one-hot classifier", "language"])
def test_tokens_to_bfloat16_logits_with_bfloat16_parameters(name: str) -> None:
    model, inputs = MODELS[name]
    variables = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), draws.variables(model, inputs))
    assert model.apply(variables, inputs).dtype == jnp.bfloat16


COUNTS: list[tuple[linen.Module, tuple[int, ...], int]] = [
    (MLP((3,)), (1, 5), 18),
    # 3*3*1*32 + 32, 3*3*32*64 + 64; 28 -> 14 -> 7: 7*7*64*128 + 128; 128*10 + 10
    (CNN(num_classes=10), (1, 28, 28, 1), 320 + 18_496 + 401_536 + 1_290),
    # Valid: 28 -> 26 -> 13 -> 11 -> 5: 5*5*64 = 1600 inputs of the logits, as in Keras' example
    (CNN(10, padding="VALID", dense=()), (1, 28, 28, 1), 320 + 18_496 + 16_010),
    # 5*3*1*2 + 2, 5*3*2*2 + 2; 9x8 pooled by 3x4 to 3x2: 3*2*2*4 + 4; 4*1 + 1
    (CNN(1, blocks=((2, 2),), kernel_size=(5, 3), pool=(3, 4), dense=(4,)), (1, 9, 8, 1), 32 + 62 + 52 + 5),
    # No biases of convolutions, but a scale and a bias a channel: 9*2 + 4; 2*2*2*3 + 3
    (CNN(3, blocks=((2,),), dense=(), batch_norm=True), (1, 4, 4, 1), 22 + 27),
    # Images just large enough: two valid convolutions of 3; 8 -> 3 -> 1 by windows of 3 at steps of 2.
    (CNN(2, blocks=((1, 1),), padding="VALID", dense=()), (1, 6, 7, 1), 10 + 10 + 4),
    (CNN(2, blocks=((1,), (1,)), pool=(3, 3), pool_strides=(2, 2), dense=()), (1, 8, 7, 1), 10 + 10 + 4),
    # 20000 * 50 and 50 * 2 + 2
    (BagOfTokens(2, vocabulary_size=20_000), (1, 4), 1_000_000 + 102),
    # 20000 * 128; four gates of 128 * 64 + 64 * 64 + 64; 64 * 2 + 2
    (Classifier(2, vocabulary_size=20_000), (1, 4), 2_560_000 + 4 * 12_352 + 130),
    # Four gates of 6 * 3 + 3 * 3 + 3; 3 * 5 + 5
    (Classifier(5, **SIZES | {"embedding_features": None}), (1, 4), 4 * 30 + 20),
    # 6 * 4; three gates of 4 * 3 + 3 * 3 + 3, and a second bias of 3; 3 * 5 + 5
    (Classifier(5, **SIZES, layer=GRU), (1, 4), 24 + 3 * 24 + 3 + 20),
    # 6 * 3; three times three gates of 3 * 3 + 3 * 3 + 3, and a second bias of 3; 3 * 6 + 6
    (Language(6, features=3, num_layers=3, layer=GRU), (1, 4), 18 + 3 * (3 * 21 + 3) + 24),
]


@pytest.mark.parametrize(("model", "shape", "count"), COUNTS)
def test_parameter_counts_by_hand(model: linen.Module, shape: tuple[int, ...], count: int) -> None:
    dtype = "float32" if isinstance(model, MLP | CNN) else "int32"
    assert models.num_parameters(model, jax.ShapeDtypeStruct(shape, dtype)) == count


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: MLP(()), "MLP: features is empty"),
    (lambda: MLP(10), r"MLP: features must be a tuple .* as \(512, 10\), not 10"),
    (lambda: MLP((8, 0)), r"MLP: features must be a tuple of integers >= 1"),
    (lambda: MLP((8, 2.0)), r"MLP: features must be a tuple of integers >= 1"),
    (lambda: MLP("ab"), "MLP: features must be a tuple of integers >= 1"),
    (lambda: MLP((8,), dropout=1.2), "a dropout rate is a probability"),
    (lambda: CNN(0), "CNN: num_classes must be an integer >= 1, not 0"),
    *((lambda b=blocks: CNN(10, blocks=b), "CNN: blocks must hold a tuple") for blocks in ((), ((32,), ()), 32)),
    (lambda: CNN(10, blocks=(32, 64)), r"CNN: blocks\[0\] must be a tuple of integers >= 1"),
    (lambda: CNN(10, dense=(-1,)), "CNN: dense must be a tuple of integers >= 1"),
    (lambda: CNN(10, kernel_size=(3,)), "CNN: kernel_size must be two integers"),
    (lambda: CNN(10, pool=2), "CNN: pool must be a tuple of integers >= 1"),
    (lambda: CNN(10, pool_strides=(2,)), "CNN: pool_strides must be two integers"),
    (lambda: CNN(10, pooling="max"), "CNN: pooling must be nn.max_pool, nn.avg_pool .* 2 blocks, not 'max'"),
    (lambda: CNN(10, pooling=(max_pool,)), "CNN: pooling must be nn.max_pool, .* one for each of the 2 blocks"),
    (lambda: CNN(10, padding=1), "CNN: no padding 1: Known are 'SAME', 'VALID'"),
    (lambda: CNN(10, padding=("VALID", "SAM")), "CNN: no padding 'SAM': did you mean 'SAME'"),
    (
        lambda: CNN(10, blocks=((8, 8), (8,)), padding=("SAME", "VALID")),
        r"CNN: padding names 2 convolutions and blocks\[1\] has 1: give one name for each",
    ),
    (lambda: CNN(10, padding=()), r"CNN: padding names 0 convolutions and blocks\[0\] has 1"),
    (lambda: CNN(10, dropout=-0.5), "a dropout rate is a probability"),
    (lambda: CNN(10, dense_dropout=7), "a dropout rate is a probability"),
    (lambda: ResNet(0), "ResNet: num_classes must be an integer >= 1, not 0"),
    (lambda: ResNet(10, num_blocks=()), "ResNet: num_blocks is empty"),
    (lambda: ResNet(10, num_blocks=3), "ResNet: num_blocks must be a tuple of integers >= 1"),
    (lambda: ResNet(10, features=1.5), "ResNet: features must be an integer >= 1"),
    (lambda: BottleneckResNet(0), "BottleneckResNet: num_classes must be an integer >= 1, not 0"),
    (lambda: BottleneckResNet(num_blocks=()), "BottleneckResNet: num_blocks is empty"),
    (lambda: BottleneckResNet(features=0), "BottleneckResNet: features must be an integer >= 1"),
    (lambda: MobileNetV2(-1), "MobileNetV2: num_classes must be an integer >= 1, not -1"),
    (lambda: MobileNetV2(features=0.5), "MobileNetV2: features must be an integer >= 1"),
    (lambda: MobileNetV2(last_features=0), "MobileNetV2: last_features must be an integer >= 1"),
    *((lambda s=s: MobileNetV2(stages=s), "MobileNetV2: stages must hold the expan") for s in ((), 3, ((6, 24, 2),))),
    (lambda: MobileNetV2(stages=((6, 24, 0, 2),)), r"MobileNetV2: stages\[0\] must be a tuple of integers >= 1"),
    (lambda: MobileNetV2(dropout=2.0), "a dropout rate is a probability"),
    (lambda: GPT(0), "GPT: vocabulary_size must be an integer >= 1, not 0"),
    (lambda: GPT(5, num_layers=-1), "GPT: num_layers must be an integer >= 1, not -1"),
    (lambda: GPT(5, max_length=0), "GPT: max_length must be an integer >= 1"),
    (lambda: GPT(5, features=10, num_heads=4), "GPT: 10 features cannot be shared by 4 heads evenly"),
    (lambda: GPT(5, dropout=2.0), "a dropout rate is a probability"),
    (lambda: BagOfTokens(0, vocabulary_size=6), "BagOfTokens: num_classes must be an integer >= 1, not 0"),
    (lambda: BagOfTokens(2, vocabulary_size=-6), "BagOfTokens: vocabulary_size must be an integer >= 1, not -6"),
    (lambda: BagOfTokens(2, vocabulary_size=6, features="a"), "BagOfTokens: features must be an integer >= 1"),
    (lambda: Classifier(0, **SIZES), "RecurrentClassifier: num_classes must be an integer >= 1, not 0"),
    (lambda: Classifier(2, vocabulary_size=0), "vocabulary_size must be an integer >= 1, not 0"),
    (lambda: Classifier(2, vocabulary_size=6, features=None), "features must be an integer >= 1, not None"),
    (lambda: Classifier(2, vocabulary_size=6, embedding_features=0), "embedding_features must be an integer >= 1"),
    (lambda: Classifier(2, **SIZES, layer="lstm"), "layer must be nn.LSTM or nn.GRU, not 'lstm'"),
    (lambda: Classifier(2, **SIZES, layer=linen.LSTMCell), "layer must be nn.LSTM or nn.GRU"),
    (lambda: Classifier(2, **SIZES, dropout=-1.0), "a dropout rate is a probability"),
    (lambda: Language(0), "RecurrentLanguageModel: vocabulary_size must be an integer >= 1, not 0"),
    (lambda: Language(6, features=None), "features must be an integer >= 1, not None"),
    (lambda: Language(6, num_layers=0), "num_layers must be an integer >= 1, not 0"),
    (lambda: Language(6, embedding_features=0), "embedding_features must be an integer >= 1, not 0"),
    (lambda: Language(6, layer=linen.LSTMCell), "layer must be nn.LSTM or nn.GRU"),
    (lambda: Language(6, dropout=1.5), "a dropout rate is a probability"),
    (lambda: TextGenerator(0), "TextGenerator: vocabulary_size must be an integer >= 1, not 0"),
    (lambda: TextGenerator(6, embedding_features=None), "embedding_features must be an integer >= 1, not None"),
    (lambda: TextGenerator(6, features=2.5), "features must be an integer >= 1, not 2.5"),
    (lambda: TextGenerator(6, hidden=512), r"hidden must be a tuple of integers >= 1, as \(512, 256\), not 512"),
    (lambda: TextGenerator(6, layer="gru"), "layer must be nn.LSTM or nn.GRU, not 'gru'"),
]


def test_a_bad_size_is_named_where_the_model_is_made() -> None:
    for make, named in BAD:
        with pytest.raises(ConfigError, match=named):
            make()


def test_inputs_that_are_no_images_or_tokens_are_named() -> None:
    for name in ("cnn", "resnet", "bottleneck", "mobilenet"):
        kind = type(MODELS[name][0]).__name__
        with pytest.raises(DataError, match=rf"{kind} needs images .* not of shape \(2, 17, 12\): add a channel axis"):
            MODELS[name][0].init(KEY, IMAGES[..., 0])
    for name in ("bag", "classifier", "language", "generator"):
        kind = type(MODELS[name][0]).__name__
        for tokens in (TOKENS / 255, TOKENS[0]):
            with pytest.raises(
                DataError, match=rf"{kind} needs token ids \[batch, time\] of integers, not {tokens.dtype}"
            ):
                MODELS[name][0].init(KEY, tokens)
