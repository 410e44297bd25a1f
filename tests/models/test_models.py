"""What holds for every model: published parameter counts, dtypes, statistics, dropout; what is wrong is named."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn import models
from jaxnn.models import CNN, GPT, MLP, FastText, MobileNetV2, ResNet, TextGenRNN, create, from_torch, num_parameters
from jaxnn.models import RecurrentClassifier as Classifier
from jaxnn.models import RecurrentLanguageModel as Language
from jaxnn.nn import GRU, BatchNorm, Dropout, max_pool
from jaxnn.types import ConfigError, DataError
from tests import draws
from tests.models.test_pretrained import GPT2, RESNET, some_weights

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
    "bottlenecks": ResNet(5, num_blocks=(1, 2), features=2, block=models.Bottleneck, stem="imagenet"),
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
    # 5*3*1*2 + 2, 5*3*2*2 + 2; 8x8 pooled by 3x4 to 2x2: 2*2*2*4 + 4; 4*1 + 1
    (CNN(1, blocks=((2, 2),), kernel_size=(5, 3), pool=(3, 4), dense=(4,)), images(8, 1), 32 + 62 + 36 + 5),
    # No biases of convolutions, but a scale and a bias a channel: 9*2 + 4; 2*2*2*3 + 3
    (CNN(3, blocks=((2,),), dense=(), batch_norm=True), images(4, 1), 22 + 27),
    # Images just large enough: 7 -> 3 -> 1 by windows of 3 at steps of 2.
    (CNN(2, blocks=((1,), (1,)), pool=(3, 3), pool_strides=(2, 2), dense=()), images(7, 1), 10 + 10 + 4),
    (linen.Dropout(0.5, deterministic=True), images(2), 0),
]
# Of torchvision.
DEEP = [(create("resnet34"), images(224), 21_797_672), (create("resnet101"), images(224), 44_549_160)]
DEEP += [(create("resnet152"), images(224), 60_192_808)]


@pytest.mark.parametrize("networks", [COUNTS, pytest.param(DEEP, marks=pytest.mark.slow)], ids=["usual", "deep"])
def test_numbers_of_parameters(networks):
    for model, inputs, count in networks:
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
VIT, TEXTS = models.ViT(5, **SMALL), models.TransformerClassifier(3, **SMALL, vocabulary_size=6, max_length=7)
VECTORS = TEXTS.clone(vocabulary_size=None)
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
    return from_torch(model, some_weights("ResNet of basic blocks") | arrays)


BAG = FastText(7, vocabulary_size=7)
NO_IMAGES, NO_TEXTS = np.ones((2, 17, 12)), (np.ones((2, 4), np.float32), np.ones(4, np.int32))
INPUTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: shape_of(models.TableMLP((3,)), TABLE), "have 2 columns of categories, and .* num_categories are of 0"),
    (lambda: shape_of(GPT(11, **SMALL, max_length=7), np.zeros((2, 8), int)), "8 tokens are longer than max_length, 7"),
    (lambda: shape_of(VIT, np.ones((2, 8, 6, 3))), "ViT: images of 8x6 are no multiple of patch_size 4"),
    (lambda: shape_of(TEXTS, np.ones((2, 8), int)), "TransformerClassifier: 8 positions are more than max_length, 7"),
    (lambda: shape_of(VECTORS, np.ones((4, 4), int)), r"vectors .* or a vocabulary_size .* not int.. \[4, 4\]"),
    (lambda: resnet(layer5__0__conv1__weight=np.ones(3)), r"layer5.0.conv1.weight \(3,\) for .* \(unknown\)\.$"),
    (lambda: resnet(fc__weight=np.ones((9, 8))), r"fit ResNet: fc.weight \(8, 9\) for Dense_0.kernel \(8, 5\)\.$"),
    (lambda: resnet(RESNET.clone(num_blocks=(1, 1))), r"layer2.1.\w+.\w+ .* \(unknown\); .* and \d+ more\.$"),
    (lambda: resnet(RESNET.clone(num_blocks=(1, 3))), r"nothing for ResNetBlock_3.BatchNorm_0.\w+ \(8,\).* and 5 more"),
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
