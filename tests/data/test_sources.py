"""Generated batches, iterables, mixtures, data in order, padded sequences: functions of seed and step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.data import arrays, generated, in_order, iterable, mixture, pad_sequences
from jaxnn.types import ConfigError, DataError
from tests import tiny


def points(key, step):
    x = jax.random.uniform(key, (8, 3))
    return x, jnp.full(8, step % 3)


def test_generated_batches_are_functions_of_seed_and_step():
    splits = generated(points, test=2)
    rows = splits.train.order(7, np.arange(3), 8)
    batches = [splits.train.gather(splits.train.examples, row) for row in rows]
    again = splits.train.gather(splits.train.examples, splits.train.order(jnp.uint32(7), jnp.arange(1, 2), 8)[0])
    np.testing.assert_array_equal(batches[1].inputs, again.inputs)
    assert [int(batch.targets[0]) for batch in batches] == [0, 1, 2]
    assert not np.array_equal(batches[0].inputs, batches[1].inputs)
    assert splits.test.num_examples == 16
    for seed in (0, 1):  # no test batch is one of training
        for row in splits.train.order(seed, np.arange(3), 8):
            assert not np.isin(
                splits.train.gather(splits.train.examples, row).inputs, splits.test.examples.inputs
            ).any()
    assert repr(splits) == "Splits(generated: train generated, 16 test)"


def test_generated_data_train_alone_swept_and_on_devices():
    experiment = tiny.experiment(data=generated(points, test=2), num_steps=6, batch_size=8)
    run, split = tiny.fit(experiment, resident=False), tiny.fit(experiment, steps_per_call=3, strategy="data")
    with pytest.raises(DataError, match="make batches of 8 examples, and batch_size is 4"):
        tiny.fit(experiment.replace(batch_size=4))
    for name, leaf in run.state.params.items():
        np.testing.assert_allclose(leaf, split.state.params[name], rtol=1e-5)
    assert run.predict(np.ones((5, 3))).shape == (5, 3)
    swept = jn.sweep(experiment, jn.grid(seed=[experiment.config.seed, 5]), record=False, progress="none")
    assert swept.members[0].final["test_loss"] == pytest.approx(run.final["test_loss"], rel=1e-5)
    assert swept.members[1].final["test_loss"] != swept.members[0].final["test_loss"]


def count(seed, start):
    return (({"x": np.full(3, index + seed, np.float32)}, index % 3) for index in itertools.count(start))


def test_an_iterable_goes_on_from_any_position():
    source = iterable(count).train
    whole = list(itertools.islice(source.batches(5, 0, 4), 3))
    (later,) = itertools.islice(source.batches(5, 2, 4, slice(1, 3)), 1)
    np.testing.assert_array_equal(whole[2].inputs["x"][1:3], later.inputs["x"])
    assert whole[2].inputs["x"][:, 0].tolist() == [13.0, 14.0, 15.0, 16.0] and whole[0].targets.tolist() == [0, 1, 2, 0]
    assert source.read(np.array([0, 2])).inputs["x"][:, 0].tolist() == [0.0, 2.0]
    with pytest.raises(DataError, match="the iterable of the training data ended"):
        list(iterable(lambda seed, start: [(1.0, 0)][start:]).train.batches(0, 0, 1))
    with pytest.raises(DataError, match=r"the input of example 1 of train is float32 \(2,\) but .* example 0"):
        list(iterable(lambda seed, start: [np.ones(1), np.ones(2)]).train.batches(0, 0, 1))


def test_functions_of_other_arguments_are_named():
    with pytest.raises(ConfigError, match=r"needs a function make_batch\(key, step\), not <lambda>\(key\)"):
        generated(lambda key: points(key, 0))
    with pytest.raises(ConfigError, match=r"needs a function train\(seed, start\) .*, not a list"):
        iterable([(1.0, 0)])


def test_a_mixture_draws_parts_by_their_weights():
    few, many = arrays((np.arange(4), np.zeros(4, int))), arrays((np.arange(100, 200), np.ones(100, int)))
    mixed = mixture({"few": few, "many": many}, {"few": 3, "many": 1})
    order = mixed.train.order(0, np.arange(100), 40)
    inputs, labels = (np.asarray(part)[order] for part in mixed.train.examples)
    assert ((inputs < 100) == (labels == 0)).all()
    # 4,000 draws: three quarters with a deviation of 0.7 %, each of the few 750 times with one of 25.
    assert abs((labels == 0).mean() - 0.75) < 0.03
    assert abs(np.bincount(inputs[labels == 0]) - 750).max() < 120 and len(np.unique(inputs[labels == 1])) > 95
    traced = jax.jit(lambda seed: mixed.train.order(seed, jnp.arange(100), 40))(jnp.uint32(0))
    np.testing.assert_array_equal(order, traced)
    with pytest.raises(DataError, match="a mixture of few, many needs a weight above 0 for each"):
        mixture({"few": few, "many": many}, {"few": 1})
    with pytest.raises(DataError, match="the part mixed of a mixture is augmented, mixed or in order"):
        mixture({"mixed": mixed}, {"mixed": 1})
    with pytest.raises(DataError, match="each of the inputs of other is float32"):
        mixture({"few": few, "other": arrays((np.ones(3), [0, 1, 1]))}, {"few": 1, "other": 1})


def test_rows_read_stretches_in_order():
    source = in_order(arrays(np.arange(11))).train
    assert source.order(3, np.arange(4), 3).tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 3, 6]]


def test_padded_sequences_keep_their_lengths():
    padded, lengths = pad_sequences([np.ones((2, 2)), np.ones((0, 2)), np.ones((5, 2))], length=3, value=-1)
    assert padded.shape == (3, 3, 2) and lengths.tolist() == [2, 0, 3]
    assert (padded[0, 2] == -1).all() and (padded[1] == -1).all() and (padded[2] == 1).all()
    with pytest.raises(DataError, match="alike but in length"):
        pad_sequences([np.ones((2, 2)), np.ones(2)])
