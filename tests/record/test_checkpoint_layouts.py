"""What was saved under one layout is read back under any other: bit for bit, and lying as that one lies."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.engine import GroupSpec, Programs, make_feed
from jaxnn.models import GPT
from jaxnn.parallel import make_layout
from jaxnn.record import Checkpoints
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

LAYOUTS = {
    "one device": {},
    "data on 2": {"strategy": "data", "devices": 2},
    "data on 4": {"strategy": "data", "devices": 4},
    "fsdp on 2": {"strategy": "fsdp", "devices": 2},
    "fsdp on 4": {"strategy": "fsdp", "devices": 4},
    "pmap on 4": {"strategy": "pmap", "devices": 4},
    "a model axis": {"mesh": "data=2,model=2"},
    "both": {"mesh": "data=2,model=2", "strategy": "fsdp"},
}
TOKENS = np.random.default_rng(0).integers(0, 7, (16, 9)).astype(np.int32)
MODEL = GPT(7, num_layers=1, features=16, num_heads=2, max_length=8, dropout=0.25)
GPT_EXPERIMENT = tiny.experiment(
    data=jn.data.arrays(train=(TOKENS[:, :-1], TOKENS[:, 1:])),
    task=lambda config: jn.tasks.next_token(MODEL),
    optimizer=lambda config: jn.optim.with_ema(optax.adam(1e-3), 0.9),
)


@functools.cache
def fresh(name: str) -> jn.TrainState:
    """The state before the first step as it lies under a layout."""
    layout = make_layout(**LAYOUTS[name])
    splits = GPT_EXPERIMENT.data(GPT_EXPERIMENT.config)
    feed = make_feed(splits, 0, 8, layout=layout)
    spec = GroupSpec(GPT_EXPERIMENT, lambda values: GPT_EXPERIMENT, False, splits.train, feed, layout)
    return Programs(spec, splits, eval_batch_size=8).init()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, one of each layout: the place in ``LAYOUTS`` is the step."""
    folder = tmp_path_factory.mktemp("layouts")
    checkpoints = Checkpoints(folder, keep_last=len(LAYOUTS))
    for step, name in enumerate(LAYOUTS):
        checkpoints.save(step, fresh(name), {})
    checkpoints.close()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [*itertools.product(LAYOUTS, repeat=2)])
def test_every_layout_reads_what_every_other_saved(saved: Path, before: str, after: str) -> None:
    like = fresh(after)
    blank = jax.tree.map(lambda leaf: leaf if _is_key(leaf) else leaf * 0, like)
    found = jn.load_checkpoint(saved / str(list(LAYOUTS).index(before)), blank)
    for got, wanted, place in zip(*map(jax.tree.leaves, (found, fresh(before), like)), strict=True):
        assert got.sharding.is_equivalent_to(place.sharding, got.ndim)
        got, wanted = (jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in (got, wanted))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
