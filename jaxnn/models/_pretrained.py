"""Networks of published sizes by name, and their published weights: parameters from a PyTorch state dict."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from jaxnn.models._gpt import GPT
from jaxnn.models._model_inputs import stack_layers
from jaxnn.models._residual import Bottleneck, ResNet, WideResNet
from jaxnn.models._transformer import ViT
from jaxnn.nn import LayerNorm
from jaxnn.types import ConfigError, DataError, ModelState, Params, suggest

# Patterns and what replaces them, in order, from PyTorch's name to a path: "….weight" has PyTorch's layout, "" no use.
type Rules = list[tuple[str, str | Callable[[re.Match[str]], str]]]
_IMAGENET = {"num_classes": 1000, "features": 64, "stem": "imagenet"}
_DEEP = {**_IMAGENET, "block": Bottleneck}
_PATCHES = {"num_classes": 1000, "patch_size": 16, "num_layers": 12}
_GPT2 = {"vocabulary_size": 50_257, "max_length": 1024, "tied": True, "epsilon": 1e-5}
_PUBLISHED: Mapping[str, tuple[type[linen.Module], Mapping[str, Any]]] = {
    "resnet18": (ResNet, {**_IMAGENET, "num_blocks": (2, 2, 2, 2)}),
    "resnet34": (ResNet, {**_IMAGENET, "num_blocks": (3, 4, 6, 3)}),
    "resnet50": (ResNet, {**_DEEP, "num_blocks": (3, 4, 6, 3)}),
    "resnet101": (ResNet, {**_DEEP, "num_blocks": (3, 4, 23, 3)}),
    "resnet152": (ResNet, {**_DEEP, "num_blocks": (3, 8, 36, 3)}),
    "vit_ti_16": (ViT, {**_PATCHES, "features": 192, "num_heads": 3}),
    "vit_s_16": (ViT, {**_PATCHES, "features": 384, "num_heads": 6}),
    "vit_b_16": (ViT, {**_PATCHES, "features": 768, "num_heads": 12}),
    "vit_l_16": (ViT, {**_PATCHES, "features": 1024, "num_heads": 16, "num_layers": 24}),
    "wrn_28_10": (WideResNet, {"num_classes": 10}),
    "gpt2": (GPT, {"num_layers": 12, "features": 768, "num_heads": 12, **_GPT2}),
    "gpt2_medium": (GPT, {"num_layers": 24, "features": 1024, "num_heads": 16, **_GPT2}),
    "gpt2_large": (GPT, {"num_layers": 36, "features": 1280, "num_heads": 20, **_GPT2}),
    "gpt2_xl": (GPT, {"num_layers": 48, "features": 1600, "num_heads": 25, **_GPT2}),
}
# Of torchvision, its old files too, and of timm.
_VIT: Rules = [
    (r"^cls_token$", "class_token"),
    (r"^(encoder\.pos_embedding|pos_embed)$", "positions"),
    (r"^(conv_proj|patch_embed\.proj)\.", "Conv_0."),
    (r"^(encoder\.ln|norm)\.", "LayerNorm_0."),
    (r"^(heads\.)?head\.", "Dense_0."),
    (r"^(encoder\.layers\.encoder_layer_|blocks\.)(\d+)\.", r"TransformerBlock_\2."),
    (r"\.(?:ln_|norm)(\d)\.", lambda match: f".LayerNorm_{int(match[1]) - 1}."),
    (r"\.(self_attention\.in_proj_|attn\.qkv\.)", ".Dense_0."),
    (r"\.(self_attention\.out_proj|attn\.proj)\.", ".Dense_1."),
    (r"\.mlp\.(0|linear_1|fc1)\.", ".Dense_2."),
    (r"\.mlp\.(3|linear_2|fc2)\.", ".Dense_3."),
]
# Of Hugging Face, with masks that are no weights; the logits are products with the embeddings.
_GPT: Rules = [
    (r"^transformer\.", ""),
    (r"^(.*\.attn\.(masked_)?bias|lm_head\.weight)$", ""),
    (r"^wte\.weight$", "Embed_0.embedding"),
    (r"^wpe\.weight$", "Embed_1.embedding"),
    (r"^h\.(\d+)\.", r"Block_\1."),
    (r"^ln_f\.", "LayerNorm_0."),
    (r"\.ln_(\d)\.", lambda match: f".LayerNorm_{int(match[1]) - 1}."),
    (r"\.attn\.c_attn\.", ".Dense_0."),
    (r"\.attn\.c_proj\.", ".Dense_1."),
    (r"\.mlp\.c_fc\.", ".Dense_2."),
    (r"\.mlp\.c_proj\.", ".Dense_3."),
]
_SHOWN = 5  # names in an error


def create(name: str, **fields: Any) -> Any:
    """Returns the network of a published size, with other ``fields`` of the module where they are given.

    The `ResNet` for 224x224 images of 1000 classes ``resnet18``, ``resnet34``, ``resnet50``, ``resnet101`` or
    ``resnet152``, the `ViT` for those ``vit_ti_16``, ``vit_s_16``, ``vit_b_16`` or ``vit_l_16``, the `WideResNet` for
    32x32 images of 10 classes ``wrn_28_10``, and the `GPT` ``gpt2``, ``gpt2_medium``, ``gpt2_large`` or ``gpt2_xl``
    (tied; 124 million to 1.6 billion parameters). Another name raises `ConfigError`.

    >>> model = jn.models.create("vit_b_16", num_classes=10, remat=True)
    >>> jn.models.num_parameters(model, jax.ShapeDtypeStruct((1, 224, 224, 3), "float32"))
    85806346
    """
    if name not in _PUBLISHED:
        raise ConfigError(f"create: no network {name!r}: {suggest(str(name), _PUBLISHED)}.")
    module, published = _PUBLISHED[name]
    return module(**{**published, **fields})


def from_torch(model: str | linen.Module, state_dict: Mapping[str, Any]) -> tuple[Params, ModelState]:
    """Returns a network's parameters and model state with the weights of a PyTorch state dict, by name.

    Takes torchvision's names for `ResNet` and `ViT`, timm's for `ViT`, and Hugging Face's of GPT-2 for a `GPT` that is
    tied, with an epsilon of 1e-5. ``model`` may be a name as of `create`.
    Arrays are NumPy's, such as of a ``safetensors`` file, or tensors on the CPU. Outputs are PyTorch's in evaluation,
    to rounding, for images normalized as there, with channels last. The results are ``variables["params"]``, of stacked
    blocks with ``scan=True``, and the other variables, without boxes. Names without a place, parameters without a name,
    and arrays of another shape raise `DataError`.

    >>> state_dict = {f"fc.{name}": np.ones(shape) for name, shape in {"weight": (1000, 2048), "bias": 1000}.items()}
    >>> jn.models.from_torch("resnet50", state_dict)
    Traceback (most recent call last):
    jaxnn.types.DataError: from_torch: weights do not fit ResNet: nothing for BatchNorm_0.mean (64,); ... more.
    """
    model = create(model) if isinstance(model, str) else model
    if not isinstance(model, ResNet | ViT | GPT):
        raise ConfigError(f"from_torch takes a ResNet, a ViT or a GPT, not a {type(model).__name__}.")
    if isinstance(model, GPT) and (not model.tied or model.rotary or model.norm is not LayerNorm):
        raise ConfigError("from_torch: GPT-2 is GPT(…, tied=True, epsilon=1e-5) with LayerNorm, not rotary.")
    rules = _VIT if isinstance(model, ViT) else _GPT if isinstance(model, GPT) else _resnet_rules(model)
    # GPT-2's layers have kernels [in, out], as Flax's.
    turned = not isinstance(model, GPT)
    converted = {name: _converted(name, value, rules, turned) for name, value in state_dict.items()}
    found = {path: array for path, array in converted.values() if path}
    given = {path: f"{name} {array.shape}" for name, (path, array) in converted.items()}
    variables = _variables(model, found)
    path_of: Callable[[Any], str] = lambda keys: jax.tree_util.keystr(keys[1:], simple=True, separator=".")  # noqa: E731
    needed = {path_of(keys): leaf.shape for keys, leaf in jax.tree.leaves_with_path(variables)}
    shapes = {path: array.shape for path, array in found.items()}
    if wrong := [path for path in shapes | needed if shapes.get(path) != needed.get(path)]:
        pairs = [f"{given.get(path, 'nothing')} for {path} {needed.get(path, '(unknown)')}" for path in wrong[:_SHOWN]]
        listed = "; ".join(pairs) + (f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
        raise DataError(f"from_torch: weights do not fit {type(model).__name__}: {listed}.")
    state = jax.tree.map_with_path(lambda keys, leaf: jnp.asarray(found[path_of(keys)], leaf.dtype), variables)
    params = state.pop("params")
    if not isinstance(model, ResNet) and model.scan:
        params = stack_layers(params, "TransformerBlock" if turned else "Block", model.num_layers)
    return params, state


def _converted(path: str, value: Any, rules: Rules, turned: bool) -> tuple[str, np.ndarray]:
    """The path of the variable that PyTorch calls ``path``, and its array in Flax's layout."""
    array = np.asarray(value)
    for pattern, replacement in rules:
        path = re.sub(pattern, replacement, path)
    if not path.endswith(".weight"):
        return path, array
    stem = path.removesuffix("weight")
    if array.ndim == 1:
        return f"{stem}scale", array
    return f"{stem}kernel", np.moveaxis(array, (0, 1), (-1, -2)) if turned else array


def _variables(model: Any, found: Mapping[str, np.ndarray]) -> Any:
    """Shapes of the variables of ``model`` without a scan, for images that fit the arrays ``found``."""
    if isinstance(model, GPT):
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        return linen.unbox(jax.eval_shape(model.clone(scan=False).init, jax.random.key(0), tokens))
    size, channels = (64, 64), found["Conv_0.kernel"].shape[-2] if "Conv_0.kernel" in found else 3
    if isinstance(model, ViT):
        num_patches = found["positions"].shape[1] - (model.pooling == "class_token") if "positions" in found else 1
        model, size = model.clone(scan=False), (model.patch_size, model.patch_size * num_patches)
    images = jax.ShapeDtypeStruct((1, *size, channels), jnp.float32)
    return linen.unbox(jax.eval_shape(model.init, jax.random.key(0), images))


def _resnet_rules(model: ResNet) -> Rules:
    blocks = [f"layer{stage}.{index}." for stage, count in enumerate(model.num_blocks, 1) for index in range(count)]
    places = {block: f"{model.block.__name__}_{number}." for number, block in enumerate(blocks)}
    shortcut = 3 if model.block is Bottleneck else 2
    return [
        (r"^layer\d+\.\d+\.", lambda match: places.get(match[0], match[0])),
        (r"\bconv(\d)\.", lambda match: f"Conv_{int(match[1]) - 1}."),
        (r"\bbn(\d)\.", lambda match: f"BatchNorm_{int(match[1]) - 1}."),
        (r"\.downsample\.0\.", f".Conv_{shortcut}."),
        (r"\.downsample\.1\.", f".BatchNorm_{shortcut}."),
        (r"\.running_(mean|var)$", r".\1"),
        (r"^fc\.", "Dense_0."),
        (r".*\.num_batches_tracked$", ""),
    ]
