"""Optimizers that update rows of tables, and wrong arguments of every optimizer, by one table."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn import optim, tasks
from jaxnn._equations import equations
from jaxnn.nn import Embed
from jaxnn.optim import SparseRows, schedules, sparse_rows, value_and_grad_of, value_and_row_gradient
from jaxnn.steps import init_train_state, make_train_step
from jaxnn.types import Batch
from tests import tiny
from tests.draws import assert_close

KEY = jax.random.key(0)
NUM_WORDS, FEATURES = 50, 3


def params_of(num_words: int = NUM_WORDS, features: int = FEATURES) -> Any:
    table, kernel = (np.sin(np.arange(size, dtype=np.float32)) for size in (num_words * features, features * 2))
    return {"words": {"embedding": table.reshape(-1, features)}, "dense": {"kernel": kernel.reshape(-1, 2)}}


def bag(num_words: int = NUM_WORDS, features: int = FEATURES) -> jn.Task:
    """A classifier of the mean of a text's embeddings."""

    def init(key: jax.Array, ids: jax.Array) -> Any:
        return jax.tree.map(jnp.asarray, params_of(num_words, features))

    def apply(params: Any, ids: jax.Array) -> jax.Array:
        table = params["words"]["embedding"]
        return table[ids].mean(axis=1) @ params["dense"]["kernel"]

    return tasks.classification((init, apply))


def texts(seed: int) -> Batch:
    """Four texts of five words above 0, some of them the same, and a fifth that is padding, of word 0."""
    draws = np.random.default_rng(seed)
    ids, labels = draws.integers(1, NUM_WORDS, (5, 5), np.int32), draws.integers(0, 2, 5, np.int32)
    ids[4] = 0
    return Batch(ids, labels, np.array([1, 1, 1, 1, 0], np.float32))


TASK, START = bag(), params_of()
TEXTS = [texts(seed) for seed in range(4)]
# Only texts of the first batch hold word 0; later only padding does.
TEXTS[0].inputs[0] = 0
SEEN = {int(word) for batch in TEXTS for word in batch.inputs[:4].ravel()}


def step_of(task: jn.Task, optimizer: Any) -> Any:
    return make_train_step(task, optimizer, value_and_grad=value_and_grad_of(optimizer))


def test_rows_that_count_move_as_under_adam_and_others_not_at_all():
    # Bias-corrected, the first step of Adam is -rate * sign(gradient). In the second, row 0 has no gradient and stays.
    # Row 1 is new at update 2: m = 0.1 g, v = 0.001 g², m / (1 - 0.9²) = 0.1 / 0.19 g = 0.526 g,
    # v / (1 - 0.999²) = 0.001 / 0.001999 g² = 0.50025 g²: a step of 0.526 / 0.7073 = 0.7441 rates.
    adam = optax.adam(0.1, eps=0.0)
    by_rows = [SparseRows(np.array(ids), np.full((len(ids), 2), -3.0, np.float32)) for ids in ([0], [1, 1])]
    all_rows = [np.float32([[1, 0], [0, 2], [3, 3]]), np.float32([[0, 3], [-1, 0], [2, 2]])]

    def updated(optimizer: optax.GradientTransformation, gradients: list[Any]) -> Any:
        params = {"words": jnp.ones((3, 2))}
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = optimizer.update({"words": gradient}, state, params)
            params = optim.apply_updates(params, updates)
        return params["words"], state[0].mu["words"], state[0].count

    rows, everywhere, plain = jax.jit(
        lambda: (
            updated(sparse_rows(adam, "words"), by_rows),
            updated(sparse_rows(optax.adam(0.1), "words"), all_rows),
            updated(optax.adam(0.1), all_rows),
        )
    )()
    np.testing.assert_allclose(rows[0], [[1.1, 1.1], [1.07441, 1.07441], [1.0, 1.0]], rtol=1e-5)
    # Row 0's moment has not decayed; row 1's is of the sum of both, -6.
    np.testing.assert_allclose(rows[1], [[-0.3, -0.3], [-0.6, -0.6], [0.0, 0.0]], rtol=1e-6)
    assert rows[2] == 2
    # A row of a dense gradient counts if any of its elements does; if every row counts, it is Adam.
    assert_close(everywhere, plain, atol=1e-7)


def test_rows_are_summed_by_id():
    # Twice 2, once 0 whose gradient is zero, 1 whose two cancel; 100 is beyond. More ids than 3 rows need no sort.
    ids = np.array([2, 0, 1, 100, 2, 1])
    rows = SparseRows(ids, np.array([[1.0], [0.0], [4.0], [np.nan], [2.0], [-4.0]], np.float32))
    none, optimizer = SparseRows(np.zeros(0, np.int32), np.zeros((0, 1), np.float32)), sparse_rows(optax.scale(1), "t")

    def summed(rows: SparseRows, num_rows: int) -> SparseRows:
        params = {"t": jnp.zeros((num_rows, 1))}
        return optimizer.update({"t": rows}, optimizer.init(params), params)[0]["t"]

    run = jax.jit(lambda rows, none: [*(summed(rows, num_rows) for num_rows in (100, 6, 3)), summed(none, 3)])
    *found, empty = run(rows, none)
    for num_rows, (ids, values) in zip((100, 6, 3), found, strict=True):
        assert len(set(ids.tolist())) == len(ids) <= num_rows
        assert [(int(i), float(v)) for i, v in zip(ids, values[:, 0], strict=True) if i < num_rows] == [(2, 3.0)]
        assert float(values.sum()) == 3.0
    assert (empty.ids.shape, empty.values.shape) == ((0,), (0, 1))


@jax.custom_vjp
def _fetched(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids]


_fetched.defvjp(
    lambda table, ids: (table[ids], (ids, len(table))),
    lambda kept, rows: (jnp.zeros((kept[1], rows.shape[-1])).at[kept[0]].add(rows), None),
)


def embedded(layer: type[nn.Module], **options: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda table, ids: layer(5, 2, **options).apply({"params": {"embedding": table}}, jnp.abs(ids))


def rest_of_a_loss(table: jax.Array, ids: jax.Array) -> jax.Array:
    rows = jax.lax.fori_loop(0, 2, lambda _, rows: rows * 1.5, table[ids])
    rows = jax.checkpoint(jnp.sin)(jax.lax.cond(rows[0, 0, 0] >= 0, jnp.cos, jnp.exp, rows))
    return rows * jax.random.normal(KEY, rows.shape)


IDS = np.array([[0, 3], [3, -1]])
LOOKUPS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "indexing": lambda table, ids: table[ids],
    "take": lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"),
    "a clipped id": lambda table, ids: table.at[ids + 3].get(mode="clip"),
    "no row beyond the table": lambda table, ids: table.at[ids + 3].get(mode="fill", fill_value=0.0),
    "vmap": jax.vmap(lambda table, ids: table[ids], in_axes=(None, 0)),
    "unsigned ids": lambda table, ids: table[jnp.abs(ids).astype(jnp.uint8)],
    "Flax's layer": embedded(nn.Embed),
    "our layer": embedded(Embed),
    "jit": lambda table, ids: jax.jit(lambda table: jax.jit(jnp.sin)(table[ids]))(table),
    "a custom derivative": lambda table, ids: _fetched(table, ids),
    "twice": lambda table, ids: table[ids] * table[ids[::-1]],
    "never": lambda table, ids: jnp.ones((2, 2, 2)),
    "loops, branches, checkpoints and noise after it": rest_of_a_loss,
    # bfloat16 keeps 8 bits, and JAX sums in it where the table was cast.
    "a cast": lambda table, ids: jnp.take(table.astype(jnp.bfloat16), ids, axis=0).astype(jnp.float32),
    "two casts": lambda table, ids: table.astype(jnp.bfloat16).astype(jnp.float32)[ids],
    "a layer's cast": lambda table, ids: embedded(Embed, dtype=jnp.bfloat16)(table, ids).astype(jnp.float32),
}


def test_gradient_by_rows_equals_the_gradient():
    def both(lookup: Callable[..., jax.Array], params: Any, scale: jax.Array) -> Any:
        def loss(params: Any, ids: jax.Array, scale: jax.Array) -> Any:
            rows = lookup(params["table"], ids)
            value = scale * jnp.sum(jnp.cos(rows * params["factor"]) * jnp.cos(jnp.arange(8.0).reshape(2, 2, 2)))
            return value, jnp.float32(7)

        by_rows = value_and_row_gradient(loss, lambda path: path[-1].key == "table", has_aux=True)
        given, gradient = by_rows(params, IDS, scale)
        ids, values = gradient["table"]
        assert values.dtype == jnp.float32 and ids.dtype == jnp.int32
        gradient["table"] = jnp.zeros((5, 2)).at[ids].add(values, mode="drop")
        return (given, gradient), jax.value_and_grad(loss, has_aux=True)(params, IDS, scale)

    params = {"table": np.arange(10, dtype=np.float32).reshape(5, 2) / 10, "factor": np.float32(1.5)}
    run = jax.jit(lambda *args: {name: both(lookup, *args) for name, lookup in LOOKUPS.items()})
    for name, ((given, found), (expected_given, expected)) in run(params, np.float32(2.0)).items():
        assert_close(given, expected_given, atol=1e-7, name=name)
        assert_close(found, expected, **({"tolerance": 0.02} if "cast" in name else {"atol": 1e-7}), name=name)


@pytest.mark.several_devices
def test_value_and_grad_of_an_optimizer_gathers_the_rows_of_devices_that_share_a_batch():
    plain, optimizer = optax.sgd(0.1), sparse_rows(optax.sgd(0.1), "table")
    assert value_and_grad_of(plain) is jax.value_and_grad
    # A combinator around it takes dense gradients.
    assert value_and_grad_of(optim.with_ema(optimizer, 0.9)) is jax.value_and_grad
    params = {"table": jnp.arange(10.0)[:, None]}

    def updated(ids: jax.Array, optimizer: Any = optimizer, axis_name: str | None = None) -> Any:
        loss = lambda params: jnp.mean(params["table"][ids] ** 2)  # noqa: E731
        value, gradient = value_and_grad_of(optimizer, axis_name)(loss)(params)
        assert isinstance(gradient["table"], SparseRows) == (optimizer is not plain)
        return value, optim.apply_updates(params, optimizer.update(gradient, optimizer.init(params), params)[0])

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": jax.P("data"), "out_specs": jax.P(), "check_vma": False}
    by_device = jax.shard_map(lambda ids: updated(ids, axis_name="data")[1], **specs)
    run = jax.jit(lambda ids: (by_device(ids), updated(ids), updated(ids, plain)))
    shared, alone, dense = run(np.array([1, 3, 3, 0]))
    assert_close(alone, dense, atol=1e-7)
    assert_close(shared, dense[1], atol=1e-7)


OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "injected adamw with a schedule": sparse_rows(
        optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1)
    ),
    "momentum and plateau": sparse_rows(
        optax.chain(optax.sgd(0.1, momentum=0.9, nesterov=True), optax.contrib.reduce_on_plateau(patience=2))
    ),
    "narrow moments": sparse_rows(optax.adam(0.1, mu_dtype=jnp.bfloat16)),
    "partition": sparse_rows(
        optax.partition(
            {"w": optax.adagrad(0.1), "d": optax.sgd(0.1)},
            lambda params: jax.tree.map_with_path(lambda path, _: path[0].key[0].lower(), params),
        )
    ),
    "averages and accumulation outside": optim.with_ema(optim.with_accumulation(sparse_rows(optax.adam(0.1)), 2), 0.9),
}


def train(optimizer: Any, start: Any, value_and_grad: Any) -> tuple[Any, Any]:
    """The state after training on all texts, and the table before and after each step."""
    step = make_train_step(TASK, optimizer, value_and_grad=value_and_grad)
    state = init_train_state(TASK, optimizer, KEY, TEXTS[0])
    state = state._replace(params=start, opt_state=optimizer.init(start))

    def scanned(state: Any, batch: Batch) -> Any:
        return step(state, batch)[0], state.params["words"]["embedding"]

    state, tables = jax.lax.scan(scanned, state, jax.tree.map(lambda *leaves: np.stack(leaves), *TEXTS))
    return state._replace(key=0), jnp.concatenate([tables, state.params["words"]["embedding"][None]])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("narrow moments", "partition"))) for name in OPTIMIZERS],
)
def test_updates_by_rows_equal_their_definition(name):
    # Given a dense gradient, the optimizer updates the tables and undoes it for rows without a gradient.
    optimizer = OPTIMIZERS[name]
    ways = value_and_grad_of(optimizer), jax.value_and_grad
    (state, tables), expected = jax.jit(lambda start: [train(optimizer, start, way) for way in ways])(START)
    assert_close((state, tables), expected, 1e-2 if name == "narrow moments" else 1e-4, atol=1e-6)
    # Rows without a gradient keep their bits; neither padding nor momentum moves one.
    assert set(np.flatnonzero((tables[0] != tables[-1]).any(axis=1))) == SEEN
    assert np.ptp(tables[2:, 0], axis=0).max() == 0


def test_vmap_and_clipping_give_the_same():
    optimizer = sparse_rows(optim.with_clipping(optax.adam(0.1), 0.1))
    starts = jax.tree.map(lambda leaf: np.stack([-leaf, leaf]), START)
    by_rows = jax.vmap(lambda start: train(optimizer, start, value_and_grad_of(optimizer)))
    run = jax.jit(lambda starts, start: (by_rows(starts), train(optimizer, start, jax.value_and_grad)))
    found, expected = run(starts, START)
    assert_close(jax.tree.map(lambda leaf: leaf[1], found), expected, 1e-4, atol=1e-6)


def on_tables(optimizer: optax.GradientTransformation) -> set[str]:
    """The operations of a step that take or give a table; not the calls of programs in which these are."""
    state = jax.eval_shape(lambda: init_train_state(TASK, optimizer, KEY, TEXTS[0]))
    program = jax.make_jaxpr(step_of(TASK, optimizer))(state, TEXTS[0])
    operations = [each for each, _ in equations(program) if not {"jaxpr", "call_jaxpr"} & each.params.keys()]
    seen = ((each.primitive.name, atom.aval.shape) for each in operations for atom in (*each.invars, *each.outvars))
    return {name for name, shape in seen if shape == (NUM_WORDS, FEATURES)}


def test_only_reads_and_writes_of_rows_see_a_table():
    assert on_tables(sparse_rows(optim.with_clipping(optax.adamw(0.1), 1.0))) == {"gather", "scatter", "scatter-add"}
    assert {"mul", "sqrt"} <= on_tables(optax.adamw(0.1))


def test_no_copy_of_a_table_in_a_scan():
    task, optimizer = bag(100_000, 8), sparse_rows(optax.adam(0.1))
    step, shapes = step_of(task, optimizer), jax.eval_shape(lambda: init_train_state(task, optimizer, KEY, TEXTS[0]))
    run = lambda state: jax.lax.scan(lambda state, _: step(state, TEXTS[0]), state, length=3)  # noqa: E731
    memory = jax.jit(run, donate_argnums=0).lower(shapes).compile().memory_analysis()
    table_bytes = 4 * 8 * 100_000
    assert memory.temp_size_in_bytes < 0.1 * table_bytes
    assert memory.alias_size_in_bytes > 3 * table_bytes


SGD, ADAM = optax.sgd(1.0), optax.adam(0.1)


def step_with(optimizer: Any) -> None:
    state = jn.steps.init_train_state(TASK, optimizer, KEY, TEXTS[0])
    step_of(TASK, optimizer)(state, TEXTS[0])
    optimizer.update(state.params, state.opt_state)


def use(read: Callable[[jax.Array], Any]) -> None:
    """Asks for a gradient by rows of a loss that reads a table otherwise."""

    def loss(params: Any) -> Any:
        return 0.0, read(params["layer"]["table"])

    optim.value_and_row_gradient(loss, lambda _: True, has_aux=True)({"layer": {"table": np.ones((5, 2), np.float32)}})


def scaled_step_without_a_scale() -> None:
    task, batch = jn.tasks.classification(tiny.MODEL), jn.Batch(*tiny.points(8), np.ones(8, np.float32))
    state = jn.steps.init_train_state(task, SGD, KEY, batch)
    jn.steps.make_scaled_train_step(task, SGD)(state, batch)


ROWS = "'layer/table' has no gradient by rows, .*"
TABLE: list[tuple[Callable[[], Any], str]] = [
    (lambda: optim.with_clipping(SGD, 0.0), "with_clipping: max_norm must be a number > 0"),
    (lambda: optim.with_accumulation(SGD, 0), "num_steps must be an integer >= 1, not 0"),
    (lambda: optim.with_ema(SGD, -0.1), "with_ema: decay must be a number in 0…1"),
    (lambda: optim.with_ema(SGD, 0.9).update(0.0, None), "needs the parameters"),
    (lambda: optim.with_norms(SGD).update(0.0, None), "with_norms: update needs the parameters"),
    (scaled_step_without_a_scale, "needs as optimizer jn.optim.with_loss_scale"),
    (lambda: schedules.linear(0.1, 0), "num_steps must be an integer >= 1, not 0"),
    (lambda: schedules.one_cycle(0.1, -3), "num_steps must be an integer >= 1, not -3"),
    (lambda: schedules.cosine(0.1, 5, warmup_steps=6), "warmup_steps=6 is more than num_steps"),
    (lambda: schedules.linear(0.1, 5, warmup_steps=-1), "warmup_steps must be an integer >= 0"),
    (lambda: schedules.cosine(0.1, 5, final_fraction=None), "final_fraction must be a number in 0…1, not None"),
    (lambda: schedules.inverse_time(float("nan"), 1.0), "inverse_time: peak must be a number >= 0, not nan"),
    (lambda: schedules.one_cycle(0.1, 5, warmup_fraction=2), "warmup_fraction must be"),
    (lambda: schedules.one_cycle(0.1, 5, initial_divisor=0.0), "initial_divisor must be"),
    (lambda: schedules.one_cycle(0.1, 5, final_divisor=0.0), "final_divisor must be"),
    (lambda: schedules.inverse_sqrt(0.1, warmup_steps=0), "warmup_steps must be an integer >="),
    (lambda: schedules.inverse_time(0.1, "1e-4"), "inverse_time: rate must be a number >= 0, not '1e-4'"),
    (lambda: use(lambda table: (table[IDS] @ table.T).sum()), f"{ROWS}'transpose'"),
    (lambda: use(lambda table: table[IDS, :1].sum()), f"{ROWS}'gather'"),
    (lambda: use(lambda table: jax.lax.map(lambda i: table[i].sum(), IDS).sum()), f"{ROWS}'scan'"),
    (lambda: use(jax.checkpoint(lambda table: table[IDS].sum())), f"{ROWS}'(remat2|checkpoint)'"),
    (lambda: use(lambda table: table), f"{ROWS}because the loss returns it"),
    (lambda: step_with(sparse_rows(ADAM, tables=("embedding", "embeding"))), "is called 'embeding': did you mean"),
    (lambda: step_with(sparse_rows(optim.with_ema(ADAM, 0.9))), "AveragedState .* put with_ema"),
    (lambda: step_with(sparse_rows(optim.with_accumulation(ADAM, 2))), "MultiStepsState"),
    (lambda: step_with(sparse_rows(optax.lbfgs())), r"keeps \[10, 50, 3\] for the table 'words/embedding' \[50, 3\]"),
    (lambda: step_with(sparse_rows(optax.adafactor(0.1, min_dim_size_to_factor=2))), "element by element"),
    (lambda: step_with(sparse_rows(optax.chain(SGD, optax.scale_by_backtracking_linesearch(5)))), "for a step size"),
    (lambda: step_with(sparse_rows(ADAM)), "update needs the parameters"),
]


@pytest.mark.parametrize(("call", "words"), TABLE, ids=[words for _, words in TABLE])
def test_wrong_arguments_and_uses_are_named(call, words):
    def run() -> None:
        call()

    with pytest.raises(jn.ConfigError, match=words):
        jax.eval_shape(run)
