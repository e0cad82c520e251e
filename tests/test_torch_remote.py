"""Worker processes of torch over shards at a URL, started by fork and by spawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from range_server import RangeServer

from twinfeed.loaders import DiskCache, Feed, open_index, pack
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import BatchSampler, RandomSampler


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    with RangeServer(tmp_path) as serving:
        yield serving


@pytest.mark.parametrize(("method", "cached"), [("fork", False), ("fork", True), ("spawn", False)])
def test_workers_read_remotely(
    tmp_path: Path, server: RangeServer, method: Any, cached: bool
) -> None:
    """The parent has read before it forks. A cache is filled by one process, once an epoch."""
    draw = np.random.default_rng(0)
    local = pack(({"x": draw.bytes(1000)} for _ in range(96)), tmp_path, shards=2)["data"]
    cache = DiskCache(tmp_path / "cache", bytes=10**7) if cached else None
    index = open_index(f"{server.url}/data.index", cache=cache)
    sampler = BatchSampler(RandomSampler(96, seed=0), batch_size=16)
    loader = TorchLoader(
        Feed(index, sampler),
        num_workers=1 if method == "spawn" else 2,
        multiprocessing_context=method,
        persistent_workers=True,
        device="cpu",
    )
    try:
        for epoch in range(2):
            server.clear()
            pairs = zip(loader, Feed(local, sampler).batches(epoch=epoch), strict=True)
            for one, other in pairs:
                assert np.array_equal(one["id"], other["id"])
                assert list(one["x"]) == list(other["x"])
        assert bool(server.asked) is not cached
    finally:
        loader.close()
