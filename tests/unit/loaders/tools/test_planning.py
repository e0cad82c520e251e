"""The plan: what an epoch asks of its store."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinfeed.loaders import Feed, Index, build_index, pack, plan, shuffled
from twinfeed.loaders.reading.prefetch.read_plan import LOCAL_GAP
from twinfeed.loaders.tools import planning
from twinfeed.loaders.tools.planning import Plan
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    RandomSampler,
    ReuseSampler,
    Sampler,
    SequentialSampler,
    ShardShuffleSampler,
)

RECORD = LOCAL_GAP + 1000
COUNT = 400


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Records that are never merged with any but a neighbour."""
    samples = ({"x": bytes(RECORD)} for _ in range(COUNT))
    return pack(samples, tmp_path_factory.mktemp("plan"), shard_records=100)["data"]


def planned(index: Index, order: Sampler, **options: Any) -> Plan:
    size = options.pop("batch_size", 10)
    return plan(Feed(index, BatchSampler(order, batch_size=size)), **options)


def test_plan_counts_few_requests_for_blocks_and_many_for_random(index: Index) -> None:
    order = ShardShuffleSampler(index.shard_lengths, seed=0, block=20, window=4)
    blocks = planned(index, order, readahead=RECORD)
    single = planned(index, RandomSampler(COUNT, seed=0), readahead=RECORD)
    assert blocks.batches == single.batches == 40
    assert blocks.samples == COUNT
    assert blocks.used_bytes == COUNT * RECORD
    assert 10 <= blocks.requests <= 20 < 250 < single.requests <= COUNT
    assert 1 <= blocks.amplification < 1.01
    assert 1 <= single.amplification < 1.3
    assert blocks.exact


def test_plan_counts_reused_images_once(index: Index) -> None:
    reused = planned(index, ReuseSampler(COUNT, reuse=4, live=20, seed=0), readahead=0)
    assert reused.samples == 4 * COUNT
    assert reused.used_bytes == COUNT * RECORD
    assert COUNT * RECORD <= reused.read_bytes <= 1.2 * COUNT * RECORD


def test_plan_estimates_a_long_epoch_from_a_part(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ShardShuffleSampler(index.shard_lengths, seed=0, block=4, window=4)
    feed = Feed(index, BatchSampler(order, batch_size=10))
    whole = plan(feed, readahead=1)
    monkeypatch.setattr(planning, "_MAX_SAMPLES", COUNT // 2)
    part = plan(feed, readahead=1)
    assert not part.exact
    assert part.samples == COUNT
    assert part.read_bytes == pytest.approx(whole.read_bytes, rel=0.2)
    assert part.requests == pytest.approx(whole.requests, rel=0.2)
    assert "about " in str(part)


def test_plan_counts_bytes_between_the_fields_of_a_tar(tmp_path: Path) -> None:
    """What is read has the bytes between: headers and other members too."""
    samples = ({"jpg": bytes(9000), "txt": bytes(40)} for _ in range(COUNT))
    tar = pack(samples, tmp_path, container="tar")["data"]
    stored = int(tar.shards["bytes"].sum())
    batches = BatchSampler(shuffled(tar, seed=0), batch_size=10)
    found = plan(Feed(tar, batches, fields=["txt"]))
    assert found.used_bytes == 40 * COUNT
    assert 0.99 * stored < found.read_bytes <= stored
    assert str(found).endswith("times the 16 kB that batches use")


def test_plan_shows_that_ranks_share_blocks_without_sections(index: Index) -> None:
    def rank(sections: int) -> Plan:
        order = ShardShuffleSampler(
            index.shard_lengths, seed=0, block=10, window=4, sections=sections
        )
        return plan(Feed(index, BatchSampler(order, batch_size=8).shard(0, 2)))

    assert rank(1).amplification == pytest.approx(2, rel=0.1)
    assert rank(2).amplification < 1.2


@pytest.mark.parametrize("container", ["tfrecord", "tar"])
def test_plan_shows_small_shards_and_requests(tmp_path: Path, container: Any) -> None:
    """Blocks end with their shards. Packed again as docs/shuffling.md says, they are long."""
    samples = [{"x": bytes([n % 256]) * 5000} for n in range(300)]
    old = pack(samples, tmp_path / "old", container=container, shard_records=3)["data"]
    new = pack(old, tmp_path / "new", container=container)["data"]
    small, large = (
        planned(index, ShardShuffleSampler(index.shard_lengths, block=60, window=4, seed=0))
        for index in (old, new)
    )
    assert (small.shards, large.shards) == (100, 1)
    assert small.shard_bytes < 20_000 < large.shard_bytes
    assert small.requests >= 100 > 10 > large.requests


def test_plan_of_loose_files_has_no_shards(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.png").write_bytes(bytes(100))
    found = planned(build_index(tmp_path, tmp_path / "i"), SequentialSampler(3), batch_size=3)
    assert (found.shards, found.shard_bytes) == (0, 0)
    assert "shards" not in str(found)


def test_plan_of_no_fields_or_records_reads_nothing(index: Index) -> None:
    feed = Feed(index, ExactOnceBatchSampler(COUNT, batch_size=10), fields=())
    assert (plan(feed).requests, plan(feed).read_bytes) == (0, 0)
    none = Feed(index, ExactOnceBatchSampler(COUNT, batch_size=10, records=np.zeros(0, np.int64)))
    assert plan(none).samples == 0
    assert planned(index, SequentialSampler(COUNT)).requests <= 10
