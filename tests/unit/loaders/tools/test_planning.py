"""The plan: what an epoch asks of its store."""

import shlex
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from twinfeed.loaders import Feed, Index, open_index, pack, plan, shuffled
from twinfeed.loaders.command_line import main
from twinfeed.loaders.reading.prefetch.read_plan import LOCAL_GAP
from twinfeed.loaders.support import system
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
    assert 4 * 20 * RECORD <= blocks.memory_bytes - RECORD <= 6 * 20 * RECORD
    assert single.memory_bytes == pytest.approx(11 * RECORD, abs=1000), "a batch, and what is ahead"
    assert blocks.exact
    assert planned(index, order).memory_bytes == planned(index, order).read_bytes, "not more"


def test_plan_counts_reused_images_once(index: Index) -> None:
    reused = planned(index, ReuseSampler(COUNT, reuse=4, live=20, seed=0), readahead=0)
    assert reused.samples == 4 * COUNT
    assert reused.used_bytes == COUNT * RECORD
    assert COUNT * RECORD <= reused.read_bytes <= 1.2 * COUNT * RECORD
    assert 20 * RECORD <= reused.memory_bytes <= 36 * RECORD, "and those of a batch"


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
    """Read, used and memory are of the same bytes: headers and other members too."""
    samples = ({"jpg": bytes(9000), "txt": bytes(40)} for _ in range(COUNT))
    tar = pack(samples, tmp_path, container="tar")["data"]
    stored = int(tar.shards["bytes"].sum())
    batches = BatchSampler(shuffled(tar, seed=0), batch_size=10)
    found = plan(Feed(tar, batches, fields=["txt"]))
    assert found.used_bytes == 40 * COUNT
    assert 0.99 * stored < found.read_bytes <= stored
    assert found.memory_bytes <= found.read_bytes
    assert "times the 16 kB that batches use: a request also brings the headers, fields" in str(
        found
    )
    both = plan(Feed(tar, batches))
    assert "that batches use\n  memory     " in str(both)


def test_plan_advises_sections_where_ranks_share_blocks(index: Index) -> None:
    def rank(sections: int) -> Plan:
        order = ShardShuffleSampler(
            index.shard_lengths, seed=0, block=10, window=4, sections=sections
        )
        return plan(Feed(index, BatchSampler(order, batch_size=8).shard(0, 2)))

    together, apart = rank(1), rank(2)
    assert together.amplification == pytest.approx(2, rel=0.1)
    assert "set sections= of the sampler to a multiple of 2" in " ".join(together.findings)
    assert apart.amplification < 1.2
    assert (together.ok, apart.ok) == (False, True)


def test_plan_warns_of_small_random_reads_of_large_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = pack([{"x": bytes(900)} for _ in range(5000)], tmp_path, shards=2)["data"]
    order = RandomSampler(5000, seed=0)
    feed = Feed(small, BatchSampler(order, batch_size=10))
    assert not plan(feed, readahead=1).findings
    monkeypatch.setattr(system, "memory", lambda: 1 << 20)
    advice = plan(feed, readahead=1).findings
    assert "take shuffled(index, seed=…)" in advice[0]
    monkeypatch.setattr(system, "memory", lambda: 1 << 36)
    fsspec.filesystem("memory").put(f"{tmp_path}/", "/planned", recursive=True)
    small = open_index(small.path, root="memory://planned")
    feed = Feed(small, BatchSampler(order, batch_size=10))
    advice = plan(feed, readahead=1).findings
    assert "take shuffled(index, seed=…), which requests about 29 kB at" in advice[0]
    blocks = Feed(small, BatchSampler(shuffled(small, seed=0), batch_size=10))
    assert not plan(blocks).findings  # of so little data blocks cannot be long
    monkeypatch.setattr(planning, "_SMALL_DATA", 0)
    report = plan(blocks)
    assert report.requests <= 2 * -(-5000 // 32)  # each block, in two parts if a segment ends in it
    assert "take blocks of about 4 MB, and shards of many blocks" in report.findings[0]


@pytest.mark.parametrize("container", ["tfrecord", "tar"])
def test_plan_advises_to_repack_many_small_shards(
    tmp_path: Path, container: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks end with their shards, so `shuffled` is no help. The command that is named is."""
    samples = [{"x": bytes([n % 256]) * 5000} for n in range(300)]
    pack(samples, tmp_path / "old", container=container, shard_records=3)
    path = str(tmp_path / "old" / "data.index")
    assert main(["plan", path]) == 1
    uniform, blocks = capsys.readouterr().out.split("blocks of ")
    for one in (blocks, uniform):
        assert "shards     100, " in one
        assert "repack 100 shards to 1, twinfeed pack" in one
        assert "take shuffled" not in one
    command = shlex.split(uniform.partition("twinfeed ")[2].splitlines()[0])
    command[command.index("FOLDER")] = str(tmp_path / "new")
    assert main([*command, "-q"]) == 0
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "new" / "data.index")]) == 0
    after = capsys.readouterr().out
    assert "shards     1, " in after
    assert "repack" not in after


def test_plan_warns_when_memory_is_exceeded(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    order = ShardShuffleSampler(index.shard_lengths, seed=0, block=20, window=20)
    monkeypatch.setattr(system, "memory", lambda: 1 << 25)
    assert any("take a smaller window" in one for one in planned(index, order).findings)


def test_plan_of_no_fields_or_records_reads_nothing(index: Index) -> None:
    feed = Feed(index, ExactOnceBatchSampler(COUNT, batch_size=10), fields=())
    assert (plan(feed).requests, plan(feed).read_bytes) == (0, 0)
    none = Feed(index, ExactOnceBatchSampler(COUNT, batch_size=10, records=np.zeros(0, np.int64)))
    assert plan(none).samples == 0
    assert planned(index, SequentialSampler(COUNT)).requests <= 10
