"""Sparse rows: rows that count are updated as by hand and by definition, all others are never touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn import optim, tasks
from jaxnn.nn import Embed
from jaxnn.optim import SparseRows, sparse_rows, value_and_grad_of, value_and_row_gradient
from jaxnn.optim._row_gradients import summed
from jaxnn.steps import init_train_state, make_train_step
from jaxnn.types import Batch, ConfigError, TrainState
from tests import tiny

KEY = jax.random.key(0)
NUM_WORDS, FEATURES = 50, 3


class Bag(nn.Module):
    """The mean of a text's embeddings, classified."""

    layer: type[nn.Embed] = Embed
    options: Any = ()

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        return nn.Dense(2)(self.layer(NUM_WORDS, FEATURES, name="words", **dict(self.options))(ids).mean(axis=1))


TASK = tasks.classification(Bag())


def texts(seed: int = 0) -> Batch:
    """Four texts of five words above 0, some of them the same, and a fifth that is padding."""
    draws = np.random.default_rng(seed)
    ids, labels = draws.integers(1, NUM_WORDS, (5, 5)), draws.integers(0, 2, 5)
    return Batch(ids.astype(np.int32), labels.astype(np.int32), np.array([1, 1, 1, 1, 0], np.float32))


TEXTS = [texts(seed) for seed in range(4)]
SEEN = {int(word) for batch in TEXTS for word in batch.inputs[:4].ravel()}


def table_of(state: TrainState) -> np.ndarray:
    return np.asarray(state.params["words"]["embedding"])


def step_of(task: jn.Task, optimizer: Any) -> Any:
    return make_train_step(task, optimizer, value_and_grad=value_and_grad_of(optimizer))


def trained(optimizer: Any, task: jn.Task = TASK, batches: Any = TEXTS) -> tuple[TrainState, TrainState]:
    """The states before and after training on ``batches``, without keys."""
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)

    @jax.jit
    def train(batches: Batch) -> Any:
        before = init_train_state(task, optimizer, KEY, TEXTS[0])
        return before, jax.lax.scan(step_of(task, optimizer), before, batches)[0]

    before, after = train(stacked)
    return before._replace(key=0), after._replace(key=0)  # type: ignore[arg-type]


def assert_close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


# The update, by hand.


def test_rows_that_count_move_as_under_adam_and_others_not_at_all() -> None:
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


def test_no_lookup_gives_no_row() -> None:
    ids, values = summed(SparseRows(jnp.zeros(0, jnp.int32), jnp.zeros((0, 2))), 3)
    assert (ids.shape, values.shape) == ((0,), (0, 2))


# The gradient by rows.


def dense_and_by_rows(loss: Callable[..., Any], params: Any, *args: Any) -> tuple[Any, Any]:
    """The gradient by rows, written into arrays, and that of JAX."""
    is_table = lambda path: path[-1].key == "table"  # noqa: E731
    is_rows = lambda node: isinstance(node, SparseRows)  # noqa: E731
    aux = lambda params, *args: (loss(params, *args), jnp.float32(7))  # noqa: E731
    (value, extra), gradient = jax.jit(value_and_row_gradient(aux, is_table, has_aux=True))(params, *args)
    found = jax.tree.map(
        lambda rows, param: jnp.zeros_like(param).at[rows.ids].add(rows.values, mode="drop") if is_rows(rows) else rows,
        gradient,
        params,
        is_leaf=is_rows,
    )
    expected_value, expected = jax.jit(jax.value_and_grad(loss))(params, *args)
    assert_close((value, extra), (expected_value, jnp.float32(7)))
    return found, expected


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
def test_gradient_by_rows_equals_the_gradient(lookup: str) -> None:
    def loss(params: Any, ids: jax.Array, scale: jax.Array) -> jax.Array:
        rows = LOOKUPS[lookup](params["table"], ids)
        return scale * jnp.sum(jnp.cos(rows * params["factor"]) * jnp.cos(jnp.arange(8.0).reshape(2, 2, 2)))

    params = {"table": jnp.arange(10.0).reshape(5, 2) / 10, "factor": jnp.float32(1.5)}
    # bfloat16 keeps 8 bits, and JAX sums in it where the table was cast.
    tolerance = {"rtol": 0.02, "atol": 0.02} if lookup == "a cast" else {}
    assert_close(*dense_and_by_rows(loss, params, IDS, jnp.float32(2.0)), **tolerance)


def test_rest_of_the_loss_is_unchanged() -> None:
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
def test_other_uses_of_a_table_are_named(misuse: str) -> None:
    use, words = MISUSES[misuse]
    loss = lambda params: (use(params["layer"]["table"]), None)  # noqa: E731
    with pytest.raises(ConfigError, match=f"'layer/table' has no gradient by rows, .* {words}"):
        value_and_row_gradient(loss, lambda path: True, has_aux=True)({"layer": {"table": jnp.ones((5, 2))}})


def test_a_table_that_the_loss_returns_is_named() -> None:
    with pytest.raises(ConfigError, match="'table' has no gradient by rows, because the loss"):
        value_and_row_gradient(lambda params: (params["table"][IDS].sum(), params), lambda path: True, has_aux=True)(
            {"table": jnp.ones((5, 2))}
        )


# Training steps.

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "narrow moments": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "clipped": lambda: optim.with_clipping(optax.adam(0.1), 0.1),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=2)),
    "partition": lambda: optax.partition(
        {"w": optax.adagrad(0.1), "d": optax.sgd(0.1)},
        lambda params: jax.tree.map_with_path(lambda path, _: path[0].key[0].lower(), params),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_by_rows_equal_their_definition(name: str) -> None:
    # Given a dense gradient, the optimizer updates the tables and undoes it for rows without a gradient.
    optimizer = sparse_rows(OPTIMIZERS[name]())
    dense_only = optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
    by_rows, by_definition = (trained(each)[1] for each in (optimizer, dense_only))
    assert_close(by_rows, by_definition, rtol=1e-2 if name == "narrow moments" else 1e-4, atol=1e-6)


def test_rows_without_a_gradient_keep_their_bits_and_padding_moves_none() -> None:
    before, after = trained(sparse_rows(optax.adamw(0.1, weight_decay=0.1)))
    # Padding has id 0, which no text of these holds.
    assert 0 not in SEEN
    moved = (table_of(before) != table_of(after)).any(axis=1)
    assert set(np.flatnonzero(moved)) == SEEN
    moments = after.opt_state[0].mu["words"]["embedding"]
    assert set(np.flatnonzero(np.asarray(moments).any(axis=1))) == SEEN


def test_momentum_does_not_move_a_row_that_is_padding() -> None:
    # Word 0 is learnt in the first step; in the second only padding has its id.
    optimizer, zeros = sparse_rows(optax.sgd(0.1, momentum=0.9)), TEXTS[0]._replace(inputs=np.zeros((5, 5), np.int32))
    (start, once), (_, twice) = (trained(optimizer, batches=[zeros, *TEXTS[:more]]) for more in (0, 1))
    assert np.array_equal(table_of(twice)[0], table_of(once)[0])
    assert not np.array_equal(table_of(once)[0], table_of(start)[0])
    assert not np.array_equal(table_of(twice), table_of(once))


def test_equals_adam_if_every_row_counts() -> None:
    ids = np.arange(NUM_WORDS, dtype=np.int32).reshape(5, 10)
    batches = [Batch(ids, TEXTS[0].targets, np.ones(5, np.float32))] * 5
    dense, by_rows = (trained(each, batches=batches)[1] for each in (optax.adam(0.1), sparse_rows(optax.adam(0.1))))
    assert_close(by_rows, dense, rtol=1e-4, atol=1e-6)


def pair() -> jn.Task:
    def init(key: jax.Array, ids: jax.Array) -> Any:
        return {"words": {"embedding": jax.random.normal(key, (NUM_WORDS, 2))}}

    model = init, lambda params, ids: params["words"]["embedding"][ids].mean(axis=1)
    return tasks.classification(model, policy=jn.nn.Policy(compute="bfloat16"))


@pytest.mark.parametrize(
    ("task", "atol"),
    [
        (tasks.classification(Bag(nn.Embed)), 1e-6),
        # Sums in bfloat16 are JAX's own.
        (tasks.classification(Bag(options=(("dtype", jnp.bfloat16),))), 1e-2),
        (pair(), 1e-2),
    ],
)
def test_any_lookup_in_a_model_may_be_sparse(task: jn.Task, atol: float) -> None:
    # Plain gradient descent moves no row without a gradient.
    by_rows, dense = (trained(each, task, TEXTS[:2])[1] for each in (sparse_rows(optax.sgd(0.1)), optax.sgd(0.1)))
    assert table_of(by_rows).dtype == np.float32
    assert_close(by_rows.params, dense.params, atol=atol)


@pytest.mark.parametrize("around", [lambda inner: optim.with_ema(inner, 0.9), lambda x: optim.with_accumulation(x, 2)])
def test_averages_and_accumulation_go_outside(around: Callable) -> None:
    before, after = trained(around(sparse_rows(optax.adam(0.1))))
    moved = (table_of(before) != table_of(after)).any(axis=1)
    assert set(np.flatnonzero(moved)) == SEEN


def test_loop_and_vmap_give_the_same() -> None:
    optimizer = sparse_rows(optim.with_clipping(optax.adam(0.1), 1.0))
    step = jax.jit(step_of(TASK, optimizer))
    batches = jax.tree.map(lambda *leaves: np.stack(leaves), *TEXTS)

    def train(key: jax.Array) -> Any:
        before = init_train_state(TASK, optimizer, key, TEXTS[0])
        return before, jax.lax.scan(step_of(TASK, optimizer), before, batches)[0]

    starts, ends = jax.jit(jax.vmap(train))(jax.random.split(KEY))
    state = jax.tree.map(lambda leaf: leaf[1], starts)
    for batch in TEXTS:
        state, _ = step(state, batch)
    assert_close(jax.tree.map(lambda leaf: leaf[1], ends)._replace(key=0), state._replace(key=0))


def operations(program: Any) -> Iterator[tuple[str, set[tuple[int, ...]]]]:
    """Every operation of a program and of the programs it calls, and the shapes it takes and gives."""
    for equation in program.jaxpr.eqns:
        called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if called is not None:
            yield from operations(called)
        else:
            yield equation.primitive.name, {atom.aval.shape for atom in (*equation.invars, *equation.outvars)}


def on_tables(optimizer: optax.GradientTransformation) -> set[str]:
    state = jax.eval_shape(lambda: init_train_state(TASK, optimizer, KEY, TEXTS[0]))
    program = jax.make_jaxpr(step_of(TASK, optimizer))(state, TEXTS[0])
    return {name for name, shapes in operations(program) if (NUM_WORDS, FEATURES) in shapes}


def test_only_reads_and_writes_of_rows_see_a_table() -> None:
    assert on_tables(sparse_rows(optim.with_clipping(optax.adamw(0.1), 1.0))) == {"gather", "scatter", "scatter-add"}
    assert {"mul", "sqrt"} <= on_tables(optax.adamw(0.1))


def test_no_copy_of_a_table_in_a_scan() -> None:
    class Large(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            return nn.Dense(2)(Embed(100_000, 8, name="words")(ids).mean(axis=1))

    task, optimizer = tasks.classification(Large()), sparse_rows(optax.adam(0.1))
    step = step_of(task, optimizer)
    train = jax.jit(
        lambda state: jax.lax.scan(lambda state, _: step(state, TEXTS[0]), state, length=3), donate_argnums=0
    )
    memory = (
        train.lower(jax.eval_shape(lambda: init_train_state(task, optimizer, KEY, TEXTS[0])))
        .compile()
        .memory_analysis()
    )
    table_bytes = 4 * 8 * 100_000
    assert memory.temp_size_in_bytes < 0.1 * table_bytes
    assert memory.alias_size_in_bytes > 3 * table_bytes


# Bad input.


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (sparse_rows(optax.adam(0.1), tables="embeding"), "no parameter is called 'embeding': did you mean"),
        (sparse_rows(optax.adam(0.1), tables=("embedding", "tags/embedding")), "called 'tags/embedding'"),
        (sparse_rows(optim.with_ema(optax.adam(0.1), 0.9)), "AveragedState .* put with_ema"),
        (sparse_rows(optim.with_accumulation(optax.adam(0.1), 2)), "MultiStepsState"),
        (sparse_rows(optax.lbfgs()), r"keeps \[10, 50, 3\] for the table 'words/embedding' \[50, 3\]"),
        (sparse_rows(optax.adafactor(0.1, min_dim_size_to_factor=2)), "element by element"),
        (
            sparse_rows(optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))),
            "searches for a step size",
        ),
        (sparse_rows(optax.adam(0.1)), "update needs the parameters"),
    ],
)
def test_wrong_optimizers_and_uses_are_named(optimizer: Any, words: str) -> None:
    def train() -> Any:
        state = init_train_state(TASK, optimizer, KEY, TEXTS[0])
        step_of(TASK, optimizer)(state, TEXTS[0])
        return optimizer.update(state.params, state.opt_state)

    with pytest.raises(ConfigError, match=words):
        jax.eval_shape(train)


# End to end.


def test_bag_of_words_is_learnt_and_recorded(tmp_path: Any) -> None:
    # A text is positive if most of its words are even; word 0 never comes.
    words = np.random.default_rng(0).integers(1, NUM_WORDS, (300, 7)).astype(np.int32)
    labels = ((words % 2 == 0).sum(axis=1) > 3).astype(int)
    splits = jn.data.arrays(train=(words[:250], labels[:250]), test=(words[250:], labels[250:]))
    optimizer = lambda config: sparse_rows(optax.adam(0.1))  # noqa: E731
    example = tiny.experiment(data=splits, task=lambda config: TASK, optimizer=optimizer, batch_size=16, num_steps=60)
    run = tiny.fit(example, tmp_path / "run", report_every=20, eval_every=60)
    # In 60 steps every word comes often enough to learn its sign.
    assert run.evaluate()["accuracy"] > 0.9
    assert tiny.read(tmp_path / "run")


@pytest.mark.parametrize("has_aux", [True, False])
def test_value_and_grad_of_an_optimizer(has_aux: bool) -> None:
    def loss(params: Any, scale: float) -> Any:
        value = scale * jnp.sum(params["table"][IDS] ** 2) + params["factor"]
        return (value, {"scale": scale}) if has_aux else value

    params = {"table": jnp.arange(10.0).reshape(5, 2), "factor": jnp.float32(1.5)}
    plain = optax.sgd(0.1)
    assert optim.value_and_grad_of(plain) is jax.value_and_grad
    # A combinator around it takes dense gradients.
    assert optim.value_and_grad_of(optim.with_ema(sparse_rows(plain, "table"), 0.9)) is jax.value_and_grad
    optimizer = sparse_rows(plain, "table")
    given, gradient = jax.jit(optim.value_and_grad_of(optimizer)(loss, has_aux=has_aux))(params, 2.0)
    expected, dense = jax.jit(jax.value_and_grad(loss, has_aux=has_aux))(params, 2.0)
    assert_close(given, expected)
    assert isinstance(gradient["table"], SparseRows)
    (updates, _), (expected, _) = (
        each.update(slope, each.init(params), params) for each, slope in ((optimizer, gradient), (plain, dense))
    )
    assert_close(optim.apply_updates(params, updates), optax.apply_updates(params, expected))


def test_rows_of_devices_that_share_a_batch_are_gathered() -> None:
    optimizer, params = sparse_rows(optax.sgd(0.1), "table"), {"table": jnp.arange(10.0).reshape(5, 2)}

    def updated(ids: jax.Array, axis_name: str | None = None) -> Any:
        gradient = value_and_grad_of(optimizer, axis_name)(lambda params: jnp.mean(params["table"][ids] ** 2))(params)[
            1
        ]
        return optim.apply_updates(params, optimizer.update(gradient, optimizer.init(params), params)[0])

    ids, mesh = jnp.array([1, 3, 3, 0]), jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": jax.P("data"), "out_specs": jax.P()}
    shared = jax.shard_map(lambda ids: updated(ids, "data"), mesh=mesh, **specs, check_vma=False)
    assert_close(jax.jit(shared)(ids), jax.jit(updated)(ids))
