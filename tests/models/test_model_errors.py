"""What is wrong with a model, its inputs, its weights or a prompt is said before anything is compiled."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen

from jaxnn import models
from jaxnn.models import CNN, GPT, MLP, FastText, MobileNetV2, ResNet, TextGenRNN, create, from_torch
from jaxnn.nn import BatchNorm, max_pool
from jaxnn.types import ConfigError, DataError
from tests import draws
from tests.models.test_models import IMAGE_MODELS, MODELS
from tests.models.test_pretrained import GPT2, RESNET, gpt2_shapes, resnet_shapes, weights_of

SETTINGS: list[tuple[Callable[[], Any], str]] = [
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
    (lambda: from_torch(MLP((3,)), {}), "takes a ResNet, a ViT or a GPT, not a MLP"),
    (lambda: from_torch(GPT2.clone(tied=False), {}), "tied=True"),
    (lambda: shape_of(CNN(2, blocks=((2,),) * 4), np.ones((1, 8, 9, 1))), "images of 8x9 .* after block 4 of 4"),
    # Two valid convolutions of 3: 5 -> 1, pooled by 2: 0.
    (lambda: shape_of(CNN(2, blocks=((2, 2),), padding="VALID"), np.ones((1, 9, 5, 1))), "9x5 .* after block 1 of 1"),
    (lambda: stream(temperature=-1.0), "temperature must be a number >= 0, not -1.0"),
    (lambda: stream(key=5), r"key=jax.random.key\(0\), for example, not 5"),
    (lambda: stream(top_p=1.5), "top_p must be a probability"),
    (lambda: stream(params=None), "params must be a dict, as run.state.params, not NoneType"),
    (lambda: stream(model=FastText(7, vocabulary_size=7)), "context, .* must be an integer >= 1, not None"),
]
SMALL: dict[str, Any] = {"num_layers": 1, "features": 8, "num_heads": 2}
VIT, ENCODER = models.ViT(5, **SMALL), models.TransformerClassifier(3, **SMALL, vocabulary_size=6, max_length=7)
PROMPTS = np.array([[1, 2, 3, 4, 5], [6, 5, 0, 0, 0]])
TABLE = {"numbers": np.ones((6, 3), np.float32), "categories": np.ones((6, 2), np.int32)}


def shape_of(model: linen.Module, inputs: Any) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0), inputs)


def stream(**given: Any) -> Any:
    """Starts generation with other arguments."""
    common = {"model": GPT(7, **SMALL, max_length=20), "params": {"unused": np.ones(1)}, "prompt": PROMPTS}
    return models.stream(**{**common, "num_tokens": 2, "key": jax.random.key(0), **given})


def resnet(model: ResNet = RESNET, **changed: np.ndarray) -> Any:
    """The weights of a small ResNet, changed at names of which ``__`` is a dot, for ``model``."""
    arrays = {name.replace("__", "."): array for name, array in changed.items()}
    return from_torch(model, weights_of(resnet_shapes(RESNET)) | arrays)


def gpt2(**fields: Any) -> Any:
    return from_torch(GPT2.clone(**fields), weights_of(gpt2_shapes(GPT2)))


BAG = FastText(7, vocabulary_size=7)
NO_IMAGES, NO_TEXTS = np.ones((2, 17, 12)), (np.ones((2, 4), np.float32), np.ones(4, np.int32))
INPUTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: shape_of(models.TableMLP((3,)), TABLE), "have 2 columns of categories, and .* num_categories are of 0"),
    (lambda: shape_of(GPT(11, **SMALL, max_length=7), np.zeros((2, 8), int)), "8 tokens are longer than max_length, 7"),
    (lambda: shape_of(VIT, np.ones((2, 8, 6, 3))), "ViT: images of 8x6 are no multiple of patch_size 4"),
    (lambda: shape_of(ENCODER, np.ones((2, 8), int)), "TransformerClassifier: 8 positions are more than max_length, 7"),
    (
        lambda: shape_of(ENCODER.clone(vocabulary_size=None), np.ones((4, 4), int)),
        r"vectors .* or a vocabulary_size .* not int.. \[4, 4\]",
    ),
    (lambda: resnet(layer5__0__conv1__weight=np.ones(3)), r"layer5.0.conv1.weight \(3,\) for .* \(unknown\)\.$"),
    (lambda: resnet(fc__weight=np.ones((9, 8))), r"fit ResNet: fc.weight \(8, 9\) for Dense_0.kernel \(8, 5\)\.$"),
    (lambda: resnet(RESNET.clone(num_blocks=(1, 1))), r"layer2.1.\w+.weight .* \(unknown\); .* and \d+ more\.$"),
    (
        lambda: resnet(RESNET.clone(num_blocks=(1, 3))),
        r"nothing for ResNetBlock_3.BatchNorm_0.\w+ \(8,\); .* and 5 more",
    ),
    (lambda: gpt2(num_layers=3), r"do not fit GPT: nothing for Block_2\.Dense_0\.bias \(36,\).* and 7 more"),
    (lambda: gpt2(vocabulary_size=12), r"wte\.weight \(11, 12\) for Embed_0\.embedding \(12, 12\)"),
    (lambda: stream(prompt=PROMPTS[0]), r"integers \[batch, time\], not int64 \[5\]"),
    (lambda: stream(prompt=PROMPTS + 5), "token ids of the prompt must be in 0…6"),
    (lambda: stream(lengths=[0, 2]), r"lengths must be 2 integers in 1…5, not \[0, 2\]"),
    (lambda: stream(lengths=[5.0, 2.0]), r"lengths must be 2 integers in 1…5, not \[5.0, 2.0\]"),
    (
        lambda: next(stream(model=BAG, params=draws.variables(BAG, PROMPTS), context=9)),
        "FastText takes no padding: .* 9 tokens",
    ),
]


for name, model in MODELS.items():
    where = type(model).__name__
    if name not in IMAGE_MODELS:
        for wrong, words in zip(NO_TEXTS, ("float32 .*int32", r"int32 \[4\]"), strict=True):
            INPUTS.append((partial(shape_of, model, wrong), rf"{where} .*\[batch, time\] .*{words}"))
    elif name != "mlp":
        INPUTS.append((partial(shape_of, model, NO_IMAGES), rf"{where} .*images .*\(2, 17, 12\)"))
WRONG = [*((ConfigError, *row) for row in SETTINGS), *((DataError, *row) for row in INPUTS)]


@pytest.mark.parametrize(("error", "call", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_what_is_wrong_is_named(error, call, words):
    with pytest.raises(error, match=words):
        call()


INTEGERS = ("num_classes", "vocabulary_size", "features", "embedding_features", "last_features")
INTEGERS += ("num_layers", "num_heads", "max_length", "patch_size", "out_features", "num_blocks", "depth", "width")


@pytest.mark.parametrize("name", MODELS)
def test_fields_out_of_range_are_named(name):
    model = MODELS[name]
    tuples = {MLP: "features", ResNet: "num_blocks"}
    wrong: list[tuple[str, Any, str]] = [
        (field, value, f"{type(model).__name__}: {field} must be an integer >= 1, not {value!r}")
        for field in set(INTEGERS) & set(vars(model)) - {tuples.get(type(model), "")}
        for value in (0, 1.5)
    ]
    wrong += [("dropout", value, "dropout rate") for value in (-0.5, 1.2) if hasattr(model, "dropout")]
    layers = ("l", linen.LSTMCell) if hasattr(model, "layer") else ()
    wrong += [("layer", layer, "layer must be nn.LSTM or nn.GRU") for layer in layers]
    for field, value, words in wrong:
        with pytest.raises(ConfigError, match=words):
            model.clone(**{field: value})
