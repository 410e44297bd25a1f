"""Lazy optimizers: rows that count are updated by hand and by definition, the rest of a table is never touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import fit, read

import jaxnn as jn
from jaxnn import optim, tasks
from jaxnn.nn import Embed
from jaxnn.optim import SparseRows, sparse_rows, value_and_grad_of, value_and_row_gradient
from jaxnn.optim._row_gradients import summed
from jaxnn.steps import init_train_state, make_train_step
from jaxnn.types import Batch, ConfigError, Metrics, TrainState

KEY = jax.random.key(0)
NUM_WORDS, FEATURES = 50, 3


class Bag(nn.Module):
    """The mean of a text's embeddings, classified."""

    layer: type[nn.Embed] = Embed
    options: Any = ()

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        return nn.Dense(2)(self.layer(NUM_WORDS, FEATURES, name="words", **dict(self.options))(ids).mean(axis=1))


def texts(seed: int = 0) -> Batch:
    """Four texts of five words above 0, some of them the same, and a fifth that is padding."""
    draws = np.random.default_rng(seed)
    ids, labels = draws.integers(1, NUM_WORDS, (5, 5)), draws.integers(0, 2, 5)
    return Batch(ids.astype(np.int32), labels.astype(np.int32), np.array([1, 1, 1, 1, 0], np.float32))


def table_of(state: TrainState) -> np.ndarray:
    return np.asarray(state.params["words"]["embedding"])


def start(task: jn.Task, optimizer: optax.GradientTransformation, key: jax.Array = KEY) -> TrainState:
    return init_train_state(task, optimizer, key, texts())


def trained(task: jn.Task, optimizer: Any, num_steps: int = 4) -> tuple[TrainState, TrainState]:
    before, step = (
        start(task, optimizer),
        jax.jit(make_train_step(task, optimizer, value_and_grad=value_and_grad_of(optimizer))),
    )
    after = before
    for seed in range(num_steps):
        after, _ = step(after, texts(seed))
    return before, after


def assert_close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


def dense_only(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same without its mark: a training step gives it dense gradients."""
    return optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)


# The update, by hand.


def test_a_row_that_counts_moves_as_under_adam_and_another_not_at_all() -> None:
    # Bias-corrected, the first step of Adam is -rate * sign(gradient). In the second, row 0 has no gradient and stays.
    # Row 1 is new at update 2: m = 0.1 g, v = 0.001 g², m / (1 - 0.9²) = 0.1 / 0.19 g = 0.526 g,
    # v / (1 - 0.999²) = 0.001 / 0.001999 g² = 0.50025 g²: a step of 0.526 / 0.7073 = 0.7441 rates.
    optimizer = sparse_rows(optax.adam(0.1, eps=0.0), tables="words")
    params = {"words": jnp.array([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])}
    state = optimizer.init(params)
    for ids in ([0], [1, 1]):
        gradient = {"words": SparseRows(jnp.array(ids), jnp.full((len(ids), 2), -3.0))}
        updates, state = optimizer.update(gradient, state, params)
        params = optim.apply_updates(params, updates)
    np.testing.assert_allclose(params["words"], [[1.1, 1.1], [1.07441, 1.07441], [1.0, 1.0]], rtol=1e-5)
    moments, count = state[0].mu["words"], state[0].count
    # Row 0's moment has not decayed; row 1's is of the sum of both, -6.
    np.testing.assert_allclose(moments, [[-0.3, -0.3], [-0.6, -0.6], [0.0, 0.0]], rtol=1e-6)
    assert int(count) == 2


@pytest.mark.parametrize("num_rows", [100, 6, 3])
def test_rows_are_summed_by_id(num_rows: int) -> None:
    # Twice 2, once 0 whose gradient is zero, 1 whose two cancel; 200 is beyond. More ids than 3 rows need no sort.
    rows = SparseRows(jnp.array([2, 0, 1, 200, 2, 1]), jnp.array([[1.0], [0.0], [4.0], [jnp.nan], [2.0], [-4.0]]))
    ids, values = summed(rows, num_rows)
    assert len(set(ids.tolist())) == len(ids) <= num_rows
    inside = [(int(i), float(v)) for i, v in zip(ids, values[:, 0], strict=True) if i < num_rows]
    assert inside == [(2, 3.0)]
    assert float(values.sum()) == 3.0


def test_nothing_looked_up_is_no_row() -> None:
    ids, values = summed(SparseRows(jnp.zeros(0, jnp.int32), jnp.zeros((0, 2))), 3)
    assert (ids.shape, values.shape) == ((0,), (0, 2))


# The gradient by rows.


def dense_and_by_rows(loss: Callable[..., Any], params: Any, *args: Any) -> tuple[Any, Any]:
    """The gradient as JAX takes it, and the rows' written into arrays."""
    is_table = lambda path: path[-1].key == "table"  # noqa: E731
    is_rows = lambda node: isinstance(node, SparseRows)  # noqa: E731
    aux = lambda params, *args: (loss(params, *args), jnp.float32(7))  # noqa: E731
    (value, extra), gradient = jax.jit(value_and_row_gradient(aux, is_table, has_aux=True))(params, *args)
    whole = jax.tree.map(
        lambda rows, param: jnp.zeros_like(param).at[rows.ids].add(rows.values, mode="drop") if is_rows(rows) else rows,
        gradient,
        params,
        is_leaf=is_rows,
    )
    expected_value, expected = jax.value_and_grad(loss)(params, *args)
    assert_close((value, extra), (expected_value, jnp.float32(7)))
    return whole, expected


@jax.custom_vjp
def _fetched(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids]


_fetched.defvjp(
    lambda table, ids: (table[ids], (ids, len(table))),
    lambda kept, rows: (jnp.zeros((kept[1], rows.shape[-1])).at[kept[0]].add(rows), None),
)
IDS = jnp.array([[0, 3], [3, -1]])
LOOKUPS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "indexing": lambda table, ids: table[ids],
    "take": lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"),
    "a clipped id": lambda table, ids: table.at[ids + 3].get(mode="clip"),
    "no row beyond the table": lambda table, ids: table.at[ids + 3].get(mode="fill", fill_value=0.0),
    "vmap": jax.vmap(lambda table, ids: table[ids], in_axes=(None, 0)),
    "unsigned ids": lambda table, ids: table[jnp.abs(ids).astype(jnp.uint8)],
    "a cast": lambda table, ids: jnp.take(table.astype(jnp.bfloat16), ids, axis=0).astype(jnp.float32),
    "jit": lambda table, ids: jax.jit(lambda table: jax.jit(jnp.sin)(table[ids]))(table),
    "a custom derivative": lambda table, ids: _fetched(table, ids),
    "twice": lambda table, ids: table[ids] * table[ids[::-1]],
    "never": lambda table, ids: jnp.ones((2, 2, 2)),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_the_gradient_by_rows_is_the_gradient(lookup: str) -> None:
    def loss(params: Any, ids: jax.Array, scale: jax.Array) -> jax.Array:
        rows = LOOKUPS[lookup](params["table"], ids)
        return scale * jnp.sum(jnp.cos(rows * params["factor"]) * jnp.cos(jnp.arange(8.0).reshape(2, 2, 2)))

    params = {"table": jnp.arange(10.0).reshape(5, 2) / 10, "factor": jnp.float32(1.5)}
    # bfloat16 keeps 8 bits, and JAX sums in it where the table was cast.
    tolerance = {"rtol": 0.02, "atol": 0.02} if lookup == "a cast" else {}
    assert_close(*dense_and_by_rows(loss, params, IDS, jnp.float32(2.0)), **tolerance)


def test_the_rest_of_the_loss_is_as_it_was() -> None:
    def loss(params: Any, ids: jax.Array, key: jax.Array) -> jax.Array:
        rows = jax.lax.fori_loop(0, 2, lambda _, rows: rows * params["factor"], params["table"][ids])
        rows = jax.checkpoint(jnp.sin)(jax.lax.cond(rows[0, 0, 0] >= 0, jnp.cos, jnp.exp, rows))
        noise = jax.random.normal(key, rows.shape)
        return jnp.sum(rows * noise) + jax.nn.relu(params["factor"])

    params = {"table": jnp.arange(10.0).reshape(5, 2) / 10, "factor": jnp.float32(1.5)}
    assert_close(*dense_and_by_rows(loss, params, IDS, KEY))


MISUSES: dict[str, tuple[Callable[[jax.Array], jax.Array], str]] = {
    "attend": (lambda table: (table[IDS] @ table.T).sum(), "'transpose'"),
    "a penalty": (lambda table: table[IDS].sum() + jnp.sum(table**2), "'(integer_pow|square|mul)'"),
    "some features": (lambda table: table[IDS, :1].sum(), "'gather'"),
    "columns": (lambda table: jnp.take(table, IDS, axis=1, mode="clip").sum(), "'gather'"),
    "a slice": (lambda table: table[:2].sum(), "'slice'"),
    "a loop": (lambda table: jax.lax.map(lambda i: table[i].sum(), IDS).sum(), "'scan'"),
    "checkpoint": (lambda table: jax.checkpoint(lambda table: table[IDS].sum())(table), "'(remat2|checkpoint)'"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_table_used_otherwise_is_named(misuse: str) -> None:
    use, sentence = MISUSES[misuse]
    loss = lambda params: (use(params["layer"]["table"]), None)  # noqa: E731
    with pytest.raises(
        ConfigError, match=f"the table 'layer/table' has no gradient by rows, .* the table meets {sentence}"
    ):
        value_and_row_gradient(loss, lambda path: True, has_aux=True)({"layer": {"table": jnp.ones((5, 2))}})


def test_a_table_given_back_is_named() -> None:
    with pytest.raises(ConfigError, match="the table 'table' has no gradient by rows, because the loss gives it back"):
        value_and_row_gradient(lambda params: (params["table"][IDS].sum(), params), lambda path: True, has_aux=True)(
            {"table": jnp.ones((5, 2))}
        )


# Training steps.

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adam": lambda: optax.adam(0.1),
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: optax.adagrad(0.1),
    "narrow moments": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "clipped": lambda: optim.with_clipping(optax.adam(0.1), 0.1),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=2)),
    "partition": lambda: optax.partition(
        {"w": optax.adam(0.1), "d": optax.sgd(0.1)},
        lambda params: jax.tree.map_with_path(lambda path, _: path[0].key[0].lower(), params),
    ),
    "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.1),
}
TASK = tasks.classification(Bag())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_by_rows_equals_by_definition(name: str) -> None:
    # Given a dense gradient, lazy runs the optimizer on whole tables and undoes it for rows without a gradient.
    optimizer = sparse_rows(OPTIMIZERS[name]())
    by_rows, by_definition = (trained(TASK, each)[1] for each in (optimizer, dense_only(optimizer)))
    tolerance = 1e-2 if name == "narrow moments" else 1e-4
    assert_close(by_rows._replace(key=0), by_definition._replace(key=0), rtol=tolerance, atol=1e-6)


def test_untouched_rows_keep_their_bits_and_padding_touches_none() -> None:
    optimizer = sparse_rows(optax.adamw(0.1, weight_decay=0.1))
    before, after = trained(TASK, optimizer)
    seen = {int(word) for seed in range(4) for word in texts(seed).inputs[:4].ravel()}
    # Padding is blanked to id 0, which no text of these holds.
    assert 0 not in seen
    moved = (table_of(before) != table_of(after)).any(axis=1)
    assert set(np.flatnonzero(moved)) == seen
    moments = after.opt_state[0].mu["words"]["embedding"]
    assert set(np.flatnonzero(np.asarray(moments).any(axis=1))) == seen


def test_a_row_with_moments_stays_where_padding_has_its_id() -> None:
    # Word 0 is learnt in the first step; in the second it is only padding, and its momentum must not carry it on.
    optimizer = sparse_rows(optax.sgd(0.1, momentum=0.9))
    step, state = (
        jax.jit(make_train_step(TASK, optimizer, value_and_grad=value_and_grad_of(optimizer))),
        start(TASK, optimizer),
    )
    zeros = texts()._replace(inputs=np.zeros((5, 5), np.int32))
    state, _ = step(state, zeros)
    again, _ = step(state, texts())
    assert np.array_equal(table_of(again)[0], table_of(state)[0])
    assert not np.array_equal(table_of(again), table_of(state))


def test_equals_adam_where_every_row_counts() -> None:
    batch = Batch(np.arange(NUM_WORDS, dtype=np.int32).reshape(5, 10), texts().targets, np.ones(5, np.float32))
    states = []
    for optimizer in (optax.adam(0.1), sparse_rows(optax.adam(0.1))):
        step, state = (
            jax.jit(make_train_step(TASK, optimizer, value_and_grad=value_and_grad_of(optimizer))),
            start(TASK, optimizer),
        )
        for _ in range(5):
            state, _ = step(state, batch)
        states.append(state._replace(key=0))
    assert_close(states[1], states[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", [Bag(nn.Embed), Bag(options=(("dtype", jnp.bfloat16),))])
def test_any_embed_will_do(model: nn.Module) -> None:
    task, optimizer = tasks.classification(model), sparse_rows(optax.sgd(0.1))
    by_rows, dense = (trained(task, each, 2)[1] for each in (optimizer, optax.sgd(0.1)))
    # A step of plain gradient descent is lazy as it is; sums in bfloat16 are JAX's own.
    assert_close(by_rows.params, dense.params, atol=1e-2 if dict(model.options).get("dtype") else 1e-6)


def test_a_pair_of_functions_will_do_under_a_policy() -> None:
    def init(key: jax.Array, ids: jax.Array) -> Any:
        return {"words": {"embedding": jax.random.normal(key, (NUM_WORDS, 2))}}

    def apply(params: Any, ids: jax.Array) -> jax.Array:
        return params["words"]["embedding"][ids].mean(axis=1)

    task = tasks.classification((init, apply), policy=jn.nn.Policy(compute="bfloat16"))
    by_rows, dense = (trained(task, each, 2)[1] for each in (sparse_rows(optax.sgd(0.1)), optax.sgd(0.1)))
    assert table_of(by_rows).dtype == np.float32
    assert_close(by_rows.params, dense.params, atol=1e-2)


def test_averages_and_accumulation_go_outside() -> None:
    for around in (lambda inner: optim.with_ema(inner, 0.9), lambda inner: optim.with_accumulation(inner, 2)):
        before, after = trained(TASK, around(sparse_rows(optax.adam(0.1))))
        untouched = np.setdiff1d(
            np.arange(NUM_WORDS), np.concatenate([texts(seed).inputs[:4].ravel() for seed in range(4)])
        )
        assert np.array_equal(table_of(before)[untouched], table_of(after)[untouched])
        assert not np.array_equal(table_of(before), table_of(after))


def test_jit_scan_and_vmap_agree() -> None:
    optimizer = sparse_rows(optim.with_clipping(optax.adam(0.1), 1.0))
    step = make_train_step(TASK, optimizer, value_and_grad=value_and_grad_of(optimizer))
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(texts(seed) for seed in range(3)))
    members = jax.vmap(lambda key: start(TASK, optimizer, key))(jax.random.split(KEY))

    def scanned(state: TrainState) -> tuple[TrainState, Metrics]:
        return jax.lax.scan(step, state, batches)

    population, _ = jax.jit(jax.vmap(scanned))(members)
    for number in range(2):
        state = jax.tree.map(lambda leaf, number=number: leaf[number], members)
        alone, _ = jax.jit(scanned)(state)
        for seed in range(3):
            state, _ = jax.jit(step)(state, texts(seed))
        mapped = jax.tree.map(lambda leaf, number=number: leaf[number], population)
        assert_close(alone._replace(key=0), state._replace(key=0))
        assert_close(mapped._replace(key=0), state._replace(key=0))


def operations(program: Any) -> Iterator[tuple[str, set[tuple[int, ...]]]]:
    """Every operation of a program and of the programs it calls, and the shapes it takes and gives."""
    for equation in program.jaxpr.eqns:
        called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if called is not None:
            yield from operations(called)
        else:
            yield equation.primitive.name, {atom.aval.shape for atom in (*equation.invars, *equation.outvars)}


def on_tables(optimizer: optax.GradientTransformation) -> set[str]:
    state = start(TASK, optimizer)
    program = jax.make_jaxpr(make_train_step(TASK, optimizer, value_and_grad=value_and_grad_of(optimizer)))(
        state, texts()
    )
    return {name for name, shapes in operations(program) if (NUM_WORDS, FEATURES) in shapes}


def test_no_operation_but_reads_and_writes_of_rows_sees_a_table() -> None:
    assert on_tables(sparse_rows(optim.with_clipping(optax.adamw(0.1), 1.0))) == {"gather", "scatter", "scatter-add"}
    assert {"mul", "sqrt"} <= on_tables(optax.adamw(0.1))


def test_no_copy_of_a_table_in_a_scan() -> None:
    class Large(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            return nn.Dense(2)(Embed(100_000, 8, name="words")(ids).mean(axis=1))

    task, optimizer = tasks.classification(Large()), sparse_rows(optax.adam(0.1))
    step = make_train_step(task, optimizer, value_and_grad=value_and_grad_of(optimizer))
    train = jax.jit(
        lambda state: jax.lax.scan(lambda state, _: step(state, texts()), state, length=3), donate_argnums=0
    )
    memory = train.lower(jax.eval_shape(lambda: start(task, optimizer))).compile().memory_analysis()
    table_bytes = 4 * 8 * 100_000
    assert memory.temp_size_in_bytes < 0.1 * table_bytes
    assert memory.alias_size_in_bytes > 3 * table_bytes


# Bad input.


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (
            sparse_rows(optax.adam(0.1), tables="embeding"),
            "sparse_rows: no parameter is called 'embeding': did you mean",
        ),
        (
            sparse_rows(optax.adam(0.1), tables=("embedding", "tags/embedding")),
            "no parameter is called 'tags/embedding'",
        ),
        (
            sparse_rows(optim.with_ema(optax.adam(0.1), 0.9)),
            "AveragedState concerns every row in every update: put with_ema",
        ),
        (sparse_rows(optim.with_accumulation(optax.adam(0.1), 2)), "MultiStepsState concerns every row"),
        (sparse_rows(optax.lbfgs()), r"keeps \[10, 50, 3\] for the table 'words/embedding' \[50, 3\]"),
        (sparse_rows(optax.adafactor(0.1, min_dim_size_to_factor=2)), r"it does not work element by element"),
    ],
)
def test_an_optimizer_that_cannot_be_lazy_is_named(optimizer: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        start(TASK, optimizer)


def test_a_line_search_is_named() -> None:
    optimizer = sparse_rows(optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)))
    with pytest.raises(ConfigError, match="lazy: the optimizer looks for a step size itself"):
        trained(TASK, optimizer, 1)


def test_missing_parameters_are_named() -> None:
    optimizer = sparse_rows(optax.adam(0.1), tables="w")
    params = {"w": jnp.ones((2, 2))}
    with pytest.raises(ConfigError, match="lazy: update needs the parameters"):
        optimizer.update(params, optimizer.init(params))


# End to end.


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 16
    num_steps: int = 60
    seed: int = 0


def test_a_bag_of_words_is_learnt_and_recorded(tmp_path: Any) -> None:
    # A text is positive if most of its words are even; word 0 never comes.
    draws = np.random.default_rng(0)
    words = draws.integers(1, NUM_WORDS, (300, 7)).astype(np.int32)
    labels = (words % 2 == 0).sum(axis=1) > 3
    splits = jn.data.arrays(train=(words[:250], labels[:250].astype(int)), test=(words[250:], labels[250:].astype(int)))
    experiment = jn.Experiment(Config(), lambda _: splits, lambda _: TASK, lambda _: sparse_rows(optax.adam(0.1)))
    run = fit(experiment, tmp_path / "run", report_every=20, eval_every=60)
    # The batch holds an example often enough in 60 steps for every word to have its sign.
    assert run.evaluate()["accuracy"] > 0.9
    assert read(tmp_path / "run")


@pytest.mark.parametrize("has_aux", [True, False])
def test_value_and_grad_of_an_optimizer(has_aux: bool) -> None:
    def loss(params: Any, scale: float) -> Any:
        value = scale * jnp.sum(params["table"][IDS] ** 2) + params["factor"]
        return (value, {"scale": scale}) if has_aux else value

    params = {"table": jnp.arange(10.0).reshape(5, 2), "factor": jnp.float32(1.5)}
    plain = optax.sgd(0.1)
    assert optim.value_and_grad_of(plain) is jax.value_and_grad
    # A combinator around a lazy optimizer takes dense gradients.
    assert optim.value_and_grad_of(optim.with_ema(sparse_rows(plain, "table"), 0.9)) is jax.value_and_grad
    optimizer = sparse_rows(plain, "table")
    given, gradient = optim.value_and_grad_of(optimizer)(loss, has_aux=has_aux)(params, 2.0)
    expected, dense = jax.value_and_grad(loss, has_aux=has_aux)(params, 2.0)
    assert_close(given, expected)
    assert isinstance(gradient["table"], SparseRows)
    (updates, _), (expected, _) = (
        each.update(slope, each.init(params), params) for each, slope in ((optimizer, gradient), (plain, dense))
    )
    assert_close(optim.apply_updates(params, updates), optax.apply_updates(params, expected))


def test_rows_of_devices_that_share_a_batch_are_gathered() -> None:
    optimizer, params = sparse_rows(optax.adam(0.1), "table"), {"table": jnp.arange(10.0).reshape(5, 2)}

    def updated(ids: jax.Array, axis_name: str | None = None) -> Any:
        gradient = value_and_grad_of(optimizer, axis_name)(lambda params: jnp.mean(params["table"][ids] ** 2))(params)[
            1
        ]
        return optim.apply_updates(params, optimizer.update(gradient, optimizer.init(params), params)[0])

    ids, mesh = jnp.array([1, 3, 3, 0]), jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": jax.P("data"), "out_specs": jax.P()}
    shared = jax.shard_map(lambda ids: updated(ids, "data"), mesh=mesh, **specs, check_vma=False)
    assert_close(jax.jit(shared)(ids), updated(ids))
