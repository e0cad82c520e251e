"""One process of a JAX run: its shards are rows of the batches of `NumpyLoader`.

python jax_rows.py INDEX [PROCESSES RANK PORT]
"""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from twinfeed.loaders import Feed, NumpyLoader, open_index
from twinfeed.loaders.jax import JaxLoader
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, PKBatchSampler, RandomSampler

index_path, *cluster = sys.argv[1:]
if cluster:
    processes, rank, port = map(int, cluster)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)


def shardings() -> list[Sharding]:
    """The ways to lay out a batch on all devices of all processes."""
    every = np.array(jax.devices())
    row, grid = Mesh(every, "d"), Mesh(every.reshape(2, -1), ("d", "m"))
    cut = [NamedSharding(row, PartitionSpec("d")), NamedSharding(row, PartitionSpec())]
    return [*cut, *(NamedSharding(grid, PartitionSpec(spec)) for spec in ("d", ("d", "m")))]


def compare(feed: Feed, sharding: Sharding | None) -> None:
    """Compare every shard of every batch of two epochs with the rows of the plain batch."""
    loader, plain = JaxLoader(feed, sharding=sharding), NumpyLoader(feed)
    for _ in range(2):
        assert loader.state_dict() == plain.state_dict()
        for batch, expected in zip(loader, plain, strict=True):
            assert batch.keys() == expected.keys()
            low = feed.sampler.batch_size
            for name, rows in expected.items():
                value = batch[name]
                if not isinstance(value, jax.Array):
                    assert name in ("id", "word")
                    continue
                assert value.shape == rows.shape
                for shard in value.addressable_shards:
                    np.testing.assert_array_equal(shard.data, rows[shard.index])
                    low = min(low, shard.index[0].start or 0)
            own = [*expected["id"][low : low + len(batch["id"])]]
            assert [*batch["id"]] == own
            assert [*batch["word"]] == [*expected["word"][low : low + len(own)]]


def brighter(sample: dict) -> dict:
    """An augmentation that draws from the sample's seed."""
    return sample | {"x": sample["x"] + np.random.default_rng(sample["seed"]).random(3, np.float32)}


def mixed(batch: dict, seed: int) -> dict:
    """A function of the batch, which sees the rows of the process and the step's seed."""
    assert len(batch["x"]) == len(batch["id"])
    return {
        **batch,
        "x": batch["x"] + batch["x"][::-1] + np.float32(seed % 1000),
        "back": batch["id"][::-1],
    }


def compare_own(feed: Feed, sharding: Sharding | None) -> None:
    """Compare shards with what the function makes of this process's part of each batch."""
    loader = JaxLoader(feed, sharding=sharding)
    plain = NumpyLoader(loader.feed)  # the part of this process
    for _ in range(2):
        for batch, expected in zip(loader, plain, strict=True):
            assert [*batch["id"]] == [*expected["id"]]
            assert batch["word"] == expected["word"]
            first = min(shard.index[0].start or 0 for shard in batch["x"].addressable_shards)
            for name in ("x", "back"):
                for shard in batch[name].addressable_shards:
                    at = (shard.index[0].start or 0) - first
                    rows = expected[name][at : at + len(shard.data)]
                    np.testing.assert_array_equal(shard.data, rows)


index = open_index(index_path)
classes = np.arange(len(index)) % 10
samplers = [
    BatchSampler(RandomSampler(len(index), seed=0), batch_size=8),
    ExactOnceBatchSampler(len(index), batch_size=16, last_batch="pad"),
    PKBatchSampler(classes, p=8, k={0: 1, 2: 2}, seed=0, batches_per_epoch=4),
]
for sampler in samplers:
    for sharding in shardings() if len(jax.devices()) > 1 else [None]:
        compare(Feed(index, sampler, transform=brighter), sharding)
        compare_own(Feed(index, sampler, transform=brighter, batch_transform=mixed), sharding)


every = np.array(jax.devices())
if len(every) > 2:
    feed, row = Feed(index, samplers[0]), shardings()[0]
    grid = Mesh(every.reshape(2, -1), ("d", "m"))
    uneven = ExactOnceBatchSampler(len(index), batch_size=8 + 1)
    schedule = PKBatchSampler(classes, p=4, k={0: 2, 3: 1}, seed=0, batches_per_epoch=4)
    refused = [
        (feed, NamedSharding(grid, PartitionSpec(None, "d")), "first axis"),
        (feed, NamedSharding(grid, PartitionSpec("d", "m")), "first axis"),
        (Feed(index, uneven), row, "batches of other sizes"),
        (Feed(index, schedule), row, "batches of other sizes"),
        (Feed(index, samplers[0].shard(0, 2)), row, "whole feed"),
    ]
    if cluster:
        across = NamedSharding(Mesh(every.reshape(2, -1).T.reshape(-1), "d"), PartitionSpec("d"))
        long = Feed(index, samplers[0], decode=lambda s: {"long": [*s["word"]]}, collate="pad")
        refused += [
            (feed, across, "consecutive rows"),
            (feed, None, "sharding must be given"),
            (long, row, "'long' may have another length in each process"),
        ]
    for feed, sharding, word in refused:
        with pytest.raises(ValueError, match=word):
            next(iter(JaxLoader(feed, sharding=sharding)))
print("all rows are equal")
