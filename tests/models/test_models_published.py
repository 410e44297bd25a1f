"""The networks of the articles have the parameters that were published, counted without making one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import (
    CNN,
    GPT,
    MLP,
    BagOfTokens,
    BottleneckResNet,
    MobileNetV2,
    RecurrentClassifier,
    RecurrentLanguageModel,
    ResNet,
    TextGenerator,
    num_parameters,
)
from jaxnn.nn import avg_pool, max_pool


def images(size: int, channels: int = 3) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, size, size, channels), jnp.float32)


def tokens(time: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, time), jnp.int32)


FCN5 = MLP((2048, 4096, 1024, 10), activation=jax.nn.sigmoid)
ALEXNET_R = CNN(
    10,
    blocks=((32,), (32,), (64,)),
    kernel_size=(5, 5),
    pool=(3, 3),
    pool_strides=(2, 2),
    pooling=(max_pool, max_pool, avg_pool),
    dense=(),
)
KERAS_DROPOUT = {"dropout": 0.25, "dense_dropout": 0.5}
MNIST_CNN = CNN(10, blocks=((32, 64),), padding="VALID", **KERAS_DROPOUT)
CIFAR10_CNN = CNN(10, blocks=((32, 32), (64, 64)), padding=("SAME", "VALID"), dense=(512,), **KERAS_DROPOUT)
CATS_AND_DOGS = CNN(1, blocks=((32,), (64,), (128,), (256,)), padding="VALID", dense=(128,))
BILSTM = RecurrentClassifier(1, vocabulary_size=20_000, bidirectional=True, dropout=0.5)
ONE_HOT = RecurrentClassifier(57, vocabulary_size=57, embedding_features=None, features=128)
RESNET_56 = {"num_blocks": (9, 9, 9)}

# name -> (the network, its inputs, how many: published, or the working)
PUBLISHED: dict[str, tuple[linen.Module, jax.ShapeDtypeStruct, int]] = {
    # Shi et al.: 784*2048 + 2048, 2048*4096 + 4096, 4096*1024 + 1024, 1024*10 + 10.
    "FCN-5": (FCN5, images(28, 1), 1_607_680 + 8_392_704 + 4_195_328 + 10_250),
    # "85000": 25*3*32 + 32, 25*32*32 + 32, 25*32*64 + 64; 32 -> 15 -> 7 -> 3: 9*64*10 + 10.
    "AlexNet-R": (ALEXNET_R, images(32), 2_432 + 25_632 + 51_264 + 5_770),
    "ResNet-20": (ResNet(10, project=False), images(32), 269_722),
    "ResNet-20 with projections": (ResNet(10), images(32), 272_474),
    "ResNet-56": (ResNet(10, **RESNET_56, project=False), images(32), 853_018),
    "ResNet-56 with projections": (ResNet(10, **RESNET_56), images(32), 855_770),
    # 10000*256, twice four gates of 256*256 + 256*256 + 256, 256*10000 + 10000.
    "PTB LSTM": (RecurrentLanguageModel(10_000), tokens(32), 2_560_000 + 2 * 4 * 131_328 + 2_570_000),
    # Keras's examples, as it summarises them.
    "mnist_mlp": (MLP((512, 512, 10)), images(28, 1), 669_706),
    "mnist_cnn": (MNIST_CNN, images(28, 1), 1_199_882),
    "cifar10_cnn": (CIFAR10_CNN, images(32), 1_250_858),
    "imdb_bidirectional_lstm": (BILSTM, tokens(100), 2_658_945),
    # 50 numbers a token, 50 weights and a bias.
    "imdb_fasttext": (BagOfTokens(1, vocabulary_size=1_200_000), tokens(400), 60_000_000 + 51),
    # 4 * 128 * (57 + 128 + 1) and 128*57 + 57.
    "lstm_text_generation": (ONE_HOT, tokens(40), 95_232 + 7_353),
    # 57*300; 4 * 128 * (300 + 128 + 1); 128*57 + 57; 128*512 + 2*512; 512*256 + 2*256; 256*57 + 57.
    "text_generator": (TextGenerator(57), tokens(40), 17_100 + 219_648 + 7_353 + 66_560 + 131_584 + 14_649),
    # "~2.0 M": 896 + 18_496 + 73_856 + 295_168; 150 -> 74 -> 36 -> 17 -> 7: 49*256*128 + 128; 129.
    "cats and dogs": (CATS_AND_DOGS, images(150), 388_416 + 1_605_760 + 129),
    # torchvision's.
    "ResNet-50": (BottleneckResNet(), images(224), 25_557_032),
    "ResNet-101": (BottleneckResNet(num_blocks=(3, 4, 23, 3)), images(224), 44_549_160),
    "ResNet-152": (BottleneckResNet(num_blocks=(3, 8, 36, 3)), images(224), 60_192_808),
    "MobileNetV2": (MobileNetV2(), images(224), 3_504_872),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    model, inputs, count = PUBLISHED[name]
    assert num_parameters(model, inputs) == count


def test_arrays_do_as_well_as_shapes() -> None:
    assert num_parameters(MLP((3,)), np.ones((2, 5))) == 5 * 3 + 3


def test_running_statistics_are_no_parameters() -> None:
    # A mean and a variance a channel would be four more.
    assert num_parameters(linen.BatchNorm(), images(4, 2), use_running_average=True) == 2 + 2


def test_parameters_in_boxes_are_counted() -> None:
    # A GPT's have the names of their axes around them; 5*4 and 3*4 of embeddings, 9*4 of norms' gains and biases …
    model = GPT(5, num_layers=1, features=4, num_heads=1, max_length=3)
    block = 4 * 12 + 12 + 4 * 4 + 4 + 4 * 16 + 16 + 16 * 4 + 4 + 4 * 4
    assert num_parameters(model, tokens(3)) == 20 + 12 + block + 8 + 4 * 5 + 5


def test_a_module_without_parameters_has_none() -> None:
    assert num_parameters(linen.Dropout(0.5, deterministic=True), images(2)) == 0
