"""Batches on a GPU: each with its own number, so that reused memory is a wrong number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinfeed.loaders import Feed, Index, pack
from twinfeed.loaders.jax import JaxLoader
from twinfeed.samplers import BatchSampler, SequentialSampler

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU")

STEPS, ROW = 60, 1 << 18  # a batch of 8 rows is 8 MiB


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    samples = ({"number": np.int32(number)} for number in range(8 * STEPS))
    return pack(samples, tmp_path_factory.mktemp("numbers"))["data"]


def stamped(sample: dict[str, Any]) -> dict[str, Any]:
    """Fill a row with the number of its batch."""
    return {"row": np.full(ROW, sample["number"] // 8, np.float32)}


@jax.jit
def slow_count_of_others(row: jax.Array, step: jax.Array) -> jax.Array:
    """Count the numbers that are not `step`, after some milliseconds of computation."""
    busy = jax.lax.fori_loop(0, 40, lambda _, x: jnp.tanh(x @ x), jnp.ones((2048, 2048)))
    return jnp.sum(row != step + 0 * busy[0, 0])


@pytest.mark.parametrize("way", [{"prefetch": 0}, {"prefetch": 1}, {"prefetch": 3, "threads": 4}])
def test_slow_step_reads_its_own_batch(index: Index, way: dict[str, Any]) -> None:
    """Batches are dropped at once, so that their memory is wanted while the step still reads it."""
    sampler = BatchSampler(SequentialSampler(len(index)), batch_size=8)
    wrong = jnp.zeros((), jnp.int32)
    with JaxLoader(Feed(index, sampler, transform=stamped), **way) as batches:
        for step, batch in enumerate(batches):
            assert batch["row"].devices() == {jax.devices()[0]}
            wrong = wrong + slow_count_of_others(batch["row"], jnp.float32(step))
            del batch
    assert int(wrong) == 0
