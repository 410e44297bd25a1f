"""FastText, recurrent classifiers and language models, GPT: by hand or by Flax's layers, padding."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import GPT, FastText, RecurrentClassifier, RecurrentLanguageModel, TextGenRNN
from jaxnn.nn import GRU, LSTM
from jaxnn.types import DataError
from tests import draws

KEY = jax.random.key(0)
near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
BAG_TOKENS = np.array([[4, 2, 4, 0], [1, 0, 0, 0], [0, 3, 0, 5], [0, 0, 0, 0]])
BAG = {
    "Embed_0": {"embedding": np.array([[9, 9], [1, 2], [3, 0], [5, 5], [0, 6], [1, 1]], np.float32)},
    "Dense_0": {"kernel": np.array([[1, 0, 1], [0, 1, -1]], np.float32), "bias": np.array([0, 10, 0], np.float32)},
}


@pytest.mark.parametrize(
    ("pad_id", "means"),
    [
        # (0+3+0+9)/4, (6+0+6+9)/4; (1+9+9+9)/4, (2+9+9+9)/4; (9+5+9+1)/4 twice; 9
        (None, [[3, 5.25], [7, 7.25], [6, 6], [9, 9]]),
        # Without zeros, at any position: (0+3+0)/3, (6+0+6)/3; 1, 2; (5+1)/2; nothing
        (0, [[1, 4], [1, 2], [3, 3], [0, 0]]),
    ],
)
def test_fasttext_by_hand(pad_id: int | None, means: list[list[float]]) -> None:
    model = FastText(3, vocabulary_size=6, features=2, pad_id=pad_id)
    apply = lambda params: model.apply({"params": params}, BAG_TOKENS)  # noqa: E731
    total = lambda params: (apply(params).sum(), apply(params))  # noqa: E731
    slope, logits = jax.jit(jax.grad(total, has_aux=True))(BAG)
    # Of a mean (a, b) the logits are a, b + 10 and a - b. They add up to 2 a + 10, so every token in use has a slope.
    np.testing.assert_allclose(logits, [[a, b + 10, a - b] for a, b in means], rtol=1e-6, atol=1e-6)
    assert np.any(slope["Embed_0"]["embedding"] != 0, axis=1).tolist() == [pad_id is None, *[True] * 5]


def test_fasttext_embeddings_are_initialized_within_one_over_features() -> None:
    model = FastText(2, vocabulary_size=1_000, features=50)
    table = jax.jit(model.init)(KEY, BAG_TOKENS)["params"]["Embed_0"]["embedding"]
    assert np.abs(table).max() == pytest.approx(1 / 50, rel=1e-3) and abs(float(np.mean(table))) < 1e-3


SIZES: dict[str, Any] = {"vocabulary_size": 6, "embedding_features": 4, "features": 3}
# 0 pads at the end; before that it is a token like the others. The last row has nothing else.
TOKENS = np.array([[4, 2, 4, 1], [1, 0, 5, 0], [3, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 0]])
LENGTHS = [4, 3, 1, 2]
CELLS: dict[Any, Any] = {LSTM: linen.OptimizedLSTMCell(3), GRU: linen.GRUCell(3)}


@pytest.mark.parametrize(("layer", "bidirectional"), [(LSTM, True), (GRU, False)])
def test_classifier_equals_flax_layers_on_each_sequence_alone(layer: Any, bidirectional: bool) -> None:
    options = {**SIZES, "layer": layer, "bidirectional": bidirectional}
    model = RecurrentClassifier(5, **options, pad_id=0)
    variables = draws.variables(model, TOKENS)
    params, bias = variables["params"], variables["params"]["Dense_0"]["bias"]

    def states(sequences: jax.Array, lengths: Any) -> jax.Array:
        last = []
        for index in range(1 + bidirectional):
            rnn = linen.RNN(CELLS[layer], return_carry=True, reverse=index == 1)
            carry, _ = rnn.apply({"params": params[f"{layer.__name__}_{index}"]}, sequences, seq_lengths=lengths)
            last.append(jax.tree.leaves(carry)[-1])
        return jnp.concatenate(last, axis=-1) @ params["Dense_0"]["kernel"] + bias[None]

    longer = np.pad(TOKENS, [(0, 0), (0, 3)])
    embedded = params["Embed_0"]["embedding"][TOKENS]
    got, more, plain, expected, expected_plain = jax.jit(
        lambda: (
            model.apply(variables, TOKENS),
            model.apply(variables, longer),
            RecurrentClassifier(5, **options).apply(variables, TOKENS),
            states(embedded[:4], jnp.array(LENGTHS)),
            states(embedded, None),
        )
    )()
    near(got[:4], expected)
    near(got[4], bias)  # of nothing but padding the state is 0
    near(more, got)
    near(plain, expected_plain)


def test_classifier_without_embedding_reads_one_hot_vectors() -> None:
    # What an embedding by the identity gives; a token outside the vocabulary is NaN.
    sizes = {"vocabulary_size": 6, "features": 3, "pad_id": 0}
    model, embedding = (RecurrentClassifier(5, **sizes, embedding_features=features) for features in (None, 6))
    params = draws.variables(model, TOKENS)["params"]
    outside = TOKENS.copy()
    outside[1, 2], outside[3, 1] = 6, -1
    got, expected, beyond = jax.jit(
        lambda: (
            model.apply({"params": params}, TOKENS),
            embedding.apply({"params": {**params, "Embed_0": {"embedding": jnp.eye(6)}}}, TOKENS),
            model.apply({"params": params}, outside),
        )
    )()
    near(got, expected)
    assert np.isnan(beyond).any(axis=1).tolist() == [False, True, False, True, False]


def test_language_model_equals_flax_layers() -> None:
    model = RecurrentLanguageModel(6, features=3, embedding_features=4)
    variables = draws.variables(model, TOKENS)
    params = variables["params"]

    def reference() -> jax.Array:
        x = params["Embed_0"]["embedding"][TOKENS]
        for layer in ("LSTM_0", "LSTM_1"):
            x = linen.RNN(CELLS[LSTM]).apply({"params": params[layer]}, x)
        return x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"][None, None]

    near(*jax.jit(lambda: (model.apply(variables, TOKENS), reference()))())


def test_textgenrnn_equals_flax_layers_and_has_auxiliary_logits_of_the_state_in_training() -> None:
    model = TextGenRNN(6, embedding_features=4, features=3, hidden=(5, 2))
    variables = draws.variables(model, TOKENS)
    params, stats = variables["params"], variables["batch_stats"]

    def reference(train: bool) -> tuple[jax.Array, jax.Array]:
        x = linen.RNN(CELLS[LSTM]).apply({"params": params["LSTM_0"]}, params["Embed_0"]["embedding"][TOKENS])[:, -1]
        state = x
        for index in range(2):
            norm = linen.BatchNorm(use_running_average=not train)
            x = x @ params[f"Dense_{index}"]["kernel"]
            own = {"params": params[f"BatchNorm_{index}"], "batch_stats": stats[f"BatchNorm_{index}"]}
            x = linen.relu(norm.apply(own, x, mutable=["batch_stats"])[0])
        last, auxiliary = params["Dense_2"], params["auxiliary"]
        logits = x @ last["kernel"] + last["bias"][None]
        return logits, state @ auxiliary["kernel"] + auxiliary["bias"][None]

    evaluated, (trained, _), expected, expected_trained = jax.jit(
        lambda: (
            model.apply(variables, TOKENS),
            model.apply(variables, TOKENS, train=True, mutable=["batch_stats"]),
            reference(False)[0],
            reference(True),
        )
    )()
    near(evaluated, expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), trained, expected_trained)


GPT_TOKENS = draws.integers(1, 11, 1, 6)
SMALL_GPT = GPT(11, num_layers=2, features=8, num_heads=2, max_length=7)


def test_gpt_initialization_is_gpt_2s() -> None:
    # Projections onto the residual stream are narrower by sqrt(2 * 1 layer).
    params = linen.unbox(jax.jit(GPT(65, num_layers=1, features=64, num_heads=1).init)(KEY, GPT_TOKENS))["params"]
    block = params["Block_0"]
    wide = [params["Embed_0"]["embedding"], params["Embed_1"]["embedding"], params["Dense_0"]["kernel"]]
    wide += [block["Dense_0"]["kernel"], block["Dense_2"]["kernel"]]
    assert [np.std(leaf) for leaf in wide] == pytest.approx([0.02] * 5, rel=0.05)
    narrow = [np.std(block[name]["kernel"]) for name in ("Dense_1", "Dense_3")]
    assert narrow == pytest.approx([0.02 / 2**0.5] * 2, rel=0.05)
    assert not np.any(block["Dense_1"]["bias"])


def test_gpt_sequences_longer_than_max_length() -> None:
    with pytest.raises(DataError, match="8 tokens are longer than max_length, 7"):
        jax.eval_shape(SMALL_GPT.init, KEY, np.zeros((2, 8), np.int32))
