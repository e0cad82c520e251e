"""`JaxLoader`: global arrays whose shards are rows of the batches of every other loader."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support import PROGRAMS
from support.cases import mark_long
from support.programs import QUIET, free_port

from twinfeed.loaders import Feed, Index, LoaderError, NumpyLoader, pack
from twinfeed.loaders.jax import JaxLoader
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, RandomSampler

ROWS = PROGRAMS / "jax_rows.py"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    records = [
        {"x": np.arange(3, dtype=np.float32) + n, "word": b"%d" % n, "n": np.int64(n)}
        for n in range(40)
    ]
    return pack(records, tmp_path_factory.mktemp("jax"))["data"]


def shuffled(**options) -> BatchSampler:
    return BatchSampler(RandomSampler(40, seed=0), batch_size=8, **options)


@pytest.mark.parametrize(("devices", "processes"), mark_long([(4, 2), (8, 1), (1, 2)], but_every=3))
def test_sharded_arrays_hold_rows_of_global_batch(
    index: Index, devices: int, processes: int
) -> None:
    port, flag = free_port(), f"--xla_force_host_platform_device_count={devices}"
    ranks = [[str(processes), str(rank), port] for rank in range(processes)]
    ranks = ranks if processes > 1 else [[]]
    started = [
        subprocess.Popen(
            [sys.executable, ROWS, index.path, *ranks[rank]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | QUIET | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"},
        )
        for rank in range(processes)
    ]
    for process in started:
        printed, errors = process.communicate(timeout=300)
        assert "all rows are equal" in printed, errors


def test_one_device_takes_smaller_last_batch(index: Index) -> None:
    feed = Feed(index, ExactOnceBatchSampler(40, batch_size=16))
    assert [len(batch["x"]) for batch in JaxLoader(feed)] == [16, 16, 8]


def test_loader_resumes_from_state_of_another_loader(index: Index) -> None:
    feed = Feed(index, shuffled())
    first, rest = JaxLoader(feed), NumpyLoader(feed)
    for _ in zip(range(3), first, strict=False):
        pass
    rest.load_state_dict(first.state_dict())
    again = JaxLoader(feed)
    again.load_state_dict(rest.state_dict())
    assert [[*b["id"]] for b in again] == [[*b["id"]] for b in rest]


def test_copies_of_loader_continue(index: Index) -> None:
    loader = JaxLoader(Feed(index, shuffled()))
    next(iter(loader))
    sharded = JaxLoader(loader.feed, sharding=loader.sharding)
    sharded.load_state_dict(loader.state_dict())
    copies = [pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader), copy.copy(sharded)]
    assert [[[*batch["id"]] for batch in one] for one in copies] == (
        [[ids.tolist() for ids in shuffled().batches(0, 1, 5)]] * 3
    )


def test_batches_kept_for_an_epoch_keep_their_values(index: Index) -> None:
    """JAX may keep the memory that numpy has: all batches of an epoch, looked at in the end."""
    feed = Feed(index, shuffled())
    kept = list(JaxLoader(feed))
    for batch, expected in zip(kept, NumpyLoader(feed), strict=True):
        assert np.asarray(batch["x"]).tolist() == expected["x"].tolist()


@pytest.mark.parametrize("value", [1 << 40, -(1 << 31) - 1])
def test_integers_beyond_32_bits_are_refused(tmp_path: Path, value: int) -> None:
    big = pack([{"n": np.int64(value)}], tmp_path)["data"]
    loader = JaxLoader(Feed(big, ExactOnceBatchSampler(1, batch_size=1)))
    with pytest.raises(LoaderError, match=f"'n' holds {value}"):
        next(iter(loader))
    with jax.enable_x64(True):
        assert int(next(iter(JaxLoader(loader.feed, prefetch=0)))["n"][0]) == value
