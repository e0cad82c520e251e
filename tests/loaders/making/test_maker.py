"""Any batch in any order, as its plain definition says."""

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import noted
from sampler_cases import FED

from twinfeed.loaders import DataCorruptionError, Feed, Index, pack
from twinfeed.loaders.making.maker import Maker
from twinfeed.samplers import BatchSampler, BatchStream, RandomSampler, ReuseSampler

HELD = [case for case in FED if case[1]()._live is None]


def words(folder: Path, records: int) -> Index:
    samples = ({"word": b"x" * (n % 100), "label": n % 4} for n in range(records))
    return pack(samples, folder)["data"]


def size(sample: dict[str, Any]) -> dict[str, Any]:
    return {"size": np.int32(len(sample["word"]))}


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    return {"noisy": np.float64(sample["size"] + sample["view"] + sample["seed"] / 2**64)}


@pytest.mark.parametrize(("_", "make"), HELD, ids=[case[0] for case in HELD])
def test_a_maker_gives_what_the_definition_says(
    _: str, make: Callable[[], BatchStream], tmp_path: Path
) -> None:
    """Backwards, from several threads, and from a copy that was sent."""
    sampler = make()
    feed = Feed(words(tmp_path, sampler.num_records), sampler, decode=size, transform=noisy)
    places = [(epoch, step) for epoch in (1, 0) for step in (len(feed) - 1, len(feed) // 2, 0)]
    expected = [noted(feed.batch(*place)) for place in places]
    with Maker(feed) as maker, ThreadPoolExecutor(3) as pool:
        assert [noted(batch) for batch in pool.map(maker.__getitem__, places)] == expected
        with pickle.loads(pickle.dumps(maker)) as sent:
            assert [noted(sent[place]) for place in places] == expected
            assert len(sent) == len(feed)


def test_a_maker_checks_what_it_is_told_to_check(tmp_path: Path) -> None:
    index = words(tmp_path, 20)
    path = Path(index.root, index.shard_paths[0])
    data = bytearray(path.read_bytes())
    data[data.rindex(b"x")] ^= 1
    path.write_bytes(data)
    sampler = BatchSampler(RandomSampler(20, seed=0), batch_size=20)
    with Maker(Feed(index, sampler)) as maker, pytest.raises(DataCorruptionError):
        maker[0, 0]
    with Maker(Feed(index, sampler), checksums=False) as maker:
        assert len(maker[0, 0]["word"]) == 20
        for maker_or_sent in (maker, pickle.loads(pickle.dumps(maker))):
            assert len(maker_or_sent[1, 0]["word"]) == 20
        with pytest.raises(IndexError):
            maker[0, 1]


def test_reuse_is_refused(tmp_path: Path) -> None:
    order = ReuseSampler(20, reuse=2, live=4, seed=0)
    feed = Feed(words(tmp_path, 20), BatchSampler(order, batch_size=4))
    with pytest.raises(ValueError, match="gives batches in their order alone: iterate over a load"):
        Maker(feed)
