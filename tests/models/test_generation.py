"""Generation equals recomputing the prefix; draws follow the distribution that temperature, top_k and top_p leave."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.models import GPT, FastText, RecurrentClassifier, RecurrentLanguageModel, TextGenRNN, generate, stream
from jaxnn.nn import GRU, LSTM, RMSNorm
from jaxnn.types import DataError
from tests import draws

KEY = jax.random.key(0)
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
