"""Models of token sequences: by hand, Flax's layers or formulas; padding, remat and scan; generation and draws."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn import models
from jaxnn.models import GPT, FastText, RecurrentClassifier, RecurrentLanguageModel, TextGenRNN, generate, stream
from jaxnn.models import TransformerClassifier as Encoder
from jaxnn.nn import GRU, LSTM, RMSNorm
from jaxnn.types import DataError
from tests import draws

KEY = jax.random.key(0)
near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
BAG_TOKENS = np.array([[4, 2, 4, 0], [1, 0, 0, 0], [0, 3, 0, 5], [0, 0, 0, 0]])
BAG = {
    "Embed_0": {"embedding": np.array([[9, 9], [1, 2], [3, 0], [5, 5], [0, 6], [1, 1]], np.float32)},
    "Dense_0": {"kernel": np.array([[1, 0, 1], [0, 1, -1]], np.float32), "bias": np.array([0, 10, 0], np.float32)},
}


class Layers(linen.Module):
    """The layers of Flax that ``function`` calls, which take the parameters of a model that calls the same in turn."""

    function: Callable[..., Any]

    @linen.compact
    def __call__(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def recurrent(name: str, x: jax.Array, **options: Any) -> tuple[Any, jax.Array]:
    """The last carry and the states of a layer of three features."""
    cell = linen.OptimizedLSTMCell(3, parent=None) if name.startswith("LSTM") else linen.GRUCell(3, parent=None)
    lengths = options.pop("lengths", None)
    return linen.RNN(cell, return_carry=True, name=name, **options)(x, seq_lengths=lengths)


@pytest.mark.parametrize(
    ("pad_id", "means"),
    [
        # (0+3+0+9)/4, (6+0+6+9)/4; (1+9+9+9)/4, (2+9+9+9)/4; (9+5+9+1)/4 twice; 9
        (None, [[3, 5.25], [7, 7.25], [6, 6], [9, 9]]),
        # Without zeros, at any position: (0+3+0)/3, (6+0+6)/3; 1, 2; (5+1)/2; nothing
        (0, [[1, 4], [1, 2], [3, 3], [0, 0]]),
    ],
)
def test_fasttext_by_hand(pad_id, means):
    model = FastText(3, vocabulary_size=6, features=2, pad_id=pad_id)
    apply = lambda params: model.apply({"params": params}, BAG_TOKENS)  # noqa: E731
    total = lambda params: (apply(params).sum(), apply(params))  # noqa: E731
    slope, logits = jax.device_get(jax.jit(jax.grad(total, has_aux=True))(BAG))
    # Of a mean (a, b) the logits are a, b + 10 and a - b. They add up to 2 a + 10, so every token in use has a slope.
    np.testing.assert_allclose(logits, [[a, b + 10, a - b] for a, b in means], rtol=1e-6, atol=1e-6)
    assert np.any(slope["Embed_0"]["embedding"] != 0, axis=1).tolist() == [pad_id is None, *[True] * 5]


SIZES: dict[str, Any] = {"vocabulary_size": 6, "embedding_features": 4, "features": 3}
# 0 pads at the end; before that it is a token like the others. The last row has nothing else.
TOKENS = np.array([[4, 2, 4, 1], [1, 0, 5, 0], [3, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(("layer", "bidirectional"), [(LSTM, True), (GRU, False)])
def test_classifier_equals_flax_layers_on_each_sequence_alone(layer, bidirectional):
    options = {**SIZES, "layer": layer, "bidirectional": bidirectional}
    model, unpadded = RecurrentClassifier(5, **options, pad_id=0), RecurrentClassifier(5, **options)
    variables = draws.variables(model, TOKENS)

    @Layers
    def logits(tokens: Any, lengths: Any) -> jax.Array:
        x, last = linen.Embed(6, 4)(tokens), []
        for index in range(1 + bidirectional):
            carry, _ = recurrent(f"{layer.__name__}_{index}", x, reverse=index == 1, lengths=lengths)
            last.append(jax.tree.leaves(carry)[-1])
        return linen.Dense(5)(jnp.concatenate(last, axis=-1))

    @jax.jit
    def compute(variables: Any) -> Any:
        longer = np.pad(TOKENS, [(0, 0), (0, 3)])  # more padding changes nothing
        given = (TOKENS[:4], jnp.array([4, 3, 1, 2])), (TOKENS, None)
        found = model.apply(variables, longer), unpadded.apply(variables, TOKENS)
        return *found, *(logits.apply(variables, *each) for each in given)

    found, plain, expected, expected_plain = jax.device_get(compute(variables))
    near(found[:4], expected)
    near(found[4], variables["params"]["Dense_0"]["bias"])  # of nothing but padding the state is 0
    near(plain, expected_plain)


def test_classifier_without_embedding_reads_one_hot_vectors():
    # What an embedding by the identity gives; a token outside the vocabulary is NaN.
    sizes = {"vocabulary_size": 6, "features": 3, "pad_id": 0}
    model, embedding = (RecurrentClassifier(5, **sizes, embedding_features=features) for features in (None, 6))
    params = draws.variables(model, TOKENS)["params"]
    outside = TOKENS.copy()
    outside[1, 2], outside[3, 1] = 6, -1
    got, expected, beyond = jax.jit(
        lambda params: (
            model.apply({"params": params}, TOKENS),
            embedding.apply({"params": {**params, "Embed_0": {"embedding": jnp.eye(6)}}}, TOKENS),
            model.apply({"params": params}, outside),
        )
    )(params)
    near(got, expected)
    assert np.isnan(beyond).any(axis=1).tolist() == [False, True, False, True, False]


def test_language_model_and_textgenrnn_equal_flax_layers_and_train_with_auxiliary_logits_of_the_state():
    language = RecurrentLanguageModel(6, features=3, embedding_features=4)
    textgenrnn = TextGenRNN(6, embedding_features=4, features=3, hidden=(5, 2))
    training: dict[str, Any] = {"train": True, "mutable": ["batch_stats"]}

    @Layers
    def of_language() -> jax.Array:
        states = recurrent("LSTM_0", linen.Embed(6, 4)(TOKENS))[1]
        return linen.Dense(6)(recurrent("LSTM_1", states)[1])

    @Layers
    def of_textgenrnn(train: bool) -> tuple[jax.Array, jax.Array]:
        state = x = recurrent("LSTM_0", linen.Embed(6, 4)(TOKENS))[1][:, -1]
        for units in (5, 2):
            x = linen.Dense(units, use_bias=False)(x)
            x = linen.relu(linen.BatchNorm(use_running_average=not train)(x))
        return linen.Dense(6)(x), linen.Dense(6, name="auxiliary")(state)

    @jax.jit
    def compute(given: Any, variables: Any) -> Any:
        trained, _ = textgenrnn.apply(variables, TOKENS, **training)
        found = language.apply(given, TOKENS), textgenrnn.apply(variables, TOKENS), *trained
        evaluated, _ = of_textgenrnn.apply(variables, False)
        return found, (of_language.apply(given), evaluated, *of_textgenrnn.apply(variables, True, mutable=True)[0])

    found, expected = compute(*(draws.variables(model, TOKENS) for model in (language, textgenrnn)))
    for one, other, tolerance in zip(found, expected, (1e-4, 1e-4, 1e-3, 1e-3), strict=True):
        near(one, other, rtol=tolerance, atol=tolerance / 10)


WIDTH: dict[str, Any] = {"num_layers": 2, "features": 8, "num_heads": 2}


@pytest.mark.slow
def test_transformer_classifier_takes_each_sequence_without_padding():
    model = Encoder(3, **WIDTH, vocabulary_size=6, pad_id=0, max_length=7)
    tokens = np.array([[4, 2, 4, 1], [0, 1, 5, 0], [3, 0, 0, 0], [0, 0, 0, 0]])  # padded at any position
    variables = draws.variables(model, tokens)
    vectors = Encoder(3, **WIDTH, max_length=7)

    def alone(params: Any, given: Any, row: Any) -> jax.Array:
        """The logits of the tokens that count, to which their positions are added here."""
        (places,) = np.nonzero(row)
        x = params["Embed_0"]["embedding"][row[places]][None] + params["positions"][:, places]
        return vectors.apply({"params": {**given, "positions": jnp.zeros((1, 7, 8))}}, x)[0]

    @jax.jit
    def compute(variables: Any) -> Any:
        params = variables["params"]
        # Vectors are projected by a layer that takes the name of the last one: here by the identity.
        given = {name: params[name] for name in params if name != "Embed_0"} | {"Dense_1": params["Dense_0"]}
        given["Dense_0"] = {"kernel": jnp.eye(8), "bias": jnp.zeros(8)}
        embedded = params["Embed_0"]["embedding"][tokens]
        of_vectors = vectors.apply({"params": given}, embedded, mask=tokens != 0)
        longer = np.pad(tokens, [(0, 0), (0, 3)])  # more padding changes nothing
        return model.apply(variables, longer), of_vectors, [alone(params, given, row) for row in tokens[:3]]

    found, of_vectors, expected = jax.device_get(compute(variables))
    near(found[:3], expected)
    near(found[3], variables["params"]["Dense_0"]["bias"])  # the mean of nothing is 0
    near(of_vectors, found)


GPT_TOKENS = draws.integers(1, 11, 2, 6)
MODERN = GPT(11, **WIDTH | {"num_heads": 4}, max_length=7, num_key_heads=2, rotary=True, norm=RMSNorm, tied=True)


def test_rotary_grouped_queries_rms_norm_and_tied_embeddings_equal_flax_layers():
    model = MODERN.clone(num_layers=1)
    params = draws.variables(model, GPT_TOKENS)["params"]
    assert set(params) == {"Embed_0", "Block_0", "RMSNorm_0"}

    def rotated(x: jax.Array) -> jax.Array:  # heads of two numbers are one complex number, at angles 0, 1, 2, …
        numbers = (x[..., 0] + 1j * x[..., 1]) * np.exp(1j * np.arange(6))[None, :, None]
        return jnp.stack([numbers.real, numbers.imag], -1)

    def block(x: jax.Array) -> jax.Array:
        normed = linen.RMSNorm()(x)
        parts = jnp.split(linen.Dense(16)(normed), [8, 12], axis=-1)
        query, key, value = (part.reshape(2, 6, -1, 2) for part in parts)
        attended = jax.nn.dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + linen.Dense(8)(attended.reshape(2, 6, 8))
        normed = linen.RMSNorm()(x)
        hidden = linen.gelu(linen.Dense(32)(normed))
        return x + linen.Dense(8)(hidden)

    @Layers
    def by_layers() -> jax.Array:
        table = linen.Embed(11, 8)
        return table.attend(linen.RMSNorm()(Layers(block, name="Block_0")(table(GPT_TOKENS))))

    bias = np.arange(11, dtype=np.float32)
    untied = params | {"Dense_0": {"kernel": np.asarray(params["Embed_0"]["embedding"]).T, "bias": bias}}
    models = (by_layers, params), (model, params), (model.clone(tied=False), untied)
    compute = jax.jit(lambda: [m.apply({"params": p}, *([GPT_TOKENS] * (m is not by_layers))) for m, p in models])
    expected, found, shifted = jax.device_get(compute())
    near(found, expected, rtol=1e-3)
    near(shifted, expected + bias, rtol=1e-3)


@pytest.mark.slow
def test_initialization_of_fasttext_and_gpt():
    bag = FastText(2, vocabulary_size=1_000, features=50)
    gpt = GPT(65, num_layers=1, features=64, num_heads=1)
    drawn = jax.jit(lambda: [linen.unbox(model.init(KEY, GPT_TOKENS))["params"] for model in (bag, gpt)])()
    words, params = jax.device_get(drawn)
    table = words["Embed_0"]["embedding"]
    # Within one over the number of features.
    assert np.abs(table).max() == pytest.approx(1 / 50, rel=1e-3) and abs(float(np.mean(table))) < 1e-3
    # GPT-2's: projections onto the residual stream are narrower by sqrt(2 * 1 layer).
    block = params["Block_0"]
    wide = [params["Embed_0"]["embedding"], params["Embed_1"]["embedding"], params["Dense_0"]["kernel"]]
    wide += [block["Dense_0"]["kernel"], block["Dense_2"]["kernel"]]
    assert [np.std(leaf) for leaf in wide] == pytest.approx([0.02] * 5, rel=0.05)
    narrow = [np.std(block[name]["kernel"]) for name in ("Dense_1", "Dense_3")]
    assert narrow == pytest.approx([0.02 / 2**0.5] * 2, rel=0.05)
    assert not np.any(block["Dense_1"]["bias"])


def stacked(params: Any, block: str, count: int) -> Any:
    """As a scan over layers has them."""
    layers = [params[f"{block}_{number}"] for number in range(count)]
    rest = {name: params[name] for name in params if not name.startswith(f"{block}_")}
    return rest | {f"{block}_0": jax.tree.map(lambda *leaves: np.stack(leaves), *layers)}


VIT = models.ViT(5, **WIDTH)
IMAGES = draws.normal(0, 2, 8, 4, 3)


@pytest.mark.slow
def test_remat_and_scan_give_equal_gradients_in_less_memory_and_fewer_products():
    deep, images = VIT.clone(num_layers=3), draws.normal(0, 16, 16, 16, 3)
    params = draws.variables(deep, images)["params"]
    looped = stacked(params, "TransformerBlock", 3)

    def lowered(remat: Any, scan: bool) -> Any:
        model = deep.clone(remat=remat, scan=scan)
        loss = lambda params: jnp.square(model.apply({"params": params}, images)).sum()  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(looped if scan else params)

    def products(program: Any) -> int:
        return program.as_text().count("stablehlo.dot_general")

    stored, both = lowered(False, False), lowered(True, True)
    again, policy = lowered(True, False), lowered(jax.checkpoint_policies.dots_saveable, False)
    assert products(policy) == products(stored) < products(again) > 2 * products(both)
    plain, compact = stored.compile(), both.compile()
    draws.assert_close(compact(looped), stacked(plain(params), "TransformerBlock", 3), 1e-3)
    assert compact.memory_analysis().temp_size_in_bytes < 0.6 * plain.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_layers_of_a_scan_draw_numbers_of_their_own():
    vit, gpt = (model.clone(scan=True, remat=True) for model in (VIT, MODERN))
    cases = ((vit, IMAGES, "TransformerBlock_0"), (gpt, GPT_TOKENS, "Block_0"))
    boxed = [jax.eval_shape(model.init, KEY, inputs)["params"] for model, inputs, _ in cases]
    for params, (*_, block) in zip(boxed, cases, strict=True):
        # Their first axis has no name of a mesh axis.
        spec = linen.get_partition_spec(params)[block]["Dense_0"]["kernel"]
        assert spec == jax.sharding.PartitionSpec(None, None, "model")

    @jax.jit
    def compute(rate: Any, params: Any) -> Any:
        drawn = [linen.unbox(model.init(KEY, inputs))["params"][block] for model, inputs, block in cases]
        options = {"train": True, "rngs": {"dropout": KEY}, "capture_intermediates": True, "mutable": ["intermediates"]}
        state = vit.clone(dropout=rate).apply({"params": params}, IMAGES, **options)[1]["intermediates"]
        return [block["Dense_0"]["kernel"] for block in drawn], state["TransformerBlock_0"]["Dropout_0"]["__call__"][0]

    ones = linen.unbox(jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), boxed[0]))
    kernels, dropped = jax.device_get(compute(0.5, ones))
    for kernel in kernels:
        assert len(kernel) == 2 and not np.allclose(kernel[0], kernel[1])
    assert dropped.shape == (2, 2, 3, 8) and np.any((dropped[0] == 0) != (dropped[1] == 0))


SMALL: dict[str, Any] = {"num_layers": 2, "features": 8, "num_heads": 4, "max_length": 20}
MODELS: dict[str, Any] = {
    "learned": GPT(7, **SMALL),
    "rotary, grouped, scanned": GPT(7, **SMALL, rotary=True, num_key_heads=2, norm=RMSNorm, tied=True, scan=True),
    "LSTM": RecurrentLanguageModel(7, features=4, layer=LSTM),
    "GRU": RecurrentLanguageModel(7, features=4, layer=GRU),
}
PROMPTS, LENGTHS = np.array([[1, 2, 3, 4, 5], [6, 5, 0, 0, 0]]), np.array([5, 2])


def params_of(model: Any) -> Any:
    return draws.variables(model, PROMPTS)["params"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "learned")) for name in MODELS]
)
def test_cached_logits_and_tokens_equal_recomputing_the_prefix(name):
    model, params = MODELS[name], params_of(MODELS[name])
    new = generate(model, params, PROMPTS, lengths=LENGTHS, num_tokens=4, temperature=0)
    rows = [np.concatenate(pair) for pair in zip((PROMPTS[0], PROMPTS[1, :2]), new, strict=True)]
    texts = np.stack([np.pad(row, (0, 9 - len(row))) for row in rows])
    complete = np.asarray(jax.jit(model.apply)({"params": params}, texts))
    expected = np.stack([complete[row, length - 1 : length + 3] for row, length in enumerate(LENGTHS)])
    step = jax.jit(lambda given, tokens, **more: model.apply({"params": given}, tokens, **more))
    cache, tokens, lengths, found = model.init_cache(2, 9), PROMPTS, LENGTHS, []
    for index in range(4):
        logits, cache = step(params, tokens, cache=cache, lengths=lengths)
        found.append(logits)
        tokens, lengths = new[:, index : index + 1], np.ones(2, int)
    np.testing.assert_allclose(np.stack(found, axis=1), expected, rtol=1e-4, atol=1e-5)
    assert new.tolist() == expected.argmax(-1).tolist()


WINDOWED: list[Any] = [
    TextGenRNN(7, embedding_features=3, features=4, hidden=(5,)),
    RecurrentClassifier(7, vocabulary_size=7, embedding_features=None, features=4),
    RecurrentLanguageModel(7, features=4, num_layers=1),
    FastText(7, vocabulary_size=7, features=4, pad_id=6),
]


@pytest.mark.parametrize("model", WINDOWED, ids=lambda model: type(model).__name__)
def test_without_a_cache_each_token_is_computed_from_the_last_ones(model):
    prompts, lengths = np.asarray(draws.integers(0, 6, 20, 5)), np.arange(20) % 4 + 2
    variables = draws.variables(model, prompts)
    # Else biases decide, and all tokens are equal.
    variables = jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 1 else leaf, variables)
    new = generate(model, variables, prompts, lengths=lengths, num_tokens=3, temperature=0, context=4)
    texts = [np.concatenate([prompts[row, :length], new[row]]) for row, length in enumerate(lengths)]
    parts = [text[max(0, end - 4) : end + 1] for text in texts for end in range(len(text) - 3, len(text))]
    by_length = [np.stack([part for part in parts if len(part) == length]) for length in (3, 4, 5)]

    @jax.jit
    def best() -> list[jax.Array]:
        logits = (model.apply(variables, windows[:, :-1]) for windows in by_length)
        return [(each if each.ndim == 2 else each[:, -1]).argmax(-1) for each in logits]

    for found, windows in zip(best(), by_length, strict=True):
        assert windows[:, -1].tolist() == found.tolist()


@pytest.mark.slow
def test_streamed_tokens_are_those_of_generate_and_depend_on_the_key_alone():
    model, params = MODELS["learned"], params_of(MODELS["learned"])
    given = partial(model.generate, params, PROMPTS, lengths=LENGTHS, num_tokens=8)
    first, again, other = (given(key=jax.random.key(seed), temperature=5.0) for seed in (0, 0, 1))
    streamed = model.stream(params, PROMPTS, lengths=LENGTHS, num_tokens=8, key=KEY, temperature=5.0)
    assert first.tolist() == again.tolist() == np.stack(list(streamed), axis=1).tolist() != other.tolist()
    parts = list(stream(model, params, PROMPTS, lengths=LENGTHS, num_tokens=8, key=KEY, temperature=5.0, chunk=3))
    assert [part.shape[1] for part in parts] == [3, 3, 2] and np.hstack(parts).tolist() == first.tolist()
    # A stopped sequence is filled with the token that stopped it, and the iterator ends after the last.
    stop = int(first[0, 2])
    stopped = given(key=KEY, temperature=5.0, stop=stop)
    for row, full in zip(stopped.tolist(), first.tolist(), strict=True):
        end = full.index(stop) + 1 if stop in full else 8
        assert row == full[:end] + [stop] * (8 - end)
    single = stream(model, params, PROMPTS[:1], num_tokens=8, temperature=0, stop=int(given(temperature=0)[0, 0]))
    assert len(list(single)) == 1


class Sums:
    """A model by hand: the next token is the sum of all tokens in its context, modulo 7."""

    context_length = 6

    def init_cache(self, batch_size: int, size: int, dtype: Any) -> jax.Array:
        return jnp.zeros(batch_size, int)

    def apply(self, variables: Any, tokens: jax.Array, *, cache: jax.Array, lengths: Any = 1) -> Any:
        counts = jnp.arange(tokens.shape[1])[None] < jnp.reshape(lengths, (-1, 1))
        cache = cache + jnp.where(counts, tokens, 0).sum(1)
        return jax.nn.one_hot(cache % 7, 7), cache


def test_text_longer_than_the_context_starts_again_from_its_last_tokens():
    given = partial(generate, Sums(), {"unused": jnp.ones(1)}, PROMPTS, temperature=0)
    with pytest.raises(DataError, match=r"5 tokens and 3 more do not fit into the model's 6 positions: .*overlap=3"):
        given(num_tokens=3)
    # 1 + 2 + 3 + 4 + 5 = 15 and 16 use six positions; from 5, 1, 2: 8, 9, 11, 15; from 2, 4, 1: 7. And 6 + 5 = 11, 15;
    # with the first row from 5, 4, 1: 10, 13, 19, 24; from 6, 5, 3: 14.
    found = given(lengths=LENGTHS, num_tokens=7, overlap=3)
    assert found.tolist() == [[1, 2, 1, 2, 4, 1, 0], [4, 1, 3, 6, 5, 3, 0]]


LOGITS = np.log([0.05, 0.4, 0.3, 0.15, 0.1])


def distribution(num_draws: int = 4_000, **options: Any) -> np.ndarray:
    """The shares of draws from logits that do not depend on the context."""
    model = RecurrentLanguageModel(5, features=1, num_layers=1)
    params = jax.tree.map(jnp.zeros_like, draws.variables(model, PROMPTS[:1, :1] * 0)["params"])
    params["Dense_0"]["bias"] = jnp.array(LOGITS)
    tokens = generate(model, params, np.zeros((num_draws, 1), int), num_tokens=1, key=KEY, **options)
    return np.bincount(tokens[:, 0], minlength=5) / num_draws


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [0.05, 0.4, 0.3, 0.15, 0.1]),
        ({"temperature": 0.5}, np.square(np.exp(LOGITS)) / np.square(np.exp(LOGITS)).sum()),
        *(({"temperature": small}, [0, 1, 0, 0, 0]) for small in (0, 1e-44, 3e-38, 1e-37, 1e-3)),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_p": 1e-6}, [0, 1, 0, 0, 0]),
        # 0.4 + 0.3 are less than 0.75, with 0.15 they are enough.
        ({"top_p": 0.75}, [0, 0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0]),
        ({"top_k": 3, "top_p": 0.75}, [0, 4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_draws_follow_the_remaining_distribution(options, shares):
    found = distribution(**options)
    assert ((found > 0) == (np.asarray(shares) > 0)).all()
    np.testing.assert_allclose(found, shares, atol=4 * 0.5 / 4_000**0.5)


def test_lengths_and_settings_share_a_program(caplog):
    model, params = MODELS["GRU"], params_of(MODELS["GRU"])
    given = partial(generate, model, params, key=KEY)
    given(PROMPTS, lengths=LENGTHS, num_tokens=3, top_k=3)
    with jax.log_compiles():
        given(PROMPTS[:, :3], num_tokens=11, top_k=2, temperature=0.5, stop=1)
        assert "Compiling" not in caplog.text
        given(PROMPTS, num_tokens=3, top_p=0.5)
        assert "Compiling jit(_extend)" in caplog.text
